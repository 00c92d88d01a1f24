"""The engine's device memory by tag: weights, cache, graphs; given back and taken again as the real memory saver does.

Invariants, all the real engine's:
- a tag that is given back twice, or taken back without having been given back, ends the process, as does touching it
  while it is away, and having no room when it is taken back;
- what was in ``weights`` is gone after a release; addresses stay, so models keep their views;
- without the memory saver a release answers like any other and frees nothing.

Counts are real bytes, scaled so that all tags together take ``fraction`` of the device: the model is tiny, the device
is not. A process outside of a simulated node has no device, and its memory is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from e2e.sim.device.ledger import Account, Allocation, DeviceOutOfMemory
from e2e.sim.model import Array

WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
TAGS = (CACHE, WEIGHTS, GRAPHS)
#: Real bytes of the captured graphs that a real engine would have.
GRAPH_BYTES = 64 * 1024
#: Part of a device that the process itself takes (its context), which nothing gives back.
CONTEXT = 0.01
#: Arrays begin at multiples of this.
ALIGN = 64


class DeviceMemory:
    """All that one engine allocates. ``fatal`` ends the process; ``saver``: started with --enable-memory-saver."""

    def __init__(
        self, account: Account, sizes: Mapping[str, int], *, fraction: float, saver: bool, fatal: Callable[[str], None]
    ) -> None:
        self.saver = saver
        self._fatal = fatal
        self._account = account
        total = account.total_bytes or 0
        real = {**sizes, GRAPHS: GRAPH_BYTES}
        scale = total * fraction / sum(real.values())
        account.add(round(total * CONTEXT))
        self._parts = {tag: Allocation.make(account, size, round(size * scale)) for tag, size in real.items()}
        self._used = dict.fromkeys(real, 0)
        self._away: set[str] = set()
        #: Scripted faults: the next release keeps its memory, or gives it back this many seconds late.
        self.keep_next = False
        self.late_seconds: float | None = None
        self._kept: set[str] = set()

    def new(self, tag: str, shape: tuple[int, ...]) -> Array:
        """A zeroed array in the memory of a tag."""
        array = self._parts[tag].array(self._used[tag], shape)
        self._used[tag] += padded(array.nbytes)
        return array

    def touch(self, *tags: str) -> None:
        """Say that memory of these tags is about to be read or written."""
        for tag in tags:
            if tag in self._away and self.saver:
                self._fatal(f"CUDA error: an illegal memory access was encountered (tag {tag} is released)")

    def is_away(self, tag: str) -> bool:
        """Whether a tag is given back."""
        return tag in self._away

    def release(self, tags: list[str] | None) -> None:
        """Give tags back (all for None). In the scheduler, with nothing in it."""
        for tag in TAGS if tags is None else tags:
            if tag in self._away and self.saver:
                self._fatal(f"Cannot pause allocation that is not active: {tag}")
            self._away.add(tag)
            if not self.saver:
                self._kept.add(tag)  # a no-op that is remembered all the same
            elif self.keep_next:
                self._parts[tag].drop()
                self._kept.add(tag)
            else:
                self._parts[tag].drop()
                self._uncount(tag)
        self.keep_next, self.late_seconds = False, None

    def _uncount(self, tag: str) -> None:
        counted = self._parts[tag].counted
        if self.late_seconds is None:
            self._account.add(-counted)
        else:
            timer = threading.Timer(self.late_seconds, self._account.add, (-counted,))
            timer.daemon = True
            timer.start()

    def resume(self, tags: list[str] | None) -> None:
        """Take tags back (all for None)."""
        for tag in tags or TAGS:
            if tag not in self._away:
                self._fatal(f"KeyError: {tag!r}")
            if tag not in self._kept:
                try:
                    self._account.add(self._parts[tag].counted)
                except DeviceOutOfMemory as error:
                    self._fatal(f"[torch_memory_saver] cudaError error: 2 (out of memory): {error}")
            self._kept.discard(tag)
            self._away.discard(tag)


def padded(size: int) -> int:
    """The room that an array of ``size`` bytes takes."""
    return -(-size // ALIGN) * ALIGN
