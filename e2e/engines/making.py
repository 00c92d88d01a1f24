"""What real engines need beside their environment: checkpoints, and somebody who clears up after them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make(python: Path, folder: Path, seeds: Sequence[int]) -> None:
    """Checkpoints and expected answers of seeds (e2e.engines.tiny), by an engine's interpreter. RuntimeError if not."""
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-m", "e2e.engines.tiny", str(folder), *map(str, seeds)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"no checkpoints could be made:\n{done.stderr}")


@contextmanager
def shared_memory() -> Iterator[None]:
    """SGLang leaves files in shared memory behind at each start: those that are new, and nobody's, go in the end."""
    shared = Path("/dev/shm")
    before = set(shared.glob("sglang_*"))
    try:
        yield
    finally:
        mapped = _mapped()
        for left in set(shared.glob("sglang_*")) - before:
            if str(left) not in mapped:
                left.unlink(missing_ok=True)


def _mapped() -> str:
    """What all processes have mapped, as the kernel tells it."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found.append(maps.read_text(errors="replace"))
        except OSError:  # it ended meanwhile, or is not ours to look at
            continue
    return "".join(found)
