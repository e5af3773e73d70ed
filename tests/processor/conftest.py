"""Where the processors of these tests keep what they know, and where they emit to."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from oncebox import OutboxStore, open_store
from oncebox.states.base import StateStore
from oncebox.wiring import open_state


@pytest.fixture
def states(tmp_path: Path) -> Iterator[StateStore]:
    store = open_state(f"sqlite:///{tmp_path}/state")
    yield store
    store.close()


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[OutboxStore]:
    store = open_store(f"sqlite:///{tmp_path}/outbox.db", check_schema=False)
    store.migrate()
    yield store
    store.close()
