"""The books of simulated devices: who holds how many bytes of which.

A node's devices are directories below one root: ``<root>/<uuid>/device`` says how large it is, ``users/<pid>`` what one
process holds. A process keeps a lock on its file for as long as it lives, so what it held is free at its death, however
it died, as a driver's memory is.

Invariants: the sum of what is held never exceeds the device, whoever asks at the same time; what is counted has real
memory behind it, and pages that are dropped go back to the system and read as zeros.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

#: Where a process finds the devices of its node, and which of them are its own (as the container runtime says it).
ROOT_ENV = "RLFLEET_SIM_DEVICES"
VISIBLE_ENV = "NVIDIA_VISIBLE_DEVICES"


class DeviceOutOfMemory(Exception):
    """The device has less room than was asked for."""


def create(root: Path, uuid: str, total_bytes: int, *, parent: str = "") -> None:
    """Make a device, or a MIG slice of the GPU ``parent``; one that exists stays as it is."""
    folder = root / uuid
    (folder / "users").mkdir(parents=True, exist_ok=True)
    if not (folder / "device").exists():
        text = f"total {total_bytes}\n" + (f"parent {parent}\n" if parent else "")
        temporary = folder / f"device.{os.getpid()}"
        temporary.write_text(text)
        temporary.rename(folder / "device")


def visible(environ: Mapping[str, str]) -> list[Path]:
    """The devices of this process that exist in the books; none outside of a simulated node."""
    root = environ.get(ROOT_ENV)
    named = [u for u in environ.get(VISIBLE_ENV, "").split(",") if u and u not in ("void", "none")]
    if not root:
        return []
    everything = sorted(p.parent for p in Path(root).glob("*/device"))
    return everything if named == ["all"] else [p for p in everything if p.name in named]


class Account:
    """What this process holds on some devices; on each of them the same, as the ranks of one engine do.

    At most one in a process: it owns the process's entry in the books.
    """

    def __init__(self, devices: Sequence[Path], name: str) -> None:
        self._name = name[:64]
        self._files = [(device, _own_file(device)) for device in devices]
        self._held = 0
        self._changing = threading.Lock()

    @property
    def total_bytes(self) -> int | None:
        """The size of the smallest device; None without any."""
        return min((_total(device) for device, _ in self._files), default=None)

    def add(self, counted: int) -> None:
        """Hold more on every device, or DeviceOutOfMemory and nothing changes. Negative: hold less."""
        with self._changing:
            wanted = self._held + counted
            for index, (device, file) in enumerate(self._files):
                with _locked(device):
                    free = _total(device) - sum(holders(device, but=os.getpid()).values()) - self._held
                    if counted <= free:
                        _write(file, wanted, self._name)
                        continue
                for earlier, its_file in self._files[:index]:
                    with _locked(earlier):
                        _write(its_file, self._held, self._name)
                raise DeviceOutOfMemory(
                    f"CUDA out of memory. Tried to allocate {counted} bytes on {device.name}, {free} are free"
                )
            self._held = wanted


@dataclass
class Allocation:
    """Real memory of one purpose, counted as ``counted`` bytes on the account's devices."""

    account: Account
    counted: int
    pages: mmap.mmap

    @classmethod
    def make(cls, account: Account, size: int, counted: int) -> Allocation:
        """Allocate ``size`` real bytes, zeroed. DeviceOutOfMemory when the device has no room for ``counted``."""
        account.add(counted)
        # Private: dropping pages of a shared mapping would leave what is in them.
        return cls(account, counted, mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def drop(self) -> None:
        """Give the real pages back; what was in them is gone."""
        self.pages.madvise(mmap.MADV_DONTNEED)

    def array(self, offset: int, shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
        """A float32 array over part of the memory; it stays valid, whatever happens to what it holds."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self.pages, np.float32, count, offset).reshape(shape)


# The format of users/<pid>: 20 digits, a blank, the name; nvml.c reads it without a lock, so it is one short write.


def _own_file(device: Path) -> int:
    path = device / "users" / str(os.getpid())
    with _locked(device):  # an entry that nobody has locked yet would be taken for a dead process's
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _write(file: int, held: int, name: str) -> None:
    os.pwrite(file, f"{held:020d} {name}\n".encode(), 0)


def _total(device: Path) -> int:
    for line in (device / "device").read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == "total":
            return int(value)
    raise ValueError(f"{device}/device says no total")


def holders(device: Path, *, but: int | None = None) -> dict[int, int]:
    """Bytes by living process, without the process ``but``. A file that nobody locks is of one that ended."""
    found: dict[int, int] = {}
    for path in (device / "users").iterdir():
        if path.name == str(but):
            continue
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found[int(path.name)] = int(file.read(20) or b"0")
    return found


@contextmanager
def _locked(device: Path) -> Iterator[Any]:
    with (device / "lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
