"""The words of the command line: its commands, their options, help and examples, in the order of an operator's day.

docs/reference/cli.md is made from `COMMANDS`.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version

from . import values
from .parser import Command, Parser, everywhere

WHO_VARIABLE = "ONCEBOX_WHO"
LIST_LIMIT = 100
AUDIT_LIMIT = 20


def root() -> Parser:
    """What understands the words before a command; without a command it only helps."""
    parser = Parser(
        prog="oncebox",
        usage="oncebox [--store URL] [--json] [--debug] COMMAND ...",
        description="Look at the events of a transactional outbox, and act on them.",
        epilog=_overview(),
    )
    parser.add_argument("--version", action="version", version=f"oncebox {version('oncebox')}", help="show the version")
    everywhere(parser)
    return parser


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"{name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    hint = "`oncebox COMMAND --help` explains a command, with examples."
    return "\n  ".join(["commands:", *lines]) + f"\n\n{hint}"


# --- arguments that several commands share -------------------------------------------------------------------------


def _audited(parser: Parser, *, why_required: bool = False) -> None:
    who = f"who acts, for the audit entry (default: ${WHO_VARIABLE}, else user@host)"
    parser.add_argument("--who", metavar="NAME", help=who)
    parser.add_argument("--why", metavar="TEXT", required=why_required, help="why, for the audit entry")


def _asks(parser: Parser) -> None:
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")


def _dry_run(parser: Parser, what: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=what)


def _ids(parser: Parser, nargs: str) -> None:
    ids = "event ids; - reads them from standard input"
    parser.add_argument("event_ids", metavar="ID", nargs=nargs, type=values.event_ids, help=ids)


def _filters(parser: Parser, states: str) -> None:
    state = f"in this state: {states}; several with commas"
    parser.add_argument("--state", metavar="STATE", type=values.states, action="extend", default=[], help=state)
    event_type = "of this event type; may be repeated"
    parser.add_argument("--type", metavar="TYPE", action="append", default=[], help=event_type)
    parser.add_argument("--key", metavar="KEY", help="with this ordering key")
    since = "created at or after this: a time ago, like 1h, or ISO 8601 (UTC unless it names its zone)"
    parser.add_argument("--since", metavar="TIME", type=values.moment, help=since)
    parser.add_argument("--until", metavar="TIME", type=values.moment, help="created before this; as --since")


# --- the arguments of each command -----------------------------------------------------------------------------------


def _migrate(parser: Parser) -> None:
    _dry_run(parser, "print the SQL that would run, and run nothing")
    _audited(parser)


def _add(parser: Parser) -> None:
    parser.add_argument("event_type", metavar="TYPE", help="the event type, like order.created")
    payload = "the payload: text, - for standard input, @FILE for a file's bytes; empty if left out"
    parser.add_argument("payload", metavar="PAYLOAD", nargs="?", default="", help=payload)
    parser.add_argument("--key", metavar="KEY", help="the ordering key: events of one key are delivered in order")
    parser.add_argument("--partition-key", metavar="KEY", help="the partition key, for the publisher's routing")
    header = "a header that is sent along; may be repeated"
    parser.add_argument("--header", metavar="NAME=VALUE", type=values.header, action="append", default=[], help=header)
    content = "default: application/json if the payload is JSON, else text or bytes"
    parser.add_argument("--content-type", metavar="TYPE", help=content)
    parser.add_argument("--delay", metavar="TIME", type=values.duration, help="not to be claimed before, like 5m")
    parser.add_argument("--id", metavar="ID", type=values.event_id, help="the event id (default: a new UUIDv7)")
    _audited(parser)


def _list(parser: Parser) -> None:
    _filters(parser, "PENDING, CLAIMED, PUBLISHED or DEAD")
    parser.add_argument("--eligible", action="store_true", help="only what a relay could claim now")
    limit = f"how many at most, or all (default: {LIST_LIMIT}; with --json all)"
    parser.add_argument("--limit", metavar="N", type=values.limit, help=limit)
    parser.add_argument("--newest", action="store_true", help="newest first (default: oldest first)")
    parser.add_argument("--after", metavar="SEQ", type=values.seq, help="go on behind this seq of a former page")


def _show(parser: Parser) -> None:
    parser.add_argument("event_id", metavar="ID", type=values.event_id, help="the event id")
    parser.add_argument("--raw", action="store_true", help="write the payload's bytes, exactly, and nothing else")


def _replay(parser: Parser) -> None:
    _ids(parser, "*")
    _filters(parser, "PUBLISHED or DEAD (default: both)")
    parser.add_argument("--all", action="store_true", help="every PUBLISHED and DEAD event, in place of a filter")
    parser.add_argument("--rate", metavar="N/s", type=values.rate, help="at most so many a second, like 100/s or 30/m")
    parser.add_argument("--after", metavar="SEQ", type=values.seq, default=0, help="go on behind an interrupted replay")
    _dry_run(parser, "count what would be replayed, and change nothing")
    _asks(parser)
    _audited(parser)


def _kill(parser: Parser) -> None:
    _ids(parser, "+")
    reason = "becomes the event's last_error (default: --why, or who did it)"
    parser.add_argument("--reason", metavar="TEXT", help=reason)
    _asks(parser)
    _audited(parser)


def _reschedule(parser: Parser) -> None:
    _ids(parser, "+")
    delay = "eligible after this time from now, like 10m"
    parser.add_argument("--delay", metavar="TIME", type=values.duration, help=delay)
    parser.add_argument("--now", action="store_true", help="eligible at once")
    _audited(parser)


def _unblock(parser: Parser) -> None:
    parser.add_argument("ordering_key", metavar="KEY", help="the ordering key")
    _audited(parser)


def _prune(parser: Parser) -> None:
    published = "delete what has been PUBLISHED for longer than this, like 7d"
    parser.add_argument("--published-after", metavar="TIME", type=values.duration, help=published)
    dead = "delete what has been DEAD for longer than this, like 30d"
    parser.add_argument("--dead-after", metavar="TIME", type=values.duration, help=dead)
    batch = "events in one transaction (default: 1000)"
    parser.add_argument("--batch", metavar="N", type=values.count, default=1000, help=batch)
    parser.add_argument("--rate", metavar="N/s", type=values.rate, help="at most so many a second, like 5000/s")
    _dry_run(parser, "count what would be deleted, and change nothing")
    _audited(parser)


def _audit(parser: Parser) -> None:
    limit = f"how many at most (default: {AUDIT_LIMIT})"
    parser.add_argument("--limit", metavar="N", type=values.count, default=AUDIT_LIMIT, help=limit)


def _settings(parser: Parser) -> None:
    change = f"settings to change: {', '.join(values.SETTINGS)}; the value {values.UNSET} takes a change back"
    parser.add_argument("changes", metavar="NAME=VALUE", nargs="*", type=values.setting, help=change)
    _audited(parser)


def _relay(parser: Parser) -> None:
    to = "where the events go: file:///dir, stdout:, valkey://…, kafka://…; ${NAME} is read from the environment"
    parser.add_argument("--to", metavar="URL", required=True, help=to)
    for name, metavar, kind, text in (
        ("--name", "NAME", str, "the relay's name, in worker ids and logs (default: relay)"),
        ("--config", "FILE", str, "a TOML file with the relay's settings; what is given here comes before it"),
        ("--master", "URL", str, "the Spark master (default: the one that spark-submit gave, else local[*])"),
        ("--queries", "N", values.count, "staggered queries (default: 2)"),
        ("--tasks", "N", values.count, "tasks of each query (default: 1)"),
        (
            "--shift",
            "TIME",
            values.duration,
            "how long a micro-batch lasts (default: 30s; with receipts, --drain: 10s)",
        ),
        ("--receipts", "FORMAT:PATH", str, "keep a row for each delivery, like parquet:/var/lib/shop/receipts"),
        ("--checkpoint", "PATH", str, "where Spark keeps its own notes (default: beside the receipts, or temporary)"),
        ("--lease", "TIME", values.duration, "how long a claim lasts unless it is renewed (default: 30s)"),
        ("--heartbeat", "TIME", values.duration, "how often leases are renewed: below a third of the lease"),
        ("--reaper-interval", "TIME", values.duration, "how often expired claims are looked for (default: 10s)"),
        ("--shutdown-timeout", "TIME", values.duration, "how long a shutdown may take: at most the lease"),
        ("--silence-max", "TIME", values.duration, "when a silent worker counts as gone (default: three leases)"),
        ("--claim-max", "N", values.count, "events in one claim (default: 1000)"),
        ("--claim-bytes-max", "N", values.count, "bytes of payload in one claim (default: 64 MiB)"),
        ("--in-flight", "N", values.count, "publish calls at once, by each worker (default: 10)"),
        ("--rate-max", "N/s", values.rate, "at most so many events a second, all workers together"),
        ("--failures-max", "N", values.count, "failures of its own after which an event is DEAD (default: 10)"),
    ):
        parser.add_argument(name, metavar=metavar, type=kind, help=text)
    parser.add_argument(
        "--drain", action="store_true", help="end once nothing is left, or with exit code 3 if something is"
    )
    wait = "how long a drain waits, without progress, for retries and leases (default: 30s)"
    parser.add_argument("--drain-wait", metavar="TIME", type=values.duration, help=wait)
    parser.add_argument(
        "--no-reaper", action="store_true", help="`oncebox reap` runs elsewhere; without one, nothing is claimed"
    )


def _process(parser: Parser) -> None:
    parser.add_argument(
        "app", metavar="MODULE:NAME", help="the Processor, like shop:app; a module of this folder is found"
    )
    source = "where the events come from: kafka://…?topic=…, valkey://…?stream=…, outbox+sqlite:///…"
    parser.add_argument("--from", dest="source", metavar="URL", required=True, help=source)
    state = "where its state is kept: sqlite:///folder, rocksdb:///folder, postgresql://…"
    parser.add_argument("--state", metavar="URL", required=True, help=state)
    parser.add_argument("--emit", metavar="URL", help="the outbox that emitted events are written to")
    parser.add_argument("--master", metavar="URL", help="the Spark master (default: as for relay)")
    parser.add_argument("--tasks", metavar="N", type=values.count, help="how many share the partitions (default: 2)")
    shift = "how long a micro-batch lasts (default: 60s)"
    parser.add_argument("--shift", metavar="TIME", type=values.duration, help=shift)
    drained = "end once nothing is left, or with exit code 3 if something is"
    parser.add_argument("--drain", action="store_true", help=drained)
    wait = "how long a drain waits, without progress, for retries and other runs (default: 30s)"
    parser.add_argument("--drain-wait", metavar="TIME", type=values.duration, help=wait)


def _state_of(parser: Parser) -> None:
    parser.add_argument("processor", metavar="PROCESSOR", help="the processor's name, like totals")
    state = "where its state is kept, as `oncebox process --state` names it"
    parser.add_argument("--state", metavar="URL", required=True, help=state)


def _letter_filters(parser: Parser) -> None:
    _state_of(parser)
    _ids(parser, "*")
    event_type = "of this event type; may be repeated"
    parser.add_argument("--type", metavar="TYPE", action="append", default=[], help=event_type)
    parser.add_argument("--key", metavar="KEY", help="with this ordering key")
    parser.add_argument("--error", metavar="TEXT", help="whose error has this in it, in either case")
    since = "died at or after this: a time ago, like 1h, or ISO 8601 (UTC unless it names its zone)"
    parser.add_argument("--since", metavar="TIME", type=values.moment, help=since)
    parser.add_argument("--until", metavar="TIME", type=values.moment, help="died before this; as --since")


def _letter_list(parser: Parser) -> None:
    _letter_filters(parser)
    limit = f"how many at most, or all (default: {LIST_LIMIT}; with --json all)"
    parser.add_argument("--limit", metavar="N", type=values.limit, help=limit)
    parser.add_argument("--newest", action="store_true", help="newest deaths first (default: oldest first)")


def _letter_show(parser: Parser) -> None:
    _state_of(parser)
    parser.add_argument("event_id", metavar="ID", type=values.event_id, help="the event id")
    replay = "of an event that was replayed: the letter of this replay (default: the latest)"
    parser.add_argument("--replay", metavar="N", type=values.whole, help=replay)
    parser.add_argument("--raw", action="store_true", help="write the payload's bytes, exactly, and nothing else")


def _letter_action(parser: Parser) -> None:
    _letter_filters(parser)
    parser.add_argument("--all", action="store_true", help="every dead letter, in place of a filter")
    parser.add_argument("--limit", metavar="N", type=values.limit, help="how many at most, oldest deaths first")
    rate = "at most so many a second, like 100/s or 30/m; whoever carries it out keeps to it"
    parser.add_argument("--rate", metavar="N/s", type=values.rate, help=rate)
    parser.add_argument("--wait", action="store_true", help="wait until the processor has carried it out")
    _dry_run(parser, "count what would be asked for, and ask for nothing")
    _asks(parser)
    _audited(parser)


def _letter_audit(parser: Parser) -> None:
    _state_of(parser)
    _audit(parser)


def _state_get(parser: Parser) -> None:
    _state_of(parser)
    parser.add_argument("key", metavar="KEY", help="the key, as handlers put it")
    raw = "write the value's bytes, exactly, and nothing else; of a JSON value its text"
    parser.add_argument("--raw", action="store_true", help=raw)


def _state_scan(parser: Parser) -> None:
    _state_of(parser)
    prefix = "what the keys begin with (default: all keys)"
    parser.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help=prefix)
    limit = f"how many at most, or all (default: {LIST_LIMIT}; with --json all)"
    parser.add_argument("--limit", metavar="N", type=values.limit, help=limit)


def _state_import(parser: Parser) -> None:
    _state_of(parser)
    file = "an export; - reads it from standard input (default: -)"
    parser.add_argument("file", metavar="FILE", nargs="?", default="-", help=file)
    _audited(parser)


def _state_repartition(parser: Parser) -> None:
    _state_of(parser)
    parser.add_argument("partitions", metavar="N", type=values.count, help="how many partitions there will be")
    source = "what it has read until now, as `oncebox process --from` names it"
    parser.add_argument("--from", dest="source", metavar="URL", required=True, help=source)
    parser.add_argument("--into", metavar="URL", help="the state store of the copy (default: the same)")
    name = "the processor's name in the copy (default: the same); not for Valkey, which knows it by its name"
    parser.add_argument("--name", metavar="NAME", help=name)
    _asks(parser)
    _audited(parser)


def _state_accept_loss(parser: Parser) -> None:
    _state_of(parser)
    source = "what it reads, as `oncebox process --from` names it"
    parser.add_argument("--from", dest="source", metavar="URL", required=True, help=source)
    parser.add_argument("--partition", metavar="N", type=int, help="this partition only (default: all)")
    _audited(parser, why_required=True)


def _reap(parser: Parser) -> None:
    interval = "how often expired claims are looked for (default: 10s)"
    parser.add_argument("--interval", metavar="TIME", type=values.duration, help=interval)
    parser.add_argument("--once", action="store_true", help="look once, and end")


def _doctor(parser: Parser) -> None:
    parser.add_argument("--to", metavar="URL", help="also ask this broker, as `oncebox relay --to` names it")
    parser.add_argument("--config", metavar="FILE", help="also check these relay settings against the store's")
    parser.add_argument(
        "--cron",
        action="store_true",
        help="relays only run from time to time, with --drain: that no relay and no reaper is alive is well",
    )
    parser.add_argument(
        "--waiting-max",
        type=values.duration,
        metavar="TIME",
        help="how long an eligible event may wait before that is a finding (default: 5m)",
    )
    parser.add_argument(
        "--no-spark", action="store_true", help="no relay runs on this machine: do not look for Spark and Java"
    )


def _readers(parser: Parser) -> None:
    parser.add_argument("--forget", metavar="NAME", help="strike this reader off, so that prune waits for it no longer")
    _asks(parser)
    _audited(parser)


def _nothing(_: Parser) -> None:
    """A command without arguments of its own."""


_IN_ORDER: Sequence[Command] = (
    Command(
        name="init",
        summary="create the schema in a database",
        description="Create the schema in a database. Safe to run twice, and from two places at once.",
        examples=(
            "oncebox init",
            "oncebox init --store postgresql://shop@localhost/shop",
            "oncebox init --dry-run > schema.sql",
        ),
        arguments=_migrate,
    ),
    Command(
        name="migrate",
        summary="bring the schema to this version",
        description="Run the migrations that the schema lacks. Safe to run twice, and from two places at once.",
        examples=("oncebox migrate", "oncebox migrate --dry-run"),
        arguments=_migrate,
    ),
    Command(
        name="add",
        summary="write an event by hand",
        description="Write one event in a transaction of its own. Services write theirs with Outbox.add, in the "
        "transaction of the change that the event tells of.",
        examples=(
            "oncebox add order.created '{\"order\": 7}' --key order-7",
            "oncebox add report.due --delay 5m --header tenant=acme",
            "oncebox add image.uploaded @photo.png --content-type image/png",
        ),
        arguments=_add,
    ),
    Command(
        name="list",
        summary="list events",
        description="List the events that fit all of the filters, oldest first.",
        examples=(
            "oncebox list --state DEAD --since 1h",
            "oncebox list --type order.created --key order-7 --newest",
            "oncebox list --state DEAD --limit all --json",
        ),
        arguments=_list,
    ),
    Command(
        name="show",
        summary="show all about one event",
        description="Show every field of one event, its payload, and what it was before each replay.",
        examples=(
            "oncebox show 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01",
            "oncebox show 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01 --raw > payload.bin",
        ),
        arguments=_show,
    ),
    Command(
        name="stats",
        summary="count the events of each state",
        description="Count the events of each state, and show what needs attention.",
        examples=("oncebox stats", "oncebox stats --json"),
        arguments=_nothing,
    ),
    Command(
        name="replay",
        summary="send PUBLISHED or DEAD events again",
        description="Return PUBLISHED and DEAD events to PENDING, oldest first, so that each ordering key keeps its "
        "order. They keep their event_id; each replay is counted, so consumers can tell it from a duplicate.",
        examples=(
            "oncebox replay --state DEAD --type order.created --why 'consumer is fixed'",
            "oncebox replay --state PUBLISHED --since 2h --rate 100/s",
            "oncebox replay 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01 --yes",
            "oncebox replay --all --dry-run",
        ),
        arguments=_replay,
    ),
    Command(
        name="kill",
        summary="give up events for good",
        description="Move PENDING and CLAIMED events to DEAD. One that was CLAIMED may have been sent; whoever holds "
        "it can change it no more. A killed event never blocks its ordering key.",
        examples=(
            "oncebox kill 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01 --reason 'order was a test'",
            "oncebox list --type test.ping --json | jq -r '.[].event_id' | oncebox kill - --yes",
        ),
        arguments=_kill,
    ),
    Command(
        name="reschedule",
        summary="set when PENDING events may be claimed",
        description="Make PENDING events eligible after a delay, or at once.",
        examples=(
            "oncebox reschedule 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01 --delay 10m",
            "oncebox reschedule 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01 --now",
        ),
        arguments=_reschedule,
    ),
    Command(
        name="unblock",
        summary="let a key go on behind a DEAD event",
        description="Let the events of an ordering key go on that wait behind a DEAD one. The DEAD one stays DEAD.",
        examples=("oncebox unblock order-7 --why 'refunded by hand'",),
        arguments=_unblock,
    ),
    Command(
        name="prune",
        summary="delete old PUBLISHED and DEAD events",
        description="Delete events that have been PUBLISHED or DEAD for longer than you say; in batches, so it can be "
        "stopped at any moment and run again. Never one that a registered reader has not passed, and never a "
        "DEAD one that blocks its key.",
        examples=(
            "oncebox prune --published-after 7d --dead-after 30d",
            "oncebox prune --published-after 7d --rate 5000/s --batch 500",
            "oncebox prune --published-after 7d --dry-run",
        ),
        arguments=_prune,
    ),
    Command(
        name="audit",
        summary="show what operators did",
        description="Show the latest actions of operators: who, when, what, why, how many; newest first.",
        examples=("oncebox audit", "oncebox audit --limit 100 --json"),
        arguments=_audit,
    ),
    Command(
        name="pause",
        summary="tell all relays to claim nothing new",
        description="Tell every relay of this store to claim nothing new; what they hold, they finish.",
        examples=("oncebox pause --why 'broker maintenance'",),
        arguments=_audited,
    ),
    Command(
        name="resume",
        summary="tell all relays to go on",
        description="Take a pause back.",
        examples=("oncebox resume",),
        arguments=_audited,
    ),
    Command(
        name="relay-config",
        summary="show or change what relays obey at run time",
        description="Show the settings that every relay of this store obeys at its next look, or change them:\n"
        "  on_dead      block (a DEAD event holds back its key) or skip\n"
        "  lease        how long a claim lasts, like 60s\n"
        "  claim_max    events in one claim\n"
        "  rate_max     events a second, like 500/s\n"
        "  workers_max  workers of all relays together: each relay takes queries × tasks places when it starts\n"
        "  notify       on or off: PostgreSQL wakes idle relays; default: on where it prepares no transactions",
        examples=(
            "oncebox relay-config",
            "oncebox relay-config on_dead=skip lease=60s --why 'slow webhooks'",
            "oncebox relay-config lease=default",
        ),
        arguments=_settings,
    ),
    Command(
        name="relay",
        summary="publish events, until stopped",
        description="Take events under leases and get them to a broker, on Spark: local[*] by default, any master, or "
        "under spark-submit. A first SIGTERM or Ctrl-C lets it finish what is in flight, a second one ends it at once.",
        examples=(
            "oncebox relay --to file:///var/lib/shop/events",
            "oncebox relay --store postgresql://shop@db/shop --to kafka://broker:9092",
            "oncebox relay --to valkey://:${VALKEY_PASSWORD}@cache:6379 --receipts parquet:/var/lib/shop/receipts",
            "oncebox relay --to stdout: --drain",
        ),
        arguments=_relay,
    ),
    Command(
        name="process",
        summary="run handlers with state, exactly once",
        description="Run a Processor over a stream of events on Spark. State, checkpoint, duplicates, retries, dead "
        "letters and emitted events are committed together; only then is an event acknowledged.",
        examples=(
            "oncebox process shop:app --from 'kafka://broker:9092?topic=order.created' --state sqlite:///state",
            "oncebox process shop:app --from outbox+sqlite:///shop.db --state rocksdb:///state --drain",
        ),
        arguments=_process,
    ),
    Command(
        name="dlq list",
        summary="list a processor's dead letters",
        description="List the events that a processor gave up, and that fit all of the filters, oldest deaths first.",
        examples=(
            "oncebox dlq list totals --state sqlite:///state",
            "oncebox dlq list totals --state sqlite:///state --type order.created --error timeout --since 1h",
            "oncebox dlq list totals --state postgresql://shop@db/shop --limit all --json",
        ),
        arguments=_letter_list,
    ),
    Command(
        name="dlq show",
        summary="show all about one dead letter",
        description="Show every field of one dead letter: the event and its payload, the error, its traceback and "
        "time, where it stood, how often it failed, and how often it was redriven.",
        examples=(
            "oncebox dlq show totals 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01 --state sqlite:///state",
            "oncebox dlq show totals 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01 --state sqlite:///state --raw > payload.bin",
        ),
        arguments=_letter_show,
    ),
    Command(
        name="dlq redrive",
        summary="have dead letters handled again",
        description="Ask a processor to handle the events of dead letters again, each exactly once, with new retries: "
        "of each ordering key in the order in which they stood, and behind what waits already. It does so when it "
        "runs, at once if it does. An event that fails again is a dead letter again.",
        examples=(
            "oncebox dlq redrive totals --state sqlite:///state --error timeout --why 'the bank is back'",
            "oncebox dlq redrive totals --state sqlite:///state --all --rate 50/s --wait",
            "oncebox dlq redrive totals 0197a4c2-7d4e-7c3a-9f10-5b1c6a2e8d01 --state sqlite:///state --yes",
            "oncebox dlq redrive totals --state sqlite:///state --all --dry-run",
        ),
        arguments=_letter_action,
    ),
    Command(
        name="dlq purge",
        summary="forget dead letters for good",
        description="Ask a processor to forget dead letters: their events are never handled. It does so when it runs, "
        "at once if it does. One that is being redriven is passed over.",
        examples=(
            "oncebox dlq purge totals --state sqlite:///state --type test.ping --why 'tests'",
            "oncebox dlq purge totals --state sqlite:///state --until 30d --dry-run",
        ),
        arguments=_letter_action,
    ),
    Command(
        name="dlq audit",
        summary="show what was asked of a processor",
        description="Show the latest requests to a processor: who, when, what, why, how many, and what became of them; "
        "newest first. They are kept for a year.",
        examples=("oncebox dlq audit totals --state sqlite:///state",),
        arguments=_letter_audit,
    ),
    Command(
        name="state get",
        summary="show one value of a processor's state",
        description="Show what handlers have put under a key, also while the processor runs.",
        examples=(
            "oncebox state get totals customer-7 --state sqlite:///state",
            "oncebox state get totals photo-7 --state rocksdb:///state --raw > photo.png",
        ),
        arguments=_state_get,
    ),
    Command(
        name="state scan",
        summary="list keys and values of a processor's state",
        description="List the keys that begin with a prefix, in their order, with their values and partitions, also "
        "while the processor runs.",
        examples=(
            "oncebox state scan totals customer- --state sqlite:///state",
            "oncebox state scan totals --state postgresql://shop@db/shop --limit all --json",
        ),
        arguments=_state_scan,
    ),
    Command(
        name="state export",
        summary="write all that a processor keeps to a file",
        description="Write everything that a processor keeps (state, checkpoints, inbox, retries, dead letters, "
        "outgoing events, requests) as lines of JSON. It may run meanwhile; stop it, if all of it must be of one "
        "moment, as for an import.",
        examples=("oncebox state export totals --state sqlite:///state > totals.jsonl",),
        arguments=_state_of,
    ),
    Command(
        name="state import",
        summary="read an export into a state store",
        description="Write an export under a name that has no state there yet, with as many partitions as it had. "
        "Stopped in the middle it leaves a part: import it under another name, or into another store.",
        examples=(
            "oncebox state import totals totals.jsonl --state postgresql://shop@db/shop",
            "oncebox state export totals --state sqlite:///state | oncebox state import totals --state rocksdb:///new",
        ),
        arguments=_state_import,
    ),
    Command(
        name="state repartition",
        summary="copy a processor's state to other partitions",
        description="Copy a processor's state to another number of partitions, so that each key is where events of "
        "that key will come. Its source must be Kafka (whose default partitioner chose the partitions) or Valkey. "
        "Stop what publishes, run the processor to its end (`oncebox process --drain`), change the number of "
        "partitions, then this; it refuses while anything is unfinished. State keys must be the events' ordering "
        "keys; one that is not where such events come is refused, and with one partition nobody can tell. What was "
        "there stays as it was.",
        examples=(
            (
                "oncebox state repartition totals 8 --state sqlite:///old --into sqlite:///new "
                "--from 'kafka://broker:9092?topic=order.created'"
            ),
            (
                "oncebox state repartition totals 8 --state rocksdb:///old --into rocksdb:///new "
                "--from 'valkey://cache:6379?stream=order.created&partitions=4'"
            ),
        ),
        arguments=_state_repartition,
    ),
    Command(
        name="state accept-loss",
        summary="go on with a state that is older than its source",
        description="Accept that the effects of some events are lost. A processor stops with `StateBehind` when its "
        "source remembers events as done that its state store does not have: an old backup was restored, a file or "
        "folder was removed, or a database lost its last commits. Restore the newer state if you can, or have the "
        "source hand the events out again; this command is for when neither is possible. The processor must not run. "
        "It prints what was accepted and writes an audit entry (`oncebox dlq audit`); then start the processor. What "
        "a log hands out again by itself is no loss, and is left as it is.",
        examples=(
            (
                "oncebox state accept-loss totals --state sqlite:///state "
                "--from 'kafka://broker:9092?topic=order.created' --why 'disk lost, no backup'"
            ),
            (
                "oncebox state accept-loss totals --partition 3 --state rocksdb:///state "
                "--from 'valkey://cache:6379?stream=order.created&partitions=8' --why 'restored from yesterday'"
            ),
        ),
        arguments=_state_accept_loss,
    ),
    Command(
        name="reap",
        summary="return the claims of the dead, until stopped",
        description="Return expired claims to PENDING, or to DEAD when their budget is spent. Each relay has a reaper "
        "of its own unless it was started with --no-reaper.",
        examples=("oncebox reap", "oncebox reap --interval 5s", "oncebox reap --once"),
        arguments=_reap,
    ),
    Command(
        name="doctor",
        summary="look for what is wrong, and say what to do",
        description="Look at the store, its schema and disk, at reapers and workers, at failing destinations, at DEAD "
        "events, at what waits and why, at the broker, at Java and Spark, and at settings that contradict each other. "
        "Exit code 1 if anything is found.",
        examples=(
            "oncebox doctor",
            "oncebox doctor --to kafka://broker:9092 --config relay.toml",
            "oncebox doctor --cron --waiting-max 30m",
        ),
        arguments=_doctor,
    ),
    Command(
        name="readers",
        summary="list the readers that prune waits for",
        description="List the registered readers of the event log and their positions, or strike one off.",
        examples=("oncebox readers", "oncebox readers --forget billing --why 'retired'"),
        arguments=_readers,
    ),
    Command(
        name="raise-epoch",
        summary="say that the store's database was restored",
        description="Begin a new epoch: after a dump was restored into another cluster, a backup or a disk was "
        "restored, or pg_upgrade ran. Readers' positions are of the database before: prune keeps everything for them "
        "until each is moved again, which a processor does by itself.",
        examples=("oncebox raise-epoch --why 'restored the backup of Monday'",),
        arguments=_audited,
    ),
    Command(
        name="verify",
        summary="check the store's invariants",
        description="Look for events that break an invariant, such as being in two states. Exit code 1 if there are "
        "any.",
        examples=("oncebox verify",),
        arguments=_nothing,
    ),
)

COMMANDS: Mapping[str, Command] = {command.name: command for command in _IN_ORDER}
