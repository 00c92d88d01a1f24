"""The sender with the real gate and the reference engine: what was published is what the engine holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state
from rlfleet.api import wire
from rlfleet.sender import WeightSender
from tests.gate import kit
from tests.sender.caller import SECONDS, Operator
from tests.sender.test_broadcast import order

Make = Callable[..., WeightSender]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[kit.Engine]:
    """A reference engine that can join gloo groups."""
    made = kit.Engine(tmp_path, "--group-timeout", "30", backend="torch")
    yield made.up()
    made.close()


@pytest.fixture
def gate(engine: kit.Engine, tmp_path: Path) -> Iterator[kit.Gate]:
    """Its gate."""
    folder = tmp_path / "gate"
    folder.mkdir()
    made = kit.Gate(folder, engine.url, engine.host)
    yield made.start()
    made.close()


@pytest.mark.parametrize(
    ("transport", "staging"),
    [
        (wire.Transport.SERIALIZED, wire.StagingMode.FULL),
        (wire.Transport.SERIALIZED, wire.StagingMode.BUCKET),
        (wire.Transport.BROADCAST, wire.StagingMode.FULL),
    ],
)
def test_a_round_by_hand(
    transport: wire.Transport,
    staging: wire.StagingMode,
    engine: kit.Engine,
    gate: kit.Gate,
    make_sender: Make,
    make_operator: Callable[[WeightSender], Operator],
) -> None:
    sender = make_sender(public_keys={kit.KID: kit.public(kit.KEY)}, bucket_bytes=40_000)
    state = torch_state(MODELS["tiny"], 11)
    manifest = sender.publish(4, state)
    assert len(manifest.bucket_bytes) > 1
    at_gate = kit.Operator(gate).ready()
    at_sender = make_operator(sender)
    at_sender.key = kit.KEY
    at_sender.operation, at_sender.generation = at_gate.operation, at_gate.generation
    assert at_sender.hold(4, manifest.digest).status_code == 200
    named = {"version": 4, "manifestDigest": manifest.digest}
    at_gate.ok("Prepare", transport=transport.value, totalBytes=manifest.total_bytes, staging=staging.value, **named)
    fills = transport is wire.Transport.SERIALIZED and staging is wire.StagingMode.FULL

    target = wire.PushTarget(
        engine="pool-0",
        url=gate.url,
        pod_uid=gate.pod_uid,
        buckets=fills,
        token=at_sender.push_token(gate.pod_uid),
    )
    # Smaller than the trainer cut them; whatever moves them is told the same.
    push = wire.PushOrder(
        manifest_digest=manifest.digest, targets=(target,), deadline_seconds=SECONDS, bucket_bytes=20_000
    )
    # A token for another generation is refused by the gate, and the gate's own words come back.
    forged = target.model_copy(update={"token": at_sender.token(kit.Scope.PUSH, audience=[gate.pod_uid], generation=7)})
    refused = at_sender.run(push.model_copy(update={"targets": (forged,)}), attempt=1)
    assert not refused.result["targets"]["pool-0"]["ok"]
    assert "manifest: " in refused.result["targets"]["pool-0"]["error"]
    record = at_sender.run(push, attempt=2)
    assert record.result["targets"]["pool-0"]["ok"], record.result
    staged = at_gate.status()["staged"]
    assert staged["complete"]
    arrived = manifest.total_bytes if fills else 0
    assert (staged["manifestDigest"], staged["receivedBytes"]) == (manifest.digest, arrived)

    before = engine.checksum()
    at_gate.ok("Pause", mode="Retract")
    load = {"transport": transport.value, **named}
    if transport is wire.Transport.BROADCAST:
        send = order(manifest, world_size=2).model_copy(update={"bucket_bytes": 20_000})
        answer = at_sender.post("/v1/operations", at_sender.request(send))
        assert answer.status_code == 202, answer.text
        at_gate.ok("Load", group=send.group.wire(), rankOffset=1, **load)
        sent = at_sender.ended(answer.json()["id"])
        assert sent.state is wire.OperationState.SUCCEEDED, sent.error
    elif fills:
        assert len(list(gate.staging.rglob("*.safetensors"))) > len(manifest.bucket_bytes)
        at_gate.ok("Load", **load)
    else:
        started = at_gate.start("Load", **load)
        assert started.status_code == 202, started.text
        filling = target.model_copy(update={"buckets": True})
        streamed = at_sender.run(push.model_copy(update={"targets": (filling,)}), attempt=3)
        assert streamed.result["targets"]["pool-0"] == {"ok": True, "bytes": manifest.total_bytes, "error": None}
        assert at_gate.wait(started.json()["id"])["state"] == "Succeeded"
    verified = at_gate.ok("Verify", **named)
    at_gate.ok("Publish", engineDigest=verified["result"]["engineDigest"], **named)
    assert engine.label() == "4"
    assert engine.checksum() != before
    assert engine.checksum() == verified["result"]["engineDigest"]
    assert at_sender.release().status_code == 200
