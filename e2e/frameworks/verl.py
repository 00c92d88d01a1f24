"""verl 0.9.1 in a folder of the cache, beside the project's own torch and Ray (145 MB; a few seconds).

Invariants: packages come from verl.lock with their hashes; a folder counts only with its mark, which is written last.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LOCK = HERE / "verl.lock"
MARK = ".complete"


def install() -> Path:
    """The interpreter that has verl, made unless it is there. CalledProcessError, with its output, when that fails."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlfleet" / "frameworks"
    digest = hashlib.sha256(LOCK.read_bytes() + f"{sys.version_info[:2]} {sys.prefix}".encode()).hexdigest()[:12]
    folder = cache / f"verl-{digest}"
    python = folder / "bin" / "python"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "verl.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / MARK).exists():
            shutil.rmtree(folder, ignore_errors=True)
            uv = str(Path(sys.executable).parent / "uv")
            _run([uv, "venv", "--quiet", "--no-config", "--python", sys.executable, str(folder)])
            packages = next(folder.glob("lib/python*/site-packages"))
            ours = next(Path(sys.prefix).glob("lib/python*/site-packages"))
            (packages / "project.pth").write_text(f"{ours}\n")
            pip = [uv, "pip", "install", "--quiet", "--no-config", "--python", str(python)]
            _run([*pip, "--no-deps", "--require-hashes", "-r", str(LOCK)])
            _run([str(python), "-c", "import verl.workers.rollout.base"])
            (folder / MARK).touch()
    return python


def _run(command: list[str]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONNOUSERSITE": "1"}
    subprocess.run(command, check=True, env=environment)
