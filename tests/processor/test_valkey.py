"""What a processor's checkpoint proves of a Valkey stream with one reader: which entries had their effect."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from oncebox import Event, clock
from oncebox.admin import LetterQuery, Letters
from oncebox.admin.losses import accept_loss
from oncebox.errors import InvalidSetting, SourceUnavailable, StateBehind
from oncebox.processor import Context, Processor
from oncebox.processor.records import progress_from
from oncebox.processor.requests import Action, Audited, Named, Request, asking
from oncebox.processor.taking import LOST
from oncebox.sources.base import Message, Progress
from oncebox.sources.valkey import PAGE
from oncebox.states.base import Space, StateStore, Write
from oncebox.testing.publishing import given
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_source, open_state
from tests.processor.brokers import WAIT, Totals, engines, run, state_of
from tests.processor.stage import dies_at

INBOX = timedelta(milliseconds=50)  # so short that only the checkpoint knows what was done before a restart
FIRST = range(1, 11)


class Stream:
    """A stream of amounts, all of one key, with small ids."""

    def __init__(self, server: Valkey, client: Any, name: str) -> None:
        self.client = client
        self.name = name
        self.url = f"{server.url.replace('redis://', 'valkey://')}?stream={name}"

    def add(self, *amounts: int) -> None:
        """Each under its own number as the id."""
        for amount in amounts:
            entry = {"event_id": str(clock.uuid7()), "event_type": "order.created", "payload": str(amount)}
            self.client.xadd(self.name, entry | {"ordering_key": "k"}, id=f"{amount}-0")

    def pending(self) -> list[int]:
        found = self.client.xpending_range(self.name, "totals", "-", "+", 1_000)
        return [int(one["message_id"].partition(b"-")[0]) for one in found]

    def settled(self, waiting: Sequence[int] = ()) -> bool:
        (group,) = self.client.xinfo_groups(self.name)
        return self.pending() == [*waiting] and group["last-delivered-id"] == self._last()

    def _last(self) -> bytes:
        return bytes(self.client.xinfo_stream(self.name)["last-generated-id"])


@pytest.fixture
def stream(valkey: Valkey, tmp_path: Path) -> Iterator[Stream]:
    with redis.Redis.from_url(valkey.url) as client:
        yield Stream(valkey, client, f"test-{tmp_path.name}")


@pytest.fixture
def totals() -> Totals:
    found = Totals()
    found.app = Processor("totals", inbox=INBOX)
    found.app.default(found.total)
    return found


def settle(totals: Totals, stream: Stream, states: StateStore, url: str = "") -> None:
    """Run until the group has nothing left."""

    def once() -> bool:
        try:
            with engines(totals.app, url or stream.url, states) as ((engine, _),):
                given.patiently(lambda: engine.step(wait=WAIT).idle and not engine.waiting and stream.settled())
                engine.close()
                return True
        except SourceUnavailable:  # as the desk does: the partition is opened again
            return False

    given.patiently(once)


def total(states: StateStore) -> int:
    return sum(state_of(states).values())


def checkpoint(states: StateStore, stream: Stream) -> Progress:
    with closing(states.look("totals", 0)) as view:
        name = f"valkey:{stream.name}".encode()
        return progress_from(view.get(Space.CHECKPOINTS, [name]).get(name))


def forget_inbox() -> None:
    clock.sleep(2 * INBOX.total_seconds())


# --- what the checkpoint covers is left out ---------------------------------------------------------------------------


@pytest.mark.requirement("EO-05")
def test_a_crash_before_the_acknowledgement_and_a_downtime_longer_than_the_inbox_double_nothing(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    stream.add(*FIRST)
    assert not run(totals.app, stream.url, states, 10, dies_at("committed"))
    assert stream.pending(), "committed, and not acknowledged"
    forget_inbox()
    settle(totals, stream, states)
    assert (sorted(totals.runs), total(states)) == (list(FIRST), sum(FIRST))


@pytest.mark.requirement("EO-05")
def test_a_group_that_is_set_back_doubles_nothing_when_the_inbox_is_empty(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    stream.add(*FIRST)
    settle(totals, stream, states)
    forget_inbox()
    stream.client.xgroup_setid(stream.name, "totals", "0")
    stream.add(11)
    settle(totals, stream, states)
    assert totals.runs == [*FIRST, 11]


def test_duplicates_alone_move_the_checkpoint_before_they_are_acknowledged(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    totals.app = Processor("totals")
    totals.app.default(totals.total)
    stream.add(*FIRST)
    settle(totals, stream, states)
    ((_, same),) = stream.client.xrange(stream.name, "10-0", "10-0")
    stream.client.xadd(stream.name, same, id="20-0")
    seen: list[Progress] = []
    with engines(totals.app, stream.url, states) as ((engine, _),):
        acknowledge = engine._source.ack

        def ack(messages: Sequence[Message]) -> None:
            seen.append(checkpoint(states, stream))
            acknowledge(messages)

        engine._source.ack = ack  # type: ignore[method-assign]
        given.patiently(lambda: engine.step(wait=WAIT).skipped == 1)
        engine.close()
    assert [progress.low for progress in seen] == [(20, 0)]
    assert stream.settled()


# --- and nothing else is ----------------------------------------------------------------------------------------------


@pytest.mark.requirement("EO-03")
def test_what_another_client_was_given_is_not_covered_by_what_comes_after_it(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    """A consumer of the group that does not ask who the owner is: an older version, or one with `takeover=idle`."""
    stream.add(*FIRST)
    with engines(totals.app, stream.url, states) as ((engine, _),):
        given.patiently(lambda: (engine.step(wait=WAIT), stream.settled())[1])
        stream.add(11, 12)
        stream.client.xreadgroup("totals", "another", {stream.name: ">"})
        stream.add(13, 14)
        with pytest.raises(SourceUnavailable, match="another client has moved the group totals from 10-0 to 12-0"):
            engine.step(wait=WAIT)
    settle(totals, stream, states)
    assert totals.runs == [*FIRST, 11, 12, 13, 14], "in the order of the stream"


@pytest.mark.requirement("EO-03")
@pytest.mark.parametrize("before", ["an older version", "takeover=idle"])
def test_a_mark_above_what_others_held_covers_nothing(
    stream: Stream, totals: Totals, states: StateStore, before: str
) -> None:
    stream.add(*FIRST)
    stream.client.xgroup_create(stream.name, "totals", id="0")
    stream.client.xreadgroup("totals", "another", {stream.name: ">"}, count=3)
    url = stream.url + ("&takeover=idle" if "=" in before else "")
    if "=" in before:
        with engines(totals.app, url, states) as ((engine, _),):
            given.patiently(lambda: (engine.step(wait=WAIT), len(totals.runs) == 7)[1])
    else:
        stream.client.xreadgroup("totals", "another", {stream.name: ">"})
        stream.client.xack(stream.name, "totals", *(f"{amount}-0" for amount in FIRST[3:]))
        with closing(states.own("totals", 0, 1, owner="old")) as state:
            old = b'{"low":[10,0],"done":[]}'
            state.commit([Write(Space.CHECKPOINTS, f"valkey:{stream.name}".encode(), old)])
    assert checkpoint(states, stream) == Progress((10, 0))
    assert stream.pending() == [1, 2, 3]
    totals.runs.clear()
    stream.add(11)
    settle(totals, stream, states)
    assert totals.runs == [1, 2, 3, 11]
    assert checkpoint(states, stream) == Progress((11, 0), since=(10, 0)), "from here on it proves something"


@pytest.mark.requirement("EO-03")
def test_a_stream_that_begins_anew_below_the_mark_is_processed(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    stream.add(*FIRST)
    settle(totals, stream, states)
    stream.client.delete(stream.name)
    stream.client.xgroup_create(stream.name, "totals", id="0", mkstream=True)
    stream.add(4, 5, 6)
    settle(totals, stream, states)
    assert totals.runs == [*FIRST, 4, 5, 6]
    stream.add(7)
    assert not run(totals.app, stream.url, states, 99, dies_at("taken"))
    settle(totals, stream, states)
    assert totals.runs == [*FIRST, 4, 5, 6, 7]


@pytest.mark.requirement("EO-03")
def test_what_a_server_adds_after_it_lost_the_end_of_its_stream_is_processed(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    """A replica took over that had not heard of the last entries, nor of the group's reads; its clock is behind."""
    stream.add(*FIRST[:6])
    settle(totals, stream, states)
    kept = stream.client.dump(stream.name)
    stream.add(*FIRST[6:])
    settle(totals, stream, states)
    forget_inbox()
    stream.client.restore(stream.name, 0, kept, replace=True)
    totals.runs.clear()
    with engines(totals.app, stream.url, states) as ((engine, _),):
        stream.add(8, 9)
        given.patiently(lambda: (engine.step(wait=WAIT), stream.settled())[1])
        engine.close()
    assert totals.runs == [8, 9]


@pytest.mark.requirement("EO-03")
def test_what_a_server_adds_after_it_lost_what_was_done_above_a_waiting_entry_is_processed(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    hour = timedelta(hours=1)
    totals.app = Processor("totals", inbox=INBOX, retry_delay=hour, retry_delay_max=hour)

    @totals.app.default
    def total(event: Event, ctx: Context) -> None:
        if event.payload == b"4":
            raise RuntimeError("later")
        totals.total(event, ctx)

    def shift(*amounts: int) -> None:
        with engines(totals.app, stream.url, states) as ((engine, _),):
            stream.add(*amounts)
            given.patiently(lambda: (engine.step(wait=WAIT), stream.settled([4]))[1])
            engine.close()

    shift(*FIRST[:6])
    kept = stream.client.dump(stream.name)
    shift(*FIRST[6:])
    assert checkpoint(states, stream).low == (3, 0)
    forget_inbox()
    stream.client.restore(stream.name, 0, kept, replace=True)
    totals.runs.clear()
    shift(8, 9)
    assert totals.runs == [8, 9]


@pytest.mark.requirement("EO-02", "EO-03")
def test_an_accepted_loss_stops_nothing_more_and_can_still_be_read_again(
    stream: Stream, totals: Totals, tmp_path: Path
) -> None:
    """What was lost had no effect, so no checkpoint covers it, also when the mark is above it."""
    with closing(open_state(f"sqlite:///{tmp_path}/lost")) as states:
        stream.add(*FIRST)
        settle(totals, stream, states)
    with closing(open_state(f"sqlite:///{tmp_path}/new")) as states:
        with pytest.raises(StateBehind), engines(totals.app, stream.url, states):
            pass
        with closing(open_source(stream.url, consumer="totals")) as source:
            (loss,) = accept_loss(states, "totals", source, who="ada", why="no backup")
            assert loss.events == len(FIRST)
            assert accept_loss(states, "totals", source, who="ada", why="again") == []
        totals.runs.clear()
        stream.add(11, 12)
        settle(totals, stream, states)
        assert totals.runs == [11, 12]
        forget_inbox()
        stream.client.xgroup_setid(stream.name, "totals", "0")
        settle(totals, stream, states)
        assert totals.runs == [11, 12, *FIRST]


# --- what the stream no longer has ------------------------------------------------------------------------------------


def lost(states: StateStore) -> list[int]:
    """The amounts, which are the ids, of the letters that are marked so."""
    found = [one.letter for one in Letters(states, "totals").find()]
    assert all(letter.lost and not letter.event.payload and letter.error == LOST for letter in found)
    return sorted(letter.position[0] for letter in found)


def take_and_die(totals: Totals, stream: Stream, states: StateStore, step: str = "marked") -> None:
    assert not run(totals.app, stream.url, states, 1_000_000, dies_at(step))


@pytest.mark.requirement("EO-03", "EO-08")
@pytest.mark.parametrize("takeover", ["open", "idle"])
def test_pending_entries_that_were_trimmed_are_dead_letters_marked_lost(
    stream: Stream, totals: Totals, states: StateStore, takeover: str
) -> None:
    url = f"{stream.url}&takeover={takeover}&min_idle_time_ms=1"
    stream.add(*FIRST)
    take_and_die(totals, stream, states)
    stream.client.xtrim(stream.name, minid="5-0", approximate=False)
    stream.client.xdel(stream.name, "8-0")
    assert not run(totals.app, url, states, 1_000_000, dies_at("recorded"))
    assert lost(states) == [1, 2, 3, 4, 8]
    assert set(stream.pending()) >= {1, 2, 3, 4, 8}, "acknowledged only when it is written down"
    before = [one.letter for one in Letters(states, "totals").find()]
    stream.add(11)
    settle(totals, stream, states, url)
    assert [one.letter for one in Letters(states, "totals").find()] == before, "each once"
    assert sorted(totals.runs) == [5, 6, 7, 9, 10, 11]
    assert {letter.source for letter in before} == {f"valkey:{stream.name}"}


@pytest.mark.requirement("EO-05")
def test_what_the_checkpoint_covers_is_not_lost_when_it_is_trimmed(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    stream.add(*FIRST)
    take_and_die(totals, stream, states, "committed")
    done = [*totals.runs]
    assert done
    stream.client.xtrim(stream.name, maxlen=0, approximate=False)
    settle(totals, stream, states)
    assert lost(states) == [amount for amount in FIRST if amount not in done]
    assert totals.runs == done


def test_a_lost_letter_that_was_purged_before_its_acknowledgement_does_not_come_again(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    totals.app = Processor("totals")
    totals.app.default(totals.total)
    url = f"{stream.url}&takeover=idle&min_idle_time_ms=1"
    stream.add(1)
    take_and_die(totals, stream, states)
    stream.client.xtrim(stream.name, maxlen=0, approximate=False)
    assert not run(totals.app, url, states, 1_000_000, dies_at("recorded"))
    asked = Letters(states, "totals").purge(LetterQuery(), who="ada", everything=True)
    with engines(totals.app, f"{stream.url}&takeover=idle", states) as ((engine, _),):
        given.patiently(lambda: (engine.step(wait=WAIT), Letters(states, "totals").became(asked).done)[1])
    assert stream.pending() == [1]
    settle(totals, stream, states, url)
    assert lost(states) == []


def test_many_lost_entries_are_written_down_bit_by_bit_and_before_what_comes_after_them(
    stream: Stream, totals: Totals, states: StateStore
) -> None:
    many = 5_000
    with stream.client.pipeline() as pipe:
        for number in range(1, many + 1):
            pipe.xadd(stream.name, {"payload": "1"}, id=f"{number}-0")
        pipe.execute()
    stream.client.xgroup_create(stream.name, "totals", id="0")
    stream.client.xreadgroup("totals", "former", {stream.name: ">"})
    stream.client.xtrim(stream.name, maxlen=1, approximate=False)
    stream.add(many + 1)
    rounds: list[int] = []
    with engines(totals.app, stream.url, states) as ((engine, _),):

        def turn() -> bool:
            done = engine.step(wait=WAIT)
            rounds.append(done.dead)
            assert many + 1 not in totals.runs or sum(rounds) == many - 1, "what comes after them waits"
            return done.idle and not engine.waiting and stream.settled()

        given.patiently(turn)
        engine.close()
    assert (sum(rounds), max(rounds) <= 2 * PAGE) == (many - 1, True)
    assert totals.runs == [1, many + 1]
    assert checkpoint(states, stream) == Progress((many + 1, 0), since=(0, 0))


@pytest.mark.requirement("EO-09")
def test_a_lost_letter_is_not_redriven_and_can_be_purged(stream: Stream, totals: Totals, states: StateStore) -> None:
    totals.refused = {5}
    stream.add(*FIRST)
    take_and_die(totals, stream, states)
    stream.client.xtrim(stream.name, minid="3-0", approximate=False)
    settle(totals, stream, states)
    letters = Letters(states, "totals")
    gone = [one.letter for one in letters.find(LetterQuery(lost=True))]
    assert [letter.position for letter in gone] == [(1, 0), (2, 0)]
    with pytest.raises(InvalidSetting, match=f"{gone[0].event.event_id} is lost.*dlq purge"):
        letters.redrive(LetterQuery(event_ids=[gone[0].event.event_id]), who="ada")
    totals.refused, totals.runs = set(), []
    assert letters.redrive(LetterQuery(), who="ada", everything=True).letters == 1
    settle(totals, stream, states)
    assert totals.runs == [5]
    named = [Named(letter.identity, 0) for letter in gone]  # as an older command line would ask
    request = Request(action_id=clock.uuid7(), action=Action.REDRIVE, letters=named)
    asked = Audited(action_id=request.action_id, action="redrive", who="ada", at=clock.now())
    states.ask("totals", 0, asking(request, asked)[1])
    settle(totals, stream, states)
    assert (totals.runs, [*letters.find()]) == ([5], [*letters.find(LetterQuery(lost=True))])
    assert letters.audit()[0].passed_over == 2
    letters.purge(LetterQuery(lost=True), who="ada")
    settle(totals, stream, states)
    assert letters.count() == 0
