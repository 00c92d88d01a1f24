"""What the chart renders, with the real helm: labels, selectors, security contexts, roles, every feature off and on."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.chart.readme import CHART
from rlfleet.api import crdgen
from rlfleet.app import settings
from rlfleet.app.hooks.uninstall import KINDS
from rlfleet.app.settings import Settings
from rlfleet.plan.deletion import FINALIZERS
from tests.chart.kit import NAMESPACED, OFF, ON, VARIANTS, Obj, chart, of_kind, one, pod_specs, refusal, values_file

#: Settings that the chart gives by other values, or not at all: a pod has no kubeconfig, and always an election.
GIVEN = {
    "namespace",
    "watch_namespaces",
    "lease_name",
    "signing_key_secret",
    "health_bind",
    "tls_secret",
    "peer_ca_file",
}
GIVEN |= {f.name for f in dataclasses.fields(Settings) if f.name.startswith("discovery")}
NOT_GIVEN = {"kubeconfig", "identity", "leader_elect"}


@pytest.fixture(scope="module", params=VARIANTS)
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Obj]:
    return chart(tmp_path_factory.mktemp("values"), VARIANTS[request.param])


def test_every_object_bears_the_standard_labels_and_its_namespace(rendered: list[Obj]) -> None:
    for o in rendered:
        labels = o["metadata"]["labels"]
        wanted = {
            "app.kubernetes.io/name": "rlfleet",
            "app.kubernetes.io/instance": "rlfleet",
            "app.kubernetes.io/managed-by": "Helm",
            "app.kubernetes.io/part-of": "rlfleet",
            "helm.sh/chart": "rlfleet-0.1.0",
        }
        assert wanted.items() <= labels.items(), o["metadata"]["name"]
        cluster = o["kind"].startswith(("Cluster", "ValidatingAdmission"))
        assert ("namespace" in o["metadata"]) != cluster, o["metadata"]["name"]


def test_names_are_unique_and_short_enough(tmp_path: Path) -> None:
    objects = chart(tmp_path, {**ON, **NAMESPACED}, release="a-release-with-a-name-as-long-as-helm-lets-it-b")
    seen = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
    assert len(seen) == len(set(seen))
    assert all(len(name) <= 63 for _, _, name in seen)


def test_every_pod_satisfies_the_restricted_standard(rendered: list[Obj]) -> None:
    specs = dict(pod_specs(rendered))
    assert "Deployment rlfleet-operator" in specs
    for where, spec in specs.items():
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, where
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert pod["runAsUser"] > 0, where
        assert spec["enableServiceLinks"] is False, where
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, where
            assert context["readOnlyRootFilesystem"] is True, where
            assert context["capabilities"] == {"drop": ["ALL"]}, where
            assert "memory" in container["resources"]["limits"], where
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, where
            assert container["image"].startswith("rlfleet/operator"), where


def test_the_selector_never_changes_with_values(tmp_path: Path) -> None:
    selectors, pod_labels = [], []
    for values in (*VARIANTS.values(), {"image": {"tag": "another"}, "commonLabels": {"a": "b"}}):
        deployment = one(chart(tmp_path, values), "Deployment")
        selectors.append(deployment["spec"]["selector"]["matchLabels"])
        pod_labels.append(deployment["spec"]["template"]["metadata"]["labels"])
    assert all(s == selectors[0] for s in selectors)
    assert all(selectors[0].items() <= labels.items() for labels in pod_labels)
    assert not [key for key in selectors[0] if "version" in key or "chart" in key]


def test_everything_that_selects_the_operator_finds_it_and_no_hook(tmp_path: Path) -> None:
    objects = chart(tmp_path, ON)
    deployment = one(objects, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    spread = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    selectors = [
        one(objects, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        one(objects, "Service", "rlfleet-metrics")["spec"]["selector"],
        *(constraint["labelSelector"]["matchLabels"] for constraint in spread),
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
        for job in of_kind(objects, "Job"):
            assert not selector.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    service = one(objects, "Service", "rlfleet-metrics")
    monitored = one(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitored.items() <= service["metadata"]["labels"].items()
    assert one(objects, "ServiceMonitor")["metadata"]["labels"]["release"] == "prom"


def test_the_operator_can_read_all_of_its_arguments(rendered: list[Obj]) -> None:
    (container,) = one(rendered, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["rlfleet", "operator"]
    chosen = parse(container["args"])
    assert chosen.namespace == "rlfleet-system"
    assert chosen.lease_name == "rlfleet-operator"
    assert chosen.health_address() == ("0.0.0.0", 9460)
    assert chosen.leader_elect


def parse(arguments: list[str]) -> Settings:
    """The arguments as the operator reads them."""
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(arguments), {})


def test_the_chart_s_settings_are_the_operator_s_with_its_defaults(tmp_path: Path) -> None:
    (container,) = one(chart(tmp_path), "Deployment")["spec"]["template"]["spec"]["containers"]
    names = {re.sub("([A-Z])", lambda m: "_" + m[1].lower(), key) for key in values_file()["settings"]}
    assert names | GIVEN | NOT_GIVEN == {f.name for f in dataclasses.fields(Settings)}
    assert not names & (GIVEN | NOT_GIVEN)
    chosen, default = parse(container["args"]), Settings()
    for name in names | {"lease_name", "signing_key_secret", "namespace"}:
        assert getattr(chosen, name) == getattr(default, name), name


def test_values_reach_the_operator(tmp_path: Path) -> None:
    objects = chart(tmp_path, {**ON, **NAMESPACED, "bindAddress": "::", "port": 8443})
    template = one(objects, "Deployment")["spec"]["template"]
    (container,) = template["spec"]["containers"]
    chosen = parse(container["args"])
    assert chosen.watch_namespaces == ("team-a", "team-b")
    assert (chosen.api_qps, chosen.poll_seconds, chosen.peer_proxy) == (1_000_000, 2.5, "http://proxy:3128")
    assert chosen.log_level == "DEBUG"
    assert chosen.health_address() == ("::", 8443)
    assert container["ports"] == [
        {"name": "http-metrics", "containerPort": 8443, "protocol": "TCP"},
        {"name": "http-discovery", "containerPort": 8002, "protocol": "TCP"},
    ]
    assert container["image"] == "rlfleet/operator@sha256:" + "a" * 64
    assert {"name": "A", "value": "b"} in container["env"]
    assert {"name": "extra", "mountPath": "/extra"} in container["volumeMounts"]
    assert template["metadata"]["labels"]["pod"] == "label"
    assert template["metadata"]["labels"]["team"] == "rl"
    assert template["metadata"]["annotations"]["pod"] == "annotation"
    for _, spec in pod_specs(objects):
        assert spec["priorityClassName"] == "system-cluster-critical"
        assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
        assert spec["tolerations"] == [{"key": "control", "operator": "Exists"}]
        assert spec["imagePullSecrets"] == [{"name": "pull"}]
    assert one(objects, "Service", "rlfleet-metrics")["spec"]["ports"][0]["port"] == 8443


def test_worker_discovery_is_off_unless_asked_for_and_then_as_the_values_say(tmp_path: Path) -> None:
    objects = chart(tmp_path)
    (container,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert not parse(container["args"]).discovery
    assert not of_kind(objects, "Service", "rlfleet-discovery")
    assert [p["name"] for p in container["ports"]] == ["http-metrics"]
    for values, default in (({"discovery": {"enabled": True}}, True), (ON, False)):
        objects = chart(tmp_path, values)
        (container,) = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
        chosen = parse(container["args"])
        assert chosen.discovery
        assert chosen.discovery_host == "0.0.0.0"
        found = {f.name: getattr(chosen, f.name) for f in dataclasses.fields(Settings) if "discovery_" in f.name}
        assert found == {
            "discovery_host": "0.0.0.0",
            "discovery_port": 8001 if default else 8002,
            "discovery_auth": "none" if default else "token",
            "discovery_namespace": "dynamo" if default else "prod",
            "discovery_endpoint": "rl" if default else "admin",
            "discovery_components": () if default else ("actors", "critics"),
            "discovery_request_timeout_seconds": 30 if default else 1_000_000,
            "discovery_max_concurrent_probes": 32 if default else 64,
        }
        service = one(objects, "Service", "rlfleet-discovery")["spec"]
        labels = one(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
        assert service["selector"].items() <= labels.items()
        (port,) = service["ports"]
        (named,) = (p for p in container["ports"] if p["name"] == port["targetPort"])
        assert port["port"] == named["containerPort"] == chosen.discovery_port
    off = {"discovery": {"enabled": True, "service": {"enabled": False}}}
    assert not of_kind(chart(tmp_path, off), "Service", "rlfleet-discovery")


def test_values_given_by_set_reach_the_operator_too(tmp_path: Path) -> None:
    # helm reads numbers of --set as integers, those of a file as floats.
    given = ("--set=settings.concurrency=8", "--set=settings.pollSeconds=3", "--set=settings.drainSeconds=0")
    (container,) = one(chart(tmp_path, {}, *given), "Deployment")["spec"]["template"]["spec"]["containers"]
    chosen = parse(container["args"])
    assert (chosen.concurrency, chosen.poll_seconds, chosen.drain_seconds) == (8, 3, 0)


def test_an_empty_web_bind_turns_the_page_off(tmp_path: Path) -> None:
    for bind, address in (("", None), ("127.0.0.1:9999", ("127.0.0.1", 9999))):
        spec = one(chart(tmp_path, {"settings": {"webBind": bind}}), "Deployment")["spec"]["template"]["spec"]
        assert parse(spec["containers"][0]["args"]).web_address() == address


def test_probes_and_a_second_to_stand_by(tmp_path: Path) -> None:
    spec = one(chart(tmp_path), "Deployment")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    paths = {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")}
    assert paths == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert spec["replicas"] == 2
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_what_is_off_is_not_there(tmp_path: Path) -> None:
    objects = chart(tmp_path, OFF)
    assert {o["kind"] for o in objects} == {"Deployment"}
    spec = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "mine"
    assert "topologySpreadConstraints" not in spec


def test_one_replica_has_no_disruption_budget(tmp_path: Path) -> None:
    # It would hold up every drain of its node.
    assert not of_kind(chart(tmp_path, {"replicas": 1}), "PodDisruptionBudget")


def test_the_signing_key_is_in_no_template(rendered: list[Obj]) -> None:
    assert not of_kind(rendered, "Secret")


def test_without_the_right_to_make_a_key_no_secret_can_be_created(tmp_path: Path) -> None:
    for values, expected in (({}, True), ({"createSigningKey": False}, False)):
        role = one(chart(tmp_path, values), "Role", "rlfleet-operator")
        secrets = [r for r in role["rules"] if r["resources"] == ["secrets"]]
        assert {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["rlfleet-signing-key"],
                "verbs": ["get"]} in secrets  # fmt: skip
        assert any("create" in r["verbs"] for r in secrets) is expected


def rules(objects: list[Obj], *kinds: str) -> list[dict[str, Any]]:
    return [rule for kind in kinds for o in of_kind(objects, kind) for rule in o.get("rules") or []]


def test_no_role_has_wildcards_or_reads_secrets_at_large(rendered: list[Obj]) -> None:
    for rule in rules(rendered, "Role", "ClusterRole"):
        words = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        assert "*" not in words, rule
        assert not {"escalate", "bind", "impersonate"} & set(words), rule
        if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
            assert rule.get("resourceNames"), rule


@pytest.mark.parametrize("namespaces", [[], ["rl"]])
def test_keys_of_routers_are_read_by_name_where_engines_are(tmp_path: Path, namespaces: list[str]) -> None:
    values = {"watchNamespaces": namespaces, "routerKeySecrets": ["keys", "more-keys"]}
    wanted = {
        "apiGroups": [""],
        "resources": ["secrets"],
        "resourceNames": values["routerKeySecrets"],
        "verbs": ["get"],
    }
    kind = "Role" if namespaces else "ClusterRole"
    assert wanted in rules(chart(tmp_path, values), kind)
    unset = rules(chart(tmp_path, {"watchNamespaces": namespaces}), "Role", "ClusterRole")
    assert wanted not in unset


def test_every_subject_is_a_service_account_that_is_there(rendered: list[Obj]) -> None:
    made = {(o["metadata"]["namespace"], o["metadata"]["name"]) for o in of_kind(rendered, "ServiceAccount")}
    for binding in (*of_kind(rendered, "RoleBinding"), *of_kind(rendered, "ClusterRoleBinding")):
        kind = binding["roleRef"]["kind"]
        roles = of_kind(rendered, kind, binding["roleRef"]["name"])
        where = binding["metadata"].get("namespace")
        assert any(kind == "ClusterRole" or r["metadata"]["namespace"] == where for r in roles)
        for subject in binding["subjects"]:
            if binding["metadata"]["labels"].get("app.kubernetes.io/component") == "trainer":
                continue  # made with the trainer
            assert (subject["namespace"], subject["name"]) in made


def test_with_namespaces_named_the_operator_has_no_right_in_the_cluster(tmp_path: Path) -> None:
    values = {"watchNamespaces": ["team-a", "team-b"], "rbac": {"aggregate": False}}
    objects = chart(tmp_path, values, "--no-hooks")
    assert not of_kind(objects, "ClusterRoleBinding")
    assert not of_kind(objects, "ClusterRole")
    served = of_kind(objects, "Role", "rlfleet-engines")
    assert {o["metadata"]["namespace"] for o in served} == {"team-a", "team-b"}
    slices = chart(tmp_path, {**values, "resourceSlices": True}, "--no-hooks")
    assert rules(slices, "ClusterRole") == [
        {"apiGroups": ["resource.k8s.io"], "resources": ["resourceslices"], "verbs": ["list"]}
    ]
    monitor = of_kind(chart(tmp_path, {**ON, **NAMESPACED}), "PodMonitor")[0]
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}


def test_gates_of_adopted_pods_are_scraped_under_the_names_of_their_pool(tmp_path: Path) -> None:
    ours, adopted = of_kind(chart(tmp_path, ON), "PodMonitor")
    assert adopted["spec"]["selector"] == {"matchLabels": {"app": "demo-engines"}}
    assert adopted["spec"]["namespaceSelector"] == {"matchNames": ["team-b"]}
    endpoint, other = adopted["spec"]["podMetricsEndpoints"][0], ours["spec"]["podMetricsEndpoints"][0]
    names = {r["targetLabel"]: r["replacement"] for r in endpoint.pop("relabelings")}
    assert names == {"pipeline": "demo", "pool": "adopted"}
    assert set(names) == {r["targetLabel"] for r in other.pop("relabelings")}
    assert endpoint == other


def test_a_trainer_may_sync_its_pipelines_only(tmp_path: Path) -> None:
    objects = chart(tmp_path, ON)
    roles = {o["metadata"]["namespace"]: o for o in of_kind(objects, "Role", "rlfleet-trainer-trainer")}
    assert roles.keys() == {"team-a", "team-b"}
    for namespace, names in (("team-a", ["demo"]), ("team-b", ["demo", "other"])):
        for rule in roles[namespace]["rules"]:
            if rule["resources"] == ["rlpipelines"]:
                assert rule["resourceNames"] == names
        assert [r["resourceNames"] for r in roles[namespace]["rules"] if "sync" in r["verbs"]] == [names]
    verbs = {n: next(r["verbs"] for r in o["rules"] if r["resources"] == ["syncrounds"]) for n, o in roles.items()}
    assert "patch" not in verbs["team-a"]
    assert "patch" in verbs["team-b"]


def test_aggregated_roles_never_write_status(tmp_path: Path) -> None:
    objects = chart(tmp_path)
    view, edit = one(objects, "ClusterRole", "rlfleet-view"), one(objects, "ClusterRole", "rlfleet-edit")
    assert {v for r in view["rules"] for v in r["verbs"]} == {"get", "list", "watch"}
    assert not [r for r in edit["rules"] if any(x.endswith("/status") for x in r["resources"])]
    plurals = {kind.plural for kind in crdgen.KINDS}
    assert plurals <= {x for r in view["rules"] for x in r["resources"]}
    assert plurals <= {x for r in edit["rules"] for x in r["resources"]}
    for role, name in ((view, "view"), (edit, "edit")):
        assert role["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{name}"] == "true"


def test_the_crd_job_may_change_our_crds_and_nothing_else(tmp_path: Path) -> None:
    objects = chart(tmp_path, ON)
    names = sorted(crdgen.crd(kind)["metadata"]["name"] for kind in crdgen.KINDS)
    assert one(objects, "ClusterRole", "rlfleet-crds")["rules"] == [
        {
            "apiGroups": ["apiextensions.k8s.io"],
            "resources": ["customresourcedefinitions"],
            "resourceNames": names,
            "verbs": ["get", "update"],
        }
    ]
    assert not [o for o in chart(tmp_path) if o["metadata"]["name"] == "rlfleet-crds"]


def test_hooks_come_before_what_they_are_for_and_go_afterwards(tmp_path: Path) -> None:
    expected = {"crds": "pre-upgrade", "uninstall": "pre-delete", "test": "test"}
    objects = chart(tmp_path, ON)
    for component, hook in expected.items():
        found = [o for o in objects if o["metadata"]["labels"].get("app.kubernetes.io/component") == component]
        assert found
        weights = {}
        for o in found:
            annotations = o["metadata"]["annotations"]
            assert annotations["helm.sh/hook"] == hook
            assert annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
            weights[o["kind"]] = int(annotations["helm.sh/hook-weight"])
        runner = weights.pop("Pod", None) if hook == "test" else weights.pop("Job", None)
        assert runner == 0
        assert set(weights.values()) == {-10}


def test_the_uninstall_job_may_let_go_of_every_finalizer_of_ours(tmp_path: Path) -> None:
    assert {res.plural for res in KINDS} == FINALIZERS.keys()
    for values in ({}, NAMESPACED):
        objects = chart(tmp_path, values)
        name = "rlfleet-uninstall-finalizers"
        found = of_kind(objects, "Role", name) or of_kind(objects, "ClusterRole", name)
        for role in found:
            (rule,) = role["rules"]
            assert set(rule["resources"]) == FINALIZERS.keys()
        assert len(found) == (2 if values else 1)
        job = one(objects, "Job", "rlfleet-uninstall")
        arguments = job["spec"]["template"]["spec"]["containers"][0]["args"]
        assert f"--watch-namespaces={','.join(values.get('watchNamespaces', []))}" in arguments
    kept = chart(tmp_path, {"uninstall": {"deleteSigningKey": False}})
    role = one(kept, "Role", "rlfleet-uninstall")
    assert not [r for r in role["rules"] if "secrets" in r["resources"]]
    arguments = one(kept, "Job")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert not [a for a in arguments if a.startswith("--signing-key-secret")]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"replcas": 3}, ["replcas", "not allowed"]),
        ({"image": {"tga": "x"}}, ["/image", "tga", "not allowed"]),
        ({"settings": {"leaderElect": False}}, ["/settings", "leaderElect", "not allowed"]),
        ({"settings": {"logLevel": "LOUD"}}, ["/settings/logLevel", "'DEBUG'", "'ERROR'"]),
        ({"replicas": "two"}, ["/replicas", "want integer"]),
        ({"replicas": -1}, ["/replicas", "minimum"]),
        ({"image": {"digest": "abc"}}, ["/image/digest", "pattern"]),
        ({"watchNamespaces": ["Team_A"]}, ["/watchNamespaces/0", "pattern"]),
        ({"watchNamespaces": ["a", "a"]}, ["/watchNamespaces", "equal"]),
        ({"port": 80}, ["/port", "1,024"]),
        ({"discovery": {"enabled": True, "port": 9460}}, ["discovery.port and port are the same"]),
        ({"discovery": {"auth": "tokn"}}, ["/discovery/auth", "'none'", "'token'"]),
        ({"discovery": {"namespace": "a.b"}}, ["/discovery/namespace", "pattern"]),
        ({"trainers": [{"namespace": "a", "serviceAccount": "t"}]}, ["/trainers/0", "pipelines"]),
        ({"commonLabels": {"a": 1}}, ["/commonLabels/a", "want string"]),
        ({"extraArgs": ["log-level=DEBUG"]}, ["/extraArgs/0", "pattern"]),
    ],
    ids=str,
)
def test_the_schema_says_which_value_is_wrong_and_why(tmp_path: Path, values: Obj, words: list[str]) -> None:
    said = refusal(tmp_path, values)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"serviceAccount": {"create": False}}, "serviceAccount.name must name an existing service account"),
        (
            {"metrics": {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}},
            "metrics.serviceMonitor.enabled needs metrics.service.enabled",
        ),
        ({"podLabels": {"app.kubernetes.io/name": "x"}}, "podLabels: app.kubernetes.io/name is the chart's own label"),
        ({"commonLabels": {"helm.sh/chart": "x"}}, "commonLabels: helm.sh/chart is the chart's own label"),
        (
            {"trainers": [{"namespace": "a", "serviceAccount": "t", "pipelines": [name]} for name in ("p", "q")]},
            "trainers: a/t stands there twice",
        ),
        (
            {"networkPolicy": {"pipelines": [{"namespace": "a", "pipeline": "p", "trainer": {"app": "t"}}] * 2}},
            "networkPolicy.pipelines: a/p stands there twice",
        ),
    ],
    ids=["account", "monitor", "pod labels", "labels", "trainer twice", "policy twice"],
)
def test_values_that_contradict_each_other_are_refused(tmp_path: Path, values: Obj, words: str) -> None:
    assert words in refusal(tmp_path, values)


def test_a_parent_chart_may_have_globals(tmp_path: Path) -> None:
    assert chart(tmp_path, {"global": {"anything": 1}})


def test_values_of_the_chart_before_are_still_understood(tmp_path: Path) -> None:
    before = yaml.safe_load((Path(__file__).parent / "previous/values.yaml").read_text())
    assert chart(tmp_path, before)


def test_alerts_and_dashboards_are_the_files_of_the_chart(tmp_path: Path) -> None:
    objects = chart(tmp_path, ON)
    rule = one(objects, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prom"
    maps = of_kind(objects, "ConfigMap")
    files = {file.name: json.loads(file.read_text()) for file in (CHART / "files/dashboards").glob("*.json")}
    assert files
    assert {name: json.loads(text) for o in maps for name, text in o["data"].items()} == files
    for o in maps:
        assert o["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert o["metadata"]["annotations"] == {"grafana_folder": "rlfleet"}
