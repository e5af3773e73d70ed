"""How much work a run does."""

from dataclasses import dataclass

PAYLOAD = bytes(range(200))
EVENT_TYPE = "order.created"
CONTENT_TYPE = "application/octet-stream"
BATCH = 1_000  # events a claim
WORKERS = 2  # processes
LOAD = 10_000  # rows a statement while events are made


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Numbers of one run; `quick` is a smoke run of all of them at a twentieth."""

    rounds: int
    rounds_held: int
    delivered: int  # events of one delivery round
    passed: int  # events that pass while a transaction is held open
    terminal: int  # rows behind a claim
    published: int  # events that are counted
    blocked: int  # events behind a blocked key
    waiting: int  # keys that wait beside those that are claimed
    lanes: int  # keys with an event each, where the number of keys is what is looked at
    written: int  # events of one round of add_many
    written_singly: int  # transactions of one round of add
    claims: int  # claims whose cost is compared
    renewals: int
    delivered_sqlite: int
    relayed: int  # events of one round of the relay on Spark
    latency_events: int  # at 20 a second
    idle: int  # seconds in which an idle relay is watched, after as many that are not
    rounds_processed: int
    processed: int  # events of one round of the processor on Spark
    processed_keys: int
    processed_singly: int  # by the loop that commits each message
    awaited: int  # events of one round of handlers that wait, many at once
    awaited_singly: int
    rounds_kept: int
    processed_kept: int  # events of one round over many keys of state
    kept_keys: int
    rounds_partitioned: int
    partitioned: int  # events of one round over many partitions


FULL = Scale(
    rounds=5,
    rounds_held=3,
    delivered=200_000,
    passed=500_000,
    terminal=5_000_000,
    published=10_000_000,
    blocked=50_000,
    waiting=300_000,
    lanes=1_000_000,
    written=100_000,
    written_singly=500,
    claims=60,
    renewals=200,
    delivered_sqlite=100_000,
    relayed=300_000,
    latency_events=1_200,
    idle=60,
    rounds_processed=2,
    processed=1_000_000,
    processed_keys=10_000,
    processed_singly=2_000,
    awaited=1_000,
    awaited_singly=50,
    rounds_kept=5,
    processed_kept=200_000,
    kept_keys=10_000_000,
    rounds_partitioned=3,
    partitioned=100_000,
)
QUICK = Scale(
    rounds=1,
    rounds_held=1,
    delivered=10_000,
    passed=25_000,
    terminal=250_000,
    published=500_000,
    blocked=2_500,
    waiting=15_000,
    lanes=50_000,
    written=5_000,
    written_singly=25,
    claims=6,
    renewals=10,
    delivered_sqlite=5_000,
    relayed=15_000,
    latency_events=60,
    idle=5,
    rounds_processed=1,
    processed=20_000,
    processed_keys=10_000,
    processed_singly=50,
    awaited=100,
    awaited_singly=5,
    rounds_kept=1,
    processed_kept=20_000,
    kept_keys=50_000,
    rounds_partitioned=1,
    partitioned=5_000,
)
