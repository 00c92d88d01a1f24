"""Weight updates: groups, sessions, loads, the version label, checksums.

Invariant: the version label is what the caller wrote; it moves only when the call that carries it succeeds, while
tokens sampled after a load carry its version whether or not the call then succeeded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from e2e.sim.tensors import RawTensor, element_size

from . import bodies
from .admission import Admission
from .groups_api import GroupError, Groups
from .labels import Answer, Labels, Refused, outcome
from .memory import WEIGHTS
from .weights import LoadError, WeightStore, combined


class Updates:
    """Control calls that change or read the weights of one engine. ``groups`` None: no broadcast (numpy backend)."""

    def __init__(self, admission: Admission, weights: WeightStore, labels: Labels, groups: Groups | None) -> None:
        self._admission = admission
        self._scheduler = admission.scheduler
        self._in_loop = admission.in_loop
        self._weights = weights
        self._labels = labels
        self._groups = groups
        self._session = False

    def halve_next_load(self) -> None:
        """A scripted fault: the next load takes only half of its tensors, and nobody is told."""
        self._weights.halve_next_load = True

    async def init_group(self, body: bodies.InitGroup) -> Answer:
        """Join a broadcast group; the scheduler is stuck until all ranks have joined."""
        if self._groups is None:
            return outcome(False, "broadcast groups need the torch backend")
        groups = self._groups
        where = (body.master_address, body.master_port, body.rank_offset, body.world_size)
        return await self._group_call(
            lambda: groups.create(body.group_name, body.backend, *where),
            "Succeeded to initialize custom process group.",
        )

    async def destroy_group(self, body: bodies.DestroyGroup) -> Answer:
        """Leave a broadcast group."""
        if self._groups is None:
            return outcome(False, "The group to be destroyed does not exist.")
        groups = self._groups
        return await self._group_call(
            lambda: groups.destroy(body.group_name), "Succeeded to destroy custom process group."
        )

    async def _group_call(self, work: Callable[[], None], done: str) -> Answer:
        try:
            await self._in_loop(work)
        except GroupError as error:
            return outcome(False, str(error))
        return outcome(True, done)

    async def begin_update(self) -> Answer:
        """Open an update session; a second is refused."""
        if self._session:
            return outcome(False, "A weight update session is already open.")
        self._session = True
        return outcome(True, "Weight update session opened.")

    async def end_update(self) -> Answer:
        """Close the session, whatever happened in it."""
        if not self._session:
            return outcome(False, "No weight update session is open.")
        self._session = False
        return outcome(True, "Weight update session closed.")

    async def from_distributed(self, body: bodies.FromDistributed) -> Answer:
        """Receive all tensors of the call from rank 0, then load them; then flush, when asked."""
        if not self._session:
            return outcome(False, "Weight updates must run between begin_weight_update and end_weight_update.")
        if self._groups is None:
            return outcome(False, f"Group {body.group_name} not in the weight update groups.")
        if not len(body.names) == len(body.dtypes) == len(body.shapes):
            return outcome(False, "names, dtypes and shapes must have the same length")
        if body.load_format not in (None, "flattened_bucket"):
            return outcome(False, f"Unknown load_format={body.load_format}")
        if body.abort_all_requests:
            await self._admission.abort_all()
        groups = self._groups

        def work() -> Answer:
            try:
                sizes = [
                    element_size(dtype) * int(np.prod(shape, dtype=np.int64))
                    for dtype, shape in zip(body.dtypes, body.shapes, strict=True)
                ]
                if body.load_format == "flattened_bucket":
                    whole = groups.receive(body.group_name, [sum(sizes)])[0]
                    ends = np.cumsum(sizes).tolist()
                    for name, dtype, end, size in zip(body.names, body.dtypes, ends, sizes, strict=True):
                        if (end - size) % element_size(dtype):
                            # The real engine views each tensor in the bucket, which needs an aligned place.
                            return outcome(False, f"Unaligned received tensor {name}: byte offset {end - size}")
                    parts = [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]
                else:
                    parts = groups.receive(body.group_name, sizes)
            except (GroupError, ValueError) as error:
                return outcome(False, str(error))
            tensors = [
                (name, RawTensor(dtype, tuple(shape), part))
                for name, part, dtype, shape in zip(body.names, parts, body.dtypes, body.shapes, strict=True)
            ]
            self._admission.memory.touch(WEIGHTS)
            try:
                self._weights.load(tensors)
            except LoadError as error:
                return outcome(
                    False,
                    f"Failed to update parameter online: {error}. The full weights of the ModelRunner are partially "
                    "updated. Please discard the whole weights.",
                )
            return self._loaded("Succeeded to update parameter online.", body.weight_version, body.flush_cache)

        async with self._admission.exclusive():
            return self._labelled(await self._in_loop(work), body.weight_version)

    async def from_disk(self, body: bodies.FromDisk) -> Answer:
        """Load every safetensors file of a directory. On success the path becomes the served model's name."""
        if body.abort_all_requests:
            await self._admission.abort_all()

        def work() -> Answer:
            held = len(self._scheduler.waiting) if self._scheduler.paused else 0
            directory = Path(body.model_path)
            if not directory.is_dir() or not any(directory.glob("*.safetensors")):
                return outcome(
                    False,
                    f"Failed to get weights iterator: {body.model_path} holds no weights",
                    num_paused_requests=held,
                )
            self._admission.memory.touch(WEIGHTS)
            try:
                self._weights.load_directory(directory)
            except LoadError as error:
                # The real engine rolls back by reading the new path once more, which fails again and takes it down.
                self._admission.fatal(f"Failed to update weights: {error}.\nRolling back to original weights.")
            done = self._loaded("Succeeded to update model weights.", body.weight_version, body.flush_cache)
            return {**done, "num_paused_requests": held}

        async with self._admission.exclusive():
            answer = self._labelled(await self._in_loop(work), body.weight_version)
        if answer["success"]:
            self._labels.model_path = self._labels.served_model_name = body.model_path
        return answer

    def _loaded(self, message: str, version: str | None, flush: bool) -> Answer:
        """After a load, in the scheduler: new tokens carry the version, even if the flush is then refused."""
        if version is not None:
            self._scheduler.version = version
        if flush and not self._scheduler.flush():
            return outcome(False, "Cache flush failed after updating weights")
        return outcome(True, message)

    def _labelled(self, answer: Answer, version: str | None) -> Answer:
        if answer["success"] and version is not None:
            self._labels.weight_version = version
        return answer

    async def set_version(self, body: bodies.WeightVersion) -> Answer:
        """Write the version label, which nobody checks; by default every running request is aborted."""
        if body.abort_all_requests:
            await self._admission.abort_all()

        def work() -> None:
            self._scheduler.version = body.new_version

        await self._in_loop(work)
        self._labels.weight_version = body.new_version
        return outcome(True, f"Weight version updated to {body.new_version}", new_version=body.new_version)

    async def extra_tensor(self, name: str) -> bytes | None:
        """The bytes of a parameter that the model does not compute with; None when there is none of that name."""
        kept = await self._in_loop(lambda: self._weights.extra.get(name))
        return None if kept is None else bytes(kept.data)

    async def weights_by_name(self, body: bodies.WeightsByName) -> list[Any]:
        """The first rows of one tensor. Refused for an unknown name."""

        def work() -> Any:
            self._admission.memory.touch(WEIGHTS)
            return self._weights.get(body.name)

        value = await self._in_loop(work)
        if value is None:
            raise Refused("Get parameter by name failed")
        return list(value[: body.truncate_size].tolist())

    async def check_weights(self, body: bodies.CheckWeights) -> Answer:
        """``checksum``: content hashes of the engine's own parameters; ``snapshot``, ``compare``, ``reset_tensors``."""
        store = self._weights
        await self._in_loop(lambda: self._admission.memory.touch(WEIGHTS))
        if body.action == "checksum":
            sums = await self._in_loop(lambda: store.checksums(body.skip_tensor_list or ()))
            total = combined(sums)
            rank = {
                "checksums": sums,
                "per_gpu_checksum": total,
                "parallelism_info": {
                    "tp_rank": 0,
                    "tp_size": 1,
                    "pp_rank": 0,
                    "pp_size": 1,
                    "dp_rank": 0,
                    "dp_size": 1,
                },
            }
            return outcome(True, "Success.", ranks=[rank], per_engine_checksum=combined({"0": total}))
        if body.action == "snapshot":
            await self._in_loop(store.snapshot)
        elif body.action == "reset_tensors":
            await self._in_loop(store.reset)
        elif body.action == "compare":
            changed = await self._in_loop(store.changed_since_snapshot)
            if changed is None or changed:
                return outcome(
                    False, "no snapshot to compare with" if changed is None else f"tensors differ: {changed}"
                )
        else:
            return outcome(False, f"Unsupported action={body.action!r}")
        return outcome(True, "Success.")
