"""Broadcast groups of the torch backend: rendezvous with a trainer's store, receive tensors over gloo.

Invariants: a group is built from the same store keys as SGLang's ``init_custom_process_group`` builds it, so one
sender serves both; every socket of this side is bound to the engine's own address, never to a wildcard.
Everything here blocks, on purpose: it runs in the scheduler's thread, as in the real engine.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from .groups_api import GroupError


class BroadcastGroups:
    """The groups of one engine by name. ``host``: address to bind to; ``timeout``: seconds a rendezvous may take."""

    def __init__(self, host: str, timeout: float) -> None:
        self._host = host
        self._timeout = timedelta(seconds=timeout)
        self._groups: dict[str, Any] = {}

    def create(
        self,
        name: str,
        backend: str,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        *,
        seconds: float | None = None,
    ) -> None:
        """Join a group; blocks until every rank has joined. GroupError on a live name, other backend or timeout.

        ``seconds``: of the rendezvous and of each collective; None: what the engine was started with.
        """
        timeout = self._timeout if seconds is None else timedelta(seconds=seconds)
        if name in self._groups:
            raise GroupError(f"The specified group name has already been created: {name}")
        if backend != "gloo":
            raise GroupError(f"backend {backend} is not available on CPU")
        try:
            store: Store = TCPStore(
                address, port, world_size=None, is_master=False, timeout=timeout, wait_for_workers=False
            )
            for prefix in (name, f"{name}/", "cpu/"):
                store = PrefixStore(prefix, store)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timeout
            options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]
            self._groups[name] = ProcessGroupGloo(store, rank, world_size, options)
        except (RuntimeError, ValueError) as error:
            raise GroupError(f"Failed to initialize custom process group: {error}") from error

    def destroy(self, name: str) -> None:
        """Leave a group. GroupError when there is none of that name."""
        if self._groups.pop(name, None) is None:
            raise GroupError(f"The group to be destroyed does not exist: {name}")

    def receive(self, name: str, sizes: list[int]) -> list[memoryview]:
        """Receive one broadcast of raw bytes per size from rank 0. GroupError when the sender goes away."""
        group = self._groups.get(name)
        if group is None:
            raise GroupError(f"Group {name} not in the weight update groups. Call init_weights_update_group first")
        result = []
        try:
            for size in sizes:
                buffer = torch.empty(size, dtype=torch.uint8)
                group.broadcast(buffer, 0).wait()
                result.append(buffer.numpy().data)
        except RuntimeError as error:
            raise GroupError(f"Failed to receive weights: {error}") from error
        return result
