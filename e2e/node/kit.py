"""What tests on the real node need: helm, manifests of the documentation, a trainer on demand, and eyes."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import yaml

from e2e.cluster.controlplane import ClusterError
from e2e.cluster.local import ROOT
from e2e.cluster.waiting import wait_until
from e2e.node.cluster import RealNode
from e2e.node.images import name_of
from e2e.scenarios.ports import CONTROL_PORT

Obj = dict[str, Any]
T = TypeVar("T")

SYSTEM = "rlfleet-system"
RELEASE = "rlfleet"
EARLIER_TAG = "earlier"
QUICKSTART = ROOT / "docs" / "examples" / "quickstart"
FAULTS = "/tmp/faults.json"
SECONDS = 180.0
TERMINAL = ("Succeeded", "Failed", "Superseded", "Cancelled", "Expired")
#: What the chart is told about images here; everything else is as it comes.
VALUES = {"image.repository": "localhost/rlfleet/operator", "image.tag": "dev", "image.pullPolicy": "Never"}


def manifests(path: Path) -> list[Obj]:
    """The objects of a file of the documentation."""
    return [obj for obj in yaml.safe_load_all(path.read_text()) if obj]


def helm(node: RealNode, verb: str, *words: str, timeout: float = 240.0, values: dict[str, str] | None = None) -> str:
    """One helm command for our release."""
    settings = [f"--set={name}={value}" for name, value in (values or {}).items()]
    return node.helm(verb, RELEASE, *words, f"--namespace={SYSTEM}", *settings, timeout=timeout)


def until(look: Callable[[], T], what: str, seconds: float = SECONDS) -> T:
    """Waits for a condition; a read that fails meanwhile (the object is not there yet) counts as not yet."""

    def safely() -> T | None:
        try:
            return look()
        except (ClusterError, KeyError, httpx.TransportError):
            return None

    found = wait_until(safely, what, seconds)
    assert found is not None
    return found


def condition(obj: Obj, kind: str) -> Obj:
    """One condition of an object; empty when it has none of this type."""
    conditions: list[Obj] = (obj.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == kind), {})


class Fleet:
    """The quickstart's pipeline and pool in one namespace, with a sender that publishes when a test says so."""

    def __init__(self, node: RealNode, namespace: str) -> None:
        self.node = node
        self.namespace = namespace
        self._version = -1

    # ------------------------------------------------------------------------------------------------ objects

    def pool_manifest(self, *, gate: str = "dev", change: Callable[[Obj], None] | None = None) -> list[Obj]:
        """The quickstart's pool and Service; engines read faults from a file, which tests write."""
        found = []
        for original in manifests(QUICKSTART / "pool.yaml"):
            obj = copy.deepcopy(original)
            obj["metadata"]["namespace"] = self.namespace
            if obj["kind"] == "EnginePool":
                obj["spec"]["gate"]["image"] = name_of("operator", gate)
                if gate != "dev":
                    del obj["spec"]["routers"]  # what it does not know it cannot keep
                container = obj["spec"]["source"]["template"]["spec"]["containers"][0]
                container["args"].append(f"--fault-file={FAULTS}")
                template = obj["spec"]["source"]["template"]["spec"]
                # What is written here is charged to the engine's memory, and to nobody's process.
                template["volumes"][0]["emptyDir"] = {"medium": "Memory"}
                template["volumes"].append({"name": "scratch", "emptyDir": {"sizeLimit": "16Mi"}})
                container["volumeMounts"].append({"name": "scratch", "mountPath": "/scratch"})
                if change is not None:
                    change(obj)
            found.append(obj)
        return found

    def pipeline_manifest(self, **sync: Any) -> Obj:
        """The quickstart's pipeline."""
        (obj,) = copy.deepcopy(manifests(QUICKSTART / "pipeline.yaml"))
        obj["metadata"]["namespace"] = self.namespace
        if sync:
            obj["spec"]["sync"] = sync
        return obj

    def publisher_manifest(self) -> Obj:
        """The quickstart's trainer pod with a program that publishes on demand instead of training."""
        (obj,) = copy.deepcopy(manifests(QUICKSTART / "trainer.yaml"))
        obj["metadata"]["namespace"] = self.namespace
        obj["spec"]["serviceAccountName"] = "default"
        container = obj["spec"]["containers"][0]
        container["command"], container["args"] = ["python", "-m", "e2e.scenarios.publisher"], []
        keys = json.dumps({k["kid"]: k["key"] for k in self.pipeline()["status"]["publicKeys"]})
        container["env"].append({"name": "RLFLEET_PUBLIC_KEYS", "value": keys})
        return obj

    def pipeline(self) -> Obj:
        """The RLPipeline."""
        found: Obj = self.node.get("rlpipelines", "demo", "-n", self.namespace)
        return found

    def pool(self) -> Obj:
        """The EnginePool."""
        found: Obj = self.node.get("enginepools", "engines", "-n", self.namespace)
        return found

    def engines(self) -> list[Obj]:
        """Living engine pods, by name."""
        pods: list[Obj] = self.node.get("pods", "-n", self.namespace, "-l", "rlfleet.dev/pool=engines")["items"]
        alive = [p for p in pods if p["status"].get("phase") == "Running" and "deletionTimestamp" not in p["metadata"]]
        return sorted(alive, key=lambda p: str(p["metadata"]["name"]))

    def states(self) -> list[str]:
        """States of the pool's engines as its status shows them."""
        return [e["state"] for e in self.pool()["status"].get("engines", [])]

    def all_active(self, count: int = 2) -> bool:
        """Whether every engine serves the committed version, by the pool's own word."""
        pool = self.pool()
        observed = (pool.get("status") or {}).get("observedGeneration") == pool["metadata"]["generation"]
        return observed and self.states() == ["Active"] * count

    def events(self, reason: str) -> list[Obj]:
        """Events of this reason in the namespace."""
        found: list[Obj] = self.node.get("events", "-n", self.namespace)["items"]
        return [e for e in found if e.get("reason") == reason]

    # ------------------------------------------------------------------------------------------------ acting

    def start_publisher(self) -> None:
        """The sender's pod, Running."""
        until(lambda: self.pipeline()["status"].get("publicKeys"), "the operator to publish its keys")
        self.node.apply(self.publisher_manifest())
        until(lambda: self._publisher()["status"].get("phase") == "Running", "the publisher to run")
        until(self._publisher_answers, "the publisher to answer")

    def _publisher(self) -> Obj:
        found: Obj = self.node.get("pods", "trainer", "-n", self.namespace)
        return found

    def _publisher_answers(self) -> bool:
        # Nothing is published by this: weights without a tensor are refused.
        return self._publish({"version": -1, "change": "empty"}).status_code == httpx.codes.CONFLICT

    def _publish(self, order: Obj) -> httpx.Response:
        url = f"http://{self._publisher()['status']['podIP']}:{CONTROL_PORT}/publish"
        return httpx.post(url, json=order, timeout=60.0, trust_env=False)

    def publish(self, version: int, bulk_mib: int = 0) -> str:
        """New weights in the sender, with a tensor of ``bulk_mib`` that engines ignore; returns its incarnation."""
        answer = self._publish({"version": version, "seed": version + 2, "bulk": bulk_mib})
        assert answer.status_code == httpx.codes.OK, answer.text
        return str(answer.json()["incarnation"])

    def order(self, bulk_mib: int = 0) -> str:
        """Publishes the next version and orders a round for it; returns the round's name."""
        incarnation = self.publish(self._version, bulk_mib)
        name = f"demo-v{self._version}".replace("--", "-base-")
        spec = {"pipeline": "demo", "version": self._version, "senderIncarnation": incarnation}
        self._version += 1
        meta = {"name": name, "namespace": self.namespace}
        self.node.apply({"apiVersion": "rlfleet.dev/v1alpha1", "kind": "SyncRound", "metadata": meta, "spec": spec})
        return name

    def round(self, name: str) -> Obj:
        """A SyncRound."""
        found: Obj = self.node.get("syncrounds", name, "-n", self.namespace)
        return found

    def phase(self, name: str) -> str:
        """Its phase."""
        return str((self.round(name).get("status") or {}).get("phase") or "")

    def sync(self, bulk_mib: int = 0) -> Obj:
        """One round, to its end."""
        name = self.order(bulk_mib)
        until(lambda: self.phase(name) in TERMINAL, f"round {name} to end")
        return self.round(name)

    def write(self, pod: Obj, path: str, mebibytes: int) -> None:
        """Writes a file of zeros from the engine's container; being killed at it is no error."""
        name = pod["metadata"]["name"]
        copying = ("dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={mebibytes}")
        with contextlib.suppress(ClusterError):
            self.node.kubectl("exec", name, "-n", self.namespace, "-c", "engine", "--", *copying)

    def fault(self, pod: Obj, rules: Obj) -> None:
        """Writes an engine's faults with ``kubectl exec``."""
        name = pod["metadata"]["name"]
        # In one step: the engine may look at any moment.
        script = f"import os, sys; open('{FAULTS}.new', 'w').write(sys.argv[1]); os.replace('{FAULTS}.new', '{FAULTS}')"
        words = ("exec", name, "-n", self.namespace, "-c", "engine", "--", "python", "-c", script, json.dumps(rules))
        self.node.kubectl(*words)


def container(pod: Obj, name: str) -> Obj:
    """The status of one container, sidecars included."""
    status = pod["status"]
    listed: Iterator[Obj] = iter([*status.get("containerStatuses", []), *status.get("initContainerStatuses", [])])
    return next((c for c in listed if c["name"] == name), {})
