"""How the URL of a PostgreSQL store is read."""

from collections.abc import Mapping

import psycopg
import pytest

from oncebox.stores.postgresql_pool import split_url

PATIENCE = ("keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")


def options(url: str) -> Mapping[str, object]:
    return psycopg.conninfo.conninfo_to_dict(split_url(url)[0])


def test_a_server_that_vanishes_without_a_word_is_given_up_within_half_a_minute() -> None:
    """A relay that waits for it in a claim or a finalize does nothing else meanwhile."""
    given = options("postgresql://host/db")
    idle, interval, count, unheard = (int(str(given[name])) for name in PATIENCE)
    assert idle + interval * count <= 30
    assert 0 < unheard <= 30_000


@pytest.mark.parametrize("name", ["tcp_user_timeout", "keepalives_idle", "connect_timeout", "application_name"])
def test_what_the_url_says_comes_before_the_defaults(name: str) -> None:
    assert options(f"postgresql://host/db?{name}=7")[name] == "7"
