"""The jars of an Apache Kafka broker, fetched once into the cache: by Maven if it is there, else by Spark's own Ivy.

Both reach their repositories as this machine is set up: Maven by its settings, Ivy by `ivysettings.xml` in `~/.ivy2`
or by the mirror that Maven's settings name.
"""

import contextlib
import fcntl
import importlib.util
import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

from ..spark.cache import cache_directory
from ..spark.java import find_java
from .servers import MissingProgram

VERSION = "4.3.1"
_BROKER = f"kafka_2.13-{VERSION}.jar"
_WANTED = [
    ("org.apache.kafka", "kafka_2.13", VERSION),
    ("org.slf4j", "slf4j-simple", "1.7.36"),  # without it the broker logs nothing, not even why it ended
]
_FETCH_SECONDS_MAX = 600
_ERROR_LINES = 15
_POM = """\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>oncebox</groupId><artifactId>kafka-jars</artifactId><version>1</version>
  <dependencies>{}</dependencies>
</project>
"""
_POM_LINE = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
_IVY = """\
<ivy-module version="2.0">
  <info organisation="oncebox" module="kafka-jars"/>
  <dependencies>{}</dependencies>
</ivy-module>
"""
_IVY_LINE = '<dependency org="{}" name="{}" rev="{}" conf="default->default"/>'
_IVY_SETTINGS = """\
<ivysettings>
  <settings defaultResolver="mirror"/>
  <resolvers><ibiblio name="mirror" m2compatible="true" root="{root}"/></resolvers>
</ivysettings>
"""


class NotFetched(MissingProgram):
    """The jars could not be had; the message ends with what each way said."""


def kafka_jars() -> Path:
    """The directory with all jars of the broker; several processes may ask at once, and one of them fetches.

    It bears its name only after every jar was fetched and opened, so a half-filled one is never used.
    """
    directory = cache_directory() / f"kafka-{VERSION}"
    if not directory.exists():
        with _locked(directory.with_name(f"{directory.name}.lock")):
            if not directory.exists():
                _fetch(directory)
    return directory


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(directory: Path) -> None:
    ways: list[Callable[[Path], None]] = [by_maven, by_ivy]
    said = []
    for way in ways:
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix="fetching-") as work:
            try:
                way(Path(work))
                _check(Path(work) / "lib")
            except NotFetched as error:
                said.append(str(error))
            else:
                (Path(work) / "lib").rename(directory)
                return
    raise NotFetched(
        f"Kafka {VERSION} is not in {directory.parent} and could not be fetched: run once with a network, Java, and "
        f"either mvn on the PATH or pyspark (pip install 'oncebox[spark]')\n" + "\n".join(said)
    )


def by_maven(work: Path) -> None:
    """Let Maven copy the broker and all that it needs into `work/lib`."""
    maven = shutil.which("mvn")
    if maven is None:
        raise NotFetched("Maven: no mvn on the PATH")
    (work / "pom.xml").write_text(_POM.format("".join(_POM_LINE.format(*wanted) for wanted in _WANTED)))
    _run("Maven", [maven, "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib"], work)


def by_ivy(work: Path) -> None:
    """Let the Ivy among Spark's jars do the same."""
    (work / "ivy.xml").write_text(_IVY.format("".join(_IVY_LINE.format(*wanted) for wanted in _WANTED)))
    command = [str(find_java()), "-cp", f"{_spark_jars()}/*", "org.apache.ivy.Main", "-m2compatible"]
    command += ["-cache", str(work / "ivy"), *_ivy_settings(work), "-ivy", "ivy.xml", "-types", "jar", "bundle"]
    command += ["-retrieve", "lib/[artifact]-[revision].[ext]"]
    _run("Ivy", command, work)


def _spark_jars() -> Path:
    spec = importlib.util.find_spec("pyspark")
    for home in spec.submodule_search_locations or () if spec else ():
        if list((Path(home) / "jars").glob("ivy-*.jar")):
            return Path(home) / "jars"
    raise NotFetched("Ivy: pyspark is not installed, or has no Ivy among its jars")


def _ivy_settings(work: Path) -> list[str]:
    own = Path("~/.ivy2/ivysettings.xml").expanduser()
    if own.exists():
        return ["-settings", str(own)]
    mirror = maven_mirror(Path("~/.m2/settings.xml").expanduser())
    if mirror is None:
        return []
    settings = work / "ivysettings.xml"
    settings.write_text(_IVY_SETTINGS.format(root=mirror.replace("&", "&amp;").replace('"', "&quot;")))
    return ["-settings", str(settings)]


def maven_mirror(settings: Path) -> str | None:
    """The address that Maven's settings give for the central repository, if they give one."""
    try:
        root = ET.parse(settings).getroot()  # noqa: S314 - the user's own file
    except (OSError, ET.ParseError):
        return None
    for mirror in root.findall("{*}mirrors/{*}mirror"):
        covers = {name.strip() for name in (mirror.findtext("{*}mirrorOf") or "").split(",")}
        if covers & {"*", "central", "external:*"} and "!central" not in covers:
            return (mirror.findtext("{*}url") or "").strip() or None
    return None


def _run(name: str, command: list[str], work: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_FETCH_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotFetched(f"{name}: no end after {_FETCH_SECONDS_MAX} s") from None
    if done.returncode != 0:
        tail = "\n".join(done.stdout.strip().splitlines()[-_ERROR_LINES:])
        raise NotFetched(f"{name} ended with code {done.returncode}: {tail}")


def _check(lib: Path) -> None:
    """Every jar opens, and the broker is among them."""
    jars = list(lib.glob("*.jar"))
    if not any(jar.name == _BROKER for jar in jars):
        raise NotFetched(f"{_BROKER} is not among the {len(jars)} jars that came")
    for jar in jars:
        try:
            zipfile.ZipFile(jar).close()
        except zipfile.BadZipFile:
            raise NotFetched(f"{jar.name} came damaged") from None
