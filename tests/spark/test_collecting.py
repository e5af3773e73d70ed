"""Rare collections: for this long, for this process, and nobody's own choice overruled."""

import contextlib
import gc
from collections.abc import Iterator

import pytest

from oncebox.spark.collecting import YOUNG, rare_collections


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_python_looks_rarely_until_the_end_however_it_ends() -> None:
    seen: list[tuple[int, int, int]] = []
    with contextlib.suppress(KeyError), rare_collections():
        seen.append(gc.get_threshold())
        raise KeyError
    assert seen == [(YOUNG, 10, 10)]
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [0, YOUNG + 1])
def test_who_looks_less_often_or_never_is_left_alone(own: int) -> None:
    gc.set_threshold(own, 5, 5)
    with rare_collections():
        assert gc.get_threshold() == (own, 5, 5)
    assert gc.get_threshold() == (own, 5, 5)
