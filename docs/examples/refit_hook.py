"""Refit hooks in the shapes of verl's rollout, NeMo-RL's weight synchronizer, and slime's and miles' weight updater.

Their loop calls it, engines follow. All are made of pairs (name, tensor) that the framework gathers. All ranks must
exhaust that generator, because gathering a sharded tensor is a collective; only rank 0, which has a client and a
sender, publishes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rlfleet.client import Client
from rlfleet.sender import WeightSender


class Refit:
    """Brings weights into the engines of one pipeline. ``client`` and ``sender``: None on other ranks than 0."""

    def __init__(self, client: Client | None = None, sender: WeightSender | None = None) -> None:
        self._client = client
        self._sender = sender

    def refit(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Return when ``version`` is served; raise (rlfleet.client.SyncFailed) when engines serve the one before."""
        if self._client is None or self._sender is None:
            for _ in weights:
                pass
            return
        # A tensor is the gatherer's buffer until the next one is asked for.
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in weights}
        digest = self._sender.publish(version, state).digest
        self._client.sync(version, sender_incarnation=self._sender.incarnation, manifest_digest=digest)


class RlfleetRollout:
    """verl's BaseRollout, for engines that rlfleet keeps."""

    def __init__(self, refit: Refit) -> None:
        self._refit = refit

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int,
        **_: Any,
    ) -> None:
        """As verl calls it after a step; ``global_steps`` is the version."""
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format {wire_format!r}: rlfleet syncs whole tensors")
        await asyncio.to_thread(self._refit.refit, global_steps, weights)

    async def resume(self, tags: list[str], reset_connector: bool = True) -> None:
        """Engines sleep and wake by their pool (spec.active), or by client.train_gpus on shared GPUs."""

    async def release(self) -> None:
        """See resume."""


class RlfleetSynchronizer:
    """NeMo-RL's WeightSynchronizer, for engines that rlfleet keeps. ``weights`` gathers the policy's tensors."""

    def __init__(
        self, refit: Refit, weights: Callable[[], Iterable[tuple[str, torch.Tensor]]], version: int = -1
    ) -> None:
        self._refit = refit
        self._weights = weights
        self._next = version
        self._stale = True

    def init_communicator(self) -> None:
        """Rounds make and end their process groups themselves."""

    def mark_stale(self) -> None:
        """After a training step."""
        self._stale = True

    @property
    def is_stale(self) -> bool:
        """Whether engines serve older weights than the policy's."""
        return self._stale

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> None:
        """Return when engines serve the policy's weights."""
        if kv_scales:
            raise ValueError("kv_scales: rlfleet syncs whole tensors, no scales of a quantised cache")
        if self._stale:
            self._refit.refit(self._next, self._weights())
            self._next += 1
            self._stale = False

    def shutdown(self) -> None:
        """Client and sender are closed by whoever made them."""


class RlfleetUpdater:
    """slime's and miles' weight updater, for engines that rlfleet keeps: one round in place of their own broadcast.

    ``chunks``: makes the framework's iterator of gathered tensors (``HfWeightIteratorBase.create``). ``version``: the
    last one that engines got from an earlier run; the framework begins anew at each start, and versions never go back.
    """

    def __init__(
        self,
        args: Any,
        model: Any,
        weights_getter: Callable[[], Any],
        *,
        refit: Refit,
        chunks: Callable[..., Any],
        version: int = 0,
        **names: Any,
    ) -> None:
        self._refit = refit
        self._weights = weights_getter
        self._iterator = chunks(args=args, model=model, **names)
        self.weight_version = version

    def connect_rollout_engines(self, *_: Any, **__: Any) -> None:
        """Rounds find the engines themselves, also those that came since, and join none to a group of the trainer's."""

    def disconnect_rollout_engines(self) -> None:
        """See connect_rollout_engines."""

    def update_weights(self) -> None:
        """Return when engines serve the next version; engines tell it as their ``weight_version``."""
        self.weight_version += 1
        gathered = self._iterator.get_hf_weight_chunks(self._weights())
        self._refit.refit(self.weight_version, (pair for chunk in gathered for pair in chunk))
