"""Why a PostgreSQL server refused a connection, by its SQLSTATE.

libpq gives no SQLSTATE for a connection that was never made, only the server's words, in the server's language. But it
can trace the protocol, and there the code stands. So a connection that failed is tried once more under a trace. What it
showed is remembered for that text of a failure, however often that comes back: a trace costs the server a connection,
and the process a few kilobytes that psycopg never gives back.
"""

import math
import os
import re
import select
import sys
from collections.abc import Callable

import psycopg
from psycopg.pq import ConnStatus, PollingStatus, Trace
from psycopg.pq.abc import PGconn

from .. import clock
from ..errors import StoreRefused

SECONDS_MAX = 5.0  # for the second attempt
KNOWN_MAX = 64  # failures that are remembered
DOUBT_SECONDS = 60.0  # how long one is remembered whose second attempt ended in another way
_CODE = re.compile(rb'^B\t\d+\tErrorResponse\t S "[^"]*"(?: V "[^"]*")? C "([0-9A-Z]{5})"', re.MULTILINE)
_NO_DATABASE = "3D000"
_NO_PRIVILEGE = "42501"
_WRONG_PASSWORD = "28P01"  # noqa: S105 - a code
_WRONG_LOGIN = "28"  # the class of it
_NO_PASSWORD = "none given"  # noqa: S105 - libpq itself says so, not the server


class Refusals:
    """Tells a server that refuses us from one that does not answer."""

    def __init__(self, conninfo: str, place: str) -> None:
        self._conninfo = conninfo
        self._place = place
        self._known: dict[bytes, tuple[float, str | None]] = {}

    def of(self, error: psycopg.OperationalError) -> StoreRefused | None:
        """What the failure of a connection attempt means, if the server answered and refused us."""
        failed = error.pgconn
        if failed is None or isinstance(error, psycopg.errors.ConnectionTimeout):
            return None
        code = _NO_PASSWORD if failed.needs_password else error.sqlstate or self._sqlstate(failed)
        problem = _problem(code or "", failed)
        return None if problem is None else StoreRefused(f"{self._place} {problem}")

    def _sqlstate(self, failed: PGconn) -> str | None:
        words, now = failed.error_message, clock.monotonic()
        until, code = self._known.get(words, (0.0, None))
        if now < until:
            return code
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        where = {"host": failed.host, "hostaddr": failed.hostaddr, "port": failed.port}
        same_host = {name: _text(value) for name, value in where.items() if value}
        code, again = _traced(psycopg.conninfo.make_conninfo(self._conninfo, **same_host))
        self._known[words] = (math.inf, code) if again == words else (now + DOUBT_SECONDS, None)
        return self._known[words][1]


def _problem(code: str, failed: PGconn) -> str | None:
    """What the server objects to, and what to do; None if it is something that passes by itself."""
    user, database = _text(failed.user), _text(failed.db)
    problems = {
        _NO_PASSWORD: f"asks for a password for the user {user!r}, and none was given: put it into the URL, "
        "the variable PGPASSWORD or the file ~/.pgpass",
        _WRONG_PASSWORD: f"refuses the password of the user {user!r}; correct the user or the password",
        _NO_DATABASE: f"answers, and has no database {database!r}; create it, or correct the URL",
        _NO_PRIVILEGE: f"does not let the user {user!r} use the database {database!r}; grant connect on it",
    }
    if code not in problems and code.startswith(_WRONG_LOGIN):
        return f"refuses the user {user!r}: {_text(failed.error_message)}; see its pg_hba.conf"
    return problems.get(code)


def _traced(conninfo: str) -> tuple[str | None, bytes]:
    """The SQLSTATE of a connection attempt that fails, and its words; none where libpq cannot trace."""
    if not sys.platform.startswith("linux"):
        return None, b""
    memory = os.memfd_create("oncebox-trace")  # never on a disk: a trace may show a password
    connection = psycopg.pq.PGconn.connect_start(conninfo.encode())
    try:
        connection.trace(memory)
        connection.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
        _finish(connection, lambda: connection.status == ConnStatus.BAD)
        connection.untrace()
        found = _CODE.findall(os.pread(memory, os.fstat(memory).st_size, 0))
        return (found[-1].decode() if found else None), connection.error_message
    except psycopg.NotSupportedError:  # a libpq before version 14
        return None, b""
    finally:
        connection.finish()
        os.close(memory)


def _finish(connection: PGconn, failed: Callable[[], bool]) -> None:
    """Bring the attempt to an end, or stop after a while."""
    deadline = clock.monotonic() + SECONDS_MAX
    while not failed() and (left := deadline - clock.monotonic()) > 0:
        status = connection.connect_poll()
        if status not in {PollingStatus.READING, PollingStatus.WRITING}:
            return
        ready = select.poll()
        ready.register(connection.socket, select.POLLIN if status == PollingStatus.READING else select.POLLOUT)
        ready.poll(left * 1000)


def _text(words: bytes) -> str:
    return words.decode(errors="replace").strip()
