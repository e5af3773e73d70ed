"""One parser takes every URL apart, and no secret of it is ever shown."""

import string
from urllib.parse import quote

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oncebox.errors import InvalidSetting, UsageError
from oncebox.publishers.message import PublisherUrl
from oncebox.registry import registered
from oncebox.url import UNREADABLE, hidden_password, parse_url, shown_word, shows

SECRET = "s3cret"


@pytest.mark.requirement("SC-01")
@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://shop:s3cret@host/db", "postgresql://shop:***@host/db"),
        ("postgresql://postgres:postgres@db/postgres", "postgresql://postgres:***@db/postgres"),
        ("postgresql://u:s3%40cret@one:5432,two:5433/db", "postgresql://u:***@one:5432,two:5433/db"),
        ("postgresql://u:s3:cret@[::1]:5432/db", "postgresql://u:***@[::1]:5432/db"),
        ("outbox+postgresql://u:s3cret@h/db?mode=read", "outbox+postgresql://u:***@h/db?mode=read"),
        ("kafka://user:s3cret@h1,h2:9092", "kafka://user:***@h1,h2:9092"),
        ("redis://:s3cret@host:6379/0", "redis://:***@host:6379/0"),
        ("valkeys://:s3cret@host", "valkeys://:***@host"),
        ("postgresql://host/db?user=shop&password=s3cret", "postgresql://host/db?user=shop&password=***"),
        ("postgresql:///db?sslpassword=s3cret&sslmode=require", "postgresql:///db?sslpassword=***&sslmode=require"),
        ("kafka://host/topic?sasl_password=s3cret&acks=all", "kafka://host/topic?sasl_password=***&acks=all"),
        ("kafka://h?ssl.key.pem=s3cret&linger.ms=5", "kafka://h?ssl.key.pem=***&linger.ms=5"),
        ("kafka://h?sasl.pasword=s3cret", "kafka://h?sasl.pasword=***"),
        ("kafka://h?topic=s3cret@host", "kafka://h?topic=***"),
        ("postgresql://u:${PG_WORD}@h/db?sslpassword=${KEY}", "postgresql://u:${PG_WORD}@h/db?sslpassword=${KEY}"),
        ("valkey:s3cret", "valkey:***"),
        ("sqlite:///outbox.db", "sqlite:///outbox.db"),
        ("sqlite:////var/lib/a@b.db?busy_timeout=5s", "sqlite:////var/lib/a@b.db?busy_timeout=5s"),
        ("stdout:?destination={event_type}", "stdout:?destination={event_type}"),
        ("null:", "null:"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert hidden_password(url) == shown


@pytest.mark.requirement("SC-01")
@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3@cret@h/db",  # which @ ends the password?
        "postgresql://u:s3/s3cret@h/db",
        "postgresql://u:1/s3cret@h/db",
        "postgresql://u:s3?s3cret@h/db",
        "postgresql://u:s3#s3cret@h/db",
        "postgresql://u:s3%s3cret@h/db",
        "postgresql://u:s3cret",  # no host: a port is a number
        "postgresql:///u:s3cret@h/db",
        "postgresql:/u:s3cret@h/db",
        "shop:s3cret@h/db",
        "host=h user=u password=s3cret",
        "postgresql://h/db?s3cret",
        "postgresql://h/db?password=a&s3cret",
        "kafka://h?x y=s3cret",
        " postgresql://u:s3cret@h/db",
        "postgresql://u:s3cret@h/db\n",
        "x://[s3cret/",
        "",
    ],
)
def test_a_url_that_cannot_be_read_is_never_shown(url: str) -> None:
    assert hidden_password(url) == UNREADABLE
    with pytest.raises(InvalidSetting, match="cannot be read") as refused:
        parse_url(url)
    assert SECRET not in str(refused.value)


def test_a_bare_name_is_no_url_and_may_be_shown() -> None:
    with pytest.raises(InvalidSetting, match=r"'shop\.db' does not begin with a scheme, as .* sqlite:///file\.db do"):
        parse_url("shop.db")


def test_a_url_is_taken_apart_and_decoded() -> None:
    url = parse_url("postgresql://us%40er:p%2Fw@one:1,two/d%20b?sslmode=require&options=-c%20a%3Db")
    assert (url.scheme, url.user, url.password) == ("postgresql", "us@er", "p/w")
    assert (url.hosts, url.path) == ("one:1,two", "/d b")
    assert url.options == (("sslmode", "require"), ("options", "-c a=b"))
    assert url.secret
    assert "p/w" not in f"{url} {url!r}"


@pytest.mark.parametrize(
    ("url", "secret"),
    [("sqlite:///x.db", False), ("kafka://h?topic=a", False), ("x://u:p@h", True), ("x://u@h/${NAME}", True)],
)
def test_it_is_known_whether_a_url_holds_a_secret(url: str, secret: bool) -> None:
    assert parse_url(url).secret is secret


def test_only_the_options_that_are_known_to_be_harmless_are_shown() -> None:
    assert shows("destination")
    assert not any(map(shows, ("password", "sslpassword", "sslkey", "passfile", "sasl.password", "tls_key", "token")))


def test_a_word_of_the_command_line_is_shown_unless_it_may_hold_a_secret() -> None:
    assert [shown_word(word) for word in ("stast", "lease=long", "12:30", "a=b c=d", "a:b@c")] == [
        *("stast", "lease=long", "12:30"),
        *(UNREADABLE, UNREADABLE),
    ]
    assert shown_word("postgresql://u:s3cret@h/db") == "postgresql://u:***@h/db"


# Nothing of this alphabet is in the names below or in our own words, so whatever is found of a secret is a leak.
SECRETS = st.text(alphabet="0123456789@:/?#%&=+$ {}[]üß€", min_size=4, max_size=30)
NAMES = st.text(alphabet=string.ascii_lowercase, min_size=1, max_size=8)
SCHEMES = st.sampled_from(["postgresql", "outbox+postgresql", "kafka", "valkeys", "redis", "postgre"])
OPTIONS = st.sampled_from(["password", "sslpassword", "sasl.password", "ssl.key.password", "api_token", "pasword"])


@pytest.mark.requirement("SC-01")
@given(SCHEMES, NAMES, SECRETS, NAMES, OPTIONS, st.booleans(), st.booleans())
def test_no_secret_is_shown_however_it_is_written(
    scheme: str, user: str, secret: str, host: str, option: str, encoded: bool, as_option: bool
) -> None:
    assume(any(character.isdigit() for character in secret))
    written = quote(secret, safe="") if encoded else secret
    url = f"{scheme}://{host}/db?{option}={written}" if as_option else f"{scheme}://{user}:{written}@{host}/db"
    if encoded:
        assert UNREADABLE not in hidden_password(url)
    for told in (hidden_password(url), repr(_parsed(url)), shown_word(url), *_errors(url)):
        assert secret not in told
        assert quote(secret, safe="") not in told
        assert quote(secret) not in told


def _parsed(url: str) -> object:
    try:
        return parse_url(url)
    except InvalidSetting as error:
        return str(error)


def _errors(url: str) -> list[str]:
    """What a registry and a publisher say of it."""
    told = []
    for attempt in (lambda: registered("oncebox.nothing", url, UsageError), lambda: PublisherUrl(url).done()):
        try:
            attempt()
        except UsageError as error:
            told.append(str(error))
    return told
