"""Plays the operator towards the SDK: writes the status of pipelines and rounds at the real apiserver."""

from __future__ import annotations

import json
import time
from typing import Any

from e2e.cluster.local import ClusterError, LocalCluster
from rlfleet.api import labels

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64
KEY = "A" * 43 + "="
INCARNATION = "trainer-1"
SECONDS = 120.0


class Fleet:
    """One namespace with a pipeline named ``demo``."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def create_pipeline(self, name: str = "demo") -> None:
        """An RLPipeline without status."""
        self.cluster.apply(
            {
                "apiVersion": labels.API_VERSION,
                "kind": "RLPipeline",
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {"weights": {"sender": {"podSelector": {"matchLabels": {"app": "trainer"}}}}},
            }
        )

    def _patch(self, kind: str, name: str, status: dict[str, Any]) -> None:
        self.cluster.kubectl(
            "patch", kind, name, f"--namespace={self.namespace}", "--subresource=status", "--type=merge", "-p",
            json.dumps({"status": status}),
        )  # fmt: skip

    def pipeline_status(self, **status: Any) -> None:
        """Merge into the pipeline's status."""
        self._patch("rlpipeline", "demo", status)

    def sender_seen(self, incarnation: str = INCARNATION, version: int = 1, digest: str = DIGEST) -> None:
        """The operator has met the sender."""
        self.pipeline_status(
            sender={"podUID": "uid-1", "incarnation": incarnation, "url": "http://127.0.0.1:9450"},
            cacheReady={"version": version, "manifestDigest": digest},
        )

    def committed(self, version: int, digest: str = DIGEST, incarnation: str = INCARNATION) -> None:
        """A version is committed."""
        self.pipeline_status(committed={"version": version, "manifestDigest": digest, "senderIncarnation": incarnation})

    def rounds(self) -> list[dict[str, Any]]:
        """All rounds, oldest attempt first."""
        items = self.cluster.get("syncrounds", f"--namespace={self.namespace}")["items"]
        return sorted(items, key=lambda r: (r["spec"]["version"], r["spec"]["attempt"]))

    def wait_rounds(self, count: int = 1) -> list[dict[str, Any]]:
        """The rounds, once there are so many."""
        until = time.monotonic() + SECONDS
        while True:
            try:
                found = self.rounds()
                if len(found) >= count:
                    return found
                saw = f"{len(found)}"
            except ClusterError as e:
                # A kind that was installed just now answers so until the apiserver has filled its cache.
                if "storage is (re)initializing" not in str(e):
                    raise
                saw = str(e)
            assert time.monotonic() < until, f"expected {count} rounds, saw {saw}"
            time.sleep(0.05)

    def round_status(self, name: str, **status: Any) -> None:
        """Merge into a round's status."""
        self._patch("syncround", name, status)

    def phase(self, name: str, phase: str, message: str = "", *, reason: str = "") -> None:
        """Move a round, saying what it waits for."""
        self.round_status(
            name,
            phase=phase,
            conditions=[
                {
                    "type": "Progressing",
                    "status": "True",
                    "reason": reason or phase,
                    "message": message,
                    "observedGeneration": 1,
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
        )

    def succeed(self, name: str, digest: str = DIGEST) -> None:
        """End a round well."""
        self.round_status(
            name,
            phase="Succeeded",
            outcome="Succeeded",
            committed=True,
            manifestDigest=digest,
            bytes=4096,
            plan={"worldSize": 2, "serialized": 3, "broadcast": 1},
            timings={"planMs": 1, "stageMs": 20, "pausedMs": 30, "totalMs": 60},
        )

    def fail(self, name: str, *, committed: bool = False, phase: str = "Failed", reason: str = "StagingFailed") -> None:
        """End a round without success."""
        self.round_status(
            name,
            phase=phase,
            outcome=phase,
            committed=committed,
            failure={"stage": "Staging", "reason": reason, "digest": "d1", "message": "pool-0: disk full"},
        )
