"""The engine pod: what is added to the user's template, what is refused, and what counts as outdated."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rlfleet.plan import presets, template
from rlfleet.plan.blocks import Slot
from rlfleet.plan.dra import engine_uses
from rlfleet.plan.pods import build_pod
from rlfleet.plan.template import InvalidPool
from tests.plan.pool_kit import pool

KEYS = {"kid": "key"}
ROOT = Path(__file__).resolve().parents[2]


def build(p: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return build_pod(p, index, f"a-{index}-00000", public_keys=KEYS)


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container["env"]}


def engine(pod: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in pod["spec"]["containers"] if c["name"] == "engine")


def gate(pod: dict[str, Any]) -> dict[str, Any]:
    return next(c for c in pod["spec"]["initContainers"] if c["name"] == "gate")


def test_gate_is_a_native_sidecar_that_guards_the_start_of_the_engine() -> None:
    pod = build(pool(pod_spec={"containers": [{"name": "engine"}], "initContainers": [{"name": "fetch"}]}))
    assert [c["name"] for c in pod["spec"]["initContainers"]] == ["fetch", "gate"]
    sidecar = gate(pod)
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"] == {"path": "/startupz", "port": 9440}
    assert sidecar["startupProbe"]["failureThreshold"] * sidecar["startupProbe"]["periodSeconds"] >= 3600
    assert sidecar["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 9440}
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert json.loads(env(sidecar)["RLFLEET_PUBLIC_KEYS"]) == KEYS


def test_the_gate_keeps_its_images_user_where_the_template_runs_as_root() -> None:
    """The kubelet refuses a container that must not run as root and inherits user 0 from its pod."""
    spec = {"containers": [{"name": "engine"}], "securityContext": {"runAsUser": 0, "runAsGroup": 0}}
    pod = build(pool(pod_spec=spec))
    assert pod["spec"]["securityContext"] == {"runAsUser": 0, "runAsGroup": 0}
    security = gate(pod)["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"], security["runAsGroup"]) == (True, 65532, 65532)
    assert "USER 65532:65532" in (ROOT / "Dockerfile").read_text()
    for other in ({}, {"securityContext": {"runAsUser": 1000}}):
        # Whoever else the pod's containers run as, the gate may, too.
        assert (
            "runAsUser"
            not in gate(build(pool(pod_spec={"containers": [{"name": "engine"}], **other})))["securityContext"]
        )


def test_a_certificate_is_mounted_into_the_gate_alone_and_probed_over_tls() -> None:
    pod = build_pod(pool(), 0, "a-0-00000", public_keys=KEYS, tls_secret="certs")
    mount = {"name": "rlfleet-tls", "mountPath": "/var/run/rlfleet/tls", "readOnly": True}
    assert {"name": "rlfleet-tls", "secret": {"secretName": "certs"}} in pod["spec"]["volumes"]
    assert mount in gate(pod)["volumeMounts"]
    assert env(gate(pod))["RLFLEET_TLS_DIR"] == "/var/run/rlfleet/tls"
    assert {gate(pod)[f"{p}Probe"]["httpGet"]["scheme"] for p in ("startup", "readiness", "liveness")} == {"HTTPS"}
    assert "rlfleet-tls" not in json.dumps(pod["spec"]["containers"])
    plain = build(pool())
    assert "RLFLEET_TLS_DIR" not in env(gate(plain))
    assert "rlfleet-tls" not in json.dumps(plain)


def test_keys_of_routers_are_mounted_into_the_gate_alone_by_the_router_s_name() -> None:
    keyed = {"name": "main", "type": "SMG", "url": "http://r:1", "adminKeySecretRef": {"name": "keys", "key": "k"}}
    free = {"name": "free", "type": "SMG", "url": "http://r:2"}
    pod = build(pool(routers=[keyed, free]))
    secret = {"name": "keys", "items": [{"key": "k", "path": "main"}], "optional": True}
    volume = {"name": "rlfleet-router-keys", "projected": {"sources": [{"secret": secret}]}}
    assert volume in pod["spec"]["volumes"]
    mount = {"name": "rlfleet-router-keys", "mountPath": "/var/run/rlfleet/router-keys", "readOnly": True}
    assert mount in gate(pod)["volumeMounts"]
    assert env(gate(pod))["RLFLEET_ROUTER_KEYS_DIR"] == mount["mountPath"]
    assert "router-keys" not in json.dumps(pod["spec"]["containers"])
    assert "router-keys" not in json.dumps(build(pool(routers=[free])))
    # Another Secret is another mount, so pods are outdated; a pool without one keeps the hash that it had.
    assert template.template_hash(pool(routers=[keyed])) != template.template_hash(pool(routers=[free]))
    assert template.template_hash(pool(routers=[free])) == template.template_hash(pool())


def test_an_engine_that_asks_for_a_key_shares_it_with_its_gate_alone() -> None:
    asking = {"containers": [{"name": "engine", "args": ["--admin-api-key=$(RLFLEET_ENGINE_ADMIN_KEY)"]}]}
    pod = build_pod(pool(pod_spec=asking), 0, "a-0-00000", public_keys=KEYS, admin_key="key-of-this-pod")
    assert (
        env(engine(pod))["RLFLEET_ENGINE_ADMIN_KEY"] == env(gate(pod))["RLFLEET_ENGINE_ADMIN_KEY"] == "key-of-this-pod"
    )
    assert presets.wants_admin_key(pool(pod_spec=asking))
    by_env = {"containers": [{"name": "engine", "env": [{"name": "K", "value": "$(RLFLEET_ENGINE_ADMIN_KEY)"}]}]}
    assert presets.wants_admin_key(pool(pod_spec=by_env))
    # An engine that would not take it gets none: its gate would otherwise present a key that is not the engine's.
    assert not presets.wants_admin_key(pool())
    plain = build_pod(pool(), 0, "a-0-00000", public_keys=KEYS, admin_key="key-of-this-pod")
    assert "key-of-this-pod" not in json.dumps(plain)


def test_identity_wins_over_the_template_and_the_template_is_left_alone() -> None:
    p = pool(
        pod_spec={
            "containers": [{"name": "engine", "env": [{"name": "MINE", "value": "1"}]}],
            "restartPolicy": "Always",
        }
    )
    p["spec"]["source"]["template"]["metadata"] = {"labels": {"app": "x", "rlfleet.dev/pool": "other"}}
    before = copy.deepcopy(p)
    pod = build(p, 1)
    assert p == before
    assert pod["metadata"]["labels"]["rlfleet.dev/pool"] == "a"
    assert pod["metadata"]["labels"]["rlfleet.dev/engine-index"] == "1"
    assert pod["metadata"]["labels"]["app"] == "x"
    assert pod["spec"]["restartPolicy"] == "Never"
    owner = pod["metadata"]["ownerReferences"][0]
    assert owner["uid"] == "pool-uid"
    assert owner["controller"]
    assert owner["blockOwnerDeletion"]
    names = [e["name"] for e in engine(pod)["env"]]
    assert names[0] == "RLFLEET_POD_IP"
    assert names[-1] == "MINE", "ours come first, so that the user's may refer to them"
    assert env(engine(pod))["RLFLEET_ENGINE_NAME"] == "a-1"


def test_pods_ask_tools_that_empty_nodes_to_leave_them_alone_unless_the_template_says_otherwise() -> None:
    p = pool()
    made = build(p)["metadata"]["annotations"]
    assert made["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert made["karpenter.sh/do-not-disrupt"] == "true"
    p["spec"]["source"]["template"]["metadata"]["annotations"] = {"karpenter.sh/do-not-disrupt": "1h"}
    made = build(p)["metadata"]["annotations"]
    assert made["karpenter.sh/do-not-disrupt"] == "1h"
    assert made["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"


def test_volumes_and_probes_of_the_engine() -> None:
    pod = build(pool(gate={"image": "g", "stagingMiB": 96, "port": 9440}))
    volumes = {v["name"]: v["emptyDir"] for v in pod["spec"]["volumes"]}
    assert volumes["rlfleet-staging"] == {"medium": "Memory", "sizeLimit": "96Mi"}
    assert volumes["rlfleet-state"] == {}
    mounts = {m["name"]: m for m in engine(pod)["volumeMounts"]}
    assert mounts["rlfleet-staging"]["readOnly"] is True
    assert "rlfleet-state" not in mounts, "the engine has no business in the gate's records"
    assert env(engine(pod))["RLFLEET_STAGING_DIR"] == mounts["rlfleet-staging"]["mountPath"]
    assert env(gate(pod))["RLFLEET_STAGING_LIMIT_BYTES"] == str(96 * 2**20)
    assert engine(pod)["startupProbe"]["httpGet"] == {"path": "/model_info", "port": 30000}


def test_users_own_startup_probe_and_gpu_request_stay() -> None:
    own = {"name": "engine", "startupProbe": {"exec": {}}, "resources": {"limits": {"nvidia.com/gpu": "4"}}}
    pod = build(pool(pod_spec={"containers": [own]}))
    assert engine(pod)["startupProbe"] == {"exec": {}}
    assert engine(pod)["resources"] == {"limits": {"nvidia.com/gpu": "4"}}


def test_gpus_are_asked_of_the_scheduler() -> None:
    pod = build(pool(engine={"type": "SGLang", "port": 30000, "gpusPerEngine": 2}))
    assert engine(pod)["resources"] == {"limits": {"nvidia.com/gpu": "2"}, "requests": {"nvidia.com/gpu": "2"}}


@pytest.mark.parametrize(("limits", "expected"), [({"memory": "2Gi"}, dict), ({"cpu": "1"}, str), (None, str)])
def test_memory_limit_of_the_gate_is_told_only_if_there_is_one(limits: dict[str, str] | None, expected: type) -> None:
    resources = {"limits": limits} if limits else None
    told = env(gate(build(pool(gate={"image": "g", "resources": resources}))))["RLFLEET_MEMORY_LIMIT_BYTES"]
    assert isinstance(told, expected)
    if expected is str:
        assert told == "0"
    else:
        assert told["resourceFieldRef"]["containerName"] == "gate"


PINNED = {
    "mode": "Pinned",
    "devices": [{"node": "n0", "devices": ["g2", "g1", "g3"]}, {"node": "n1", "devices": ["h1", "h2"]}],
}


def test_pinned_engines_get_slices_of_the_list_that_never_span_nodes() -> None:
    p = pool(placement=PINNED, engine={"type": "SGLang", "port": 30000, "gpusPerEngine": 2})
    assert [(a.node, a.devices) for a in template.assignments(p)] == [("n0", ("g1", "g2")), ("n1", ("h1", "h2"))]
    pod = build(p, 1)
    assert env(engine(pod))["NVIDIA_VISIBLE_DEVICES"] == "h1,h2"
    assert env(gate(pod))["RLFLEET_DEVICES"] == "h1,h2"
    assert "resources" not in engine(pod), "the scheduler is not asked for devices that we hand out"
    with pytest.raises(InvalidPool, match=r"placement\.devices has room for 2 engines, not for index 2"):
        build(p, 2)


def test_pinned_node_is_required_in_every_alternative_of_the_users_affinity() -> None:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [z]}]} for z in ("z1", "z2")]
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}
    p = pool(placement=PINNED, pod_spec={"containers": [{"name": "engine"}], "affinity": affinity})
    before = copy.deepcopy(p)
    node = build(p)["spec"]["affinity"]["nodeAffinity"]
    found = node["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [[e["key"] for e in t["matchExpressions"]] for t in found] == [["zone", "kubernetes.io/hostname"]] * 2
    assert found[0]["matchExpressions"][1]["values"] == ["n0"]
    assert p == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"containers": [{"name": "main"}]}, r"exactly one container named 'engine' \(found: main\)"),
        ({"containers": [{"name": "engine"}, {"name": "gate"}]}, "container name 'gate' is the operator's"),
        ({"containers": [{"name": "engine", "env": [{"name": "RLFLEET_POOL"}]}]}, r"RLFLEET_\* are the operator's"),
        ({"containers": [{"name": "engine"}], "volumes": [{"name": "rlfleet-state"}]}, r"volumes\[0\]\.name"),
        (
            {"containers": [{"name": "engine", "volumeMounts": [{"name": "rlfleet-state", "mountPath": "/mine"}]}]},
            "volumeMounts of 'rlfleet-state' are the operator's",
        ),
        ({"containers": [{"name": "engine"}], "volumes": [{"name": "rlfleet-tls"}]}, r"volumes\[0\]\.name"),
        ({"containers": [{"name": "engine", "restartPolicy": "Always"}]}, "restartPolicy is the operator's"),
        (
            {"containers": [{"name": "engine", "restartPolicyRules": [{"action": "Restart"}]}]},
            "restartPolicyRules is the operator's",
        ),
        (
            {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/var/lib/rlfleet/staging/x"}]}]},
            "mountPath",
        ),
        ({"containers": [{"image": "x"}]}, r"containers\[0\] needs a name"),
        ({"containers": "engine"}, "must be a list"),
    ],
)
def test_templates_that_cannot_become_engine_pods_are_refused_by_field(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidPool, match=message):
        build(pool(pod_spec=spec))


def test_ports_must_differ_and_pinned_must_not_ask_the_scheduler() -> None:
    with pytest.raises(InvalidPool, match="both 30000"):
        build(pool(gate={"image": "g", "port": 30000}))
    asks = {"containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    with pytest.raises(InvalidPool, match="placement Pinned"):
        build(pool(placement=PINNED, pod_spec=asks))
    sets = {"containers": [{"name": "engine", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}]}
    with pytest.raises(InvalidPool, match="NVIDIA_VISIBLE_DEVICES"):
        build(pool(placement=PINNED, pod_spec=sets))


def test_hash_moves_with_what_shapes_a_pod_and_with_nothing_else() -> None:
    base = template.template_hash(pool())
    assert template.template_hash(pool(replicas=9, routers=[{"name": "r"}], pipeline="other")) == base
    assert template.template_hash(pool(gate={"image": "rlfleet:2", "stagingMiB": 64})) != base
    assert template.template_hash(pool(pod_spec={"containers": [{"name": "engine", "image": "other"}]})) != base


def test_hash_of_version_one_is_frozen() -> None:
    # Pods in users' clusters bear it: another value here would mark all of them outdated after an upgrade.
    assert template.template_hash(pool()) == "v1-da0c8332a8c9c0a7"


def test_outdated() -> None:
    p = pool()
    current = template.template_hash(p)
    assert not template.is_outdated(p, current, "", 0)
    assert template.is_outdated(p, "v1-0123456789abcdef", "", 0)
    assert not template.is_outdated(p, "v9-0123456789abcdef", "", 0), "a hash of a newer operator says nothing to us"
    pinned = pool(placement=PINNED)
    slot = template.assignments(pinned)[0].text
    assert not template.is_outdated(pinned, template.template_hash(pinned), slot, 0)
    assert template.is_outdated(pinned, template.template_hash(pinned), "n0/g9", 0)


CLAIMS = {"mode": "Claims", "blocks": ["a"]}
SLOTS = [Slot("p.a", "slot-0"), Slot("p.a", "slot-1")]


def test_claimed_engines_and_their_gates_use_their_slot_and_no_gpu_resource() -> None:
    own = {"name": "engine", "resources": {"claims": [{"name": "nic"}]}}
    spec = {"containers": [own, {"name": "other"}], "resourceClaims": [{"name": "nic", "resourceClaimName": "nic-0"}]}
    pod = build_pod(pool(placement=CLAIMS, pod_spec=spec), 1, "a-1-00000", public_keys=KEYS, slots=SLOTS)
    assert pod["spec"]["resourceClaims"] == [
        {"name": "nic", "resourceClaimName": "nic-0"},
        {"name": "rlfleet-devices", "resourceClaimName": "p.a"},
    ]
    mine = {"name": "rlfleet-devices", "request": "slot-1"}
    assert engine(pod)["resources"] == {"claims": [{"name": "nic"}, mine]}
    assert gate(pod)["resources"]["claims"] == [mine]
    assert "resources" not in pod["spec"]["containers"][1]
    assert pod["metadata"]["annotations"]["rlfleet.dev/slot"] == "p.a/slot-1"
    assert engine_uses(pod) == (("p.a", "slot-1"),), "a network card is no GPU of the engine"
    with pytest.raises(InvalidPool, match="blocks have 2 slots, none for index 2"):
        build_pod(pool(placement=CLAIMS), 2, "a-2-00000", public_keys=KEYS, slots=SLOTS)
    taken = {"containers": [{"name": "engine"}], "resourceClaims": [{"name": "rlfleet-devices"}]}
    with pytest.raises(InvalidPool, match="resourceClaims: the name 'rlfleet-devices' is the operator's"):
        build(pool(pod_spec=taken))


def test_a_template_with_claims_of_its_own_gets_no_gpu_resource_beside_them() -> None:
    pod = build(pool(pod_spec={"containers": [{"name": "engine", "resources": {"claims": [{"name": "x"}]}}]}))
    assert engine(pod)["resources"] == {"claims": [{"name": "x"}]}


def test_slots_make_a_pod_outdated_as_pins_do() -> None:
    claims = pool(placement=CLAIMS)
    current = template.template_hash(claims)
    texts = [s.text for s in SLOTS]
    assert current != template.template_hash(pool())
    assert not template.is_outdated(claims, current, "p.a/slot-0", 0, texts)
    assert template.is_outdated(claims, current, "p.a/slot-0", 1, texts)
    assert not template.is_outdated(claims, current, "p.a/slot-9", 9, texts), "no slot now: nothing to compare with"


def test_nodes_and_pack_domain_bind_beside_what_the_user_requires() -> None:
    placement = {"mode": "Scheduler", "nodes": ["n1", "n2"], "packDomain": "nvidia.com/gpu.clique"}
    term = {"labelSelector": {}, "topologyKey": "zone"}
    users = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    p = pool(placement=placement, pod_spec={"containers": [{"name": "engine"}], "affinity": users})
    before = copy.deepcopy(p)
    affinity = build(p)["spec"]["affinity"]
    found = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert found == [
        {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1", "n2"]}]}
    ]
    assert affinity["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == [
        term,
        {"labelSelector": {"matchLabels": {"rlfleet.dev/pool": "a"}}, "topologyKey": "nvidia.com/gpu.clique"},
    ]
    assert p == before
    assert template.template_hash(p) != template.template_hash(pool(pod_spec=p["spec"]["source"]["template"]["spec"]))
