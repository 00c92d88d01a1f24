"""What vLLM's workers do when the engine asks all of them: loads, the one transfer group, device memory.

Invariant: everything but ``run`` runs in the scheduler's thread, and blocks there as the real engine's loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from e2e.sim.tensors import RawTensor, element_size

from .admission import Admission
from .groups_api import GroupError, Groups
from .memory import CACHE, GRAPHS, WEIGHTS
from .vllm_weights import LayerwiseLoads, WorkerError
from .weights import WeightStore

T = TypeVar("T")
_TAGS = {"kv_cache": CACHE, "weights": WEIGHTS}


class Workers:
    """What runs in the engine's loop beside requests: loads, the one transfer group, device memory."""

    def __init__(self, admission: Admission, store: WeightStore, loads: LayerwiseLoads, groups: Groups | None) -> None:
        self._admission = admission
        self._store = store
        self._groups = groups
        self._group: str | None = None
        self.loads = loads

    def halve_next_load(self) -> None:
        """A scripted fault: the next load takes only half of its tensors, and nobody is told."""
        self._store.halve_next_load = True

    async def extra_tensor(self, name: str) -> bytes | None:
        """The bytes of a parameter that the model does not compute with; None when there is none of that name."""
        kept = await self.run(lambda: self._store.extra.get(name))
        return None if kept is None else bytes(kept.data)

    async def run(self, work: Callable[[], T]) -> T:
        """Run in the engine's loop."""
        return await self._admission.in_loop(work)

    def join(self, info: Mapping[str, Any]) -> None:
        """Join a group, in place of the one that there is; stuck until all ranks are there or time is over."""
        groups = self._groups
        if groups is None:
            raise WorkerError("broadcast groups need the torch backend")
        self.leave()
        try:
            name, where = str(info["group_name"]), (str(info["master_address"]), int(info["master_port"]))
            ranks, seconds = (int(info["rank_offset"]), int(info["world_size"])), float(info["timeout_s"])
            groups.create(name, str(info["backend"]), *where, *ranks, seconds=seconds)
        except (KeyError, GroupError) as error:
            raise WorkerError(f"Invalid init_info: {error}") from error
        self._group = name

    def leave(self) -> None:
        """Leave the group, if there is one."""
        if self.loads.active:
            raise WorkerError("Cannot release a trainer connection during a weight update")
        name, self._group = self._group, None
        if self._groups is not None and name is not None:
            self._groups.destroy(name)

    def update(self, info: Mapping[str, Any]) -> None:
        """One update as our plug-in takes it: a directory, or one flattened bucket by broadcast."""
        self._admission.memory.touch(WEIGHTS)
        if info.get("directory"):
            self.loads.directory(Path(str(info["directory"])))
            return
        self.loads.demand_session()
        try:
            if not info.get("names"):
                raise ValueError("update_info needs either names, dtype_names and shapes, or directory")
            tensors = self._receive(info["names"], info["dtype_names"], info["shapes"])
        except (GroupError, KeyError, ValueError) as error:
            so_far = "weights are incomplete now" if self.loads.loading else "nothing was loaded, weights are as before"
            self.loads.drop()
            raise WorkerError(f"rlfleet: {so_far}: {error}") from error
        self.loads.update(tensors)

    def _receive(
        self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> list[tuple[str, RawTensor]]:
        if self._groups is None or self._group is None:
            raise GroupError("no group was joined")
        sizes = [element_size(d) * int(np.prod(s, dtype=np.int64)) for d, s in zip(dtypes, shapes, strict=True)]
        whole = self._groups.receive(self._group, [sum(sizes)])[0]
        ends = np.cumsum(sizes).tolist()
        return [
            (name, RawTensor(dtype, tuple(shape), whole[end - size : end]))
            for name, dtype, shape, end, size in zip(names, dtypes, shapes, ends, sizes, strict=True)
        ]

    def rpc(self, method: str, kwargs: Mapping[str, Any]) -> None:
        """A method of every worker."""
        memory = self._admission.memory
        if method == "reload_weights":
            memory.touch(WEIGHTS)
            self.loads.reload(Path(str(kwargs["weights_path"])))
        elif method == "sleep" and memory.saver:
            memory.release([tag for tag in (WEIGHTS, CACHE, GRAPHS) if not memory.is_away(tag)])
            self._store.forget_extra()
        elif method == "discard" and memory.saver:
            memory.release([_TAGS[t] for t in kwargs["tags"] if not memory.is_away(_TAGS[t])])
        elif method == "wake_up" and memory.saver:
            # What is neither weights nor cache comes back with whatever is taken back first.
            wanted = [GRAPHS, *(_TAGS[t] for t in kwargs.get("tags") or _TAGS)]
            memory.resume([tag for tag in wanted if memory.is_away(tag)])
        elif method not in ("sleep", "discard", "wake_up"):
            raise WorkerError(f"'CPUWorker' object has no attribute '{method}'")
