"""A caller that signs and calls as the operator does, and weights to publish."""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any

import httpx
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from rlfleet.api import tokens, wire

torch.set_num_threads(1)

POD_UID = "trainer-pod-uid"
PIPELINE = "pipeline-uid"
SECONDS = 120.0


class Operator:
    """Signs tokens and calls one sender under one fence."""

    def __init__(self, url: str, key: Ed25519PrivateKey, incarnation: str) -> None:
        self.url = url
        self.key = key
        self.incarnation = incarnation
        self.pipeline = PIPELINE
        self.operation = f"round-{uuid.uuid4().hex[:8]}"
        self.generation = int(time.time() * 1000)
        self.http = httpx.Client(timeout=SECONDS, trust_env=False)

    def token(self, scope: tokens.Scope = tokens.Scope.CONTROL, **change: Any) -> str:
        """A token for this caller; ``change`` overrides claims."""
        claims: dict[str, Any] = {
            "audience": [POD_UID],
            "scope": scope,
            "pipeline": self.pipeline,
            "operation": self.operation,
            "generation": self.generation,
            "issued_at": int(time.time()),
        }
        return tokens.sign(change.pop("key", self.key), change.pop("kid", "k1"), **(claims | change))

    def fence(self, **change: Any) -> dict[str, Any]:
        """The fence of a body."""
        return {"pipeline": self.pipeline, "operation": self.operation, "generation": self.generation} | change

    def get(self, path: str, token: str | None = None) -> httpx.Response:
        """GET with a read token."""
        bearer = self.token(tokens.Scope.READ) if token is None else token
        return self.http.get(self.url + path, headers={"Authorization": f"Bearer {bearer}"})

    def post(self, path: str, body: dict[str, Any], token: str | None = None) -> httpx.Response:
        """POST with a control token."""
        bearer = self.token() if token is None else token
        return self.http.post(self.url + path, json=body, headers={"Authorization": f"Bearer {bearer}"})

    def status(self) -> wire.SenderStatus:
        """The sender's status."""
        answer = self.get("/v1/status")
        assert answer.status_code == 200, answer.text
        return wire.SenderStatus.model_validate_json(answer.content)

    def hold(self, version: int, digest: str | None = None, seconds: float = SECONDS) -> httpx.Response:
        """Take a hold."""
        return self.post(
            "/v1/hold",
            self.fence(version=version, deadlineSeconds=seconds) | ({"manifestDigest": digest} if digest else {}),
        )

    def release(self) -> httpx.Response:
        """End this operation's hold."""
        return self.post("/v1/release", self.fence())

    def request(self, order: wire.PushOrder | wire.BroadcastOrder, attempt: int = 1) -> dict[str, Any]:
        """The body that starts an order."""
        op_id = wire.operation_id(self.operation, order.kind, attempt, self.incarnation)
        return self.fence(senderIncarnation=self.incarnation, id=op_id, attempt=attempt, order=order.wire())

    def run(self, order: wire.PushOrder | wire.BroadcastOrder, attempt: int = 1) -> wire.OperationRecord:
        """Start an order and wait for its recorded end."""
        answer = self.post("/v1/operations", self.request(order, attempt))
        assert answer.status_code in (200, 202), answer.text
        return self.ended(wire.OperationRecord.model_validate_json(answer.content).id)

    def ended(self, op_id: str) -> wire.OperationRecord:
        """The record of an operation that has ended."""
        until = time.monotonic() + SECONDS
        while True:
            answer = self.get(f"/v1/operations/{op_id}?waitSeconds=5")
            assert answer.status_code == 200, answer.text
            record = wire.OperationRecord.model_validate_json(answer.content)
            if record.state is not wire.OperationState.RUNNING:
                return record
            assert time.monotonic() < until, "the operation does not end"

    def push_token(self, pod_uid: str) -> str:
        """A token with which the sender may push to one gate."""
        return self.token(tokens.Scope.PUSH, audience=[pod_uid])


def public(key: Ed25519PrivateKey) -> str:
    """A public key as it travels."""
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """A small state dict of several dtypes that fills several buckets of 4 KiB."""
    made = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(32, 16, generator=made),
        "flags": torch.randint(0, 2, (3,), generator=made).to(torch.bool),
        "layer.weight": torch.randn(64, 40, generator=made).to(torch.bfloat16),
        "step": torch.tensor(seed, dtype=torch.int64),
        "head.weight": torch.randn(50, 16, generator=made),
    }
