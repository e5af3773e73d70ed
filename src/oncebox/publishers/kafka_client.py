"""What every Kafka client of ours needs: its brokers, who it is, and librdkafka's settings by their own names."""

import logging
from collections.abc import Collection
from typing import Any

from confluent_kafka import KafkaError

from ..url import shows
from .message import PublisherUrl

logger = logging.getLogger(__name__)

# Secrets that librdkafka takes as they are, so that it has no reason to quote them.
_NEVER_QUOTED = frozenset(
    {
        *("sasl.password", "ssl.key.password", "ssl.keystore.password", "ssl.key.pem", "ssl.certificate.pem"),
        *("ssl.ca.pem", "ssl.key.location", "ssl.keystore.location", "sasl.oauthbearer.client.secret"),
    }
)
_WITHOUT_VALUES = ('No such configuration property: "{}"', 'Invalid value for configuration property "{}"')


class ClientLog:
    """Where a client's own log lines go: what matters of them is in what its user is told."""

    @staticmethod
    def log(_level: int, text: str, *arguments: object) -> None:
        logger.debug(text, *arguments)


def client_settings(url: PublisherUrl, *, topic_option: str) -> dict[str, Any]:
    """The settings that a URL may still change by `own_settings`."""
    if not url.authority or url.path.strip("/"):
        raise url.wrong(
            f"names no brokers alone; write kafka://host:9092,other:9092, and the topic as ?{topic_option}=…"
        )
    return {
        "bootstrap.servers": url.authority,
        "client.id": "oncebox",
        "log_level": 2,
        "topic.metadata.propagation.max.ms": 5_000,
        "socket.keepalive.enable": True,
        "reconnect.backoff.max.ms": 1_000,
        **_login(url),
    }


def _login(url: PublisherUrl) -> dict[str, Any]:
    """A user in the URL logs in by SASL, over TLS unless another protocol is named."""
    if url.user is None:
        return {}
    login = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN", "sasl.username": url.user}
    return {**login, "sasl.password": url.password or ""}


def own_settings(url: PublisherUrl, ours: Collection[str], *, whose: str = "publisher") -> dict[str, str]:
    """Settings of librdkafka, by their own names, as the URL has them; never one of `ours`."""
    own = url.dotted()
    for name in own:
        if name in ours:
            raise url.wrong(f"{name} is not yours to set: the {whose}'s promises hang on it")
    if "sasl.mechanisms" in own:
        own["sasl.mechanism"] = own.pop("sasl.mechanisms")
    return own


def refusal(error: KafkaError, given: Collection[str]) -> str:
    """Why the client refuses its settings: in its own words, unless they may quote the value of a secret one."""
    doubtful = [name for name in given if not shows(name) and name not in _NEVER_QUOTED]
    harmless = {words.format(name) for name in doubtful for words in _WITHOUT_VALUES}
    if not doubtful or error.str() in harmless:
        return error.str()
    return f"librdkafka does not take its settings; look at {', '.join(doubtful)}"
