"""Places: how many workers the relays of a store may have together, and which relay holds how many (LR-041).

A relay's row among the workers says in its details how many places the relay holds. Pure: a store decides by this, or
by its like in SQL, in the very step that enters the row.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from ..config import SILENCE_LEASES
from ..errors import NoPlace
from .living import RELAY_KIND, Worker, first_id, seconds_in

PLACES = "places"  # among the details of a relay's row
PLACES_UNSAID = 1  # of a relay of a version that did not count them
SILENCE_MIN = timedelta(seconds=30)  # of a worker that did not say how long it may be silent
HOLDERS_SHOWN = 10  # relays that a message names


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A relay, under all ids that it has signed on with, and the places that it holds."""

    relay: str
    host: str
    pid: int
    places: int
    silent: bool = False  # for longer than it may be: its places are free for others

    def __str__(self) -> str:
        return f"{self.relay} (process {self.pid} on {self.host}) holds {self.places}"


def silence_of(worker: Worker) -> timedelta:
    """How long this worker may be silent until it counts as gone."""
    lease = seconds_in(worker.details, "lease", timedelta(0))
    return seconds_in(worker.details, "silence", max(SILENCE_MIN, SILENCE_LEASES * lease))


def places_of(worker: Worker) -> int:
    """How many places this row holds, or is to hold."""
    places = worker.details.get(PLACES)
    if isinstance(places, int | float) and math.isfinite(places):
        return max(0, int(places))
    return PLACES_UNSAID if worker.kind == RELAY_KIND else 0


def holders(workers: Iterable[Worker]) -> list[Holder]:
    """The relays among these workers; one that signed on more than once is there once."""
    found: dict[str, Holder] = {}
    for worker in workers:
        if worker.kind == RELAY_KIND:
            relay = first_id(worker)
            known = found.get(relay)
            places, silent = places_of(worker), (worker.silent_for or timedelta(0)) > silence_of(worker)
            found[relay] = Holder(
                relay=relay,
                host=worker.host,
                pid=worker.pid,
                places=max(places, known.places) if known else places,
                silent=silent and (known is None or known.silent),
            )
    return list(found.values())


def in_the_way(relay: Worker, workers_max: int | None, workers: Iterable[Worker]) -> frozenset[str]:
    """The silent relays whose rows must go for this relay to have its places; `NoPlace` if that is not enough.

    A silent relay that wakes up later finds its row gone, so it has to ask for its places again.
    """
    wanted = places_of(relay)
    if workers_max is None or not wanted:
        return frozenset()
    others = [one for one in holders(workers) if one.relay != first_id(relay)]
    if wanted + sum(one.places for one in others) <= workers_max:
        return frozenset()
    living = [one for one in others if not one.silent]
    if wanted + sum(one.places for one in living) > workers_max:
        raise no_place(wanted, workers_max, living)
    return frozenset(one.relay for one in others if one.silent)


def no_place(wanted: int, workers_max: int, living: Iterable[Holder]) -> NoPlace:
    """What to raise when living relays hold too many places."""
    taking = sorted((one for one in living if one.places), key=lambda one: -one.places)
    taken = sum(one.places for one in taking)
    more = f" and {len(taking) - HOLDERS_SHOWN:,} more relays" if len(taking) > HOLDERS_SHOWN else ""
    who = f": {'; '.join(map(str, taking[:HOLDERS_SHOWN]))}{more}" if taking else ""
    return NoPlace(
        f"no place for this relay: it wants {wanted:,} (queries × tasks), workers_max is {workers_max:,}, and "
        f"{taken:,} are taken{who}. Stop a relay, start this one with fewer --queries or --tasks, or raise the limit: "
        f"`oncebox relay-config workers_max={taken + wanted}` (LR-041)"
    )
