"""kill -9 of a worker whose destination is slow: little is sent again, and little waits for a lease."""

import signal
from pathlib import Path

import pytest

from oncebox.event import State
from oncebox.testing.scripted import sent
from tests.crash.conftest import Start
from tests.crash.relay_process import Orders, publisher_for
from tests.relay.stage import Stage

EACH = 0.005  # seconds an event
HALF_A_SECOND = 100  # events
SECOND = 200
SENT = 730  # the first claim holds 500, the next ones a second's work


@pytest.mark.requirement("LC-16", "LC-19", "LC-21")
def test_a_kill_repeats_at_most_what_was_sent_in_the_last_half_second(
    stage: Stage, start: Start, tmp_path: Path
) -> None:
    """Counted in events: on a busy machine the destination is slower, and takes fewer in that time."""
    ids = stage.append(1_500)
    log = tmp_path / "sent"
    to = f"scripted://{log}"
    killed = start(Orders(store=stage.url, to=to, claim_max=1_000, each=EACH, die_after=SENT))
    with stage.reaping():
        assert killed.wait(120) == -signal.SIGKILL
        arrived = [one.event_id for one in sent(log)]
        publisher = publisher_for(to)
        with stage.working(publisher, claim_max=1_000) as work:
            stage.until_states(PUBLISHED=len(ids))
        publisher.close()
    assert len(arrived) == len(set(arrived)) == SENT
    again = [one.event_id for one in sent(log)[SENT:]]
    repeated = set(again) & set(arrived)
    assert len(again) == len(set(again))
    assert len(repeated) <= HALF_A_SECOND
    assert repeated <= set(arrived[-HALF_A_SECOND:])
    assert set(arrived) | set(again) == set(map(str, ids))
    suspects = [record for record in stage.store.find(limit=len(ids)) if record.attempts > 1]
    assert len(suspects) <= SECOND
    assert stage.states() == {State.PUBLISHED: len(ids)}
    assert not any(batch.refused for batch in work.batches)
