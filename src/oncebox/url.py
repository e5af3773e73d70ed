"""A URL, taken apart: the one parser, which knows what is secret in it. Pure.

    scheme://user:password@host:port,host:port/path?option=value&option=value

It is strict where a mistake would show a password: a URL that could be read in two ways, such as one with an `@` inside
the password, is not read at all, and a URL that is not read is never shown.
"""

import re
from dataclasses import dataclass, field
from urllib.parse import unquote, unquote_plus

from .errors import InvalidSetting

UNREADABLE = "a URL that cannot be read"  # stands in messages for what must not be shown
MASK = "***"

# The options whose values may be shown. All others are hidden: the name of a secret may have a typing error in it.
_SHOWN_OPTIONS = frozenset(
    {
        # ours
        *("destination", "partitions", "dedup", "maxlen", "wait", "tls_ca", "tls_cert", "partitioner", "topic"),
        *("start", "stream", "min_idle_time_ms", "takeover", "mode", "lease", "busy_timeout", "pool_max"),
        # libpq's
        *("user", "host", "hostaddr", "port", "dbname", "sslmode", "sslrootcert", "sslcert", "sslnegotiation"),
        *("target_session_attrs", "load_balance_hosts", "application_name", "connect_timeout", "channel_binding"),
        *("keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout", "service"),
        *("gssencmode", "require_auth", "client_encoding", "ssl_min_protocol_version", "ssl_max_protocol_version"),
        # librdkafka's
        *("acks", "client.id", "compression.type", "compression.codec", "compression.level", "linger.ms"),
        *("message.timeout.ms", "socket.timeout.ms", "security.protocol", "sasl.mechanism", "sasl.mechanisms"),
        *("sasl.username", "ssl.ca.location", "ssl.certificate.location", "ssl.endpoint.identification.algorithm"),
    }
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_VARIABLE = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
_HOST = re.compile(rf"(\[[0-9A-Fa-f:.]+(?:%[^\]]*)?\]|[^\[\]:]*)(:([0-9]{{0,5}}|{_VARIABLE.pattern}))?")
_OPTION = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*)=(.*)")
_LOGIN_IN_PATH = re.compile(r":.*@")
_BARE = re.compile(r"[\w./-]+")
_CONNINFO = re.compile(r"\w\s*=.*\s|\s.*\w\s*=")  # keywords and values, as libpq takes them too
_BROKEN_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class Url:
    """The parts of a URL, decoded; `str` gives the URL with every secret masked."""

    scheme: str
    user: str | None
    password: str | None = field(repr=False)
    hosts: str  # as it is written: some URLs name several
    path: str
    options: tuple[tuple[str, str], ...] = field(repr=False)
    masked: str
    secret: bool  # whether it holds anything that must not be shown, itself or in a variable that it names

    def __str__(self) -> str:
        return self.masked


def parse_url(text: str) -> Url:
    """Take a URL apart; `InvalidSetting` says what is wrong with it, and shows no part of it."""
    scheme, colon, rest = text.partition(":")
    if not colon or not _SCHEME.fullmatch(scheme):
        named = repr(text) if _BARE.fullmatch(text) else "it"  # a name or a path alone has no place for a login
        raise _unreadable(
            f"{named} does not begin with a scheme, as postgresql://host/database and sqlite:///file.db do"
        )
    if not text.isprintable():
        raise _unreadable("it holds a character that cannot be printed")
    place, _, query = rest.partition("?")
    authority, path = _split_place(place)
    login, _, hosts = authority.rpartition("@")
    _check_login(login, hosts)
    _check_path(place, authority, path)
    user, colon, password = login.partition(":")
    options = _options(query)
    shown = [(name, value if _is_shown(name, value) else MASK) for name, value in options]
    masked_password = f":{password if _VARIABLE.fullmatch(password) else MASK}" if colon else ""
    masked = "".join(
        (
            f"{scheme}:",
            "//" if place.startswith("//") else "",
            f"{user}{masked_password}@" if "@" in authority else "",
            hosts,
            path if place.startswith("/") or not path else MASK,
            "?" if "?" in rest else "",
            "&".join(f"{name}={value}" for name, value in shown),
        )
    )
    return Url(
        scheme,
        unquote(user) if "@" in authority else None,
        unquote(password) if colon else None,
        hosts,
        unquote(path),
        tuple((name, unquote_plus(value)) for name, value in options),
        masked,
        masked != text or bool(_VARIABLE.search(text)),
    )


def hidden_password(url: str) -> str:
    """The URL for messages and logs, with every secret masked; `UNREADABLE` if it cannot be taken apart."""
    try:
        return parse_url(url).masked
    except InvalidSetting:
        return UNREADABLE


def shown_word(word: str) -> str:
    """A word of a command line for a message: one that may be a URL, a part of one or a conninfo is masked."""
    return hidden_password(word) if "://" in word or "@" in word or _CONNINFO.search(word) else word


def shows(option: str) -> bool:
    """Whether the value of this option may be shown."""
    return option in _SHOWN_OPTIONS


def broken_percent(text: str) -> bool:
    """Whether a `%` stands in the text that begins no %XX."""
    return bool(_BROKEN_PERCENT.search(text))


def _unreadable(problem: str) -> InvalidSetting:
    return InvalidSetting(f"the URL cannot be read: {problem}")


def _split_place(place: str) -> tuple[str, str]:
    if not place.startswith("//"):
        return "", place
    authority, slash, path = place[2:].partition("/")
    return authority, slash + path


def _check_login(login: str, hosts: str) -> None:
    if "@" in login:
        raise _unreadable("it has more than one '@'; in a user or a password write %40")
    if "#" in login or "#" in hosts:
        raise _unreadable("it has a '#' before its path; in a password write %23")
    if broken_percent(login):
        raise _unreadable("its user or its password has a '%' that begins no %XX; write %25")
    if not all(_HOST.fullmatch(host) for host in hosts.split(",")):
        raise _unreadable(
            "it names no host and port; a port is a number, and in a password write '/' as %2F, '?' as %3F, '@' as %40"
        )


def _check_path(place: str, authority: str, path: str) -> None:
    """A login that ended up in the path, because of a slash too few or too many, or of one in a password."""
    if "@" in path and (authority or not place.startswith("//") or _LOGIN_IN_PATH.search(path)):
        raise _unreadable("it has an '@' behind a '/'; in a password write '/' as %2F, in a path write '@' as %40")


def _options(query: str) -> list[tuple[str, str]]:
    """The options as they are written."""
    found = [_OPTION.fullmatch(one) for one in query.split("&")] if query else []
    if not all(found):
        raise _unreadable("what follows its '?' is not option=value&option=value; in a password write '?' as %3F")
    return [(match[1], match[2]) for match in found if match]


def _is_shown(name: str, value: str) -> bool:
    return not value or bool(_VARIABLE.fullmatch(value)) or (shows(name) and "@" not in value)
