"""The way in and out: arguments to a command, errors to a message and an exit code.

Exit codes: 0 done, 1 it failed, 2 wrong use, 130 interrupted. No secret of the store's URL leaves by any of them.
"""

import contextlib
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import unquote, urlsplit

from ..errors import DuplicateEvent, OnceboxError, UsageError
from ..stores.base import hidden_password
from ..wiring import store_url
from . import acting, doctor, letters, looking, relaying, states, words
from .call import FAILED, INTERRUPTED, MISUSED, OK, Call, Refused
from .parser import WrongUse, parse
from .tables import Screen

_OPTION = re.compile(r"--[a-z-]+=")

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
    "reap": relaying.reap,
    "doctor": doctor.doctor,
    "readers": acting.readers,
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
        return _fail(argv, *_judged(error))
    return code


def _run(argv: Sequence[str]) -> int:
    if not argv:
        words.root().print_help(sys.stderr)
        return MISUSED
    args = parse(argv, words.root(), words.COMMANDS)
    return RUN[args.command](Call(args, Screen.of_stdout()))


def _judged(error: Exception) -> tuple[int, Exception, str]:
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
    return FAILED, error, f"unexpected {type(error).__name__}: {error}\n{hint}"


def _fail(argv: Sequence[str], code: int, error: BaseException, message: str) -> int:
    """Say what went wrong, and how far it came, on standard error; as JSON to whoever asked for JSON."""
    told = "\n".join([message, *getattr(error, "__notes__", [])])
    if "--json" in argv:
        shown = json.dumps({"error": told.replace("\n", "; "), "type": type(error).__name__})
    else:
        shown = f"oncebox: {told}"
    if "--debug" in argv:
        shown = "".join(traceback.format_exception(error)) + shown
    with contextlib.suppress(BrokenPipeError):
        print(_redacted(shown, argv), file=sys.stderr, flush=True)
    return code


def _redacted(text: str, argv: Sequence[str]) -> str:
    """The text without the password of the store's URL, in whatever form a driver quotes it."""
    for url in _urls(argv):
        text = text.replace(url, hidden_password(url))
        try:
            secret = urlsplit(url).password
        except ValueError:
            continue
        for form in {secret, unquote(secret)} if secret else ():
            text = text.replace(form, "***")
    return text


def _urls(argv: Sequence[str]) -> list[str]:
    """Every word that may be a store's URL: the command line may not have been understood."""
    return [_OPTION.sub("", word) for word in argv if "://" in word] + [store_url()]


def _forget_stdout() -> None:
    """Let the interpreter's own flush at exit find nothing to complain of."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
