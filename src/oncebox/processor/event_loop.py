"""The event loop that async handlers run on: one for each process, for the life of the process.

An async client that a module of handlers keeps is bound to the loop that it was first used on. So the loop outlives
handlers, engines and shifts. It runs in the thread that asks, and only while handlers run; other threads take turns. A
process that is forked makes a loop of its own: what its parent's loop waits for is the parent's.
"""

import asyncio
import atexit
import ctypes
import os
import threading
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from typing import Any, TypeVar

Result = TypeVar("Result")

PATIENCE = 5.0  # seconds for tasks that were cancelled, and should end

_lock = threading.RLock()  # one thread runs the loop at a time; a second run in the same thread is refused by asyncio
_runner: asyncio.Runner | None = None


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """What the coroutine returns or raises; it has ended then, also when something else has ended the loop's run."""
    global _runner
    with _lock:
        if _runner is None:
            _runner = asyncio.Runner()
        task: list[asyncio.Task[Any]] = []
        try:
            return _runner.run(_named(main, task), context=copy_context())  # the caller's, not that of the first
        except BaseException:  # KeyboardInterrupt and SystemExit of any task end the run at once
            if task and not task[0].done():
                end(_runner.get_loop(), task)
            if task and task[0].done() and not task[0].cancelled():
                task[0].exception()  # what was raised here needs no warning of its own
            raise


async def _named(main: Coroutine[Any, Any, Result], task: list[asyncio.Task[Any]]) -> Result:
    found = asyncio.current_task()
    assert found is not None
    task.append(found)
    return await main


def end(loop: asyncio.AbstractEventLoop, tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel these, and run the loop until they have ended, but not for long."""
    for task in tasks:
        task.cancel()
    if tasks:
        with suppress(SystemExit):
            loop.run_until_complete(asyncio.wait(tasks, timeout=PATIENCE))


async def limited(result: Awaitable[None], seconds: float) -> None:
    """Await it; after so many seconds it is cancelled, and that is a `TimeoutError`."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            await result
    except TimeoutError as error:
        if not limit.expired():  # the handler's own
            raise
        raise TimeoutError(f"the handler was cancelled after {seconds:g} s, its timeout") from error


def _forget() -> None:
    """In a forked process: the parent's loop shares its selector, so it must not even be closed here."""
    global _lock, _runner
    if _runner is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_runner.get_loop()))  # one that is collected closes itself
    _lock, _runner = threading.RLock(), None


def _close() -> None:
    global _runner
    runner, _runner = _runner, None
    if runner is not None:
        loop = runner.get_loop()
        end(loop, list(asyncio.all_tasks(loop)))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close)
