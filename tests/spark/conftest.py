"""One Spark session for all tests here: it takes longer to start than most of them to run."""

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from oncebox.spark.session import session

SHARED = "spark"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests with the shared session go to one test process, so that there is one session and not several."""
    for item in items:
        if isinstance(item, pytest.Function) and SHARED in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(SHARED))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session with our settings and more task slots than this machine may have cores."""
    warehouse = tmp_path_factory.mktemp("warehouse")
    running = session("local[4]", conf={"spark.sql.warehouse.dir": str(warehouse)})
    yield running
    running.stop()
