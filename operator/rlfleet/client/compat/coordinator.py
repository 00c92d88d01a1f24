"""MilesCoordinator: the coordinator's calls, each carried out by the cluster's objects.

Invariants:
- a refusal touches no engine: everything that can be refused is refused before the first request is made;
- a shrink ends when the engines are proven asleep and their memory free, an expand when they serve the version that was
  made ready last; neither is believed because a call returned.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlfleet.api.v1alpha1.enginepool_status import EngineState
from rlfleet.client import errors
from rlfleet.client.client import Client
from rlfleet.client.compat import environment as env
from rlfleet.client.compat.ranks import Ranks

log = logging.getLogger(__name__)

#: Names the namespace and the RLPipeline where the constructor gets no client.
NAMESPACE, PIPELINE = "RLFLEET_NAMESPACE", "RLFLEET_PIPELINE"
SYNC_SECONDS = 1800.0
_MODE, _NO_ADAPTER = "actor_train", "__fft__"


@dataclass(frozen=True, slots=True)
class ResizeResponse:
    """What resize_infer answers."""

    success: bool = True


@dataclass(frozen=True, slots=True)
class ProgressReport:
    """What report_progress_from_scheduler takes: ``metrics`` has collected, mode, adapter_id and new_batch."""

    pipeline_id: str
    step_target_trajectories: int
    fifo_timestamp: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PipelineActor:
    """What create_pipeline_actor answers: the configuration with this pipeline's identity merged in.

    There is no actor behind it: pods are made by EnginePools, and the trainer is the process that calls.
    """

    pipeline_id: str
    namespace: str
    config: Any


class MilesCoordinator:
    """Drop-in for rlix's MilesCoordinator. May be used by several threads.

    ``pipeline_id``: as there, without ``:``. ``pipeline_config``: ``verify_model_after_sync`` (False) and
    ``num_gpus_per_node`` (8: an engine fits on one node) are read, as attributes or keys. ``client``: default one for
    RLPipeline RLFLEET_PIPELINE (else the id in lower case, with '-' for '_') in namespace RLFLEET_NAMESPACE (else
    "default"). Beside what Client needs, the identity needs ``list`` and ``get`` on enginepools, and hears of changes
    at once with ``watch``.
    """

    def __init__(self, *, pipeline_id: str, pipeline_config: Any, client: Client | None = None) -> None:
        if not isinstance(pipeline_id, str) or not pipeline_id or ":" in pipeline_id:
            raise ValueError(f"pipeline_id must be a string that is not empty and has no ':', not {pipeline_id!r}")
        self.pipeline_id = pipeline_id
        self._verify = bool(_read(pipeline_config, "verify_model_after_sync", False))
        per_node = _read(pipeline_config, "num_gpus_per_node", 8)
        if isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 1:
            raise ValueError(f"pipeline_config.num_gpus_per_node must be a positive int, not {per_node!r}")
        self._per_node = per_node
        name = os.environ.get(PIPELINE) or re.sub("[^a-z0-9]+", "-", pipeline_id.lower()).strip("-")
        self._client = client or Client(os.environ.get(NAMESPACE) or "default", name)
        self._ranks = Ranks(self._client, pipeline_id)
        self._lock = threading.RLock()
        self._registered = False
        self._owner: Any = None
        self._engines: int | None = None
        self._active: set[int] = set()
        self._bootstrapped = False
        self._ready: int | None = None
        self._batches: dict[str, int] = {}
        self._actor: PipelineActor | None = None

    # ---------------------------------------------------------------------------------------------- start

    def register_model_update_resources(
        self,
        *,
        cache_owner_actor: Any,
        rollout_manager: Any,
        train_gpu_ids: Sequence[int] | None = None,
        infer_gpu_ids: Sequence[int] | None = None,
        rollout_num_gpus_per_engine: int = 1,
    ) -> None:
        """Check everything that a sync depends on; nothing is stored when anything is wrong.

        ``cache_owner_actor``: any handle; one with ``incarnation`` (a WeightSender) names the sender. The transport
        mode is RLPipeline.spec.transport.mode; the environment may repeat it, and a contradiction is refused.
        """
        for label, handle in (("cache_owner_actor", cache_owner_actor), ("rollout_manager", rollout_manager)):
            if handle is None:
                raise ValueError(f"{label} must not be None")
        if rollout_num_gpus_per_engine < 1:
            raise ValueError(f"rollout_num_gpus_per_engine must be at least 1, not {rollout_num_gpus_per_engine}")
        asked = env.transport_mode()
        pipeline = self._reachable()
        mode = {v: k for k, v in env.MODES.items()}[pipeline.spec.transport.mode.value]
        if asked is not None and asked != mode:
            raise RuntimeError(
                f"{env.TRANSPORT}={asked}, but spec.transport.mode of the RLPipeline is {env.MODES[mode]}: make them "
                "agree, there is no silent change of transport"
            )
        log.info("transport mode: %s", mode)
        env.check_mixed(mode, train_gpu_ids, infer_gpu_ids, rollout_num_gpus_per_engine)
        self._ranks.check_size(rollout_num_gpus_per_engine, self._per_node)
        if self._verify and pipeline.spec.sync.verify.value == "Off":
            raise RuntimeError(
                "verify_model_after_sync is set, but spec.sync.verify of the RLPipeline is Off: set it to "
                "IfSupported or Required, or leave verify_model_after_sync out"
            )
        with self._lock:
            self._owner = cache_owner_actor
            self._engines = len(infer_gpu_ids) // rollout_num_gpus_per_engine if infer_gpu_ids else None
            self._registered = True

    def _reachable(self) -> Any:
        """The RLPipeline, of an operator that answers: so that nothing is quiesced that nobody could carry on."""
        try:
            self._client.public_keys()
            return self._client.pipeline()
        except errors.ClientError as e:
            raise RuntimeError(f"rlfleet cannot carry out syncs for pipeline {self.pipeline_id!r}: {e}") from e

    def bootstrap_active_engines(self, engine_indices: Iterable[int]) -> None:
        """Set the active engines, once; a second call is a RuntimeError, also for empty sets.

        With deferred start all others are put to sleep, as the coordinator's engines are after their start: the trainer
        demands their devices, until an expand gives them back.
        """
        wanted = set(engine_indices)
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in wanted):
            raise ValueError(f"engine_indices must be ints from 0, not {sorted(map(str, wanted))}")
        with self._lock:
            if self._bootstrapped:
                raise RuntimeError("bootstrap_active_engines was called before: it sets the active engines once")
            self._bootstrapped = True
        try:
            if env.deferred_start():
                everyone = self._ranks.all_up(self._engines)
                self._ranks.rest([r for r in everyone if r not in wanted], self._step(), None)
        except BaseException:
            with self._lock:
                self._bootstrapped = False
            raise
        with self._lock:
            self._active = wanted

    def _step(self) -> int:
        """The step that demands are for: the one that was made ready last."""
        with self._lock:
            return self._ready if self._ready is not None else -1

    def get_active_engines(self) -> frozenset[int]:
        """Indices of the engines that this trainer regards as active."""
        with self._lock:
            return frozenset(self._active)

    def publish_cache_ready_step(self, step: int) -> int:
        """Say that the sender holds ``step`` (-1: base); waits until the operator sees it."""
        step = int(step)
        try:
            self._client.wait_for_sender(step, SYNC_SECONDS)
        except errors.ClientError as e:
            raise RuntimeError(f"step {step} is not ready: {e}") from e
        with self._lock:
            self._ready = step
        return step

    # ---------------------------------------------------------------------------------------------- sync

    def sync_base_weights_to_active(self, step: int) -> int:
        """Bring ``step`` into all active engines; with none, only what is ready advances. Returns ``step``."""
        with self._lock:
            self._ready = int(step)
            if not self._active:
                return int(step)
            if not self._registered:
                raise RuntimeError("sync before register_model_update_resources")
        self._bring(int(step))
        return int(step)

    def _bring(self, step: int) -> None:
        """Have ``step`` committed, which all awake engines serve then; nothing is done where it is."""
        with self._lock:
            incarnation = getattr(self._owner, "incarnation", None)
        try:
            self._client.sync(
                step,
                sender_incarnation=incarnation if isinstance(incarnation, str) else None,
                timeout=SYNC_SECONDS,
                retries=1,
            )
        except errors.ClientError as e:
            raise RuntimeError(f"sync of step {step} failed: {e}") from e

    def sync_lora_weights(self, *, loras_to_sync: Any) -> None:
        """Not there: adapters are not synced."""
        raise NotImplementedError("sync_lora_weights: rlfleet syncs whole policies, not LoRA adapters")

    # ---------------------------------------------------------------------------------------------- resize

    def resize_infer(self, dp_ranks_to_remove: Sequence[int], dp_ranks_to_add: Sequence[int]) -> ResizeResponse:
        """Put engines to sleep, then wake others; each list may be empty. Success, or an error."""
        remove, add = sorted(set(dp_ranks_to_remove)), sorted(set(dp_ranks_to_add))
        try:
            if remove:
                self._shrink(remove)
            if add:
                self._expand(add)
        except errors.ClientError as e:
            raise RuntimeError(f"resize of {remove} and {add} failed: {e}") from e
        return ResizeResponse()

    def _shrink(self, ranks: Sequence[int]) -> None:
        self._needs_registration("shrink")
        self._ranks.rest(ranks, self._step(), env.residual_gib())
        with self._lock:
            self._active -= set(ranks)

    def _expand(self, ranks: Sequence[int]) -> None:
        self._needs_registration("expand")
        if self._ready is None:
            raise RuntimeError("expand before cache-ready: publish_cache_ready_step comes first")
        entries = self._ranks.entries(ranks, None)
        states = {entries[r].state for r in ranks}
        if states == {EngineState.ACTIVE}:
            if env.deferred_start():
                raise RuntimeError(
                    f"engines {list(ranks)} are active although {env.DEFER}=1: something woke them behind this trainer"
                )
        elif states == {EngineState.OFFLOADED}:
            self._ranks.may_wake(ranks)
            # What was made ready while nobody was active is not committed yet, and engines wake with what is committed.
            self._bring(self._ready)
            self._ranks.wake(ranks)
        else:
            found = ", ".join(f"{r}: {entries[r].state.value}" for r in ranks)
            raise RuntimeError(f"engines to expand are in heterogeneous states ({found}): all must be Offloaded")
        with self._lock:
            self._active |= set(ranks)

    def _needs_registration(self, what: str) -> None:
        if not self._registered:
            raise RuntimeError(f"{what} before register_model_update_resources")

    # ---------------------------------------------------------------------------------------------- progress

    def report_progress_from_scheduler(self, report: Any) -> None:
        """Forward progress; a report that cannot be forwarded is logged and never raises."""
        try:
            metrics = _read(report, "metrics", {}) or {}
            key = f"{metrics.get('mode') or _MODE}:{metrics.get('adapter_id') or _NO_ADAPTER}"
            opens = "collected" not in metrics
            anew = bool(metrics.get("new_batch", opens))
            with self._lock:
                batch = self._batches[key] = self._batches.get(key, 0) + (1 if anew else 0)
            target = int(_read(report, "step_target_trajectories", 0) or 0)
            self._client.report_progress(
                max(0, int(metrics.get("collected") or 0)), target=max(0, target), batch=batch, stream=key
            )
        except Exception as e:  # noqa: BLE001 - the coordinator's own promise: progress never stops a trainer
            log.warning("progress was not forwarded: %s: %s", type(e).__name__, e)

    def clear_progress_stream(self, *, mode: str | None, adapter_id: str | None) -> None:
        """A stream is over; an unknown one is no error, and what cannot be forwarded is logged."""
        try:
            self._client.clear_progress(f"{mode or _MODE}:{adapter_id or _NO_ADAPTER}")
        except errors.ClientError as e:
            log.warning("the end of a stream was not forwarded: %s", e)

    # ---------------------------------------------------------------------------------------------- actors

    def create_pipeline_actor(self, *, pipeline_config: Any) -> PipelineActor:
        """The configuration, copied, with this pipeline's identity in ``system_envs``; the same handle ever after."""
        with self._lock:
            if self._actor is None:
                config = copy.deepcopy(pipeline_config)
                identity = {
                    "PIPELINE_ID": self.pipeline_id,
                    "ROLL_RAY_NAMESPACE": f"pipeline_{self.pipeline_id}_NS",
                    env.CONTROL_PLANE: os.environ.get(env.CONTROL_PLANE) or "rlix",
                }
                if env.RESIDUAL in os.environ:
                    identity[env.RESIDUAL] = os.environ[env.RESIDUAL]
                merged = {**(_read(config, "system_envs", None) or {}), **identity}
                _write(config, "system_envs", merged)
                self._actor = PipelineActor(self.pipeline_id, self._client.namespace, config)
            return self._actor

    def remove_resource_manager_node_pg(self) -> bool:
        """False: there is no placement group. Where pods run is the Kubernetes scheduler's decision."""
        log.info("no placement group to remove: the Kubernetes scheduler places engines")
        return False


def _read(config: Any, name: str, default: Any) -> Any:
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _write(config: Any, name: str, value: Any) -> None:
    if isinstance(config, dict):
        config[name] = value
        return
    try:
        setattr(config, name, value)
    except (AttributeError, TypeError) as e:
        log.debug("the configuration is frozen, %s stays as it is: %s", name, e)
