"""What is particular to the standard output: a reader that goes away, or that reads no more."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from oncebox.errors import InvalidSetting
from oncebox.publishers.base import NOT_TRIED, Deadline
from oncebox.publishers.lines import delivered
from oncebox.publishers.stdout import StdoutPublisher
from oncebox.retry import Failure, Scope
from oncebox.testing.publishing import given

PROGRAM = """
import sys
from oncebox.publishers.base import Deadline
from oncebox.publishers.stdout import StdoutPublisher
from oncebox.testing.publishing import given

claims = [given.claimed("order.created", b"x" * 1_000_000) for _ in range(3)]
print(StdoutPublisher.open("stdout:").publish(claims, Deadline(float(sys.argv[1]))), file=sys.stderr)
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def test_a_reader_that_goes_away_is_a_failure_of_the_broker(program: subprocess.Popen[bytes]) -> None:
    assert program.stdout is not None
    assert program.stderr is not None
    os.read(program.stdout.fileno(), 10)
    program.stdout.close()
    said = program.stderr.read().decode()
    assert "Broken pipe" in said
    assert "BROKER" in said
    assert said.count("NOT_TRIED") == 2


def test_a_reader_that_reads_no_more_does_not_outlive_the_deadline() -> None:
    reading, writing = os.pipe()
    kept = os.dup(1)
    os.dup2(writing, 1)
    try:
        claims = [given.claimed("order.created", b"x" * 200_000) for _ in range(2)]
        outcomes = StdoutPublisher.open("stdout:").publish(claims, Deadline(given.BRIEF_SECONDS))
    finally:
        os.dup2(kept, 1)
        for handle in (reading, writing, kept):
            os.close(handle)
    assert isinstance(outcomes[0], Failure)
    assert outcomes[0].scope is Scope.BROKER
    assert outcomes[1] is NOT_TRIED


def test_after_a_torn_line_the_next_one_is_whole(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    test_a_reader_that_reads_no_more_does_not_outlive_the_deadline()
    claim = given.claimed("order.created", b"whole")
    given.publish(StdoutPublisher.open("stdout:"), [claim])
    *_, last, end = capfdbinary.readouterr().out.split(b"\n")
    assert end == b""
    assert delivered(last).payload == b"whole"


@pytest.mark.parametrize("url", ["stdout://somewhere", "stdout:name", "stdout:?colour=red"])
def test_a_url_with_more_than_it_takes_is_refused(url: str) -> None:
    with pytest.raises(InvalidSetting):
        StdoutPublisher.open(url)
