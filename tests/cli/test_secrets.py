"""No secret of a URL leaves the command line, and a refused login says what is wrong with it."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncebox import clock
from oncebox.cli import entry, main
from oncebox.cli.call import Call
from oncebox.errors import PublisherRefused, PublisherUnavailable, StateRefused, StoreRefused, StoreUnavailable
from oncebox.stores.postgresql_pool import ConnectionPool
from oncebox.testing.kafka import Kafka
from oncebox.testing.servers import PostgreSQL, Valkey, free_port
from oncebox.wiring import open_publisher, open_state, open_store
from tests.cli.steps import Cli, Outcome

SECRET = "s3cr3t-w0rd"
NOBODY = "127.0.0.1:1"  # a port where nothing listens


def told(outcome: Outcome) -> str:
    return outcome.out + outcome.err


# --- three messages ------------------------------------------------------------------------------------------------


def refusals(server: PostgreSQL) -> dict[str, str]:
    """URLs that a server refuses, by a part of the message."""
    return {
        "refuses the password of the user 'oncebox'": server.url.replace(server.password, SECRET),
        "refuses the password of the user 'eve'": server.url.replace("oncebox:", "eve:"),
        "asks for a password for the user 'oncebox', and none was given": server.url.replace(f":{server.password}", ""),
        "has no database 'nowhere'": server.database_url("nowhere"),
    }


def test_a_wrong_password_an_unknown_database_and_no_answer_are_three_messages(
    cli: Cli, postgresql: PostgreSQL
) -> None:
    for message, url in refusals(postgresql).items():
        for words in (("stats", "--store", url), ("state", "get", "totals", "1", "--state", url)):
            outcome = cli(*words)
            assert (outcome.code, outcome.out) == (1, "")
            assert message in outcome.err
            assert "does not answer" not in outcome.err
            assert SECRET not in outcome.err
            assert postgresql.password not in outcome.err
    silent = cli("stats", "--store", f"postgresql://ada:{SECRET}@{NOBODY}/shop")
    assert silent.code == 1
    assert f"postgresql://ada:***@{NOBODY}/shop does not answer" in silent.err
    assert len(silent.err.splitlines()) == 1


def test_a_refused_login_is_a_type_of_its_own_and_still_unavailable(postgresql: PostgreSQL) -> None:
    for url in refusals(postgresql).values():
        with pytest.raises(StoreRefused):
            open_store(url)
        with pytest.raises(StateRefused):
            open_state(url)
    with pytest.raises(StoreUnavailable) as silent:
        open_store(f"postgresql://ada@{NOBODY}/shop")
    assert type(silent.value) is StoreUnavailable


def test_several_hosts_are_refused_by_the_last_that_answers(postgresql: PostgreSQL) -> None:
    several = postgresql.url.replace("@", f"@{NOBODY},").replace(postgresql.password, SECRET)
    with pytest.raises(StoreRefused, match="refuses the password"):
        open_store(several)


def test_a_role_that_may_not_connect_is_told_so(postgresql: PostgreSQL, postgresql_url: str) -> None:
    database = postgresql_url.rpartition("/")[2]
    postgresql.psql(f"create role guest login password 'g'; revoke connect on database \"{database}\" from public")
    try:
        with pytest.raises(StoreRefused, match=r"does not let the user 'guest' use the database .* grant connect"):
            open_store(postgresql_url.replace(f"{postgresql.user}:{postgresql.password}", "guest:g"))
    finally:
        postgresql.psql("drop role guest")


def test_a_server_without_a_free_connection_is_unavailable_and_does_not_refuse_us() -> None:
    with PostgreSQL({"max_connections": "6", "superuser_reserved_connections": "0"}) as server:
        held = [psycopg.connect(server.url) for _ in range(6)]
        with pytest.raises(StoreUnavailable, match="too many clients") as full:
            open_store(server.url)
        assert type(full.value) is StoreUnavailable
        for connection in held:
            connection.close()


def test_a_user_whom_the_server_lets_in_from_nowhere_is_told_so() -> None:
    with PostgreSQL() as server:
        Path(server.psql("show hba_file").strip()).write_text("host all all 127.0.0.1/32 reject\n")
        server.psql("select pg_reload_conf()")
        clock.sleep(0.2)
        with pytest.raises(StoreRefused, match=r"refuses the user 'oncebox': .*; see its pg_hba.conf"):
            open_store(server.url)


@pytest.mark.parametrize(("code", "kind"), [(b"28P01", StoreRefused), (b"57P03", StoreUnavailable)])
def test_the_code_of_a_refusal_decides_and_not_its_language(code: bytes, kind: type[StoreUnavailable]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_refuse_all, args=(listening, code), daemon=True).start()
        with pytest.raises(StoreUnavailable) as refused:
            open_store(f"postgresql://ada:{SECRET}@127.0.0.1:{listening.getsockname()[1]}/shop?sslmode=disable")
    assert type(refused.value) is kind
    assert SECRET not in str(refused.value)


def _refuse_all(listening: socket.socket, code: bytes) -> None:
    """Answer as a server does that speaks German."""
    fields = [b"SFATAL", b"VFATAL", b"C" + code, "MAnmeldung für Benutzer »ada« fehlgeschlagen".encode(), b""]
    body = b"\0".join(fields)
    with contextlib.suppress(OSError):  # until the test closes it
        while True:
            client, _ = listening.accept()
            with client:
                client.recv(1024)
                client.sendall(b"E" + struct.pack("!i", len(body) + 5) + body + b"\0")


@pytest.mark.parametrize("credentials", ["", f":{SECRET}@", f"eve:{SECRET}@"])
def test_a_broker_that_refuses_the_password_is_told_from_one_that_is_silent(
    cli: Cli, valkey: Valkey, credentials: str
) -> None:
    refused = f"valkey://{credentials}127.0.0.1:{valkey.port}"
    with pytest.raises(PublisherRefused, match="refuses the login"):
        open_publisher(refused).check()
    silent = f"valkey://{credentials}127.0.0.1:{free_port()}"
    with pytest.raises(PublisherUnavailable, match="does not answer") as unavailable:
        open_publisher(silent).check()
    assert type(unavailable.value) is PublisherUnavailable
    for url in (refused, silent):
        assert SECRET not in told(cli("doctor", "--no-spark", "--to", url))


def test_a_kafka_cluster_that_refuses_the_password_is_told_from_one_that_is_silent(cli: Cli, kafka: Kafka) -> None:
    refused = cli("doctor", "--no-spark", "--to", kafka.url.replace(kafka.password, SECRET))
    assert "refuses the login" in refused.out
    silent = cli("doctor", "--no-spark", "--to", kafka.url.replace(f":{kafka.port}", f":{free_port()}"))
    assert "does not answer" in silent.out
    assert SECRET not in told(refused)
    assert kafka.password not in told(silent)


def test_the_reason_of_a_refusal_is_asked_for_once_however_often_it_comes_back() -> None:
    with PostgreSQL({"log_connections": "on"}) as server:
        pool = ConnectionPool(server.url.replace(server.password, SECRET), 1, place="here")
        before = server.log.read_text().count("connection received")
        for _ in range(20):
            with pytest.raises(StoreRefused):
                pool.connect()
        assert server.log.read_text().count("connection received") - before == 21


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (f"kafka://{NOBODY}?destination=bad topic {{event_type}}", "a topic's name has 1 to 249 characters"),
        (f"kafka://{NOBODY}?destination=bad%2Ftopic", "a topic's name has 1 to 249 characters"),
        (f"kafka://{NOBODY}/bad topic {{event_type}}", "?destination="),
        ("file:///proc/nowhere?destination=" + "shop." * 49, "240 are possible"),
        (f"valkey://{NOBODY}?destination={{topic}}", "unknown field 'topic'"),
    ],
)
@pytest.mark.usefixtures("store")
def test_a_destination_that_no_event_makes_legal_is_refused_before_anything_starts(
    cli: Cli, url: str, problem: str
) -> None:
    assert problem in cli("doctor", "--no-spark", "--to", url).out
    outcome = cli("relay", "--to", url)
    assert (outcome.code, outcome.out) == (2, "")
    assert problem in outcome.err


# --- nothing leaks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--store", "--to", "--from", "--state", "--emit"])
def test_a_url_that_cannot_be_read_is_named_by_its_option(cli: Cli, option: str) -> None:
    words = {
        "--store": ["stats"],
        "--to": ["relay"],
        "--from": ["process", "shop:app", "--state", "sqlite:///s"],
        "--state": ["process", "shop:app", "--from", "outbox+sqlite:///o.db"],
        "--emit": ["process", "shop:app", "--from", "outbox+sqlite:///o.db", "--state", "sqlite:///s"],
    }
    outcome = cli(*words[option], option, f"postgresql://u:{SECRET}@x@h/db")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{option}: the URL cannot be read" in outcome.err
    assert SECRET not in outcome.err


def test_a_variable_that_cannot_be_read_is_named(process: Cli) -> None:
    outcome = process("stats", ONCEBOX_STORE=f"host=h password={SECRET}")
    assert outcome.code == 2
    assert "ONCEBOX_STORE: the URL cannot be read" in outcome.err
    assert SECRET not in outcome.err


def test_a_typo_in_a_scheme_gets_a_hint_and_shows_no_secret(cli: Cli) -> None:
    outcome = cli("stats", "--store", f"postgre://ada:{SECRET}@h/db")
    assert outcome.code == 2
    assert "no store for postgre://ada:***@h/db; did you mean postgres" in outcome.err


def test_a_password_that_is_also_the_name_of_everything_is_not_given_away(cli: Cli) -> None:
    """Replacing its text everywhere would show where it stood."""
    outcome = cli("stats", "--store", f"postgresql://postgres:postgres@{NOBODY}/postgres")
    assert f"postgresql://postgres:***@{NOBODY}/postgres does not answer" in outcome.err
    assert outcome.err.count("***") == 1


@pytest.mark.parametrize(
    "words",
    [
        [f"postgresql://u:{SECRET}@h/db", "stats"],
        ["stats", f"postgresql://u:{SECRET}@h/db"],
        ["stats", f"host=h password={SECRET}"],
        ["stats", f"--storre=postgresql://u:{SECRET}@h/db"],
        ["list", "--limit", f"postgresql://u:{SECRET}@h/db"],
        ["list", f"--limit=postgresql://u:{SECRET}@h/db"],
        ["list", "--state", f"postgresql://u:{SECRET}@h/db"],
        ["stats", f"--json=postgresql://u:{SECRET}@h/db"],
        ["dlq", f"postgresql://u:{SECRET}@h/db"],
        ["show", f"postgresql://u:{SECRET}@h/db"],
    ],
)
def test_a_url_in_the_wrong_place_is_not_quoted(cli: Cli, words: list[str]) -> None:
    outcome = cli(*words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("oncebox: ")
    assert SECRET not in outcome.err


@pytest.fixture
def careless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that quotes what it was given, as a stranger's store may do."""

    def fail(call: Call) -> int:
        raise RuntimeError(f"no answer from {call.args.store}") from OSError(f"connecting to {call.args.store}")

    monkeypatch.setitem(entry.RUN, "stats", fail)


@pytest.mark.usefixtures("careless")
def test_the_words_of_a_stranger_are_left_out_where_a_secret_was_given(cli: Cli) -> None:
    for flag in ((), ("--debug",), ("--json",), ("--json", "--debug")):
        outcome = cli("stats", "--store", f"postgresql://u:{SECRET}@h/db", *flag)
        assert outcome.code == 1
        assert "unexpected RuntimeError (its text may quote a password" in outcome.err
        assert "u:" not in outcome.err
    assert "no answer from sqlite:///x.db" in cli("stats", "--store", "sqlite:///x.db").err
    debug = cli("stats", "--store", "sqlite:///x.db", "--debug").err
    assert "OSError: connecting to sqlite:///x.db" in debug
    assert "RuntimeError: no answer" in debug


# No word of ours holds four digits, so whatever is found of such a secret is a leak.
SECRETS = st.text(alphabet="0123456789@:/?#%&=+$ {}[]ü", min_size=4, max_size=24).filter(
    lambda text: sum(map(str.isdigit, text)) > 3
)
OPTIONS = st.sampled_from(["password", "sslpassword", "sasl.password", "ssl.key.password", "pasword", "token"])
FORMS: list[Callable[[str, str], str]] = [
    lambda secret, _: f"postgresql://ada:{secret}@{NOBODY}/shop?connect_timeout=2",
    lambda secret, _: f"postgresql://ada:{secret}@{NOBODY},{NOBODY}/shop?sslmod=require",
    lambda secret, option: f"postgresql://{NOBODY}/shop?{option}={secret}",
    lambda secret, _: f"postgre://ada:{secret}@{NOBODY}/shop",
    lambda secret, _: f"sqlite://ada:{secret}@{NOBODY}/shop.db",
    lambda secret, option: f"sqlite:///shop.db?{option}={secret}",
    lambda secret, _: f"ada:{secret}@{NOBODY}",
    lambda secret, _: f"host=h password='{secret}'",
]


@pytest.mark.usefixtures("surroundings")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(
    st.sampled_from(FORMS),
    SECRETS,
    OPTIONS,
    st.booleans(),
    st.sampled_from([(), ("--debug",), ("--json",)]),
    st.sampled_from([("stats", "--store"), ("dlq", "list", "totals", "--state"), ("doctor", "--no-spark", "--to")]),
)
def test_no_message_holds_a_generated_secret(
    capsys: pytest.CaptureFixture[str],
    form: Callable[[str, str], str],
    secret: str,
    option: str,
    encoded: bool,
    flags: tuple[str, ...],
    command: tuple[str, ...],
) -> None:
    written = quote(secret, safe="") if encoded else secret
    main([*command, form(written, option), *flags])
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    for line in shown.splitlines():
        if '", line ' in line:  # a place in a traceback has numbers of its own
            shown = shown.replace(line, "")
    assert secret not in shown
    assert quote(secret, safe="") not in shown
    assert json.dumps(secret)[1:-1] not in shown
