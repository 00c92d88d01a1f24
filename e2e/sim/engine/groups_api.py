"""What the front end needs of broadcast groups, without importing torch (the numpy backend has none)."""

from __future__ import annotations

from typing import Protocol


class GroupError(Exception):
    """A group can not be made or used; the text is the engine's answer."""


class Groups(Protocol):
    """See :class:`e2e.sim.engine.groups.BroadcastGroups`."""

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
        """Join a group; blocks."""
        ...

    def destroy(self, name: str) -> None:
        """Leave a group."""
        ...

    def receive(self, name: str, sizes: list[int]) -> list[memoryview]:
        """Receive one broadcast of raw bytes per size; blocks."""
        ...
