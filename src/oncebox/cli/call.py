"""One run of a command: where it acts, who acts, what it answers, and whether it may go on."""

import argparse
import getpass
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ..admin.operations import Operations
from ..errors import OnceboxError
from ..states.base import StateStore
from ..stores.base import Query, hidden_password
from ..wiring import anchored, open_state, open_store, resolved, store_url
from . import documents, tables
from .parser import WrongUse, usage_of
from .progress import Bar
from .tables import Screen
from .words import WHO_VARIABLE

OK, FAILED, MISUSED, LEFT, INTERRUPTED = 0, 1, 2, 3, 130


class Refused(Exception):
    """What was asked for was not done, or not all of it; exit code 1."""


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a command: its arguments, and what the answer is shown on."""

    args: argparse.Namespace
    screen: Screen

    @contextmanager
    def operations(self, *, check_schema: bool = True) -> Iterator[Operations]:
        """The operations on the store that was named, closed afterwards."""
        store = open_store(self.args.store, check_schema=check_schema)
        try:
            yield Operations(store)
        finally:
            store.close()

    @contextmanager
    def states(self, *, new: bool = False) -> Iterator[StateStore]:
        """The state store that was named, closed afterwards; a folder is made only where it may be `new`."""
        if not new and (folder := _folder(self.args.state)) is not None and not folder.is_dir():
            raise Refused(f"there is no folder {folder}, so there is no state in {self.state}; correct the URL")
        store = open_state(self.args.state)
        try:
            yield store
        finally:
            store.close()

    @property
    def state(self) -> str:
        """The state store's URL, fit to be shown."""
        return hidden_password(self.args.state)

    @property
    def store(self) -> str:
        """The store's URL, fit to be shown."""
        return hidden_password(store_url(self.args.store))

    @property
    def audited(self) -> dict[str, Any]:
        """Who acts, and why."""
        return {"who": self.args.who or os.environ.get(WHO_VARIABLE) or _user_at_host(), "why": self.args.why}

    def answer(self, document: Any, lines: Iterable[str]) -> None:
        """Print the document, or the lines for people."""
        for line in [documents.written(document)] if self.args.json else lines:
            print(line)

    def note(self, text: str) -> None:
        """Tell people something beside the answer."""
        if not self.args.json:
            print(text, file=sys.stderr)

    def confirm(self, question: str) -> None:
        """Ask, unless told not to; go on only after a yes."""
        if self.args.yes:
            return
        if not tables.watched(sys.stdin):
            raise WrongUse(f"{question} Nobody is there to answer: add --yes", usage_of(self.args.command))
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise Refused("nothing was changed")


@contextmanager
def following(verb: str, done: str, go_on: Callable[[int], str]) -> Iterator[Bar]:
    """A progress bar; whatever ends the work early is told how far it came, and how to go on."""
    with Bar(verb) as bar:
        try:
            yield bar
        except (KeyboardInterrupt, OnceboxError) as stop:
            if bar.last is not None:
                stop.add_note(f"{tables.events(bar.last.done)} {done} so far; {go_on(bar.last.last_seq)}")
            raise


def query(args: argparse.Namespace) -> Query:
    """The events that the filters mean."""
    if args.since and args.until and args.since >= args.until:
        raise WrongUse("--since is not before --until, so nothing can fit", usage_of(args.command))
    return Query(
        states=tuple(dict.fromkeys(args.state)),
        event_types=tuple(dict.fromkeys(args.type)),
        ordering_key=args.key,
        created_from=args.since,
        created_to=args.until,
        eligible=getattr(args, "eligible", False),
    )


def _folder(state: str) -> Path | None:
    """Where a local state store is."""
    scheme, local, rest = anchored(resolved(state)).partition(":///")
    return Path(unquote(rest.partition("?")[0])) if local and scheme in {"sqlite", "rocksdb"} else None


def _user_at_host() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
