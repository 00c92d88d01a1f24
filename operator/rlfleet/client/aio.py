"""The SDK for trainers that run in an event loop: every call of Client, awaited in a thread.

Invariant: an awaiting task that is cancelled does not stop the call under it, which keeps its own timeout; what was
asked for (a round, GPUs) stands in the cluster either way. GPUs of ``train_gpus`` are given back all the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from rlfleet.api.v1alpha1 import EnginePool, RLPipeline
from rlfleet.api.v1alpha1.rlpipeline_status import CommittedVersion, Grant
from rlfleet.client.client import Client
from rlfleet.client.demand import ACTOR
from rlfleet.client.rounds import SyncResult


class AsyncClient:
    """Client for asyncio. The constructor and every method take what Client's take."""

    def __init__(
        self, namespace: str, pipeline: str, kubeconfig: str | os.PathLike[str] | None = None, **how: Any
    ) -> None:
        self._client = Client(namespace, pipeline, kubeconfig, **how)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """See Client."""
        await asyncio.to_thread(self._client.close)

    async def pipeline(self, **how: Any) -> RLPipeline:
        """See Client."""
        return await asyncio.to_thread(self._client.pipeline, **how)

    async def public_keys(self, **how: Any) -> dict[str, str]:
        """See Client."""
        return await asyncio.to_thread(self._client.public_keys, **how)

    async def wait_for(self, version: int, **how: Any) -> CommittedVersion:
        """See Client."""
        return await asyncio.to_thread(self._client.wait_for, version, **how)

    async def wait_for_sender(self, version: int, **how: Any) -> None:
        """See Client."""
        await asyncio.to_thread(self._client.wait_for_sender, version, **how)

    async def pools(self, **how: Any) -> list[EnginePool]:
        """See Client."""
        return await asyncio.to_thread(self._client.pools, **how)

    async def wait_for_pool(self, name: str, wanted: Callable[[EnginePool], bool], **how: Any) -> EnginePool:
        """See Client. ``wanted`` is called in another thread."""
        return await asyncio.to_thread(self._client.wait_for_pool, name, wanted, **how)

    async def sync(self, version: int, **how: Any) -> SyncResult:
        """See Client. ``on_progress`` is called in another thread."""
        return await asyncio.to_thread(self._client.sync, version, **how)

    async def order(self, version: int, **how: Any) -> SyncResult | str:
        """See Client."""
        return await asyncio.to_thread(self._client.order, version, **how)

    async def cancel(self, round: str, **how: Any) -> None:
        """See Client."""
        await asyncio.to_thread(self._client.cancel, round, **how)

    async def report_progress(self, collected: int, **how: Any) -> bool:
        """See Client."""
        return await asyncio.to_thread(self._client.report_progress, collected, **how)

    async def clear_progress(self, stream: str = ACTOR) -> bool:
        """See Client."""
        return await asyncio.to_thread(self._client.clear_progress, stream)

    async def request_gpus(self, step: int, **how: Any) -> Grant:
        """See Client."""
        return await asyncio.to_thread(self._client.request_gpus, step, **how)

    async def release_gpus(self, cluster: str = ACTOR, **how: Any) -> bool:
        """See Client."""
        return await asyncio.to_thread(self._client.release_gpus, cluster, **how)

    async def before_train_step(self, step: int, **how: Any) -> Grant:
        """See Client."""
        return await asyncio.to_thread(self._client.before_train_step, step, **how)

    async def after_train_step(self, version: int, **how: Any) -> SyncResult:
        """See Client."""
        return await asyncio.to_thread(self._client.after_train_step, version, **how)

    @asynccontextmanager
    async def train_gpus(self, step: int, *, cluster: str = ACTOR, **how: Any) -> AsyncIterator[Grant]:
        """See Client."""
        asked = asyncio.ensure_future(self.request_gpus(step, cluster=cluster, **how))
        try:
            yield await asyncio.shield(asked)
        finally:
            # A task that was cancelled while it waited has a request under way in its thread; released after it.
            await asyncio.shield(self._after(asked, cluster))

    async def _after(self, asked: asyncio.Future[Grant], cluster: str) -> None:
        await asyncio.wait({asked})
        if asked.exception() is None:
            await self.release_gpus(cluster)
