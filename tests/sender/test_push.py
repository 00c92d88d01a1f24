"""Pushing to real HTTP receivers: exact bytes, one outcome per gate, bad gates cost only themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from rlfleet.api import wire
from rlfleet.sender import WeightSender
from tests.sender.caller import SECONDS, Operator, weights
from tests.sender.receiver import Receiver, targets


def test_push_brings_the_published_bytes_to_every_gate(sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(3, weights())
    assert len(manifest.bucket_bytes) > 1
    with Receiver() as a, Receiver() as b:
        order = wire.PushOrder(
            manifest_digest=manifest.digest,
            targets=targets({"a": a, "b": b}, operator.push_token),
            deadline_seconds=SECONDS,
        )
        record = operator.run(order)
        assert record.state is wire.OperationState.SUCCEEDED
        for name, receiver in {"a": a, "b": b}.items():
            assert receiver.manifest == manifest
            assert receiver.tensor_hashes() == {t.name: t.hash for t in manifest.tensors}
            assert receiver.operations == {operator.operation}
            assert receiver.tokens == {t.token for t in order.targets if t.engine == name}
            assert None not in receiver.lengths
            assert record.result["targets"][name] == {"ok": True, "bytes": manifest.total_bytes, "error": None}
        assert record.result["bytes"] == 2 * manifest.total_bytes


def test_a_broadcast_member_gets_the_manifest_only(sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(3, weights())
    with Receiver() as a:
        target = targets({"a": a}, operator.push_token)[0].model_copy(update={"buckets": False})
        order = wire.PushOrder(manifest_digest=manifest.digest, targets=(target,), deadline_seconds=SECONDS)
        record = operator.run(order)
        assert record.result["targets"]["a"]["ok"]
        assert a.manifest == manifest
        assert not a.buckets


def test_bad_gates_do_not_stop_the_good_one(
    make_sender: Callable[..., WeightSender], make_operator: Callable[[WeightSender], Operator]
) -> None:
    sender = make_sender(bucket_bytes=8 * 2**20)
    operator = make_operator(sender)
    manifest = sender.publish(1, {"w": torch.arange(6 * 2**20, dtype=torch.int32)})
    stale = wire.ErrorBody(reason=wire.ErrorReason.STALE_FENCE, message="generation 7 is held")
    with Receiver() as good, Receiver(die_after=2**20) as dies, Receiver(refuse=stale) as refuses:
        with Receiver() as gone:
            gone_url = gone.url
        wanted = targets({"good": good, "dies": dies, "refuses": refuses}, operator.push_token)
        absent = wanted[0].model_copy(update={"engine": "absent", "url": gone_url})
        record = operator.run(
            wire.PushOrder(manifest_digest=manifest.digest, targets=(*wanted, absent), deadline_seconds=SECONDS)
        )
        assert record.state is wire.OperationState.SUCCEEDED
        result = record.result["targets"]
        assert result["good"] == {"ok": True, "bytes": manifest.total_bytes, "error": None}
        assert good.tensor_hashes() == {t.name: t.hash for t in manifest.tensors}
        assert not result["dies"]["ok"]
        assert "buckets/0" in result["dies"]["error"]
        assert not result["refuses"]["ok"]
        assert "StaleFence: generation 7 is held" in result["refuses"]["error"]
        assert refuses.buckets == {}
        assert not result["absent"]["ok"]
        assert "connection failed" in result["absent"]["error"]
        assert record.result["bytes"] == manifest.total_bytes


def test_a_frozen_gate_ends_at_the_deadline(sender: WeightSender, operator: Operator) -> None:
    manifest = sender.publish(1, {"w": torch.zeros(16 * 2**20, dtype=torch.uint8)})
    with Receiver() as good, Receiver(freeze=True) as frozen:
        record = operator.run(
            wire.PushOrder(
                manifest_digest=manifest.digest,
                targets=targets({"good": good, "frozen": frozen}, operator.push_token),
                deadline_seconds=2,
            )
        )
        assert record.state is wire.OperationState.SUCCEEDED
        assert record.result["targets"]["good"]["ok"]
        assert not record.result["targets"]["frozen"]["ok"]
        assert "DeadlineExceeded" in record.result["targets"]["frozen"]["error"]
        # The sender is as good as before.
        frozen.thaw()
        with contextlib.ExitStack() as stack:
            again = stack.enter_context(Receiver())
            second = operator.run(
                wire.PushOrder(
                    manifest_digest=manifest.digest,
                    targets=targets({"again": again}, operator.push_token),
                    deadline_seconds=SECONDS,
                ),
                attempt=2,
            )
            assert second.result["targets"]["again"]["ok"]


def test_pushing_bytes_that_are_not_held_is_refused(sender: WeightSender, operator: Operator) -> None:
    sender.publish(1, weights())
    with Receiver() as a:
        order = wire.PushOrder(
            manifest_digest="sha256:" + "0" * 64,
            targets=targets({"a": a}, operator.push_token),
            deadline_seconds=SECONDS,
        )
        answer = operator.post("/v1/operations", operator.request(order))
        assert answer.status_code == 409
        assert answer.json()["reason"] == "VersionNotHeld"
        assert a.manifest is None
