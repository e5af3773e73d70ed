"""The Kafka launcher: a broker that can be killed, and jars that are fetched once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer

from oncebox.spark.cache import cache_directory
from oncebox.testing import guard, jars
from oncebox.testing.kafka import Kafka
from oncebox.testing.servers import MissingProgram, ServerError

MIRRORS = """<settings xmlns="urn:settings"><mirrors>
<mirror><id>a</id><mirrorOf>other</mirrorOf><url>urn:other</url></mirror>
<mirror><id>b</id><mirrorOf>{covers}</mirrorOf><url> urn:mirror </url></mirror>
</mirrors></settings>"""
FAKE_MAVEN = """#!/bin/sh
echo run >> {calls}
sleep 0.3
mkdir lib
{python} -c "import zipfile; zipfile.ZipFile('lib/{broker}', 'w').close()"
{then}
"""


def test_a_killed_kafka_comes_back_with_what_it_acknowledged_and_leaves_nothing() -> None:
    with Kafka() as server:
        topic, port = server.create_topic(partitions=2), server.port
        producer = Producer({**server.client, "acks": "all"})
        for number in range(1000):
            producer.produce(topic, str(number))
        assert producer.flush(60) == 0
        server.kill()
        assert not guard.living_in(server.directory)
        server.start()
        assert server.port == port
        assert sorted(int(record.value or b"") for record in server.records(topic)) == list(range(1000))
        directory = server.directory
    assert not guard.living_in(directory)
    assert not directory.exists()


def test_a_broker_that_cannot_start_shows_why() -> None:
    with pytest.raises(ServerError, match=r"num\.io\.threads"):
        Kafka({"num.io.threads": "none"}).start()


def test_a_topic_that_is_there_already_says_so(kafka: Kafka) -> None:
    topic = kafka.create_topic()
    with pytest.raises(ServerError, match="already exists"):
        kafka.create_topic(topic)


@pytest.mark.parametrize(
    ("covers", "wanted"),
    [
        ("central", "urn:mirror"),
        ("*", "urn:mirror"),
        ("external:*, !internal", "urn:mirror"),
        ("*,!central", None),
        ("x", None),
    ],
)
def test_the_mirror_of_mavens_settings_is_found(covers: str, wanted: str | None, tmp_path: Path) -> None:
    settings = tmp_path / "settings.xml"
    settings.write_text(MIRRORS.format(covers=covers))
    assert jars.maven_mirror(settings) == wanted


def test_settings_that_are_not_there_name_no_mirror(tmp_path: Path) -> None:
    assert jars.maven_mirror(tmp_path / "none.xml") is None


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a Maven that counts its calls."""
    monkeypatch.setenv("ONCEBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return write_maven(tmp_path)


def write_maven(home: Path, then: str = "") -> Path:
    program = home / "mvn"
    text = FAKE_MAVEN.format(calls=home / "calls", python=sys.executable, broker=jars._BROKER, then=then)
    program.write_text(text)
    program.chmod(0o755)
    return program


def test_two_processes_fetch_once(maven: Path) -> None:
    code = "from oncebox.testing.jars import kafka_jars; print(kafka_jars())"
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    places = {process.communicate()[0].strip() for process in both}
    assert places == {str(cache_directory() / f"kafka-{jars.VERSION}")}
    assert (maven.parent / "calls").read_text() == "run\n"


@pytest.mark.parametrize("then", ["exit 1", f"echo no jar > lib/{jars._BROKER}", "rm -r lib"])
def test_half_a_fetch_is_never_used_and_the_error_says_what_to_do(
    then: str, maven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_maven(maven.parent, then)
    monkeypatch.setattr(jars, "_spark_jars", no_ivy)
    with pytest.raises(MissingProgram, match="run once with a network"):
        jars.kafka_jars()
    assert [path.name for path in cache_directory().iterdir()] == [f"kafka-{jars.VERSION}.lock"]
    write_maven(maven.parent)
    assert (jars.kafka_jars() / jars._BROKER).exists()


def no_ivy() -> Path:
    raise jars.NotFetched("Ivy: not here")
