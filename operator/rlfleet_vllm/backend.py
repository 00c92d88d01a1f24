"""The weight transfer backend ``rlfleet`` of vLLM 0.32. Imported by vLLM's workers only.

A session (start, update, ..., finish) takes the whole model, in one or several updates: buckets of a trainer's
broadcast, or directories of safetensors files. Invariants:
- what is received is received whole before a parameter is touched: a transfer that breaks before the first load leaves
  the engine as it was;
- a session ends well only if every parameter was loaded in it. Nothing else answers 200 to "finish";
- an update that fails after a load began leaves the model in the state of loading with nothing loaded: it can not
  serve, and the next full load, by a session or by ``reload_weights``, repairs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from rlfleet_vllm.group import Group, Rendezvous, nbytes_of, views

logger = init_logger(__name__)

_NAMED = 5


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The group to join. ``rank_offset``: rank of this engine's first worker; ``timeout_s``: for the rendezvous."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "gloo"
    timeout_s: float = 60.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One bucket of a broadcast (``names``, ``dtype_names``, ``shapes``), or one ``directory`` of safetensors files.

    ``timeout_s``: for the one collective; absent: that of the group.
    """

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    directory: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if bool(self.names) == bool(self.directory):
            raise ValueError("update_info needs either names, dtype_names and shapes, or directory")
        if not len(self.names) == len(self.dtype_names) == len(self.shapes):
            raise ValueError("names, dtype_names and shapes of update_info differ in length")


class RlfleetWeights(WeightTransferEngine):  # type: ignore[misc]
    """One worker's end of a transfer."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group: Group | None = None
        self._expected: frozenset[str] = frozenset()
        self._loaded: set[str] | None = set()
        self._touched = False

    # ------------------------------------------------------------------------------------------ the group

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join a group; an earlier one is left first."""
        self.shutdown()
        parallel = self.parallel_config
        worker = int(parallel.data_parallel_index) * int(parallel.world_size) + int(parallel.rank)
        at = Rendezvous(
            master_address=init_info.master_address,
            master_port=int(init_info.master_port),
            rank=int(init_info.rank_offset) + worker,
            world_size=int(init_info.world_size),
            group_name=init_info.group_name,
            backend=init_info.backend,
            timeout_s=float(init_info.timeout_s),
        )
        self._group = Group(at, self.device)

    def shutdown(self) -> None:
        """Leave the group."""
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    # ------------------------------------------------------------------------------------------ a session

    def start_weight_update(self) -> None:
        """Begin a session. The model is touched by its first load, not here."""
        self._loaded = set()
        self._touched = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive and load one part."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive one part whole, then load it."""
        try:
            tensors = self._tensors(update_info)
        except Exception as e:
            so_far = "weights are incomplete now" if self._touched else "nothing was loaded, weights are as before"
            self._give_up()
            raise RuntimeError(f"rlfleet: {so_far}: {_say(e)}") from e
        try:
            if not self._touched:
                self._touched = True
                initialize_layerwise_reload(self.model)
                # Asked now: what kernels made of the weights, and what they put beside them, no checkpoint has.
                self._expected = frozenset(name for name, _ in self.model.named_parameters())
            loaded = self.model.load_weights(tensors)
        except Exception as e:
            self._give_up()
            # vLLM passes on the text alone, and an assertion has none.
            raise RuntimeError(f"rlfleet: the load broke off, weights are incomplete now: {_say(e)}") from e
        if loaded is None or self._loaded is None:
            self._loaded = None
        else:
            self._loaded |= set(loaded)

    def _tensors(self, info: UpdateInfo) -> Iterable[tuple[str, torch.Tensor]]:
        if info.directory is not None:
            return _read(info.directory)
        if self._group is None:
            raise RuntimeError("no group was joined")
        sizes = [nbytes_of(dtype, shape) for dtype, shape in zip(info.dtype_names, info.shapes, strict=True)]
        flat = self._group.receive(sum(sizes), info.timeout_s)
        return list(views(flat, info.names, info.dtype_names, info.shapes))

    def finish_weight_update(self) -> None:
        """End a session: RuntimeError unless every parameter was loaded in it, or nothing was wrong and none was."""
        if self._touched:
            self._demand_all()
            finalize_layerwise_reload(self.model, self.model_config)
            self._touched = False
        elif any(get_layerwise_info(layer).can_load() for layer in self.model.modules()):
            raise RuntimeError(
                "rlfleet: nothing was loaded in this session, and an earlier one left the weights incomplete: load all "
                "of them"
            )

    def _demand_all(self) -> None:
        """The rule by which vLLM judges a checkpoint at start, which has passed for this very model, and a sharper one.

        A parameter that holds several tensors of a checkpoint counts as loaded there with the first of them.
        """
        missing = _missing_shards(self.model)
        if self._loaded is not None and self.model_config.quantization is None:
            missing += self._expected - self._loaded
        missing.sort()
        if missing:
            self._give_up()
            named = ", ".join(missing[:_NAMED]) + (", ..." if len(missing) > _NAMED else "")
            raise RuntimeError(
                f"rlfleet: {len(missing)} of {len(self._expected)} parameters were not sent or not whole, weights "
                f"are incomplete now: {named}"
            )

    def _give_up(self) -> None:
        """Forget what layers were given in part: a later load must not be completed with it, or stand beside it."""
        if not self._touched:
            return
        self._touched = False
        for layer in self.model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        # A layer that was given nothing gets its memory back, whatever state it was left in; then all wait for a load.
        finalize_layerwise_reload(self.model, self.model_config)
        initialize_layerwise_reload(self.model)


def _missing_shards(model: torch.nn.Module) -> list[str]:
    """Fused weights and biases that still wait for a part (``q_proj`` came, ``k_proj`` did not)."""
    missing = []
    for name, layer in model.named_modules():
        if isinstance(layer, QKVParallelLinear):
            whole: set[Any] = {"q", "k", "v"}
        elif isinstance(layer, MergedColumnParallelLinear):
            whole = set(range(len(layer.output_sizes)))
        else:
            continue
        # What is complete was processed, and waits for nothing.
        waiting = get_layerwise_info(layer).loaded_weights
        for part in ("weight", "bias"):
            given = {args.arguments.get("loaded_shard_id") for which, args in waiting if which == part}
            if given and None not in given:
                flat = {one for shard in given for one in (shard if isinstance(shard, tuple) else (shard,))}
                missing += [f"{name}.{part}[{shard}]" for shard in sorted(whole - flat, key=str)]
    return missing


def _read(directory: str) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(str(f) for f in Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} holds no *.safetensors file")
    found: Iterator[tuple[str, torch.Tensor]] = safetensors_weights_iterator(files, use_tqdm_on_load=False)
    return found


def _say(error: BaseException) -> str:
    text = str(error).strip().split("\n", 1)[0][:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
