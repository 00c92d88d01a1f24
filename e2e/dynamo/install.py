"""Installs the Dynamo runtime, once per machine and pin, into a folder of its own below the cache.

The pins are the requirements files beside this module; the folder's name carries a hash of the file, so a changed pin
never meets an old environment. They are complete and installed without looking at dependencies: the package's own list
names a placeholder that fetches from a vendor's index. Invariant: a folder under its final name is complete; a second
process waits for the first one's lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from e2e.cluster.programs import cache_root

#: The version that answers with a protocol version, and one from before it had any.
CURRENT, UNVERSIONED = "1.6.1", "1.3.1"
#: How often the package index is asked; it is the network that fails, not the pins.
TRIES = 3
_SECONDS = 600

Say = Callable[[str], None]


class InstallError(Exception):
    """The runtime could not be installed; the message ends with the installer's own words."""


def requirements(version: str) -> Path:
    """The pins of one version."""
    return Path(__file__).with_name(f"requirements-{version}.txt")


def folder(version: str) -> Path:
    """Where the environment of this version's pins lies (it may not exist yet)."""
    pins = requirements(version).read_bytes() + f"{sys.version_info[:3]}".encode()
    return cache_root() / "dynamo" / f"{version}-{hashlib.sha256(pins).hexdigest()[:12]}"


def ensure(version: str = CURRENT, say: Say = print) -> Path:
    """The Python of an environment with this version; installs it on first use (some 300 MB, seconds)."""
    target = folder(version)
    python = target / "bin" / "python"
    if python.exists():
        return python
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            started = time.monotonic()
            say(f"installing Dynamo {version} into {target}")
            _install(target, requirements(version))
            say(f"Dynamo {version} installed in {time.monotonic() - started:.0f} s")
    return python


def _install(target: Path, pins: Path) -> None:
    # The lock is ours, so whatever lies there is the rest of an interrupted installation.
    shutil.rmtree(target, ignore_errors=True)
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        raise InstallError(f"{uv} is missing: run `make venv` first")
    # Made under its final name, because scripts carry their interpreter's path; complete when `bin/python` appears.
    hidden = target / "bin" / ".python"
    _run([str(uv), "venv", "--quiet", "--python", sys.executable, str(target)])
    os.rename(target / "bin" / "python", hidden)
    for attempt in range(1, TRIES + 1):
        try:
            command = [str(uv), "pip", "install", "--quiet", "--no-deps", "--python", str(hidden), "-r", str(pins)]
            _run(command)
            break
        except InstallError:
            if attempt == TRIES:
                raise
    os.rename(hidden, target / "bin" / "python")


def _run(command: list[str]) -> None:
    # The environment that we run in is not the one that is meant.
    env = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired as e:
        raise InstallError(f"{' '.join(command[:4])} did not end within {_SECONDS} s") from e
    if done.returncode != 0:
        raise InstallError(f"{' '.join(command[:4])} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def main() -> int:
    """``python -m e2e.dynamo.install [VERSION ...]``: installs what is missing and prints where it lies."""
    try:
        for version in sys.argv[1:] or [CURRENT, UNVERSIONED]:
            print(ensure(version, say=lambda line: print(line, flush=True)))
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
