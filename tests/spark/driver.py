"""A driver process for tests: prints the pid of its JVM, then does what its argument says."""

import os
import sys

from pyspark import SparkContext

from oncebox.cli.signals import stop_on_signals
from oncebox.spark.session import session


def main(way: str) -> None:
    with stop_on_signals() as stop:
        spark = session("local[1]")
        assert SparkContext._gateway is not None
        print(SparkContext._gateway.proc.pid, os.getpid(), flush=True)
        if way == "wait":
            stop.wait()
            print(spark.range(5).count(), flush=True)
            spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
