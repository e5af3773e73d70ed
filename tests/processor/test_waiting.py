"""Whose turn it is: of each key the oldest first, what has failed or is suspect alone, and nobody is forgotten."""

from hypothesis import given
from hypothesis import strategies as st

from oncebox.processor.records import identity
from oncebox.processor.waiting import Failed, Waiting
from oncebox.sources.base import Message
from tests.processor.stage import event


@given(
    keys=st.lists(st.sampled_from(["a", "b", None]), max_size=25),
    suspects=st.sets(st.integers(0, 24), max_size=4),
    failing=st.dictionaries(st.integers(0, 24), st.integers(1, 3), max_size=6),
    limit=st.integers(1, 6),
    arrivals=st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_each_runs_to_its_end_in_the_order_of_its_key(
    keys: list[str | None], suspects: set[int], failing: dict[int, int], limit: int, arrivals: list[int]
) -> None:
    messages = [Message((number,), event(key=key, amount=number)) for number, key in enumerate(keys)]
    blamed = {identity(messages[number]) for number in suspects if number < len(messages)}
    left = {identity(messages[number]): times for number, times in failing.items() if number < len(messages)}
    waiting, coming, done, now = Waiting(blamed), list(messages), list[Message](), 0.0
    while coming or len(waiting):
        for message in coming[: arrivals[int(now) % len(arrivals)]]:
            waiting.add(message, identity(message))
            coming.remove(message)
        batch = waiting.batch(limit, now)
        now += 1
        assert len(batch) <= limit
        assert len(batch) == 1 or not any(tried.failures or tried.identity in blamed for tried in batch)
        finished, skipped, stopped = [], [], set[str | None]()
        for tried in batch:
            key = tried.message.event.ordering_key
            if key in stopped:
                skipped.append(tried)
            elif left.get(tried.identity, 0):
                left[tried.identity] -= 1
                waiting.failed(tried, now + 2)
                stopped |= {key} - {None}
            else:
                finished.append(tried)
        waiting.held_back(skipped)
        waiting.finished(finished)
        done += [tried.message for tried in finished]
        assert now < 1_000, "it never came to an end"
    assert sorted(done) == messages
    for key in ("a", "b"):
        own = [message for message in done if message.event.ordering_key == key]
        assert own == sorted(own)


def test_a_batch_of_one_or_with_a_suspect_is_not_announced() -> None:
    first, second, third = (Message((number,), event(key=None)) for number in range(3))
    waiting = Waiting({identity(second)})
    waiting.add(first, identity(first))
    assert waiting.plain(10, 0.0) == []
    for message in (second, third):
        waiting.add(message, identity(message))
    assert waiting.plain(10, 0.0) == []
    assert [tried.message for tried in waiting.batch(10, 0.0)] == [first]
    assert [tried.message for tried in waiting.batch(10, 0.0)] == [second]


def test_what_is_due_again_comes_before_what_is_announced() -> None:
    messages = [Message((number,), event(key=f"k{number}")) for number in range(4)]
    waiting = Waiting()
    for message in messages:
        waiting.add(message, identity(message))
    (first,) = waiting.batch(1, 0.0)
    waiting.failed(first, 5.0)
    assert waiting.plain(10, 6.0) == []
    assert waiting.batch(10, 6.0) == [first]
    assert len(waiting.plain(10, 6.0)) == 3


def test_the_same_event_at_another_position_is_done_with_the_first() -> None:
    one = event()
    first, second = Message((1,), one), Message((2,), one)
    waiting = Waiting()
    for message in (first, second):
        waiting.add(message, identity(message))
    (tried,) = waiting.batch(10, 0.0)
    assert tried.messages == (first, second)
    assert waiting.messages() == [first, second]
    waiting.finished([tried])
    assert waiting.messages() == []


def test_what_ended_well_before_a_failure_lets_nobody_pass_it() -> None:
    messages = [Message((number,), event(key="k")) for number in range(4)]
    waiting = Waiting()
    for message in messages:
        waiting.add(message, identity(message))
    first, second, third = waiting.batch(3, 0.0)
    waiting.failed(second, 5.0)
    waiting.held_back([third])
    waiting.finished([first])
    assert waiting.batch(10, 1.0) == []
    assert waiting.batch(10, 5.0) == [second]
    waiting.finished([second])
    assert [tried.message for tried in waiting.batch(10, 6.0)] == messages[2:]


def test_what_has_failed_in_a_former_life_runs_alone() -> None:
    messages = [Message((number,), event(key=None)) for number in range(3)]
    waiting = Waiting()
    waiting.add_all(messages, map(identity, messages), {identity(messages[1]): Failed(1)})
    for expected in messages:
        assert [tried.message for tried in waiting.batch(10, 0.0)] == [expected]
