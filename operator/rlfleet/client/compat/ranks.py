"""Engines by rank: the coordinator's indices in the one EnginePool of a pipeline.

Invariant: a rank that nothing is known of is an error, never an engine that needs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rlfleet.api.v1alpha1 import EnginePool
from rlfleet.api.v1alpha1.common import MAX_LISTED_ENGINES
from rlfleet.api.v1alpha1.enginepool_status import EngineEntry, EngineState
from rlfleet.client import errors
from rlfleet.client.client import Client
from rlfleet.client.compat import environment as env

log = logging.getLogger(__name__)

RESIZE_SECONDS = 600.0
#: Seconds for a pool's status to show what has been granted already.
SHOWN_SECONDS = 60.0


def _cluster(rank: int) -> str:
    """Which part of the trainer demands the devices of this rank: one demand for each."""
    return f"resize-{rank}"


def _size(pool: EnginePool) -> int:
    """How many engines it has: of adopted pods, whose number the spec does not say, those that are there."""
    return pool.spec.replicas if pool.spec.source.template is not None else pool.status.replicas


class Ranks:
    """Asks for engines by their rank, and waits for what becomes of them."""

    def __init__(self, client: Client, pipeline_id: str) -> None:
        self._client = client
        self._pipeline_id = pipeline_id

    def check_size(self, per_engine: int, per_node: int) -> None:
        """An engine lies on one node, and has as many GPUs as its pool says."""
        if per_engine > per_node:
            raise RuntimeError(
                f"rollout_num_gpus_per_engine={per_engine} does not fit on a node of num_gpus_per_node={per_node}"
            )
        for pool in self._pools():
            if pool.spec.engine.gpus_per_engine != per_engine:
                raise RuntimeError(
                    f"rollout_num_gpus_per_engine={per_engine}, but spec.engine.gpusPerEngine of EnginePool "
                    f"{pool.metadata.name} is {pool.spec.engine.gpus_per_engine}: make them agree"
                )

    def rest(self, ranks: Sequence[int], step: int, limit: float | None) -> None:
        """Demand the devices of these engines until all of them are granted; a failure withdraws every demand of it."""
        entries = self.entries(ranks, limit)
        blind = [r for r in ranks if not entries[r].gpus or entries[r].node is None]
        if blind:
            raise RuntimeError(
                f"devices of engines {blind} are not known, so they cannot be freed one by one: use placement Pinned "
                "or Claims, or nodes with NVML"
            )

        def ask(rank: int) -> None:
            row = entries[rank]
            self._client.request_gpus(
                step,
                cluster=_cluster(rank),
                devices=[{"node": row.node, "devices": list(row.gpus or ())}],
                timeout=RESIZE_SECONDS,
            )

        try:
            # All at once, so that they go to sleep together.
            with ThreadPoolExecutor(max_workers=max(1, len(ranks))) as threads:
                asked = {rank: threads.submit(ask, rank) for rank in ranks}
            for rank, future in asked.items():
                error = future.exception()
                if isinstance(error, errors.ClientError):
                    raise RuntimeError(f"shrink of engine {rank} failed: {error}") from error
                if error is not None:
                    raise error
            self._until_shown_asleep(ranks)
        except BaseException:
            self._withdraw(ranks)
            raise

    def _withdraw(self, ranks: Sequence[int]) -> None:
        """Give devices back on the way out of an error; what fails there is said, hides nothing and keeps no other."""
        for rank in ranks:
            try:
                self._client.release_gpus(_cluster(rank))
            except errors.ClientError as e:
                log.error("the devices of engine %d could not be given back, it stays asleep: %s", rank, e)

    def _until_shown_asleep(self, ranks: Sequence[int]) -> None:
        """A grant comes before the pool's status says so, by which the next resize goes."""

        def awake(pool: EnginePool) -> list[int]:
            listed = {e.index: e.state for e in pool.status.engines}
            return [r for r in ranks if listed.get(r, EngineState.OFFLOADED) is not EngineState.OFFLOADED]

        name = self._pool().metadata.name
        if left := awake(self._client.wait_for_pool(name, lambda p: not awake(p), SHOWN_SECONDS)):
            raise RuntimeError(
                f"the devices of engines {left} are free, but EnginePool {name} does not show them asleep"
            )

    def may_wake(self, ranks: Sequence[int]) -> None:
        """RuntimeError: the pool's ceiling of awake engines is in the way."""
        pool = self._pool()
        awake = [e.index for e in pool.status.engines if e.state is not EngineState.OFFLOADED and e.index not in ranks]
        ceiling = pool.spec.active
        if ceiling is not None and len(awake) + len(ranks) > ceiling:
            raise RuntimeError(
                f"engines {list(ranks)} cannot be woken beside {len(awake)} others: spec.active of EnginePool "
                f"{pool.metadata.name} is {ceiling}, raise or remove it"
            )

    def wake(self, ranks: Sequence[int]) -> None:
        """Give the devices of these engines back, and wait until they serve what is committed."""
        for rank in ranks:
            self._client.release_gpus(_cluster(rank))

        def closed(pool: EnginePool) -> dict[int, str]:
            states = {e.index: e.state for e in pool.status.engines if e.index in ranks}
            return {r: s.value for r in ranks if (s := states.get(r, EngineState.PENDING)) is not EngineState.ACTIVE}

        pool = self._client.wait_for_pool(self._pool().metadata.name, lambda p: not closed(p), RESIZE_SECONDS)
        if left := closed(pool):
            raise RuntimeError(f"engines {left} did not become Active in {RESIZE_SECONDS:g} s: see their pool")

    def _pools(self) -> list[EnginePool]:
        try:
            found = self._client.pools()
        except errors.ClientError as e:
            raise RuntimeError(f"EnginePools of pipeline {self._pipeline_id!r} cannot be read: {e}") from e
        return [p for p in found if p.spec.pipeline == self._client.pipeline_name]

    def _pool(self) -> EnginePool:
        """The pipeline's only pool; RuntimeError: it has none, or several, or one that is too large to be listed."""
        pools = self._pools()
        if len(pools) != 1:
            names = ", ".join(p.metadata.name for p in pools) or "none"
            raise RuntimeError(f"ranks are indices of engines in the pipeline's only EnginePool; it has: {names}")
        (pool,) = pools
        if _size(pool) > MAX_LISTED_ENGINES:
            raise RuntimeError(
                f"EnginePool {pool.metadata.name} has {_size(pool)} engines: ranks of a pool of more than "
                f"{MAX_LISTED_ENGINES} cannot be resized one by one, its status does not list them all"
            )
        return pool

    def entries(self, ranks: Sequence[int], limit: float | None) -> dict[int, EngineEntry]:
        """The engines of these ranks, from their pool's status. RuntimeError: unknown ones, or another memory limit."""
        pool = self._pool()
        if limit is not None and limit != pool.spec.residual_memory_gi_b:
            raise RuntimeError(
                f"{env.RESIDUAL}={limit:g}, but spec.residualMemoryGiB of EnginePool {pool.metadata.name} is "
                f"{pool.spec.residual_memory_gi_b:g}: make them agree"
            )
        found = {e.index: e for e in pool.status.engines}
        missing = [r for r in ranks if r not in found]
        if missing:
            raise RuntimeError(f"engines {missing} have no process in EnginePool {pool.metadata.name}: scale it up")
        return found

    def all_up(self, registered: int | None) -> list[int]:
        """The ranks of the whole pool, once each of them has a process whose devices are known.

        ``registered``: how many engines the trainer was told of; None: it was not. Of adopted pods nothing else says
        how many there will be: those that come later would stay awake.
        """
        pool = self._pool()
        name = pool.metadata.name
        adopted = pool.spec.source.adopt is not None
        if adopted and registered is None:
            raise RuntimeError(
                f"{env.DEFER}=1, and the pods of EnginePool {name} are adopted: only infer_gpu_ids of "
                "register_model_update_resources says how many engines there will be, so register with them first"
            )

        def missing(pool: EnginePool) -> list[int]:
            known = {e.index for e in pool.status.engines if e.node is not None and e.gpus}
            if not adopted:
                return [r for r in range(max(1, _size(pool))) if r not in known]
            # Their numbers are what their maker gave them, and need not begin with 0.
            listed = sorted({e.index for e in pool.status.engines})
            owed = max(registered or 0, _size(pool)) - len(listed)
            free = (r for r in range(MAX_LISTED_ENGINES + len(listed)) if r not in listed)
            return [*(r for r in listed if r not in known), *(r for r, _ in zip(free, range(owed), strict=False))]

        pool = self._client.wait_for_pool(name, lambda p: not missing(p), RESIZE_SECONDS)
        if left := missing(pool):
            raise RuntimeError(f"engines {left} of EnginePool {name} have no process, or none whose devices are known")
        return sorted({e.index for e in pool.status.engines}) if adopted else list(range(_size(pool)))
