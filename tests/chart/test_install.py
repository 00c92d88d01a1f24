"""The chart is installed, tested, upgraded and uninstalled by helm, on a cluster whose pods run.

Operator and hooks are what the chart makes of them: pods under their own service accounts, on hollow nodes (which run a
container's command as a process, without its image).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.local import ROOT, ClusterError, LocalCluster
from e2e.scenarios.kit import http, wait_until
from rlfleet.api import labels
from tests.chart.kit import Obj, run_helm

pytestmark = pytest.mark.cluster

CHART = str(ROOT / "charts/rlfleet")
NAMESPACE = "rlfleet-system"
#: Both replicas live on one machine, each with an address of its own; and nobody waits for a lease here.
ON_HOLLOW_NODES: Obj = {"bindAddress": "$(RLFLEET_POD_IP)", "settings": {"pollSeconds": 1}}


@pytest.fixture
def bare(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of its own without CRDs and chart; the release's namespace enforces the restricted standard."""
    with LocalCluster(tmp_path / "c", nodes=2, say=print, bare=True) as started:
        for name in (NAMESPACE, "team-a", "team-b"):
            started.apply(
                {
                    "apiVersion": "v1",
                    "kind": "Namespace",
                    "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
                }
            )
            for thing in ("serviceaccount/default", "configmap/kube-root-ca.crt"):
                started.kubectl("wait", "--for=create", thing, f"--namespace={name}", "--timeout=180s")
        yield started


class Release:
    """A release of the chart."""

    def __init__(self, cluster: LocalCluster, folder: Path, values: Obj) -> None:
        self.cluster = cluster
        self._file = folder / "release.json"
        self.values = values

    def helm(self, verb: str, *more: str, **values: Any) -> str:
        """install or upgrade with the values, these added."""
        self._file.write_text(json.dumps({**ON_HOLLOW_NODES, **self.values, **values}))
        words = ("rlfleet", CHART, f"--namespace={NAMESPACE}", f"--values={self._file}", "--wait", "--timeout=120s")
        return run_helm(self.cluster, verb, *words, *more)

    def test(self) -> str:
        """`helm test`."""
        return run_helm(self.cluster, "test", "rlfleet", f"--namespace={NAMESPACE}", "--logs=false", "--timeout=120s")

    def uninstall(self) -> None:
        """`helm uninstall`, with its hooks."""
        run_helm(self.cluster, "uninstall", "rlfleet", f"--namespace={NAMESPACE}", "--wait", "--timeout=180s")

    def leader(self) -> str:
        """The name of the pod that holds the Lease."""
        holder = self.cluster.get("lease", "rlfleet-operator", f"--namespace={NAMESPACE}")["spec"]["holderIdentity"]
        return str(holder).partition("_")[0]

    def pods(self) -> list[str]:
        """Names of the operator's pods."""
        found = self.cluster.get("pods", f"--namespace={NAMESPACE}", "-l", "app.kubernetes.io/component=operator")
        return [p["metadata"]["name"] for p in found["items"]]

    def key(self) -> Obj:
        """The signing key's Secret."""
        found: Obj = self.cluster.get("secret", "rlfleet-signing-key", f"--namespace={NAMESPACE}")
        return found

    def gone(self, *, but: str = "") -> None:
        """Wait until nothing of the release is left; the pods of its jobs go a moment after these."""
        expected = [but] if but else []
        wait_until(lambda: self.left() == expected, f"nothing to be left but {expected}")

    def left(self) -> list[str]:
        """Everything of the release that is still there, in all namespaces and in the cluster."""
        found = []
        kinds = (
            "deployments,pods,jobs,services,serviceaccounts,secrets,roles,rolebindings,leases,poddisruptionbudgets,"
            "networkpolicies,configmaps"
        )
        for namespace in (NAMESPACE, "team-a", "team-b"):
            for item in self.cluster.get(kinds, f"--namespace={namespace}")["items"]:
                # What belongs to a pool (its disruption budget) stays with it.
                pools = [o for o in item["metadata"].get("ownerReferences") or [] if o["kind"] == "EnginePool"]
                if item["metadata"]["name"] not in ("default", "kube-root-ca.crt") and not pools:
                    found.append(f"{item['kind']} {namespace}/{item['metadata']['name']}")
        wide = "clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings"
        for item in self.cluster.get(wide, "-l", "app.kubernetes.io/part-of=rlfleet")["items"]:
            found.append(f"{item['kind']} {item['metadata']['name']}")
        return found


def pipeline(name: str) -> Obj:
    return {"weights": {"sender": {"podSelector": {"matchLabels": {"app": name}}}}}


def apply(cluster: LocalCluster, namespace: str, kind: str, name: str, spec: Obj) -> None:
    meta = {"name": name, "namespace": namespace}
    cluster.apply({"apiVersion": labels.API_VERSION, "kind": kind, "metadata": meta, "spec": spec})


def pool(cluster: LocalCluster, namespace: str) -> None:
    """A pool without engines: enough for a finalizer."""
    container = {"name": "engine", "image": "x", "command": ["sleep", "9"]}
    spec = {
        "pipeline": "p",
        "replicas": 0,
        "engine": {"type": "SGLang", "gpusPerEngine": 1},
        "source": {"template": {"spec": {"containers": [container]}}},
        "gate": {"image": "x", "stagingMiB": 1024},
    }
    apply(cluster, namespace, "EnginePool", "e", spec)
    wait_until(lambda: finalizers(cluster, namespace), "the operator's finalizer on the pool")


def finalizers(cluster: LocalCluster, namespace: str) -> list[str]:
    found = cluster.get("enginepools.rlfleet.dev", "e", f"--namespace={namespace}")["metadata"]
    return list(found.get("finalizers") or [])


def served_columns(cluster: LocalCluster) -> list[str]:
    """Printer columns of the pipelines' CRD."""
    crd = cluster.get("crd", "rlpipelines.rlfleet.dev")
    return [c["name"] for c in crd["spec"]["versions"][0]["additionalPrinterColumns"]]


def test_install_test_upgrade_uninstall(bare: LocalCluster, tmp_path: Path) -> None:
    release = Release(bare, tmp_path, {})
    assert "serves all namespaces" in release.helm("install")
    assert len(release.pods()) == 2
    wait_until(lambda: release.leader() in release.pods(), "a leader")
    assert "Phase:          Succeeded" in release.test()
    assert not bare.get("rlpipelines.rlfleet.dev", "--all-namespaces")["items"]

    # An upgrade rolls the pods, keeps the key, brings old CRDs to this release, and turns worker discovery on.
    key, old = release.key(), release.pods()
    columns = served_columns(bare)
    stale = [{"op": "remove", "path": "/spec/versions/0/additionalPrinterColumns/0"}]
    bare.kubectl("patch", "crd", "rlpipelines.rlfleet.dev", "--type=json", "-p", json.dumps(stale))
    assert served_columns(bare) == columns[1:]
    settings = {**ON_HOLLOW_NODES["settings"], "logLevel": "DEBUG"}
    release.helm("upgrade", crds={"upgrade": {"enabled": True}}, settings=settings, discovery={"enabled": True})
    assert served_columns(bare) == columns
    wait_until(lambda: len(release.pods()) == 2 and not set(release.pods()) & set(old), "new pods only")
    wait_until(lambda: release.leader() in release.pods(), "one of them to lead")
    (port,) = bare.get("service", "rlfleet-discovery", f"--namespace={NAMESPACE}")["spec"]["ports"]
    for pod in release.pods():  # the standby, too
        address = bare.get("pod", pod, f"--namespace={NAMESPACE}")["status"]["podIP"]
        listed = http("GET", f"http://{address}:{port['port']}/v1/rl/workers")
        assert listed == (200, {"protocol_version": 1, "namespace": "dynamo", "workers": []})
    assert release.key()["data"] == key["data"]
    assert release.key()["metadata"]["uid"] == key["metadata"]["uid"]

    # Whatever stays behind can be deleted afterwards, though nobody serves it any more.
    apply(bare, "team-a", "RLPipeline", "p", pipeline("p"))
    pool(bare, "team-a")
    release.uninstall()
    release.gone()
    assert finalizers(bare, "team-a") == []
    bare.kubectl("delete", "epool/e", "rlp/p", "--namespace=team-a", "--timeout=180s")


@pytest.mark.slow
def test_namespaced_release_needs_no_right_in_the_cluster(bare: LocalCluster, tmp_path: Path) -> None:
    release = Release(bare, tmp_path, {"watchNamespaces": ["team-a", "team-b"], "rbac": {"aggregate": False}})
    release.helm("install")
    assert "Phase:          Succeeded" in release.test()
    user = f"--as=system:serviceaccount:{NAMESPACE}:rlfleet"
    with pytest.raises(ClusterError):
        bare.kubectl("auth", "can-i", "list", "pods", "--all-namespaces", user)
    for namespace in ("team-a", "team-b"):
        apply(bare, namespace, "RLPipeline", "p", pipeline("p"))
        pool(bare, namespace)
    release.uninstall()
    release.gone()
    assert finalizers(bare, "team-a") == finalizers(bare, "team-b") == []


@pytest.mark.slow
def test_uninstall_waits_for_objects_that_are_ending(bare: LocalCluster, tmp_path: Path) -> None:
    release = Release(bare, tmp_path, {"uninstall": {"deleteSigningKey": False}})
    release.helm("install")
    apply(bare, "team-a", "RLPipeline", "p", pipeline("p"))
    pool(bare, "team-a")
    bare.kubectl("delete", "epool/e", "--namespace=team-a", "--wait=false")
    release.uninstall()
    assert not bare.get("enginepools.rlfleet.dev", "--namespace=team-a")["items"]
    release.gone(but=f"Secret {NAMESPACE}/rlfleet-signing-key")


@pytest.mark.slow
def test_features_off_then_on_then_off(bare: LocalCluster, tmp_path: Path) -> None:
    off: Obj = {
        "replicas": 1,
        "topologySpread": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
        "metrics": {"service": {"enabled": False}},
        "test": {"enabled": False},
        "uninstall": {"enabled": False},
        "rbac": {"aggregate": False},
    }
    on: Obj = {
        "trainers": [{"namespace": "team-a", "serviceAccount": "trainer", "pipelines": ["p"], "cancel": True}],
        "commonLabels": {"team": "rl"},
        "podLabels": {"a": "b"},
        "crds": {"upgrade": {"enabled": True}},
    }
    for verb, values in (("install", off), ("upgrade", on), ("upgrade", off)):
        release = Release(bare, tmp_path, values)
        release.helm(verb)
        wait_until(lambda r=release: r.leader() in r.pods(), "a leader")  # type: ignore[misc]
    run_helm(bare, "rollback", "rlfleet", "2", f"--namespace={NAMESPACE}", "--wait", "--timeout=120s")
    release.uninstall()
    release.gone()


@pytest.mark.slow
def test_the_page_works_as_written(bare: LocalCluster, tmp_path: Path) -> None:
    page = (ROOT / "docs/install.md").read_text()
    commands = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(commands) == 5
    values = tmp_path / "hollow.json"
    values.write_text(json.dumps(ON_HOLLOW_NODES))
    # What hollow nodes need is added behind the page's back; everything else is as it says.
    program = bare.program("helm")
    wrapper = tmp_path / "bin" / "helm"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f'#!/bin/sh\ncase "$1" in install|upgrade) set -- "$@" --values={values} ;; esac\nexec {program} "$@"\n'
    )
    wrapper.chmod(0o755)
    path = (wrapper.parent, program.parent, Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(commands)],
        cwd=ROOT,
        env={
            "KUBECONFIG": str(bare.kubeconfig),
            "HOME": str(bare.state),
            "PATH": os.pathsep.join([*map(str, path), "/usr/bin:/bin"]),
            "PYTHONPATH": "operator:.",
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [c for c in bare.get("crd")["items"] if c["spec"]["group"] == labels.GROUP]


@pytest.mark.slow
def test_upgrade_from_the_chart_that_held_roles_only(bare: LocalCluster, tmp_path: Path) -> None:
    """The first chart had no Deployment: operators ran beside it and had made their key already."""
    bare.kubectl("apply", "--server-side", *(f"--filename={f}" for f in sorted((ROOT / "crds").glob("rlfleet.dev_*"))))
    words = ("rlfleet", str(Path(__file__).parent / "previous"), f"--namespace={NAMESPACE}")
    run_helm(bare, "install", *words)
    seed = tmp_path / "seed"
    seed.write_bytes(bytes(range(32)))
    bare.kubectl(
        "create",
        "secret",
        "generic",
        "rlfleet-signing-key",
        f"--from-file=ed25519.seed={seed}",
        f"--namespace={NAMESPACE}",
    )
    release = Release(bare, tmp_path, {})
    key = release.key()
    release.helm("upgrade")
    wait_until(lambda: release.leader() in release.pods(), "a leader")
    assert release.key()["data"] == key["data"]
    assert "Phase:          Succeeded" in release.test()
    release.uninstall()
    release.gone()
