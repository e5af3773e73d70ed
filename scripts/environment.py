"""Bring .venv up to date: `python3 scripts/environment.py build dev`.

Each name is a lock in requirements/. What is installed is written down by the lock's hash, so a second run does
nothing, and two runs at once wait for each other. `spark-oldest` goes into a folder of its own under build/, which a
PYTHONPATH lays over .venv. Only the standard library is used: this runs before anything else.
"""

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
OLDEST = (3, 11)
OVERLAYS = {"spark-oldest": ROOT / "build" / "spark-oldest"}


def main(names: list[str]) -> int:
    if sys.version_info < OLDEST:
        return fail(f"Oncebox needs Python 3.11 or newer, and this is {sys.version.split()[0]}: make PYTHON=python3.x")
    VENV.mkdir(exist_ok=True)
    with (VENV / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            prepare(names)
        except subprocess.CalledProcessError as error:
            return fail(f"this failed, see above: {' '.join(map(str, error.cmd))}")
    return 0


def prepare(names: Iterable[str]) -> None:
    once("venv", key(sys.version, str(VENV)), create)
    for name in names:
        lock = ROOT / "requirements" / f"{name}.lock"
        once(name, key(lock.read_text()), partial(install_lock, lock, OVERLAYS.get(name)), OVERLAYS.get(name, VENV))
        if name == "build":
            once("package", key((ROOT / "pyproject.toml").read_text()), install_package)


def once(name: str, wanted: str, act: Callable[[], None], home: Path = VENV) -> None:
    """Do `act` unless it was done for `wanted` before; if it fails, it counts as not done."""
    stamp = home / f".{name}.stamp"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"setting up {home.relative_to(ROOT)}: {name}", file=sys.stderr, flush=True)
    stamp.unlink(missing_ok=True)
    act()
    stamp.write_text(wanted)


def key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def create() -> None:
    for old in VENV.iterdir():
        if old.name != ".lock":
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    without_pip = [] if bundled_pip() else ["--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *without_pip, str(VENV)], check=True)


def bundled_pip() -> bool:
    """Debian's python3 has no ensurepip until python3-venv is there; its own pip can then serve the environment."""
    return importlib.util.find_spec("ensurepip") is not None


def install_lock(lock: Path, overlay: Path | None) -> None:
    """Packages that come as source are built with what the locks hold, never with what is newest that day."""
    if overlay and overlay.exists():
        shutil.rmtree(overlay)  # pip does not replace what a folder holds already
    target = ["--target", str(overlay)] if overlay else []
    install("--require-hashes", "--no-build-isolation", *target, "--requirement", str(lock))


def install_package() -> None:
    install("--no-build-isolation", "--no-deps", "--editable", str(ROOT))


def install(*arguments: str) -> None:
    pip = [str(PYTHON), "-m", "pip"] if bundled_pip() else [sys.executable, "-m", "pip", "--python", str(PYTHON)]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    subprocess.run([*pip, "install", *quiet, *arguments], check=True)


def fail(message: str) -> int:
    print(f"environment: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
