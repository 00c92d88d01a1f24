"""Addresses for nodes and pods: one 127.B.0.0/16 block per cluster, never shared by two running clusters.

The block is claimed by an abstract unix socket name, which the kernel gives to one process at a time and takes back at
its death: no lock file to be left behind. Pod addresses are handed out in turn, so a deleted pod's address is not soon
another's (a client that still calls the old pod must not reach the new one).
"""

from __future__ import annotations

import hashlib
import socket

# 127.0.x.x is where everything else on the machine listens.
_BLOCKS = range(16, 255)
_FIRST_POD = 256


class AddressBlock:
    """A claimed block. Keep it referenced as long as addresses of it are in use."""

    def __init__(self, seed: str) -> None:
        start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big")
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for offset in range(len(_BLOCKS)):
            self.block = _BLOCKS[(start + offset) % len(_BLOCKS)]
            try:
                self._claim.bind(f"\0rlfleet-hollow-127.{self.block}")
            except OSError:
                continue
            break
        else:
            self._claim.close()
            raise RuntimeError("all loopback address blocks are in use by other clusters")
        self._next = _FIRST_POD
        self._used: set[str] = set()

    def node(self, number: int) -> str:
        """The address of node ``number`` (0 to 253)."""
        return f"127.{self.block}.0.{number + 1}"

    def take(self) -> str:
        """An address for a new pod."""
        for _ in range(_FIRST_POD, 65536):
            number = self._next
            self._next = number + 1 if number < 65534 else _FIRST_POD
            address = f"127.{self.block}.{number >> 8}.{number & 255}"
            if number & 255 not in (0, 255) and address not in self._used:
                self._used.add(address)
                return address
        raise RuntimeError("no free pod address")

    def release(self, address: str) -> None:
        """Gives an address back."""
        self._used.discard(address)

    def close(self) -> None:
        """Gives the block back."""
        self._claim.close()
