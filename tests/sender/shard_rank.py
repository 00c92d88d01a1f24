"""One rank of a sharded trainer as its own process, over gloo on the loopback interface.

Usage: shard_rank.py RANK WORLD_SIZE FOLDER SCENARIO. Writes what came of each publish to FOLDER/rank-RANK.json.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from rlfleet.sender import SenderError, WeightSender, publish_sharded

BUCKET_BYTES = 4096
#: Of the scenario "large": tensors of 4 MiB.
LARGE = 32


def model() -> torch.nn.Module:
    """A model whose sizes do not divide by two."""
    torch.manual_seed(7)
    made = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 31), torch.nn.LayerNorm(31))
    made.register_buffer("steps", torch.tensor(5))
    return made


def by_hand() -> dict[str, torch.Tensor]:
    """Full tensors of several dtypes, for placements that FSDP does not make."""
    made = torch.Generator().manual_seed(3)
    return {
        "columns": torch.randn(5, 7, generator=made),
        "rows": torch.randn(9, 4, generator=made).to(torch.bfloat16),
        "everywhere": torch.randint(0, 99, (6,), generator=made),
        "summed": torch.ones(4),
        "plain": torch.randn(3, generator=made),
        "larger.than.a.bucket": torch.randn(41, 50, generator=made),
    }


def sharded(scale: float = 1.0) -> dict[str, Any]:
    """What this rank publishes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module = model()
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    state: dict[str, Any] = {f"model.{name}": t for name, t in module.state_dict().items()}
    assert any(isinstance(t, DTensor) for t in state.values())
    full = by_hand()
    state["columns"] = distribute_tensor(full["columns"] * scale, mesh, [Shard(1)])
    state["rows"] = distribute_tensor(full["rows"], mesh, [Shard(0)])
    state["everywhere"] = distribute_tensor(full["everywhere"], mesh, [Replicate()])
    state["summed"] = DTensor.from_local(full["summed"] / dist.get_world_size(), mesh, [Partial()])
    state["plain"] = full["plain"]
    state["larger.than.a.bucket"] = distribute_tensor(full["larger.than.a.bucket"], mesh, [Shard(0)])
    return state


def large() -> dict[str, Any]:
    """Tensors that together are far larger than a rank may need beyond its shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    part = 2**20 // dist.get_world_size()
    return {f"w{i}": DTensor.from_local(torch.full((part,), float(i)), mesh, [Shard(0)]) for i in range(LARGE)}


def strike_in_gather(number: int, signal_number: int) -> None:
    """This process meets its fate in the middle of gathering the n-th tensor."""
    gather = DTensor.full_tensor
    calls = 0

    def struck(self: DTensor, **given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal_number)
        return gather(self, **given)

    DTensor.full_tensor = struck  # type: ignore[method-assign]


def peak() -> int:
    """Most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Rank:
    """Publishes, and keeps what came of it by name."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.senders: list[WeightSender] = []
        self.outcome: dict[str, Any] = {}

    def sender(self, bucket_bytes: int = BUCKET_BYTES) -> WeightSender:
        """A sender of this process."""
        self.senders.append(WeightSender("127.0.0.1", 0, bucket_bytes=bucket_bytes).start())
        return self.senders[-1]

    def publish(
        self, name: str, version: int, state: dict[str, Any], sender: WeightSender | None, **options: Any
    ) -> None:
        """Take part in one publish. ``error``: its kind and words, or None."""
        before = peak()
        made: dict[str, Any] = {"digest": None, "error": None}
        try:
            made["digest"] = publish_sharded(version, state, sender=sender, **options)
        except SenderError as e:
            made["error"] = [type(e).__name__, str(e)]
        made["grown"] = peak() - before
        newest = None if sender is None else sender._slots.newest()
        made["held"] = None if newest is None else [newest.version, newest.digest]
        self.outcome[name] = made

    def together(self, folder: Path) -> None:
        """What all ranks live to see the end of."""
        none: WeightSender | None = None
        first, rank = self.rank == 0, self.rank
        self.publish("two owners", 1, sharded(), self.sender())
        self.publish("no owner", 1, sharded(), none)
        self.publish("other version", rank, sharded(), self.sender() if first else none)
        state = sharded()
        self.publish(
            "other order", 1, state if first else dict(reversed(state.items())), self.sender() if first else none
        )
        odd = {"plain": torch.ones(3, dtype=torch.complex128)}
        self.publish("refused by one", 1, state if first else state | odd, self.sender() if first else none)
        self.publish("first owns", 1, state, self.senders[-1] if first else none)
        self.publish("backwards", 0, state, self.senders[-1] if first else none)
        self.publish("last owns", 1, state, none if first else self.sender())
        # After all the above whatever grows once has grown.
        self.publish("large", 2, large(), self.sender(2**22) if first else none)
        for name, owner in (("first owns", 0), ("last owns", self.world_size - 1)):
            if rank == owner:
                digest = self.outcome[name]["digest"]
                weights = next(w for s in self.senders if (w := s._slots.newest()) and w.digest == digest)
                self.outcome[name]["manifest"] = weights.manifest.model_dump(mode="json", by_alias=True)
                data = b"".join(bytes(weights.view(i)) for i in range(len(weights.buckets)))
                (folder / name).write_bytes(data)

    def struck(self, signal_number: int) -> None:
        """Rank 1 does not live through the second publish."""
        sender = self.sender() if self.rank == 0 else None
        self.publish("before", 1, sharded(), sender)
        if self.rank == 1:
            strike_in_gather(3, signal_number)
        self.publish("struck", 2, sharded(2.0), sender, deadline_seconds=8)


def main() -> None:
    """Join, publish, write what came of it."""
    torch.set_num_threads(1)
    rank, world_size, folder, scenario = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    made = Rank(rank, world_size)
    if scenario == "together":
        made.together(folder)
    else:
        made.struck(signal.SIGKILL if scenario == "dies" else signal.SIGSTOP)
    (folder / f"rank-{rank}.json").write_text(json.dumps(made.outcome))
    for sender in made.senders:
        sender.close()
    # A group with a collective in it that never ends would keep the interpreter from ending.
    os._exit(0)


if __name__ == "__main__":
    main()
