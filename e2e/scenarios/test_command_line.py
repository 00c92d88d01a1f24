"""The command line against a live fleet: what a person sees, steers and is told, by exit codes and words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import ROOT, Fleet, Operator, http, wait_until
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster


class Shell:
    """``rlfleet`` in a terminal without colour, in the fleet's namespace."""

    def __init__(self, fleet: Fleet, **env: str) -> None:
        self._fleet = fleet
        self._env = env

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run a command that ends with ``code``; what it said (standard output, or error where it failed)."""
        done = subprocess.run(
            [sys.executable, "-m", "rlfleet.app.cli", *words, "-n", self._fleet.namespace],
            env={
                **{k: v for k, v in os.environ.items() if k != "COLUMNS"},
                "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}",
                "KUBECONFIG": str(self._fleet.cluster.kubeconfig),
                **self._env,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout if code == 0 else done.stdout + done.stderr

    def document(self, *words: str, code: int = 0) -> Any:
        """A command's JSON."""
        return json.loads(self(*words, "-o", "json", code=code))


def states(fleet: Fleet) -> list[str]:
    """States of the pool's engines, by name."""
    rows = fleet.status("enginepool", "e").get("engines") or []
    return [str(e["state"]) for e in sorted(rows, key=lambda e: str(e["name"]))]


def heard(fleet: Fleet, version: int) -> None:
    """Wait until the operator knows that the sender holds this version."""
    wait_until(
        lambda: fleet.status("rlpipeline", "p")["cacheReady"]["version"] == version,
        f"the operator to hear of version {version}",
    )


def viewer(fleet: Fleet, name: str, *rules: dict[str, Any]) -> str:
    """A token of a service account that may do what the rules say in the fleet's namespace."""
    meta = {"name": name, "namespace": fleet.namespace}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": fleet.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    fleet.cluster.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": list(rules)},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": meta,
            "roleRef": role, "subjects": [subject],
        },
    )  # fmt: skip
    return fleet.cluster.kubectl("create", "token", name, "-n", fleet.namespace).strip()


OURS = {"apiGroups": ["rlfleet.dev"], "resources": ["*"], "verbs": ["get", "list"]}
PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}


def test_seeing_steering_and_being_told(fleet: Fleet, operator: Operator, tmp_path: Path) -> None:
    shell = Shell(fleet)
    pods = [p["metadata"]["name"] for p in serialized_fleet(fleet, 2)]
    wait_until(lambda: states(fleet) == ["Active", "Active"], "both engines to be shown active")
    shown = shell.document("status")["pipelines"][0]["pools"][0]["engines"]
    assert [(e["name"], e["state"], e["version"]) for e in shown] == [(p, "Active", -1) for p in pods]
    fleet.publish(1)
    # Without --version a dry run is for the newest version that the operator has heard of.
    heard(fleet, 1)

    # What a sync would do, by the operator's own planner, for whoever may read what it tells.
    page = f"http://127.0.0.1:{operator.web}"
    allowed = ("--operator", page, "--token", viewer(fleet, "viewer", OURS, PODS))
    would = shell.document("explain", "p", *allowed)
    assert (would["would"], would["reason"]) == ("WouldRun", "Planned")
    assert {(e["engine"], e["joins"], e["transport"]) for e in would["engines"]} == {
        (p, True, "Serialized") for p in pods
    }
    digest = fleet.status("rlpipeline", "p")["committed"]["manifestDigest"]
    base = ("explain", "p", "--version", "-1")
    assert "AlreadyCommitted as Succeeded" in shell(*base, "--digest", digest, *allowed)
    assert "VersionNotHeld as Failed" in shell(*base, *allowed, code=1)
    assert "SenderNotReady" in shell("explain", "p", "--version", "7", *allowed, code=1)
    # A round that waits for it is what is explained, not one that would supersede it.
    waits = fleet.order(7)
    would = shell.document("explain", "p", "--version", "7", *allowed, code=1)
    assert (would["would"], would["reason"]) == ("WouldWait", "SenderNotReady")
    assert (would["ordered"], would["supersedes"]) == (waits, [])
    assert f"ordered already: round {waits}" in shell("explain", "p", "--version", "7", *allowed, code=1)
    shell("cancel", waits)
    # However a round ends: cancelled is neither Complete nor Failed.
    fleet.cluster.kubectl(
        "wait", f"sr/{waits}", "-n", fleet.namespace, "--for=jsonpath={.status.outcome}", "--timeout=60s"
    )
    wait_until(lambda: fleet.phase(waits) == "Cancelled", "the round that waits to be called off")
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == -1
    healthy = shell.document("doctor", "--operator-namespace", fleet.namespace, *allowed, code=1)
    assert [c["what"] for c in healthy["checks"] if c["level"] == "Failed"] == ["operator"]  # none was elected here
    assert any(c["what"] == f"sender of {fleet.namespace}/p" and c["level"] == "Ok" for c in healthy["checks"])
    blind = viewer(fleet, "blind", OURS)
    assert "pods is forbidden" in shell("explain", "p", "--operator", page, "--token", blind, code=4)
    assert "does not accept this token" in shell("explain", "p", "--operator", page, "--token", "forged", code=4)
    assert "logs in without one (by certificate)" in shell("explain", "p", "--operator", page, code=4)
    code, tree = http("GET", f"{page}/api/fleet?namespace={fleet.namespace}")
    assert code == 401
    request = urllib.request.Request(
        f"{page}/api/fleet?namespace={fleet.namespace}", headers={"Authorization": f"Bearer {blind}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        tree = json.load(answer)
    assert [e["name"] for e in tree["pipelines"][0]["pools"][0]["engines"]] == pods

    # What is handed to others has no secrets in it.
    fleet.cluster.kubectl(
        "annotate",
        "pod",
        pods[0],
        "-n",
        fleet.namespace,
        "example.com/token=Zx9planted4Q",
        f"example.com/x=Bearer {blind}",
    )
    archive = tmp_path / "support.tar.gz"
    made = shell.document("support-bundle", "--file", str(archive), *allowed)
    with tarfile.open(archive) as opened:
        content = {m.name: opened.extractfile(m).read().decode() for m in opened if m.isfile()}  # type: ignore[union-attr]
    assert sorted(f"rlfleet-support/{name}" for name in made["files"]) == sorted(content)
    everything = "\n".join(content.values())
    assert "Zx9planted4Q" not in everything
    assert blind not in everything
    assert allowed[3] not in everything
    assert all(p in content["rlfleet-support/objects/pods.json"] for p in pods)
    assert "[redacted]" in content["rlfleet-support/objects/pods.json"]
    assert archive.stat().st_mode & 0o077 == 0

    said = shell("sync", "p")
    assert said.startswith("v1 is served: round p-v1-")
    assert shell("sync", "p", "--version", "1") == "v1 is committed already: nothing was asked for\n"
    assert "below version 1, which is committed; --rollback if that is meant" in shell(
        "sync", "p", "--version", "0", code=1
    )
    name = shell.document("rounds", "p", "--limit", "1")["rounds"][0]["name"]
    page = shell("round", "show", name)
    assert all(p in page for p in pods)
    assert "Succeeded" in page
    assert "has ended (Succeeded): there is nothing to cancel" in shell("cancel", name, code=1)
    assert all(p in shell("topology") for p in pods)

    # Out of service by a person: closed and member of no round, until it is released.
    shell("quarantine", pods[0], "--reason", "its GPU is suspect")
    wait_until(lambda: fleet.paused(fleet.pod(pods[0])), "the quarantined engine to be paused")
    wait_until(lambda: states(fleet) == ["Quarantined", "Active"], "the quarantine to be shown")
    assert "QuarantineRequested: its GPU is suspect" in shell("status")
    fleet.publish(2)
    heard(fleet, 2)
    assert "v2 is served" in shell("sync", "p")
    round_ = shell.document("rounds", "p", "--limit", "1")["rounds"][0]
    assert [m["engine"] for m in shell.document("round", "show", round_["name"])["members"]] == [pods[1]]
    assert fleet.paused(fleet.pod(pods[0]))
    assert fleet.label(fleet.pod(pods[0])) == "1"
    assert "released; it opens once it holds" in shell("release", pods[0])
    fleet.serving(fleet.pod(pods[0]), 2)
    wait_until(lambda: states(fleet) == ["Active", "Active"], "both engines to be active again")
    assert "was not quarantined" in shell("release", pods[0])

    shell("drain", "e", "--to", "1")
    assert fleet.get("enginepool", "e")["spec"]["active"] == 1
    assert "would put nobody to sleep" in shell("drain", "e", "--to", "2", code=2)
    shell("wake", "e")
    assert "active" not in fleet.get("enginepool", "e")["spec"]


def test_errors_name_the_object_and_the_remedy(cluster: LocalCluster, namespace: str) -> None:
    shell = Shell(Fleet(cluster, namespace))
    assert "No RLPipeline here" in shell("status")
    assert 'rlpipelines.rlfleet.dev "nope" not found' in shell("status", "nope", code=3)
    assert 'enginepools.rlfleet.dev "nope" not found' in shell("drain", "nope", code=3)
    assert "there is no pod 'nope'" in shell("quarantine", "nope", code=3)
    assert "there is no RLPipeline 'nope'" in shell("sync", "nope", "--version", "1", code=3)
    nobody = {"KUBERNETES_SERVICE_HOST": "", "KUBECONFIG": "/nonexistent"}
    assert "--kubeconfig or KUBECONFIG" in Shell(Fleet(cluster, namespace), **nobody)("status", code=5)
