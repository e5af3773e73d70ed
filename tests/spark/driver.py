"""A driver process for tests: prints the pid of its JVM, then does what its argument says."""

import os
import signal
import sys
import threading

from pyspark import SparkContext

from oncebox.spark.session import session


def main(way: str) -> None:
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told.set())
    spark = session("local[1]")
    assert SparkContext._gateway is not None
    print(SparkContext._gateway.proc.pid, os.getpid(), flush=True)
    if way == "wait":
        told.wait()
        print(spark.range(5).count(), flush=True)
        spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
