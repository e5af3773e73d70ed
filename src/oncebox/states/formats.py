"""Which format a state store has, and how it becomes the next one.

A format is what the bytes of a store mean: its tables, its keys, its values. Format 1 is released, and never changes. A
later one is an `Upgrade` in its store's table `FORMATS`: the owner of a partition runs what is missing before it does
anything else, in one transaction with the number. A new store is made in format 1 and upgraded in the same way, so
there is one path only. An export has a number of its own (`admin/states.py`), which grows where values change.

Code refuses a format that is newer than it knows, and writes nothing. A reader refuses an older one, too: only an owner
may upgrade.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidSetting, StateOutdated, StateTooNew

log = logging.getLogger(__name__)

FIRST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """Makes the format `number` of the one before it.

    `run` is called with what its store says: SQLite and PostgreSQL give the driver's connection, in the transaction;
    RocksDB gives its `Rewrite`. It may neither commit nor wait.
    """

    number: int
    does: str  # for the log, and for readers of the table
    run: Callable[[Any], None]


class Formats:
    """The formats that one kind of store knows: the first, and one more for each upgrade."""

    def __init__(self, *upgrades: Upgrade) -> None:
        self._upgrades: list[Upgrade] = []
        for upgrade in upgrades:
            if upgrade.number != self.newest + 1:
                raise InvalidSetting(f"an upgrade to format {upgrade.number}; the next one is {self.newest + 1}")
            self._upgrades.append(upgrade)

    @property
    def newest(self) -> int:
        """The format that this version writes."""
        return FIRST + len(self._upgrades)

    def missing(self, found: int, place: object) -> list[Upgrade]:
        """What an owner has to run, in this order; `StateTooNew` for a format that this version does not know."""
        self.check_known(found, place)
        return self._upgrades[found - FIRST :]

    def run(self, upgrade: Upgrade, handle: Any, place: object) -> None:
        """One step, and a word about it."""
        log.info("%s: upgrading the state to format %d: %s", place, upgrade.number, upgrade.does)
        upgrade.run(handle)

    def check_known(self, found: int, place: object) -> None:
        """Refuse what a newer version has written."""
        if found > self.newest:
            raise StateTooNew(
                f"{place} has format {found}, this version knows {self.newest}: upgrade oncebox, or restore a backup "
                "from before the state was upgraded"
            )

    def check_newest(self, found: int, place: object) -> None:
        """Refuse any other format, for those who may not upgrade it."""
        self.check_known(found, place)
        if found < self.newest:
            raise StateOutdated(
                f"{place} has format {found}, this version reads {self.newest}: start its processor with this version "
                "once, which upgrades it in place"
            )
