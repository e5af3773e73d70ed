"""A Hypothesis machine that holds a store against the model of who holds the lease and who holds the key.

It predicts for each finalize and each renewal exactly which are refused, for each claim what it may contain, and after
every step how every event looks.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any
from uuid import UUID

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from .. import clock
from ..config import Budget, Control, OnDead
from ..event import TERMINAL, Claim, Dead, NewEvent, Published, Record, Released, Retry, State, Verdict
from ..stores.base import SUSPECT_DIVISOR, OutboxStore, Query
from .model import REASONS, SETTLED_SECONDS, Hand, Known, Model

WORKERS = ("ana", "bo", "cy")
KEYS = (None, None, "red", "blue", "green")
LONG = timedelta(hours=1)
BRIEF = timedelta(milliseconds=6)  # over when SETTLED_SECONDS are, and then not yet three times over
PAYLOAD_BYTES_MAX = 40
LOOK_EVERY = 4  # steps between two looks at what costs more


errors = st.integers(0, 999).map("error {}!".format)
soon_or_not = st.sampled_from([timedelta(0), timedelta(0), LONG])
verdicts = st.sampled_from(["published"] * 3 + ["retry"] * 2 + ["released"] * 2 + ["dead"]).flatmap(
    {
        "published": st.just(Published()),
        "retry": st.builds(Retry, errors, soon_or_not, st.booleans()),
        "released": st.builds(Released, soon_or_not),
        "dead": st.builds(Dead, errors, st.booleans()),
    }.__getitem__
)
workers = st.sampled_from(WORKERS)
limits = st.sampled_from([1, 2, 3, 5, 20])
budgets = st.integers(1, 3)
places = st.integers(0, 40)

# What can happen, how often, and with what. One rule for all of it: Hypothesis would otherwise leave out rules at
# random, and a life without claims, or without crashes, shows little.
ACTS: dict[str, tuple[int, dict[str, st.SearchStrategy[Any]]]] = {
    "append": (
        2,
        {
            "count": st.sampled_from([1, 2, 3, 18]),
            "key": st.sampled_from(KEYS),
            "delay": st.sampled_from([None, None, timedelta(0), LONG]),
            "size": st.integers(0, PAYLOAD_BYTES_MAX),
        },
    ),
    "claim": (
        5,
        {
            "worker": workers,
            "limit": limits,
            "budget": budgets,
            "brief": st.sampled_from([False, False, True]),
            "bytes_max": st.sampled_from([None, None, 2 * PAYLOAD_BYTES_MAX]),
        },
    ),
    "claim_and_finalize": (
        4,
        {"worker": workers, "limit": limits, "budget": budgets, "verdicts": st.lists(verdicts, min_size=1, max_size=3)},
    ),
    "claim_and_crash": (3, {"worker": workers, "limit": limits, "budget": budgets, "times": st.integers(1, 3)}),
    "finalize_a_hand": (
        4,
        {"hand": places, "verdicts": st.lists(verdicts, min_size=1, max_size=4), "but": st.integers(0, 2)},
    ),
    "finalize_some": (2, {"picks": st.lists(st.tuples(places, verdicts), min_size=1, max_size=6)}),
    "finalize_anothers": (3, {"picks": st.lists(st.tuples(places, verdicts), min_size=1, max_size=4), "forge": places}),
    "renew": (2, {"worker": workers, "picks": st.lists(places, max_size=4)}),
    "reap": (2, {"worker": st.sampled_from([None, *WORKERS])}),
    "replay": (3, {"picks": st.lists(places, min_size=1, max_size=6)}),
    "kill": (1, {"picks": st.lists(places, min_size=1, max_size=2)}),
    "reschedule": (1, {"picks": st.lists(places, min_size=1, max_size=3), "far": st.booleans()}),
    "unblock": (2, {"key": st.sampled_from(["red", "blue", "green", "unknown"])}),
    "decide_on_dead": (1, {"policy": st.sampled_from(["block", "block", "skip"])}),
}
acts = st.sampled_from([name for name, (weight, _) in ACTS.items() for _ in range(weight)]).flatmap(
    lambda name: st.tuples(st.just(name), st.fixed_dictionaries(ACTS[name][1]))
)


class StoreMachine(RuleBasedStateMachine):
    """Random lives of a few events in a few hands, each step held against the model.

    Draws depend on nothing that the store answers: numbers are taken modulo what there is to choose from.
    """

    def __init__(self, open_store: Callable[[], OutboxStore]) -> None:
        super().__init__()
        self.store = open_store()
        self.model = Model()
        self.claims: list[Claim] = []  # every claim that was ever handed out, stale ones too
        self.tokens: list[UUID] = [clock.uuid7()]  # the first one was never handed out
        self.audit_id = 0
        self.steps = 0

    @initialize()
    def begin(self) -> None:
        self.audit_id = self.store.begin_audit(who="machine", action="test", why=None, what={})
        for key, count in ((None, 3), ("red", 4), ("blue", 3)):
            self.write(count, key, None, size=1)

    def teardown(self) -> None:
        try:
            assert self.store.verify() == []
        finally:
            self.store.close()

    @rule(act=acts)
    def step(self, act: tuple[str, dict[str, Any]]) -> None:
        name, arguments = act
        getattr(self, name)(**arguments)

    # --- birth and claim -------------------------------------------------------------------------------------------

    def append(self, count: int, key: str | None, delay: timedelta | None, size: int) -> None:
        self.write(count, key, delay, size)

    def write(self, count: int, key: str | None, delay: timedelta | None, size: int) -> None:
        events = [
            NewEvent(event_id=one, event_type="machine", payload=b"x" * size, ordering_key=key, delay=delay)
            for one in clock.uuid7s(count)
        ]
        self.store.append(events)
        due_at = clock.monotonic() + (0 if delay is None else SETTLED_SECONDS)
        for event in events:
            self.model.events[event.event_id] = Known(event.event_id, key, size, waits=delay == LONG, due_at=due_at)

    def claim(self, worker: str, limit: int, budget: int, brief: bool, bytes_max: int | None) -> None:
        self.obtain(worker, limit, budget, brief=brief, bytes_max=bytes_max)

    def claim_and_finalize(self, worker: str, limit: int, budget: int, verdicts: list[Verdict]) -> None:
        """A relay on a good day, or on a mixed one."""
        claims = self.obtain(worker, limit, budget)
        self.finalize([(claim, verdicts[n % len(verdicts)]) for n, claim in enumerate(claims)])

    def claim_and_crash(self, worker: str, limit: int, budget: int, times: int) -> None:
        """A relay that dies of what it claims."""
        for _ in range(times):
            self.obtain(worker, limit, budget)
            self.end_leases(worker)

    def obtain(
        self, worker: str, limit: int, budget: int, *, brief: bool = False, bytes_max: int | None = None
    ) -> list[Claim]:
        certain = self.model.certain()
        claims = self.store.claim(
            worker=worker,
            limit=limit,
            lease=BRIEF if brief else LONG,
            budget=Budget(default=budget),
            bytes_max=bytes_max,
        )
        assert claims or not certain, f"nothing was claimed, though {certain[0]} is free"
        if claims:
            self.check_claim(claims, worker, limit, bytes_max)
            self.take(claims, worker, budget, brief=brief)
        if brief:
            clock.sleep(SETTLED_SECONDS)
        return claims

    def check_claim(self, claims: Sequence[Claim], worker: str, limit: int, bytes_max: int | None) -> None:
        """Everything that is promised about what a claim may contain."""
        taken = [self.model.events[one.event.event_id] for one in claims]
        allowed = self.model.allowed()
        assert len(claims) <= limit, "more than the limit"
        assert [one.seq for one in claims] == sorted({one.seq for one in claims}), "not sorted, or one of them twice"
        assert all(known in allowed for known in taken), "an event that nobody may have"
        for key in self.model.ordering_keys():
            mine = [known for known in taken if known.key == key]
            assert mine == self.model.head(key)[: len(mine)], f"not the first of key {key}"
        for known in taken:
            assert known.measure is None or len(taken) <= known.measure, "too many beside a suspect"
        assert bytes_max is None or len(taken) == 1 or sum(known.size for known in taken) <= bytes_max, "too many bytes"
        assert {one.claimed_by for one in claims} == {worker}
        assert len({one.token for one in claims} - set(self.tokens)) == 1, "not one new token"
        for one, known in zip(claims, taken, strict=True):
            assert (one.attempts, one.failures, one.replays) == (known.attempts + 1, known.failures, known.replays)

    def take(self, claims: Sequence[Claim], worker: str, budget: int, *, brief: bool) -> None:
        taken = [self.model.events[one.event.event_id] for one in claims]
        token = claims[0].token
        alone = taken[0] if len(taken) == 1 else None
        suspect = alone is not None and alone.measure is not None
        self.model.hands[token] = Hand(worker, len(taken), budget, expired=brief, events=taken, suspect=suspect)
        for known in taken:
            known.state, known.token, known.attempts = State.CLAIMED, token, known.attempts + 1
        self.claims += claims
        self.tokens.append(token)

    # --- lease and verdict -----------------------------------------------------------------------------------------

    def finalize_some(self, picks: list[tuple[int, Verdict]]) -> None:
        """Claims of any age and any hand, in one call."""
        chosen = {(claim.seq, claim.token): (claim, verdict) for claim, verdict in self.pick(self.claims, picks)}
        self.finalize(list(chosen.values()))

    def finalize_anothers(self, picks: list[tuple[int, Verdict]], forge: int) -> None:
        """Of events that somebody holds: former claims of them, and present ones under a token of another hand."""
        taken = [claim for claim in self.claims if self.model.events[claim.event.event_id].token is not None]
        former = [claim for claim in taken if not self.model.holds(claim)]
        forged = [
            claim._replace(token=token)
            for claim in taken
            for token in self.nth(list(self.model.hands), forge)
            if self.model.holds(claim) and token != claim.token
        ]
        chosen = {(claim.seq, claim.token): (claim, verdict) for claim, verdict in self.pick(former + forged, picks)}
        self.finalize(list(chosen.values()))

    def finalize_a_hand(self, hand: int, verdicts: list[Verdict], but: int) -> None:
        """All of a living claim, or all but the first few."""
        for token in self.nth(list(self.model.hands), hand):
            mine = [claim for claim in self.claims if claim.token == token and self.model.holds(claim)][but:]
            self.finalize([(claim, verdicts[n % len(verdicts)]) for n, claim in enumerate(mine)])

    def finalize(self, verdicts: Sequence[tuple[Claim, Verdict]]) -> None:
        if not verdicts:
            return
        refused = self.store.finalize(verdicts)
        stale = [claim for claim, _ in verdicts if not self.model.holds(claim)]
        assert names(refused) == names(stale), "the wrong claims were refused"
        for claim, verdict in verdicts:
            if self.model.holds(claim):
                self.model.judge(self.model.events[claim.event.event_id], verdict)

    def renew(self, worker: str, picks: list[int]) -> None:
        tokens = {self.tokens[-1 - pick % len(self.tokens)] for pick in picks}
        lost = self.store.renew(worker=worker, tokens=tokens, lease=LONG)
        held = {token for token, hand in self.model.hands.items() if not hand.expired}
        assert lost == tokens - held, "the wrong renewals were refused"

    def reap(self, worker: str | None) -> None:
        self.end_leases(worker)

    def end_leases(self, worker: str | None) -> None:
        ended = {one.token: one for one in self.store.reap(worker=worker)}
        hands = self.model.hands
        due = {one for one, hand in hands.items() if (hand.expired if worker is None else hand.worker == worker)}
        assert ended.keys() == due, "the wrong leases were ended"
        for token, one in ended.items():
            hand = self.model.hands[token]
            died = self.recover(hand)
            assert (one.claimed_by, one.recovered + one.died) == (hand.worker, len(hand.events)), "miscounted"
            assert one.died == died, "the wrong number died"
            del self.model.hands[token]

    def recover(self, hand: Hand) -> int:
        """All of a hand goes back; how many of it died."""
        died = 0
        for known in hand.events:
            charged = hand.suspect
            if known.unsure and hand.size == 1 and not hand.suspect:
                charged = self.seen(known).failures > known.failures
            known.failures += charged
            if charged and known.failures >= hand.budget:
                self.model.bury(known, hand.worker, charged=False)
                died += 1
            else:
                known.give_back(waits=False)
                known.due_at = 0
                known.measure, known.unsure = max(1, hand.size // SUSPECT_DIVISOR), False
                known.error = hand.worker
        return died

    # --- operators -------------------------------------------------------------------------------------------------

    def replay(self, picks: list[int]) -> None:
        chosen = self.events(picks)
        query = Query(event_ids=[known.event_id for known in chosen])
        step = self.store.replay(query, limit=100, after=0, audit_id=self.audit_id)
        ended = [known for known in chosen if known.state in TERMINAL]
        assert step.count == len(ended), "the wrong number was replayed"
        for known in ended:
            known.give_back(waits=False)
            known.replays, known.failures = known.replays + 1, 0
            known.blocks, known.published_at = False, None

    def kill(self, picks: list[int]) -> None:
        chosen = self.events(picks)
        killed = self.store.kill([one.event_id for one in chosen], reason="killed", audit_id=self.audit_id)
        alive = [known for known in chosen if known.state not in TERMINAL]
        assert {(one.event_id, one.was) for one in killed} == {(known.event_id, known.state) for known in alive}
        for known in alive:
            self.model.let_go(known)
            attempts = self.seen(known).attempts
            assert attempts - known.attempts in ({0, 1} if known.state is State.PENDING else {0})
            known.attempts, known.error = attempts, "killed"
            known.end(State.DEAD)

    def reschedule(self, picks: list[int], far: bool) -> None:
        chosen = self.events(picks)
        delay = LONG if far else timedelta(0)
        moved = self.store.reschedule([one.event_id for one in chosen], delay=delay, audit_id=self.audit_id)
        pending = [known for known in chosen if known.state is State.PENDING]
        assert set(moved) == {known.event_id for known in pending}, "the wrong events were moved"
        for known in pending:
            known.give_back(waits=far)

    def unblock(self, key: str) -> None:
        freed = self.store.unblock(key, audit_id=self.audit_id)
        assert freed is (key in self.model.blocked_keys()), "a block was invented or forgotten"
        for known in self.model.line(key):
            known.blocks = False

    def decide_on_dead(self, policy: OnDead) -> None:
        self.store.set_control(Control(on_dead=policy), audit_id=self.audit_id)
        self.model.on_dead = policy

    # --- what must hold after every step ---------------------------------------------------------------------------

    @invariant()
    def the_store_agrees_with_the_model(self) -> None:
        self.steps += 1
        self.check_events()
        if self.steps % LOOK_EVERY == 0:
            self.check_counts()
            assert self.store.verify() == []

    def check_events(self) -> None:
        seen = self.store.find(limit=10_000)
        assert [one.event.event_id for one in seen] == list(self.model.events), (
            "an event is lost, twice or out of order"
        )
        for one in seen:
            check_record(one, self.model.events[one.event.event_id])

    def check_counts(self) -> None:
        stats, events = self.store.stats(), self.model.events.values()
        assert dict(stats.states) == {state: sum(known.state is state for known in events) for state in State}
        pending = [known for known in events if known.state is State.PENDING]
        suspect, unsure = (sum(test(known) for known in pending) for test in (is_suspect, is_unsure))
        assert suspect <= stats.suspect <= suspect + unsure, "suspects are miscounted"
        counted = {reason: getattr(stats, reason) for reason in REASONS}
        reasons = [self.model.reason(known) for known in pending]
        assert counted == {reason: reasons.count(reason) for reason in REASONS}, "the reasons to wait are miscounted"
        eligible = [one.event.event_id for one in self.store.find(Query(eligible=True), limit=10_000)]
        free = [known.event_id for known, reason in zip(pending, reasons, strict=True) if reason == "eligible"]
        assert eligible == free, "the wrong events are eligible"
        blocked, held = self.model.blocked_keys(), self.model.held_keys()
        assert len(blocked - held) <= stats.blocked_keys <= len(blocked), "blocked keys are miscounted"
        assert stats.expired_claims == sum(hand.expired for hand in self.model.hands.values())

    # --- choosing --------------------------------------------------------------------------------------------------

    def seen(self, known: Known) -> Record:
        (one,) = self.store.find(Query(event_ids=[known.event_id]))
        return one

    def events(self, picks: Iterable[int]) -> list[Known]:
        """The picked events, the latest first, each once."""
        events = list(self.model.events.values())
        chosen = {known.event_id: known for pick in picks for known in self.nth(events, pick)}
        return list(chosen.values())

    def pick(self, claims: Sequence[Claim], picks: Iterable[tuple[int, Verdict]]) -> list[tuple[Claim, Verdict]]:
        return [(claim, verdict) for number, verdict in picks for claim in self.nth(claims, number)]

    @staticmethod
    def nth(choices: Sequence[Any], number: int) -> Sequence[Any]:
        """One of the choices, counted from the latest; nothing if there is none."""
        return [choices[-1 - number % len(choices)]] if choices else []


def names(claims: Iterable[Claim]) -> list[tuple[int, UUID]]:
    return sorted((claim.seq, claim.token) for claim in claims)


def is_suspect(known: Known) -> bool:
    return known.measure is not None


def is_unsure(known: Known) -> bool:
    return known.measure is None and known.unsure


def check_record(seen: Record, known: Known) -> None:
    """A row as the store shows it against what must be true of it."""
    assert seen.state is known.state, f"{seen.event.event_id} is {seen.state}, and must be {known.state}"
    counts = (known.attempts, known.failures, known.replays)
    assert (seen.attempts, seen.failures, seen.replays) == counts, f"{seen} is miscounted: must be {counts}"
    assert seen.lock_token == known.token
    claimed = known.state is State.CLAIMED
    assert [one is not None for one in (seen.claimed_at, seen.claimed_by, seen.locked_until)] == [claimed] * 3
    assert (seen.published_at is not None) == (known.state is State.PUBLISHED)
    assert (seen.died_at is not None) == (known.state is State.DEAD)
    if known.published_at is not None:
        assert seen.published_at == known.published_at, "published_at changed"
    known.published_at = seen.published_at
    assert known.error is None or known.error in (seen.last_error or ""), f"{seen.last_error!r} is another's error"
    assert len(seen.event.payload) == known.size
    assert not known.waits or seen.available_at is not None


def run_machine(open_store: Callable[[], OutboxStore], *, examples: int, steps: int, shorten: bool) -> None:
    """Hold `examples` random lives of `steps` steps against the store; the same ones at every run.

    With `shorten`, a life that fails is made as short as it can be and still fail; that takes minutes.
    """

    class Machine(StoreMachine):
        def __init__(self) -> None:
            super().__init__(open_store)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            report_multiple_bugs=False,
            phases=(Phase.generate, Phase.shrink) if shorten else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )
