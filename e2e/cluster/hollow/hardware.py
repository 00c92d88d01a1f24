"""The simulated GPUs of hollow nodes as containers see them: their books, and a driver library that answers from these.

Every container of a node is shown the node's books; which devices are its own is said by NVIDIA_VISIBLE_DEVICES alone,
as on a real node: a container that was given none sees none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from e2e.sim.device import ledger, nvml

#: Memory of one simulated GPU.
GPU_BYTES = 80 * 2**30

log = logging.getLogger("hollow.hardware")


class Hardware:
    """GPUs of all nodes of one hollow kubelet. ``devices``: the UUIDs of a node."""

    def __init__(self, folder: Path, devices: Callable[[str], Sequence[str]]) -> None:
        self._folder = folder
        self._devices = devices
        self._driver: Path | None = None

    def install_driver(self) -> None:
        """Build the driver library; without a compiler the nodes have none, and nobody can read their devices."""
        try:
            self._driver = nvml.build(self._folder)
        except nvml.NoCompiler as error:
            log.warning("no simulated driver: %s", error)

    def environment(self, node: str) -> dict[str, str]:
        """Variables of every container on the node; its devices are made when the first of them starts."""
        root = self._folder / "devices" / node
        for uuid in self._devices(node):
            ledger.create(root, uuid, GPU_BYTES)
        return {ledger.ROOT_ENV: str(root), **self.driver}

    @property
    def driver(self) -> dict[str, str]:
        """Those by which a process finds the driver library; the same on all nodes."""
        return {} if self._driver is None else {"LD_LIBRARY_PATH": str(self._driver)}
