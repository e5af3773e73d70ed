"""Reads the SQL that ships with a store: named blocks, and numbered migrations."""

import re
from functools import cache
from importlib import resources

from ..errors import SchemaMissing, SchemaOutdated, SchemaTooNew
from .base import Migration

_BLOCK = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def blocks(file: str) -> dict[str, str]:
    """The blocks of a `.sql` file beside this module, each under the name of its `-- name:` line."""
    return named_blocks((resources.files(__package__) / file).read_text("utf-8"))


def named_blocks(text: str) -> dict[str, str]:
    """The blocks of such a file's text."""
    _, *parts = _BLOCK.split(text)
    return {name: body.strip().rstrip(";") for name, body in zip(parts[::2], parts[1::2], strict=True)}


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """The migrations of a dialect in order; file names are `0001_what_it_does.sql`."""
    folder = resources.files(__package__) / "migrations" / dialect
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    found = tuple(
        Migration(number=int(file.name[:4]), name=file.name[5:-4], sql=file.read_text("utf-8")) for file in files
    )
    assert [migration.number for migration in found] == list(range(1, len(found) + 1)), "migrations must be 1, 2, 3, …"
    return found


def check_version(dialect: str, version: int | None, place: str) -> None:
    """Raise when this code cannot run on the schema at `place`: it runs on that of its newest migration, and the next.

    The next one, so that services go on while `oncebox migrate` of the next version runs, and so that their code can be
    rolled back without the schema.
    """
    newest = len(migrations(dialect))
    if version is None:
        raise SchemaMissing(f"{place} has no Oncebox schema; run `oncebox init --store URL` first")
    if version < newest:
        raise SchemaOutdated(f"{place} has schema {version}, this version needs {newest}; run `oncebox migrate`")
    if version > newest + 1:
        raise SchemaTooNew(
            f"{place} has schema {version}, this version runs on {newest} and {newest + 1}; upgrade oncebox"
        )


def check_migratable(dialect: str, version: int | None, place: str) -> None:
    """Raise when the schema at `place` is newer than every migration that this code knows."""
    newest = len(migrations(dialect))
    if version is not None and version > newest:
        raise SchemaTooNew(
            f"{place} has schema {version}, and this version knows the migrations up to {newest} only; "
            "migrate with the version of oncebox that made that schema, or a newer one"
        )
