"""Stages of the outage grid: each serves many faults, one after the other, for its Spark takes longest to start."""

from collections.abc import Iterator

import pytest

from oncebox.testing.proxy import Proxy
from oncebox.testing.servers import PostgreSQL, Valkey
from tests.outages.stage import Stage, Times


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A stage with the times that the module is about, at work."""
    times: Times = request.module.TIMES
    with PostgreSQL() as server, Valkey() as broker, Proxy(server.port) as proxy:
        stage = Stage(server, broker, proxy, times, tmp_path_factory.mktemp("stage"))
        try:
            stage.start()
            yield stage
        finally:
            stage.close()
