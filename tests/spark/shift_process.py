"""A process that runs shifts of a processor's tasks, one after the other, as Spark's Python processes do."""

import json
import sys
from datetime import timedelta

import pyarrow as pa

from oncebox.spark.processing import Work, run_work
from oncebox.spark.reports import read_all


def main() -> None:
    given = json.loads(sys.argv[1])
    work = Work(**given, length=timedelta(seconds=30), drain=True, drain_wait=timedelta(0))
    for line in sys.stdin:
        ticket = {"run": "run", "again": False, **json.loads(line)}
        batches = run_work(work, [pa.RecordBatch.from_pylist([ticket])])
        rows = [row for batch in batches for row in batch.to_pylist()]
        (report,) = read_all(row["report"] for row in rows if row["report"])
        told = {
            "handled": sum(row["published"] or 0 for row in rows),
            "left": {reason: number for reason, number in report.left.items() if number},
            "failure": str(report.failure or ""),
        }
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
