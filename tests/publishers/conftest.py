"""What several publishers are tested with."""

import subprocess
from pathlib import Path

import pytest

from oncebox.testing.servers import MissingProgram


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=kit"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    except FileNotFoundError:
        raise MissingProgram("openssl is not on this machine: apt-get install openssl") from None
    return tmp_path
