"""Splits a claim into publish calls: as many at once as is allowed, events of a key one after the other."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

from ..event import Claim
from ..publishers.base import NOT_TRIED, Deadline, Outcome, Publisher


class Calls:
    """Publishes a batch by one publisher, with at most `in_flight` calls at once (LR-041)."""

    def __init__(self, publisher: Publisher, in_flight: int) -> None:
        self._publisher = publisher
        self._batch_max = publisher.guarantees.batch_max
        self._lines = min(in_flight, publisher.guarantees.calls_max or in_flight)
        self._pool = ThreadPoolExecutor(self._lines, thread_name_prefix="publish")

    def close(self) -> None:
        """Wait for the calls that run, and start no more."""
        self._pool.shutdown()

    def publish(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        """One outcome for each, in order; within a key nothing is sent after a failure (LC-18)."""
        if len(claims) <= self._batch_max:
            return self._call(claims, deadline)
        outcomes: dict[int, Outcome] = {}
        lines = divided(claims, min(self._lines, -(-len(claims) // self._batch_max)))
        running = [self._pool.submit(self._one_after_the_other, line, deadline) for line in lines]
        wait(running)  # also when one of them raises: nobody may still be sending when this returns
        for line in running:
            outcomes |= line.result()
        return [outcomes[claim.seq] for claim in claims]

    def _one_after_the_other(self, claims: Sequence[Claim], deadline: Deadline) -> dict[int, Outcome]:
        outcomes: dict[int, Outcome] = {}
        stopped: set[str | None] = set()
        for part in parts(claims, self._batch_max):
            going = [claim for claim in part if claim.event.ordering_key not in stopped]
            outcomes |= {claim.seq: NOT_TRIED for claim in part}
            for claim, outcome in zip(going, self._call(going, deadline), strict=True):
                outcomes[claim.seq] = outcome
                if outcome is not None and claim.event.ordering_key is not None:
                    stopped.add(claim.event.ordering_key)
        return outcomes

    def _call(self, claims: Sequence[Claim], deadline: Deadline) -> list[Outcome]:
        if deadline.over or not claims:
            return [NOT_TRIED] * len(claims)
        return self._publisher.publish(claims, deadline)


def parts(claims: Sequence[Claim], size: int) -> Iterator[Sequence[Claim]]:
    """The claims in pieces of at most `size`, in order."""
    return (claims[start : start + size] for start in range(0, len(claims), size))


def divided(claims: Sequence[Claim], lines: int) -> list[list[Claim]]:
    """The claims in so many lines, in order in each, the events of a key all in one."""
    result: list[list[Claim]] = [[] for _ in range(lines)]
    for place, claim in enumerate(claims):
        key = claim.event.ordering_key
        result[(place if key is None else hash(key)) % lines].append(claim)
    return result
