"""Rank 0 of a gloo group, as a trainer makes it, for tests of whoever receives."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore


class Rank0:
    """Has its port from the start; its group is there once all ranks have joined.

    The store's socket is bound to loopback here: torch by itself would listen on every address.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(64)
        self.port: int = self._socket.getsockname()[1]
        self.group: Any = None
        self._store: Store | None = None

    def open(self, name: str, world_size: int = 2, *, seconds: float = 30.0) -> Any:
        """Form the group; RuntimeError when not all ranks came within ``seconds``."""
        timeout = timedelta(seconds=seconds)
        self._store = prefixed = TCPStore(
            "127.0.0.1",
            self.port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=self._socket.detach(),
        )
        for prefix in (name, f"{name}/", "cpu/"):
            prefixed = PrefixStore(prefix, prefixed)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self.group = ProcessGroupGloo(prefixed, 0, world_size, options)
        return self.group

    def close(self) -> None:
        """Leave the group, and stop listening."""
        self.group = self._store = None
        self._socket.close()
