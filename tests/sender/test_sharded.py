"""Sharded trainers: two real gloo ranks gather into one cache, and what becomes of them when one rank does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlfleet.api.manifest import Manifest
from rlfleet.sender import InvalidStateDict, WeightSender
from tests.sender import shard_rank
from tests.sender.test_cache import build, raw

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120.0

Outcomes = list[dict[str, Any] | None]


def run(folder: Path, scenario: str, *, wait_for: tuple[int, ...] = (0, 1)) -> Outcomes:
    """Run a scenario on two ranks; what each wrote, None for one that did not live to."""
    ranks: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}/operator:{ROOT}", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        for rank in range(2):
            argv = [sys.executable, "-m", "tests.sender.shard_rank", str(rank), "2", str(folder), scenario]
            with (folder / f"rank-{rank}.log").open("wb") as log:
                ranks.append(subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
        for rank in wait_for:
            code = ranks[rank].wait(SECONDS)
            assert code == 0, (folder / f"rank-{rank}.log").read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait(20)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of ``together`` leave what they have."""
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def together(folder: Path) -> list[dict[str, Any]]:
    """What two ranks that live came to, by name of the publish."""
    outcomes = run(folder, "together")
    assert all(outcomes)
    return [o for o in outcomes if o is not None]


def expected() -> dict[str, Any]:
    """The full state dict that the ranks have shards of."""
    return {f"model.{name}": t for name, t in shard_rank.model().state_dict().items()} | shard_rank.by_hand()


@pytest.mark.parametrize(("name", "owner"), [("first owns", 0), ("last owns", 1)])
def test_what_the_owner_holds_is_the_full_state_dict(
    together: list[dict[str, Any]], folder: Path, name: str, owner: int
) -> None:
    full = build(expected(), shard_rank.BUCKET_BYTES)
    for rank, outcome in enumerate(together):
        assert outcome[name]["error"] is None
        assert outcome[name]["digest"] == full.digest
        assert outcome[name]["held"] == ([1, full.digest] if rank == owner else None)
    assert Manifest.model_validate(together[owner][name]["manifest"]) == full.manifest
    buckets = (folder / name).read_bytes()
    assert buckets == b"".join(bytes(full.view(i)) for i in range(len(full.buckets)))
    start = {i: sum(full.manifest.bucket_bytes[:i]) for i in range(len(full.buckets))}
    for entry in full.manifest.tensors:
        at = start[entry.bucket] + entry.offset
        assert buckets[at : at + entry.nbytes] == raw(expected()[entry.name].detach())


def test_no_rank_ever_has_the_whole_beside_the_buckets(together: list[dict[str, Any]]) -> None:
    owner, other = (outcome["large"] for outcome in together)
    assert owner["error"] is None
    assert owner["digest"] == other["digest"]
    everything = shard_rank.LARGE * 2**22
    # A tensor while it is gathered, its parts on the way, and what the allocator keeps: nowhere near all of them.
    assert owner["grown"] < everything * 1.5
    assert other["grown"] < everything * 0.5


@pytest.mark.parametrize(("scenario", "kind"), [("dies", "GatherFailed"), ("freezes", "GatherTimeout")])
def test_a_rank_that_goes_away_ends_the_publish_and_nothing_else(scenario: str, kind: str, tmp_path: Path) -> None:
    owner, other = run(tmp_path, scenario, wait_for=(0,))
    assert other is None
    assert owner is not None
    said, message = owner["struck"]["error"]
    assert said == kind, message
    assert "version 2" in message
    assert owner["struck"]["held"] == [1, owner["before"]["digest"]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("two owners", "exactly one rank owns the cache and gives its sender, here 2 do: ranks 0, 1"),
        ("no owner", "exactly one rank owns the cache and gives its sender, here no rank does"),
        ("other version", "the ranks publish different versions: rank 0: 0, rank 1: 1"),
        ("other order", "differ between rank 0 and rank 1"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused_everywhere(
    together: list[dict[str, Any]], name: str, says: str
) -> None:
    for outcome in together:
        kind, message = outcome[name]["error"]
        assert kind == "GatherFailed"
        assert says in message
        assert outcome[name]["held"] is None


def test_what_one_rank_refuses_is_said_on_all(together: list[dict[str, Any]]) -> None:
    first, last = (outcome["refused by one"]["error"] for outcome in together)
    assert first[0] == "GatherFailed"
    assert first[1].startswith("rank 1 can not take part: tensor 'plain': dtype complex128 cannot be carried")
    assert last[0] == "InvalidStateDict"
    owner, other = (outcome["backwards"] for outcome in together)
    assert owner["error"][0] == "VersionGoesBackwards"
    assert owner["held"][0] == 1
    assert other["error"][1].startswith("rank 0 can not take part: version 0 is below version 1")


def test_a_sharded_tensor_needs_the_sharded_publish(sender: WeightSender, tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        one = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        with pytest.raises(InvalidStateDict, match=r"tensor 'w' is sharded .*publish_sharded on every rank"):
            sender.publish(1, {"w": one})
    finally:
        dist.destroy_process_group()
