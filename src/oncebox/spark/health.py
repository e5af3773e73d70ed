"""Whether a relay could run here."""

from importlib.metadata import PackageNotFoundError, version

from .java import JavaMissing, find_java, version_of

OLDEST = (4, 2)


def spark_version() -> str | None:
    """The version of PySpark that is installed; None if there is none."""
    try:
        return version("pyspark")
    except PackageNotFoundError:
        return None


def spark_fits(installed: str) -> bool:
    """Whether a relay runs on this version."""
    major, minor = (int(part) for part in installed.split(".")[:2])
    return (major, minor) >= OLDEST and major < OLDEST[0] + 1


def java_version() -> tuple[int | None, str]:
    """The version of the Java that Spark would start, and where it is; or None, and what to do."""
    try:
        java = find_java()
        return version_of(java), str(java)
    except JavaMissing as error:
        return None, str(error)
