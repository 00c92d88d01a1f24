"""A vLLM worker's end of a broadcast (rlfleet_vllm.group) against the real weight sender; vLLM itself is not needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlfleet.api import wire
from rlfleet.api.manifest import Manifest
from rlfleet.sender import WeightSender
from rlfleet_vllm.group import Group, Rendezvous, TransferError, nbytes_of, views
from tests.sender.caller import SECONDS, Operator, weights
from tests.sender.test_broadcast import order, start

CPU = torch.device("cpu")


def join(of: wire.BroadcastOrder, rank: int = 1, **change: Any) -> Group:
    group = of.group
    fields: dict[str, Any] = {
        "master_address": group.master_address,
        "master_port": group.master_port,
        "rank": rank,
        "world_size": group.world_size,
        "group_name": group.group_name,
        "backend": group.backend,
        "timeout_s": SECONDS,
    }
    return Group(Rendezvous(**(fields | change)), CPU)


def bucket(group: Group, manifest: Manifest, index: int, seconds: float | None = None) -> dict[str, torch.Tensor]:
    tensors = manifest.bucket(index)
    names, dtypes, shapes = [t.name for t in tensors], [t.dtype for t in tensors], [t.shape for t in tensors]
    size = sum(nbytes_of(d, s) for d, s in zip(dtypes, shapes, strict=True))
    assert size == manifest.bucket_bytes[index], "the engine is told no sizes: it counts them as the sender does"
    return dict(views(group.receive(size, seconds), names, dtypes, shapes))


def test_a_worker_receives_what_the_sender_holds(sender: WeightSender, operator: Operator) -> None:
    state = weights(3) | {"eight": torch.randn(9).to(torch.float8_e4m3fn), "scalar": torch.tensor(1.5)}
    manifest = sender.publish(1, state)
    assert len(manifest.bucket_bytes) > 1
    of = order(manifest, world_size=2)
    sent = start(operator, of)
    group = join(of)
    found: dict[str, torch.Tensor] = {}
    for index in range(len(manifest.bucket_bytes)):
        found |= bucket(group, manifest, index)
    group.leave()
    assert operator.ended(sent).state is wire.OperationState.SUCCEEDED
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name


def test_a_trainer_that_sends_nothing_more_ends_the_wait_and_the_group(
    sender: WeightSender, operator: Operator
) -> None:
    manifest = sender.publish(1, weights())
    of = order(manifest, world_size=2)
    sent = start(operator, of)
    group = join(of)
    for index in range(len(manifest.bucket_bytes)):
        bucket(group, manifest, index)
    with pytest.raises(TransferError, match=r"4096 bytes did not arrive within 0.2 s"):
        group.receive(4096, 0.2)
    with pytest.raises(TransferError, match="the group was left"):
        group.receive(4096)
    assert operator.ended(sent).state is wire.OperationState.SUCCEEDED


def test_a_trainer_that_never_comes_ends_the_wait(sender: WeightSender) -> None:
    of = order(sender.publish(1, weights()), world_size=2)
    with pytest.raises(TransferError, match=rf"group {of.group.group_name} at .* was not joined as rank 1 of 2 within"):
        join(of, timeout_s=0.2)


def test_a_host_without_an_address_is_named_with_the_remedy(sender: WeightSender) -> None:
    of = order(sender.publish(1, weights()), world_size=2)
    named = rf"group {of.group.group_name} at trainer\.invalid:.* no address for 'trainer\.invalid' .*podSelector"
    with pytest.raises(TransferError, match=named):
        join(of, master_address="trainer.invalid", timeout_s=0.2)


def test_what_can_not_be_joined_is_named(sender: WeightSender) -> None:
    of = order(sender.publish(1, weights()), world_size=2)
    with pytest.raises(ValueError, match="backend nccl needs CUDA devices, and this worker's model lies on cpu"):
        join(of, backend="nccl")
    with pytest.raises(ValueError, match="backend 'mpi' is not known: use one of gloo, nccl"):
        join(of, backend="mpi")


def test_tensors_lie_in_the_bucket_where_their_dtype_allows_it_and_are_copied_where_not() -> None:
    flat = torch.arange(16, dtype=torch.uint8)
    found = dict(views(flat, ["a", "b", "c"], ["uint8", "float32", "int16"], [[4], [2], []]))
    assert found["b"].untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    shifted = dict(views(flat, ["a", "b"], ["uint8", "float32"], [[3], [2]]))
    assert torch.equal(shifted["b"].view(torch.uint8), flat[3:11])
    assert found["c"].shape == ()
    with pytest.raises(ValueError, match="'nothing' is no dtype"):
        nbytes_of("nothing", [1])
    with pytest.raises(ValueError, match="negative"):
        nbytes_of("uint8", [-1])
