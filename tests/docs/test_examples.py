"""docs/examples: the apiserver takes every object as it is, and what a queueing system reads arrives in the pods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.local import LocalCluster
from rlfleet import __version__
from rlfleet.api.naming import gate_server_name, sender_server_name
from rlfleet.plan.pods import build_pod

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
KEYS = {"k": "cHVibGlj"}


#: Kinds of a program that no test cluster has, and a patch; e2e/scenarios/test_adopt*.py run all but the first.
ABSENT = ("cert-manager.yaml", "adopt-lws.yaml", "adopt-rbg.yaml", "adopt-raycluster.yaml", "adopt-tls.yaml")


@pytest.mark.cluster
@pytest.mark.parametrize(
    "file", [f for f in sorted(EXAMPLES.glob("*.yaml")) if f.name not in ABSENT], ids=lambda f: f.name
)
def test_an_example_is_accepted_as_it_is(cluster: LocalCluster, namespace: str, file: Path) -> None:
    objects: list[dict[str, Any]] = [o for o in yaml.safe_load_all(file.read_text()) if o]
    assert objects
    elsewhere = {(o.get("metadata") or {}).get("namespace") for o in objects} - {None}
    where = ("-n", namespace) if not elsewhere else ()
    if elsewhere - {"default"}:
        pytest.skip(f"{file.name} belongs into a namespace that is not here; tests/chart/test_argocd.py runs it")
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", *where, "-f", str(file))


def test_certificates_of_cert_manager_are_those_that_chart_and_gates_ask_for() -> None:
    objects = list(yaml.safe_load_all((EXAMPLES / "cert-manager.yaml").read_text()))
    values = yaml.safe_load((EXAMPLES.parents[1] / "charts/rlfleet/values.yaml").read_text())["tls"]
    made = {
        (o["metadata"]["namespace"], o["spec"]["secretName"]): o["spec"] for o in objects if "secretName" in o["spec"]
    }
    leaf = made["demo", values["secretName"]]
    assert leaf["dnsNames"] == [gate_server_name("demo"), sender_server_name("demo")]
    issuers = {o["metadata"]["name"]: o["spec"] for o in objects if o["kind"] == "ClusterIssuer"}
    # One authority signs what is presented and what is believed, and its pair is where the issuer reads it.
    believed = made["rlfleet-system", values["authoritySecret"]]
    assert leaf["issuerRef"] == believed["issuerRef"] == {"name": "rlfleet", "kind": "ClusterIssuer"}
    assert made["cert-manager", issuers["rlfleet"]["ca"]["secretName"]]["isCA"]


def test_gates_run_from_the_image_that_the_chart_installs() -> None:
    values = yaml.safe_load((EXAMPLES.parents[1] / "charts/rlfleet/values.yaml").read_text())
    wanted = f"{values['image']['repository']}:{__version__}"
    found = {
        image for file in EXAMPLES.glob("*.yaml") for image in re.findall(r"image: (\S*rlfleet\S*)", file.read_text())
    }
    assert found == {wanted}


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_guide_shows_the_command_line_that_an_example_gets(name: str) -> None:
    pool = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    pool["metadata"] |= {"namespace": "ns", "uid": "u", "generation": 1}
    (engine,) = build_pod(pool, 0, "x-0-00000", public_keys=KEYS, admin_key="k")["spec"]["containers"]
    line = f"{pool['spec']['engine']['type']}: {' '.join([*engine['command'], *engine['args']])}"
    assert line in (EXAMPLES.parent / "guides/engines.md").read_text().splitlines()


def test_what_a_queueing_system_reads_arrives_in_the_pods() -> None:
    pool = yaml.safe_load((EXAMPLES / "queueing.yaml").read_text())
    pool["metadata"] |= {"namespace": "ns", "uid": "u", "generation": 1}
    # Defaults, as the apiserver fills them in.
    pool["spec"]["engine"]["port"] = 30000
    pool["spec"]["gate"]["port"] = 9440
    template = pool["spec"]["source"]["template"]
    template["metadata"]["annotations"] = {"kueue.x-k8s.io/pod-group-total-count": "2"}
    template["spec"] |= {"schedulerName": "volcano", "schedulingGates": [{"name": "example.com/quota"}]}
    pod = build_pod(pool, 0, "queued-engines-0-00000", public_keys=KEYS)
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "rollouts"
    assert pod["metadata"]["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "2"
    for field in ("priorityClassName", "schedulerName", "schedulingGates", "tolerations"):
        assert pod["spec"][field] == template["spec"][field]


def template_at(name: str, *path: str | int) -> dict[str, Any]:
    """A pod template in the first object of an example."""
    found: Any = next(iter(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())))
    for step in path:
        found = found[step]
    return dict(found["spec"])


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("adopt-lws", ("spec", "leaderWorkerTemplate", "leaderTemplate")),
        ("adopt-rbg", ("spec", "roles", 1, "standalonePattern", "template")),
        ("adopt-raycluster", ("spec", "workerGroupSpecs", 0, "template")),
    ],
)
def test_every_maker_of_pods_gets_the_gate_of_the_guide(name: str, path: tuple[str | int, ...]) -> None:
    guide, found = template_at("adopt", "spec", "template"), template_at(name, *path)
    for part in ("initContainers", "volumes"):
        assert found[part] == guide[part]
    assert [c["volumeMounts"] for c in found["containers"]] == [c["volumeMounts"] for c in guide["containers"]]
    assert (EXAMPLES / f"{name}.yaml").read_text().count("rlfleet.gate]") == 1, "pods that are no engines have none"


def test_what_tls_adds_to_an_adopted_gate_is_what_gates_of_ours_have() -> None:
    values = yaml.safe_load((EXAMPLES.parents[1] / "charts/rlfleet/values.yaml").read_text())["tls"]
    pool = yaml.safe_load((EXAMPLES / "sglang.yaml").read_text())
    pool["metadata"] |= {"namespace": "ns", "uid": "u", "generation": 1}
    made = build_pod(pool, 0, "x-0-00000", public_keys=KEYS, tls_secret=values["secretName"])["spec"]
    ours = next(c for c in made["initContainers"] if c["name"] == "gate")
    more = template_at("adopt-tls", "spec", "template")
    (patched,), (plain,) = more["initContainers"], template_at("adopt", "spec", "template")["initContainers"]
    for part in ("env", "volumeMounts"):
        assert [e for e in patched[part] if e not in ours[part]] == []
    assert [v for v in more["volumes"] if v not in made["volumes"]] == []
    probes = {k for k in plain if k.endswith("Probe")}
    assert {k for k in patched if k.endswith("Probe")} == probes
    assert (
        {patched[k]["httpGet"]["scheme"] for k in probes} == {ours[k]["httpGet"]["scheme"] for k in probes} == {"HTTPS"}
    )
