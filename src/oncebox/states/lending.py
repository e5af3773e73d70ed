"""What a handler may not do with the connection it is lent: the transaction is not its own."""

import re

from ..errors import StateError, TransactionEnded

_ENDING = re.compile(
    r"(?:\s|;|--[^\n]*(?:\n|$)|/\*.*?\*/)*"
    r"(?P<word>commit|end|abort|begin|start\s+transaction|prepare\s+transaction|rollback(?!\s+(?:transaction\s+|work\s+)?to\b)"
    r"|listen|unlisten|attach|detach|vacuum)\b",
    re.IGNORECASE | re.DOTALL,
)


def refused(what: str) -> StateError:
    """What a handler is told that tries to end the transaction that its batch is in, or to leave it."""
    return StateError(
        f"{what} is refused in a handler: ctx.connection is in the transaction of its batch, which ends with the "
        "checkpoint; leave it out"
    )


def check_statement(statement: str) -> None:
    """Refuse a statement that ends the transaction, or that has no place in one."""
    if found := _ENDING.match(statement):
        raise refused(found["word"].upper())


def ended(place: str, why: str = "") -> TransactionEnded:
    """What to raise when the transaction is gone after a handler: nothing of its batch may be committed."""
    return TransactionEnded(
        f"{place}: the transaction of a batch has ended while a handler had its connection: "
        + (why or "by a commit, rollback or close of its own, or because the database gave it up")
        + "; nothing that came after is written. Let the handler leave the transaction alone, and end soon"
    )
