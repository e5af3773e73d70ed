"""One event loop for each process: what handlers keep on it outlives engines."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import redis.asyncio

from oncebox import Event
from oncebox.processor import Context, Processor, event_loop
from oncebox.processor.engine import Engine
from oncebox.processor.memory import decoded
from oncebox.states.base import StateStore
from oncebox.testing.servers import Valkey
from oncebox.wiring import open_state
from tests.processor.stage import Died, Lives, Log, event

FORKED = """
import asyncio, os, time
from oncebox.processor import event_loop

def pid():
    time.sleep(0.2)  # the loop sleeps meanwhile
    return os.getpid()

async def threaded():  # its end wakes up the loop from another thread
    late = []
    timer = asyncio.get_running_loop().call_later(10, late.append, "only a timer has woken it up")
    found = await asyncio.to_thread(pid)
    timer.cancel()
    assert not late
    return found

ours = event_loop.run(threaded())
if (child := os.fork()) == 0:
    assert event_loop.run(threaded()) == os.getpid() != ours
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0
assert event_loop.run(threaded()) == ours
print("both go on")
"""
LEFT = """
import asyncio
from oncebox.processor import event_loop

async def stays():
    try:
        await asyncio.sleep(600)
    finally:
        print("ended")

async def leaves():
    global task
    task = asyncio.create_task(stays())
    await asyncio.sleep(0)

event_loop.run(leaves())
"""


@pytest.fixture
def states(tmp_path: Path) -> Iterator[StateStore]:
    with closing(open_state(f"sqlite:///{tmp_path}/state")) as store:
        yield store


def once(lives: Lives) -> Engine:
    """An engine that has had one turn, and was closed."""
    engine = lives.engine()
    engine.step(wait=timedelta(0))
    engine.close()
    engine._state.close()
    return engine


@pytest.mark.parametrize("concurrency", [1, 10])
def test_an_async_client_of_a_module_works_in_the_next_engine_too(
    states: StateStore, valkey: Valkey, concurrency: int
) -> None:
    app = Processor("app", max_retries=0, concurrency=concurrency)
    client = redis.asyncio.from_url(valkey.url.replace("valkey://", "redis://"))  # of the module, as it were
    key = f"event-loop-{concurrency}"

    @app.on("order.created")
    async def handler(event: Event, ctx: Context) -> None:
        ctx.state.put(event.ordering_key or "", await client.incr(key))

    log = Log()
    lives = Lives(app, log, states)
    for keys in (("a", "b", "c"), ("d", "e", "f")):
        for name in keys:
            log.add(event(key=name))
        once(lives)
    event_loop.run(client.aclose())
    assert sorted(decoded(value) for value in lives.state().values()) == [1, 2, 3, 4, 5, 6]


def test_a_queue_between_handlers_outlives_the_engine_that_it_was_first_used_in(states: StateStore) -> None:
    app, queue = Processor("app", max_retries=0), asyncio.Queue[str]()

    @app.on("order.created")
    async def handler(event: Event, ctx: Context) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 0.001)  # binds it to the loop
        ctx.state.add("runs")

    log = Log()
    lives = Lives(app, log, states)
    for _ in range(2):
        log.add(event())
        once(lives)
    assert decoded(lives.state()[b"runs"]) == 2


def test_a_forked_process_has_a_loop_of_its_own_and_leaves_its_parents_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "both go on\n", done.stderr


def test_what_is_left_on_the_loop_is_ended_with_its_process() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("ended\n", "", 0)


def test_threads_take_turns_on_the_loop() -> None:
    running: list[int] = []

    async def alone() -> None:
        running.append(threading.get_ident())
        await asyncio.sleep(0.01)
        assert running == [threading.get_ident()]
        running.clear()

    failed: list[BaseException] = []

    def often() -> None:
        try:
            for _ in range(10):
                event_loop.run(alone())
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=often) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_task_that_ends_the_run_of_the_loop_leaves_no_handler_on_it(error: type[BaseException]) -> None:
    ended: list[str] = []

    async def raises() -> None:
        raise error

    async def waits() -> None:
        task = asyncio.create_task(raises())
        task.add_done_callback(asyncio.Task.exception)
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(str(task.done()))

    with pytest.raises(error):
        event_loop.run(waits())
    assert ended == ["True"]


@pytest.mark.parametrize("concurrency", [1, 10])
def test_a_process_that_dies_in_a_handler_leaves_nothing_and_the_next_life_goes_on(
    states: StateStore, concurrency: int
) -> None:
    app, deaths = Processor("app", concurrency=concurrency), [1]

    @app.on("order.created")
    async def handler(event: Event, ctx: Context) -> None:
        ctx.state.add(event.ordering_key or "")
        if event.ordering_key == "b" and deaths:
            deaths.pop()
            raise Died
        await asyncio.sleep(0)

    log = Log()
    for key in "abc":
        log.add(event(key=key))
    lives = Lives(app, log, states)
    assert not lives.live()
    assert lives.state() == {}
    lives.until_done()
    assert {key: decoded(value) for key, value in lives.state().items()} == {b"a": 1, b"b": 1, b"c": 1}
