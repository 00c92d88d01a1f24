"""Pods as LeaderWorkerSet, RoleBasedGroup and KubeRay make them of the guide's manifests, without their controllers.

What each adds to a template (names, labels, annotations, owners, further containers) is that of LWS 0.8, RBG 0.8 and
KubeRay 1.4, as far as a selector, a garbage collector or an engine can tell. Custom resources are real objects of
schemaless definitions, so owner references name something that exists.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from e2e.cluster.local import LocalCluster
from e2e.scenarios.adopting import with_reference_engine
from e2e.scenarios.kit import Fleet, await_kind, wait_until

Obj = dict[str, Any]

LWS = "leaderworkerset.sigs.k8s.io"
RBG = "rbg.workloads.x-k8s.io"
#: A pod of a group that is no engine.
IDLE = {"command": ["sleep", "3600"]}
_KINDS = (
    ("workloads.x-k8s.io", "v1alpha2", "RoleBasedGroup"),
    ("workloads.x-k8s.io", "v1alpha2", "RoleInstance"),
    ("ray.io", "v1", "RayCluster"),
)


def serve_kinds(cluster: LocalCluster) -> None:
    """Have the apiserver take the custom resources of RBG and KubeRay, whatever they contain."""
    names = []
    for group, version, kind in _KINDS:
        plural = f"{kind.lower()}s"
        names.append(f"{plural}.{group}")
        cluster.apply(
            {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {
                    "name": f"{plural}.{group}",
                    # The apiserver wants to know who approved a name of this kind.
                    "annotations": {"api-approved.kubernetes.io": "unapproved, a test's"},
                },
                "spec": {
                    "group": group,
                    "scope": "Namespaced",
                    "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
                    "versions": [
                        {
                            "name": version,
                            "served": True,
                            "storage": True,
                            "schema": {
                                "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                            },
                        }
                    ],
                },
            }
        )
    for name in names:
        await_kind(cluster, name)


def create(fleet: Fleet, thing: Obj) -> Obj:
    """Apply one object in the test's namespace; the object as it is then, with its UID."""
    thing = deepcopy(thing)
    thing["metadata"]["namespace"] = fleet.namespace
    fleet.cluster.apply(thing)
    group = thing["apiVersion"].partition("/")[0] if "/" in thing["apiVersion"] else ""
    kind = thing["kind"].lower()
    found: Obj = fleet.cluster.get(
        f"{kind}s.{group}" if group else kind, thing["metadata"]["name"], "-n", fleet.namespace
    )
    return found


def controlled_by(owner: Obj) -> list[Obj]:
    """The owner reference that a controller sets."""
    meta = owner["metadata"]
    return [
        {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


def pod(name: str, template: Obj, owner: Obj, labels: dict[str, str], annotations: dict[str, str]) -> Obj:
    """One pod of a template."""
    meta = template.get("metadata") or {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {**(meta.get("labels") or {}), **labels},
            "annotations": {**(meta.get("annotations") or {}), **annotations},
            "ownerReferences": controlled_by(owner),
        },
        "spec": template["spec"],
    }


def lws_group(fleet: Fleet, workload: Obj) -> None:
    """One group of a LeaderWorkerSet: a leader and a worker, each of a StatefulSet that the real controllers run."""
    name = workload["metadata"]["name"]
    spec = workload["spec"]["leaderWorkerTemplate"]
    leader, worker = deepcopy(spec["leaderTemplate"]), deepcopy(spec["workerTemplate"])
    with_reference_engine(leader)
    worker["spec"] |= {"terminationGracePeriodSeconds": 1}
    worker["spec"]["containers"][0] |= IDLE
    size = {f"{LWS}/size": "2"}
    mine = {f"{LWS}/name": name, f"{LWS}/worker-index": "0"}
    group = {f"{LWS}/name": name, f"{LWS}/group-index": "0", f"{LWS}/group-key": "a" * 40}
    revision = {f"{LWS}/template-revision-hash": "5d8c7b6f4"}
    create(fleet, _stateful_set(name, leader, mine, {**mine, **revision}, size))
    found = wait_until(lambda: _pod(fleet, f"{name}-0"), "the leader's pod")
    # What its webhook adds as the pod is created.
    fleet.cluster.kubectl(
        "label", "pod", f"{name}-0", "-n", fleet.namespace, *(f"{k}={v}" for k, v in group.items()), "--overwrite"
    )
    workers = _stateful_set(
        f"{name}-0", worker, group, {**group, **revision}, {**size, f"{LWS}/leader-name": f"{name}-0"}
    )
    workers["metadata"]["ownerReferences"] = controlled_by(found)
    workers["spec"]["ordinals"] = {"start": 1}
    create(fleet, workers)


def _stateful_set(
    name: str, template: Obj, select: dict[str, str], labels: dict[str, str], notes: dict[str, str]
) -> Obj:
    marked = {"metadata": {"labels": labels, "annotations": notes}, "spec": template["spec"]}
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "serviceName": name,
            "replicas": 1,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": select},
            "template": marked,
        },
    }


def _pod(fleet: Fleet, name: str) -> Obj | None:
    listed = fleet.cluster.get("pods", "-n", fleet.namespace)["items"]
    return next((p for p in listed if p["metadata"]["name"] == name), None)


def rbg_pods(fleet: Fleet, workload: Obj) -> None:
    """One pod for each role of a RoleBasedGroup, each of a RoleInstance."""
    group = create(fleet, workload)
    name = group["metadata"]["name"]
    for role in workload["spec"]["roles"]:
        instance = f"{name}-{role['name']}-0"
        owner = {"apiVersion": group["apiVersion"], "kind": "RoleInstance", "metadata": {"name": instance}, "spec": {}}
        template = deepcopy(role["standalonePattern"]["template"])
        if role["name"] == "engine":
            with_reference_engine(template)
        else:
            template["spec"]["containers"][0] |= {**IDLE, "args": []}
            template["spec"]["terminationGracePeriodSeconds"] = 1
        labels = {
            f"{RBG}/group-name": name,
            f"{RBG}/role-name": role["name"],
            f"{RBG}/role-instance-name": instance,
            f"{RBG}/role-instance-index": "0",
            f"{RBG}/component-name": role["name"],
            f"{RBG}/component-id": "0",
        }
        create(fleet, pod(instance, template, create(fleet, owner), labels, {}))


def ray_pods(fleet: Fleet, workload: Obj) -> None:
    """The head of a RayCluster and a worker."""
    cluster = create(fleet, workload)
    name = cluster["metadata"]["name"]
    (group,) = workload["spec"]["workerGroupSpecs"]
    head, worker = deepcopy(workload["spec"]["headGroupSpec"]["template"]), deepcopy(group["template"])
    head["spec"] |= {"terminationGracePeriodSeconds": 1}
    head["spec"]["containers"][0] |= IDLE
    with_reference_engine(worker)
    ray = worker["spec"]["containers"][0]
    shared = [*ray["volumeMounts"], {"name": "shared-mem", "mountPath": "/dev/shm"}]
    # It goes behind the gate, and mounts what Ray's container does.
    wait = {"name": "wait-gcs-ready", "image": ray["image"], "command": ["true"], "volumeMounts": ray["volumeMounts"]}
    worker["spec"]["initContainers"].append(wait)
    worker["spec"]["volumes"].append({"name": "shared-mem", "emptyDir": {"medium": "Memory"}})
    ray["volumeMounts"] = shared

    def labels(kind: str, of: str) -> dict[str, str]:
        return {
            "ray.io/cluster": name,
            "ray.io/node-type": kind,
            "ray.io/group": of,
            "ray.io/is-ray-node": "yes",
            "ray.io/identifier": f"{name}-{kind}",
            "app.kubernetes.io/name": "kuberay",
            "app.kubernetes.io/created-by": "kuberay-operator",
        }

    create(fleet, pod(f"{name}-head", head, cluster, labels("head", "headgroup"), {"ray.io/ft-enabled": "false"}))
    of = group["groupName"]
    create(fleet, pod(f"{name}-{of}-worker-x7k2p", worker, cluster, labels("worker", of), {}))
