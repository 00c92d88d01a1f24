"""What people see with kubectl: defaults, explanations, columns, categories, scaling, and status that survives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rlfleet.api import crdgen
from rlfleet.api.v1alpha1 import EnginePool, RLPipeline, SyncRound

pytestmark = pytest.mark.cluster

Example = Callable[..., dict[str, Any]]
NOW = "2026-01-31T12:00:00Z"
DIGEST = "sha256:" + "0a" * 32
CONDITIONS = [
    {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "as an example",
        "observedGeneration": 1,
        "lastTransitionTime": NOW,
    }
    for kind, status, reason in (
        ("SenderReady", "True", "SenderReady"),
        ("AdmissionOpen", "True", "EnginesOpen"),
        ("TemplateOutdated", "False", "TemplateCurrent"),
        ("Ready", "Unknown", "EnginesNotActive"),
    )
]
STATUS: dict[str, dict[str, Any]] = {
    "RLPipeline": {
        "observedGeneration": 1,
        "fence": 1_790_000_000_123,
        "activeOperation": {
            "kind": "Refresh",
            "name": "demo-v12-0123456789",
            "uid": "u-1",
            "generation": 1_790_000_000_123,
            "committed": False,
            "holder": "rlfleet-0",
        },
        "committed": {
            "version": 11,
            "manifestDigest": DIGEST,
            "senderIncarnation": "s1",
            "engineDigests": [{"layout": "l1", "digest": "d1"}],
        },
        "cacheReady": {"version": 12, "manifestDigest": DIGEST},
        "sender": {"podUID": "p-1", "incarnation": "s1", "url": "http://127.0.0.5:9450"},
        "publicKeys": [{"kid": "k1", "key": "A" * 43 + "="}],
        "lastRound": "demo-v11-0123456789",
        "updateRoom": {"since": NOW, "until": NOW},
        "engines": {"total": 4, "active": 3, "asleep": 1},
        "blocks": [
            {
                "name": "a",
                "claim": "demo.a",
                "claimUID": "c-1",
                "node": "gpu-node-1.example",
                "devices": ["GPU-0", "GPU-1"],
                "movedFrom": "gpu-node-2.example/GPU-8, gpu-node-2.example/GPU-9",
                "movedAfter": "demo-v11-0123456789",
            }
        ],
        "rendezvousClaims": [
            {
                "address": "127.0.0.5",
                "port": 29500,
                "operation": "u-1",
                "senderIncarnation": "s1",
                "senderPod": "trainer",
                "senderPodUID": "p-1",
                "leaked": True,
            }
        ],
        "grants": [
            {
                "cluster": "actor",
                "priority": "ActorTraining",
                "step": 12,
                "id": "a1",
                "granted": False,
                "reason": "EnginesAwake",
                "message": "demo-engines-2-0a1b2 must be Offloaded or gone first",
                "devices": [{"node": "gpu-node-1.example", "devices": ["GPU-0", "GPU-1"]}],
            }
        ],
        "progress": {"target": 512, "collected": 130, "completed": 128, "percent": 24, "batches": "0a1b2c3d4e5f6071"},
        "conditions": CONDITIONS,
    },
    "EnginePool": {
        "observedGeneration": 1,
        "replicas": 4,
        "readyReplicas": 3,
        "selector": "rlfleet.dev/pool=demo-engines",
        "counts": {
            "pending": 0,
            "booting": 0,
            "loading": 1,
            "active": 3,
            "draining": 0,
            "offloaded": 2,
            "quarantined": 0,
            "failed": 0,
        },
        "versions": [{"version": 12, "engines": "0-1,3"}],
        "engines": [
            {
                "name": "demo-engines-2-0a1b2",
                "index": 2,
                "podUID": "p-2",
                "incarnation": "e2",
                "node": "gpu-node-1.example",
                "gpus": ["GPU-2", "GPU-3"],
                "state": "Loading",
                "instance": "12298635699951225666",
                "loadingSince": "2026-01-01T00:00:00Z",
                "version": 11,
                "fence": 1_790_000_000_123,
                "routed": False,
                "failure": "RouterUnreachable: main",
            }
        ],
        "catchUp": [
            {
                "engine": "demo-engines-2-0a1b2",
                "incarnation": "e2",
                "version": 11,
                "attempts": 2,
                "round": "5b0c",
                "reason": "VerifyFailed",
            }
        ],
        "startFailures": [
            {"index": 1, "count": 3, "node": "gpu-node-1.example", "onNode": 2, "at": NOW, "podUID": "p-7"}
        ],
        "podsRefusedSince": NOW,
        "templateHash": "v1-0a1b2c",
        "fencing": "Cooperative",
        "admissionGuarantee": "Enforced",
        "conditions": CONDITIONS,
    },
    "SyncRound": {
        "observedGeneration": 1,
        "phase": "Failed",
        "outcome": "Failed",
        "lease": {"holder": "rlfleet-0", "generation": 1_790_000_000_123, "acquiredAt": NOW, "renewedAt": NOW},
        "manifestDigest": DIGEST,
        "bytes": 2**40,
        "plan": {
            "worldSize": 3,
            "serialized": 2,
            "broadcast": 1,
            "checkpoint": 0,
            "staging": "Full",
            "bucketMiB": 0,
            "blocked": ["p-9"],
            "members": [
                {
                    "engine": "demo-engines-0",
                    "podUID": "p-0",
                    "incarnation": "e0",
                    "transport": "Broadcast",
                    "rankOffset": 1,
                    "worldSize": 2,
                    "reason": "disjoint from the train pool",
                }
            ],
            "silent": ["demo-engines-1"],
        },
        "members": [{"engine": "demo-engines-0", "result": "Lost", "reason": "PodLost"}],
        "timings": {
            "planMs": 1,
            "stageMs": 20,
            "quiesceMs": 3,
            "transferMs": 4,
            "verifyMs": 5,
            "publishMs": 6,
            "reopenMs": 7,
            "pausedMs": 25,
            "totalMs": 46,
        },
        "committed": True,
        "failure": {"stage": "Reopen", "reason": "RoutingDegraded", "digest": "f1", "message": "a router is away"},
        "attempts": [
            {
                "requestId": "r1",
                "op": "Settle",
                "result": "Rejected",
                "generation": 7,
                "reason": "NotOwner",
                "at": NOW,
            }
        ],
        "refused": {
            "stage": "Planned",
            "reason": "TopologyUnknown",
            "message": "devices are unknown",
            "podUIDs": ["p-1"],
            "startOvers": 1,
        },
        "startedAt": NOW,
        "stagingAt": NOW,
        "pausedAt": NOW,
        "finishedAt": NOW,
        "conditions": CONDITIONS,
    },
}
MODELS = {"RLPipeline": RLPipeline, "EnginePool": EnginePool, "SyncRound": SyncRound}
KINDS = pytest.mark.parametrize("kind", crdgen.KINDS, ids=lambda kind: kind.name)
WITH_STATUS = pytest.mark.parametrize("kind", [k for k in crdgen.KINDS if k.status], ids=lambda kind: kind.name)


def fields(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, child in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from fields(child, f"{path}.{name}")
        yield from fields(child.get("items", {}), f"{path}.{name}")


def present(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield f"{path}.{name}"
            yield from present(child, f"{path}.{name}")
    elif isinstance(value, list):
        for child in value:
            yield from present(child, path)


@WITH_STATUS
def test_a_status_with_every_field_survives(kind: crdgen.Kind, example: Example, server: Any) -> None:
    status = STATUS[kind.name]
    assert set(fields(crdgen.schema(kind)["properties"]["status"])) == set(present(status)), "the example lacks a field"
    stored = server.create(example(kind.name))
    written = server.patch(stored, {"status": status}, "--subresource=status")
    assert written["status"] == status
    assert MODELS[kind.name].from_dict(written).status.to_dict() == status
    assert written["metadata"]["generation"] == 1, "a status write must not look like a change of spec"


def test_the_server_fills_in_defaults(example: Example, server: Any) -> None:
    pipeline = server.create(example("RLPipeline", {"spec.transport": None, "spec.trainer": None}))
    assert pipeline["spec"] == {
        "weights": {"sender": {"podSelector": {"matchLabels": {"app": "demo-trainer"}}, "port": 9450}},
        "transport": {
            "mode": "CPUSerialize",
            "assertMixed": False,
            "backend": "nccl",
            "rendezvousPorts": {"first": 29500, "last": 29599},
            "bucketMiB": 512,
            "staging": "Full",
        },
        "sync": {
            "deadlines": {"pendingSeconds": 600, "stagingSeconds": 600, "pausedSeconds": 150},
            "drainSeconds": 30,
            "verify": "IfSupported",
            "maxUnavailable": "10%",
            "probeGeneration": False,
            "onFailure": "Replace",
        },
        "historyLimit": 20,
        "ttlSecondsAfterFinished": 3600,
    }
    assert "status" not in pipeline
    nothing = {"spec.replicas": None, "spec.routers": None, "spec.gate": {"image": "rlfleet:0.1.0"}}
    pool = server.create(example("EnginePool", {**nothing, "spec.engine": {"type": "SGLang"}}))["spec"]
    assert pool.pop("source") == example("EnginePool")["spec"]["source"]
    assert pool == {
        "pipeline": "demo",
        "replicas": 1,
        "engine": {"type": "SGLang", "port": 30000, "gpusPerEngine": 1, "allowUnknownVersion": False},
        "placement": {"mode": "Scheduler"},
        "gate": {"image": "rlfleet:0.1.0", "port": 9440, "stagingMiB": 1024},
        "updateStrategy": {"type": "OnDelete"},
        "residualMemoryGiB": 13,
    }
    assert server.create(example("SyncRound"))["spec"] == {
        "pipeline": "demo",
        "version": 1,
        "kind": "Refresh",
        "senderIncarnation": "5b0c5b7e2f1d4c3a",
        "attempt": 1,
        "allowRollback": False,
        "cancel": False,
    }


@pytest.mark.parametrize(
    "edits", [{"spec.sync": {}}, {"spec.sync": {"deadlines": {"pausedSeconds": 9}, "quiesce": {}}}]
)
def test_defaults_fill_what_is_given_in_part(edits: dict[str, Any], example: Example, shared_server: Any) -> None:
    sync = shared_server.create(example("RLPipeline", edits), dry=True)["spec"]["sync"]
    wanted = edits["spec.sync"].get("deadlines", {}).get("pausedSeconds", 150)
    assert sync["deadlines"] == {"pendingSeconds": 600, "stagingSeconds": 600, "pausedSeconds": wanted}
    # No mode: each engine type has its own.
    assert ("mode" in sync.get("quiesce", {}), sync["maxUnavailable"]) == (False, "10%")


def test_the_pod_template_keeps_whatever_kubernetes_knows(example: Example, server: Any) -> None:
    spec = {
        "containers": [
            {
                "name": "engine",
                "image": "x",
                "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
            }
        ],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }
    # Keys with nothing behind them, as templates of YAML leave them, are as good as none.
    empty = {**spec, "volumes": None, "containers": [{**spec["containers"][0], "args": None, "resources": None}]}
    stored = server.create(example("EnginePool", {"spec.source.template.spec": empty}))
    assert stored["spec"]["source"]["template"]["spec"] == spec


@pytest.mark.parametrize(
    ("path", "phrases"),
    [
        ("rlpipeline", ["One training pipeline", "spec\t<Object> -required-"]),
        (
            "rlpipeline.spec.transport",
            ["mode\t<string>\n  enum: CPUSerialize, Broadcast, Auto", "assertMixed\t<boolean>", "Only with mode Auto."],
        ),
        ("rlpipeline.spec.sync.deadlines", ["pausedSeconds\t<integer>", "Engines do not serve meanwhile."]),
        ("enginepool.spec.placement", ["mode\t<string>\n  enum: Scheduler, Claims, Pinned", "NVIDIA_VISIBLE_DEVICES"]),
        ("enginepool.spec.gate.stagingMiB", ["memory volume", "in MiB"]),
        ("syncround.spec", ["-required-", "cancel\t<boolean>", "expectedCommitted\t<integer>"]),
        ("syncround.status.plan.members", ["rankOffset\t<integer>", "Nonce of its engine process."]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_explain_reads_well(path: str, phrases: list[str], shared_server: Any) -> None:
    text = shared_server.kubectl("explain", path)
    prose = re.sub(r"\s+", " ", text)
    for phrase in phrases:
        assert phrase in text or phrase in prose, text
    assert "<no description>" not in text


def table(text: str) -> dict[str, str]:
    """Header to cell, of the only row; cells are cut where the headers begin."""
    header, row = text.rstrip("\n").splitlines()
    starts = [match.start() for match in re.finditer(r"\S+", header)]
    ends = [*starts[1:], None]
    return {header[a:b].strip(): row[a:b].strip() for a, b in zip(starts, ends, strict=True)}


COLUMNS = {
    "RLPipeline": (
        {"NAME": "demo", "SENDER": "True", "READY": "Unknown", "VERSION": "11", "ACTIVE": "3", "ENGINES": "4"}
        | {"OPERATION": "demo-v12-0123456789", "PROGRESS": "24"},
        {"TRANSPORT": "Auto", "PUBLISHED": "12", "FENCE": "1790000000123", "REASON": "EnginesNotActive"},
    ),
    "EnginePool": (
        {"NAME": "demo-engines", "PIPELINE": "demo", "DESIRED": "4", "ACTIVE": "3", "VERSION": "12", "OPEN": "True"}
        | {"READY": "Unknown", "ASLEEP": "2"},
        {
            "PODS": "4",
            "CEILING": "",
            "LOADING": "1",
            "DRAINING": "0",
            "QUARANTINED": "0",
            "FAILED": "0",
            "OUTDATED": "False",
            "FENCING": "Cooperative",
            "ADMISSION": "Enforced",
        }
        | {"REASON": "EnginesNotActive"},
    ),
    "SyncRound": (
        {"NAME": "demo-v1-by-hand", "PIPELINE": "demo", "KIND": "Refresh", "VERSION": "1", "PHASE": "Failed"}
        | {"SERIALIZED": "2", "BROADCAST": "1", "PAUSED-MS": "25", "TOTAL-MS": "46"},
        {"COMMITTED": "true", "ATTEMPT": "1", "BYTES": str(2**40), "GENERATION": "1790000000123"}
        | {"REASON": "RoutingDegraded"},
    ),
    "TrainerDemand": (
        {"NAME": "demo", "TRAINER": "trainer-0", "WANTS": "actor-train", "STEP": "7"},
        {"STREAMS": "actor-train"},
    ),
}


@KINDS
def test_get_shows_the_useful_columns(kind: crdgen.Kind, example: Example, server: Any) -> None:
    stored = server.create(example(kind.name))
    if kind.status:
        server.patch(stored, {"status": STATUS[kind.name]}, "--subresource=status")
    narrow, wide = COLUMNS[kind.name]
    shown = table(server.kubectl("get", kind.short))
    assert shown.pop("AGE")
    assert shown == narrow
    shown = table(server.kubectl("get", kind.short, "-o", "wide"))
    assert shown.pop("AGE")
    assert shown == narrow | wide


def test_the_category_lists_all_kinds_and_no_short_name_is_taken(example: Example, server: Any) -> None:
    for kind in crdgen.KINDS:
        server.create(example(kind.name))
    listed = server.kubectl("get", "rlfleet", "-o", "name").splitlines()
    assert sorted(listed) == [
        "enginepool.rlfleet.dev/demo-engines",
        "rlpipeline.rlfleet.dev/demo",
        "syncround.rlfleet.dev/demo-v1-by-hand",
        "trainerdemand.rlfleet.dev/demo",
    ]
    # A short name that a core kind has too would silently mean the core kind.
    for kind in crdgen.KINDS:
        assert server.kubectl("get", kind.short, "-o", "name").startswith(f"{kind.name.lower()}.rlfleet.dev/")


def test_pools_scale(example: Example, server: Any) -> None:
    stored = server.create(example("EnginePool"))
    server.patch(stored, {"status": STATUS["EnginePool"]}, "--subresource=status")
    server.kubectl("scale", "epool/demo-engines", "--replicas=7", "--current-replicas=4")
    scale = server.kubectl(
        "get",
        "epool/demo-engines",
        "--subresource=scale",
        "-o",
        "jsonpath={.spec.replicas} {.status.replicas} {.status.selector}",
    )
    assert scale == "7 4 rlfleet.dev/pool=demo-engines"


def test_a_pinned_pool_does_not_scale_beyond_its_devices(example: Example, server: Any) -> None:
    devices = [{"node": "n1", "devices": ["GPU-0", "GPU-1"]}]
    server.create(example("EnginePool", {"spec.placement": {"mode": "Pinned", "devices": devices}, "spec.replicas": 2}))
    answer = server.answer(lambda: server.kubectl("scale", "epool/demo-engines", "--replicas=3"))
    assert "placement.devices has too few devices" in answer
