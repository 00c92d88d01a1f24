"""What tests of the chart share: rendering, and every combination of features that is worth a look."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.chart.base import render
from e2e.cluster.local import LocalCluster

Obj = dict[str, Any]

ADOPTED: Obj = {"namespace": "team-b", "pipeline": "demo", "pool": "adopted", "podLabels": {"app": "demo-engines"}}
#: Everything that is off by default, on.
ON: Obj = {
    "metrics": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prom"}},
        "podMonitor": {"enabled": True, "adopted": [ADOPTED]},
    },
    "alerts": {"enabled": True, "labels": {"release": "prom"}},
    "dashboards": {"enabled": True, "annotations": {"grafana_folder": "rlfleet"}},
    "crds": {"upgrade": {"enabled": True}},
    "trainers": [
        {"namespace": "team-a", "serviceAccount": "trainer", "pipelines": ["demo"]},
        {"namespace": "team-b", "serviceAccount": "trainer", "pipelines": ["demo", "other"], "cancel": True},
    ],
    "networkPolicy": {
        "pipelines": [
            {"namespace": "team-a", "pipeline": "demo", "trainer": {"app": "demo-trainer"}},
            {
                "namespace": "team-b",
                "pipeline": "demo",
                "trainer": {"app": "demo-trainer"},
                "router": {"app": "demo-router"},
                "clients": [{"app": "worker"}, {"app": "eval", "tier": "gpu"}],
                "enginePort": 8000,
                "gatePort": 9441,
                "collectivePorts": {"first": 32768, "last": 60999},
                "adopted": [{"app": "demo-engines"}, {"app": "more", "role": "leader"}],
            },
        ],
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "discoveryFrom": [{"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "demo-trainer"}}}],
    },
    "tls": {"enabled": True, "secretName": "certs", "authoritySecret": "authority"},
    "discovery": {
        "enabled": True,
        "port": 8002,
        "auth": "token",
        "namespace": "prod",
        "endpoint": "admin",
        "components": ["actors", "critics"],
        "requestTimeoutSeconds": 1000000,
        "maxConcurrentProbes": 64,
    },
    "commonLabels": {"team": "rl"},
    "podLabels": {"pod": "label"},
    "podAnnotations": {"pod": "annotation"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "tolerations": [{"key": "control", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "system-cluster-critical",
    "imagePullSecrets": [{"name": "pull"}],
    "image": {"digest": "sha256:" + "a" * 64},
    "extraArgs": ["--log-level=DEBUG"],
    "extraEnv": [{"name": "A", "value": "b"}],
    "extraVolumes": [{"name": "extra", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
    "settings": {"peerProxy": "http://proxy:3128", "apiQps": 1000000, "pollSeconds": 2.5},
}
#: Everything that is on by default, off.
OFF: Obj = {
    "replicas": 1,
    "podDisruptionBudget": {"enabled": False},
    "topologySpread": {"enabled": False},
    "serviceAccount": {"create": False, "name": "mine"},
    "rbac": {"create": False, "aggregate": False},
    "createSigningKey": False,
    "admissionPolicy": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "metrics": {"service": {"enabled": False}},
    "uninstall": {"enabled": False, "deleteSigningKey": False},
    "test": {"enabled": False},
}
NAMESPACED: Obj = {"watchNamespaces": ["team-a", "team-b"], "resourceSlices": True}

#: Name -> values.
VARIANTS: dict[str, Obj] = {
    "default": {},
    "on": ON,
    "off": OFF,
    "namespaced": NAMESPACED,
    "namespaced-on": {**ON, **NAMESPACED},
    "namespaced-off": {**OFF, **NAMESPACED, "resourceSlices": False},
}


def chart(folder: Path, values: Obj | None = None, *arguments: str, release: str = "rlfleet") -> list[Obj]:
    """The objects that the chart renders with these values."""
    file = folder / "values.yaml"
    file.write_text(json.dumps(values or {}))
    return render(f"--values={file}", *arguments, release=release)


def refusal(folder: Path, values: Obj) -> str:
    """Why helm refuses the values."""
    with pytest.raises(subprocess.CalledProcessError) as refused:
        chart(folder, values)
    return str(refused.value.stderr)


def of_kind(objects: list[Obj], kind: str, name: str | None = None) -> list[Obj]:
    """Objects of one kind (and name)."""
    return [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]


def one(objects: list[Obj], kind: str, name: str | None = None) -> Obj:
    """The only one."""
    found = of_kind(objects, kind, name)
    assert len(found) == 1, [(o["kind"], o["metadata"]["name"]) for o in objects]
    return found[0]


def pod_specs(objects: list[Obj]) -> Iterator[tuple[str, Obj]]:
    """Every pod spec that the objects hold, with its owner's kind and name."""
    for o in objects:
        if o["kind"] == "Pod":
            yield f"Pod {o['metadata']['name']}", o["spec"]
        elif "template" in (o.get("spec") or {}):
            yield f"{o['kind']} {o['metadata']['name']}", o["spec"]["template"]["spec"]


def values_file() -> Obj:
    """The chart's own values.yaml."""
    from e2e.chart.readme import CHART

    loaded: Obj = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def run_helm(cluster: LocalCluster, *arguments: str, timeout: float = 180.0) -> str:
    """helm as admin of the cluster; its output. Fails with its words."""
    done = subprocess.run(
        [str(cluster.program("helm")), *arguments],
        env={"KUBECONFIG": str(cluster.kubeconfig), "HOME": str(cluster.state), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}{done.stdout}"
    return done.stdout
