"""`python -m benchmarks`: run, print the table, keep it as JSON; a full run also writes docs/benchmarks.md."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path

from oncebox.testing.servers import PostgreSQL

from . import (
    chain,
    concurrency,
    costs,
    database,
    delivery,
    idle,
    machine,
    partitions,
    processing,
    relay,
    report,
    sqlite,
    statements,
    writing,
)
from .results import Result
from .scale import FULL, QUICK, Scale

ROOT = Path(__file__).resolve().parent.parent
JSON = ROOT / "build" / "benchmarks.json"
PAGE = ROOT / "docs" / "benchmarks.md"

get_name = attrgetter("name")
Benchmark = Callable[[PostgreSQL, Scale], list[Result]]
BENCHMARKS: Mapping[str, Benchmark] = {
    "delivery": delivery.delivery,
    "held": delivery.held,
    "unanalyzed": delivery.unanalyzed,
    "writing": writing.writing,
    "terminal": costs.terminal,
    "blocked": costs.blocked,
    "waiting": costs.waiting,
    "suspects": costs.suspects,
    "lanes": costs.lanes,
    "heartbeat": costs.heartbeat,
    "prune": costs.prune,
    "look": idle.look,
    "stats": costs.stats,
    "sqlite": sqlite.sqlite,
    "statements": statements.statements,
    "relay": relay.relay,
    "brokers": relay.brokers,
    "latency": relay.latency,
    "cold": relay.cold,
    "idle": idle.idle,
    "concurrency": concurrency.concurrency,
    "processing": processing.processing,
    "keys": processing.keys,
    "partitions": partitions.partitions,
    "chain": chain.chain,
}


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    scale = replace(QUICK if options.quick else FULL, **dict(options.set))
    results: list[Result] = []
    with database.server() as server:
        words = machine.words(database.ask(server.url, database.VERSION))
        for name in options.only or BENCHMARKS:
            print(f"… {name}", file=sys.stderr, flush=True)
            found = BENCHMARKS[name](server, scale)
            print(report.table(found), file=sys.stderr, flush=True)
            results += found
    print(report.table(results))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report.document(results, words), indent=2) + "\n")
    if not (options.quick or options.only or options.set):
        PAGE.write_text(report.page(results, words, database.SETTINGS))
    return 0


def parser() -> argparse.ArgumentParser:
    shown = argparse.ArgumentParser(prog="python -m benchmarks", description="Speed as ratios to bare loops.")
    shown.add_argument("--quick", action="store_true", help="a smoke run at a twentieth of the size")
    shown.add_argument("--only", nargs="+", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    shown.add_argument(
        "--set",
        nargs="+",
        type=setting,
        default=[],
        metavar="NAME=NUMBER",
        help=", ".join(map(get_name, fields(Scale))),
    )
    shown.add_argument("--json", type=Path, default=JSON, help="where to keep the figures (%(default)s)")
    return shown


def setting(text: str) -> tuple[str, int]:
    """One number of the scale."""
    name, _, number = text.partition("=")
    if name not in map(get_name, fields(Scale)) or not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of the scale")
    return name, int(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
