"""The way in and out: arguments to a command, errors to a message and an exit code.

Exit codes: 0 done, 1 it failed, 2 wrong use, 3 it ended and work is left, 130 interrupted. No secret of a URL leaves by
any of them: each message is made of parts that hold none.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..config import STORE_VARIABLE
from ..errors import DuplicateEvent, InvalidSetting, OnceboxError, UsageError
from ..url import parse_url
from ..wiring import store_url
from . import acting, doctor, letters, looking, relaying, states, words
from .call import FAILED, INTERRUPTED, MISUSED, OK, Call, Refused
from .parser import WrongUse, parse
from .tables import Screen

_OPTION = re.compile(r"--[a-z-]+=")

URL_OPTIONS = {
    "store": "--store",
    "to": "--to",
    "source": "--from",
    "state": "--state",
    "emit": "--emit",
    "into": "--into",
}

RUN: Mapping[str, Callable[[Call], int]] = {
    "init": acting.migrate,
    "migrate": acting.migrate,
    "add": acting.add,
    "list": looking.list_events,
    "show": looking.show,
    "stats": looking.stats,
    "replay": acting.replay,
    "kill": acting.kill,
    "reschedule": acting.reschedule,
    "unblock": acting.unblock,
    "prune": acting.prune,
    "audit": looking.audit,
    "pause": acting.pause,
    "resume": acting.resume,
    "relay-config": acting.relay_config,
    "relay": relaying.relay,
    "process": relaying.process,
    "dlq list": letters.list_letters,
    "dlq show": letters.show,
    "dlq redrive": letters.redrive,
    "dlq purge": letters.purge,
    "dlq audit": letters.audit,
    "state get": states.get,
    "state scan": states.scan,
    "state export": states.export,
    "state import": states.import_,
    "state repartition": states.repartition,
    "state accept-loss": states.accept_loss,
    "reap": relaying.reap,
    "doctor": doctor.doctor,
    "readers": acting.readers,
    "raise-epoch": acting.raise_epoch,
    "verify": looking.verify,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; prints nothing but its answer, or what went wrong."""
    argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(argv)
        print(end="", flush=True)
    except BrokenPipeError:  # whoever read our answer has seen enough
        _forget_stdout()
        return OK
    except KeyboardInterrupt as stop:
        return _fail(argv, INTERRUPTED, stop, "interrupted")
    except SystemExit as end:  # --help and --version
        return OK if end.code is None else int(end.code)
    except Exception as error:  # noqa: BLE001 - an operator gets a message, never a bare traceback
        return _fail(argv, *_judged(error, secret=_holds_secret(argv)))
    return code


def _run(argv: Sequence[str]) -> int:
    if not argv:
        words.root().print_help(sys.stderr)
        return MISUSED
    args = parse(argv, words.root(), words.COMMANDS)
    _check_urls(args)
    return RUN[args.command](Call(args, Screen.of_stdout()))


def _check_urls(args: argparse.Namespace) -> None:
    """A URL that cannot be read is never shown: only here is known which option holds it."""
    given = {option: getattr(args, name, None) for name, option in URL_OPTIONS.items()}
    if not args.store and STORE_VARIABLE in os.environ:
        given[STORE_VARIABLE] = os.environ[STORE_VARIABLE]
    for where, url in given.items():
        if isinstance(url, str) and url:
            try:
                parse_url(url)
            except InvalidSetting as error:
                raise InvalidSetting(f"{where}: {error}") from None


def _judged(error: Exception, *, secret: bool) -> tuple[int, Exception, str]:
    """What an error means to an operator: an exit code, and a message."""
    match error:
        case WrongUse():
            return MISUSED, error, f"{error}\nread on: {error.usage}"
        case DuplicateEvent() | Refused():
            return FAILED, error, str(error)
        case UsageError():
            return MISUSED, error, str(error)
        case OnceboxError():
            return FAILED, error, str(error)
    hint = "this should not happen: --debug shows where; please report it"
    return FAILED, error, f"unexpected {_words(error, secret=secret)}\n{hint}"


def _fail(argv: Sequence[str], code: int, error: BaseException, message: str) -> int:
    """Say what went wrong, and how far it came, on standard error; as JSON to whoever asked for JSON."""
    told = "\n".join([message, *getattr(error, "__notes__", [])])
    if "--json" in argv:
        shown = json.dumps({"error": told.replace("\n", "; "), "type": type(error).__name__})
    else:
        shown = f"oncebox: {told}"
    if "--debug" in argv:
        shown = "".join(_traceback(error, secret=_holds_secret(argv))) + shown
    with contextlib.suppress(BrokenPipeError):
        print(shown, file=sys.stderr, flush=True)
    return code


def _traceback(error: BaseException, *, secret: bool) -> Iterator[str]:
    """The traceback of an error and of what caused it, like Python's own but for the words of strangers."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None:
        yield from _traceback(before, secret=secret)
        yield "\nwhich led to\n\n"
    yield "Traceback (most recent call last):\n"
    for frame in traceback.extract_tb(error.__traceback__):
        yield f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}\n'
        if frame.line and not secret:  # a password may stand in a program's own text
            yield f"    {frame.line}\n"
    yield f"{_words(error, secret=secret)}\n"


def _words(error: BaseException, *, secret: bool) -> str:
    """The kind of an error and its text; our own texts are made without secrets, others may quote what they were given.

    So where a secret was given, the text of a stranger's error is left out: nothing is replaced in it, for a part of
    the secret might stay.
    """
    kind = type(error).__name__
    if secret and not isinstance(error, OnceboxError | WrongUse | Refused):
        return f"{kind} (its text may quote a password of a URL, so it is not shown)"
    return f"{kind}: {error}"


def _holds_secret(argv: Sequence[str]) -> bool:
    """Whether any word, or the store of the environment, is a URL with a secret, or may be one."""
    words = [word.partition("=")[2] if _OPTION.match(word) else word for word in (*argv, store_url())]
    return any(map(_may_hold_secret, words))


def _may_hold_secret(word: str) -> bool:
    if "://" not in word and "@" not in word:
        return False
    try:
        return parse_url(word).secret
    except InvalidSetting:
        return True


def _forget_stdout() -> None:
    """Let the interpreter's own flush at exit find nothing to complain of."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
