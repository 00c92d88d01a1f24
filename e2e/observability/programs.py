"""Prometheus and promtool, once per machine: from PATH, or from the Debian package unpacked into the cache folder.

Nothing is installed into the system, so no root is needed where apt's lists are there. Invariant: a program under its
final name is complete; a second process waits for the first one's lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("prometheus", "promtool")
REMEDY = (
    "install Prometheus 2.40 or newer, so that `prometheus` and `promtool` are in PATH (Debian, Ubuntu: "
    "apt-get install prometheus; else https://prometheus.io/download), or run where apt-get can download"
)
_SECONDS = 300


class Missing(Exception):
    """The programs are not there and cannot be had; the message says what was tried and what to do."""


def cache_folder() -> Path:
    """Where an unpacked package lies."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlfleet" / "prometheus"


def ensure() -> dict[str, Path]:
    """Paths of ``prometheus`` and ``promtool``. Missing: they cannot be had here."""
    found = {name: shutil.which(name) for name in NAMES}
    if all(found.values()):
        return {name: Path(str(path)) for name, path in found.items()}
    folder = cache_folder()
    paths = {name: folder / name for name in NAMES}
    if all(path.exists() for path in paths.values()):
        return paths
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Missing(f"no prometheus and promtool in PATH, and no apt-get to fetch them: {REMEDY}")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(path.exists() for path in paths.values()):
            _unpack(folder)
    return paths


def _unpack(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as text:
        temporary = Path(text)
        options = ["-qq", "-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else ["-qq"]
        tries = [_run(["apt-get", *options, "download", "prometheus"], temporary)]
        if tries[0]:
            # No lists yet, as in a fresh container. Root fetches them; others keep lists of their own.
            if os.geteuid() != 0:
                for part in ("lists/partial", "archives/partial"):
                    (temporary / part).mkdir(parents=True)
                options += ["-o", f"Dir::State::lists={temporary}/lists", "-o", f"Dir::Cache={temporary}"]
            tries.append(_run(["apt-get", *options, "update"], temporary))
            tries.append(_run(["apt-get", *options, "download", "prometheus"], temporary))
        packages = sorted(temporary.glob("prometheus_*.deb"))
        if not packages:
            raise Missing(f"apt-get could not download prometheus ({'; '.join(t for t in tries if t)}): {REMEDY}")
        problem = _run(["dpkg-deb", "-x", str(packages[0]), "unpacked"], temporary)
        if problem:
            raise Missing(f"{packages[0].name} could not be unpacked ({problem}): {REMEDY}")
        for name in NAMES:
            program = temporary / "unpacked/usr/bin" / name
            if problem := _run([str(program), "--version"], temporary):
                raise Missing(f"Debian's {name} does not run here ({problem}): {REMEDY}")
            program.rename(folder / name)


def _run(command: list[str], folder: Path) -> str:
    """Run a program; what went wrong, or an empty text."""
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return f"{command[0]}: {e}"
    tail = " ".join(done.stderr.split())[-300:]
    return "" if done.returncode == 0 else f"{' '.join(command[:1])} ended with {done.returncode}: {tail}"


if __name__ == "__main__":
    try:
        print("\n".join(str(path) for path in ensure().values()))
    except Missing as e:
        sys.exit(str(e))
