"""Presets by engine type: what fills the pod, what the template may say otherwise, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.gate.links import LOOP_SECONDS
from rlfleet.plan import presets, template
from rlfleet.plan.pods import build_pod
from rlfleet.plan.template import InvalidPool
from tests.plan.pool_kit import pool as example

PLUGIN = "/var/lib/rlfleet/vllm"


def pool(kind: str = "VLLM", *, container: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    spec = {key: engine.pop(key) for key in ("placement", "shrink") if key in engine}
    pod = {"containers": [{"name": "engine", "image": "x", **(container or {})}]}
    size = engine.pop("size", 1)
    return example(pod_spec=pod, engine={"type": kind, "port": 30000, "gpusPerEngine": size, **engine}, **spec)


def build(p: dict[str, Any]) -> dict[str, Any]:
    return build_pod(p, 0, "a-0-00000", public_keys={"kid": "key"}, admin_key="this-pods")


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in [*pod["spec"]["containers"], *pod["spec"]["initContainers"]] if c["name"] == name)


def env(found: dict[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in found["env"]}


def test_vllm_is_started_with_its_middleware_its_backend_and_its_control_endpoints() -> None:
    pod = build(pool(model="org/model", size=2, args=["--enforce-eager"]))
    engine, gate = container(pod, "engine"), container(pod, "gate")
    assert engine["command"] == ["python3", "-m", "vllm.entrypoints.openai.api_server"]
    assert engine["args"] == [
        *("--model", "$(RLFLEET_MODEL)", "--host", "$(RLFLEET_POD_IP)", "--port", "30000"),
        *("--tensor-parallel-size", "2", "--middleware", "rlfleet_vllm.ControlKey"),
        *("--weight-transfer-config", '{"backend":"rlfleet"}', "--enforce-eager"),
    ]
    assert env(engine)["VLLM_SERVER_DEV_MODE"] == "1"
    assert env(engine)["PYTHONPATH"] == PLUGIN
    assert env(engine)["RLFLEET_ENGINE_ADMIN_KEY"] == env(gate)["RLFLEET_ENGINE_ADMIN_KEY"] == "this-pods"
    assert engine["startupProbe"]["httpGet"] == {"path": "/health", "port": 30000}
    live = engine["livenessProbe"]
    assert live["httpGet"] == {"path": "/enginez", "port": 9440}, "of the gate, which knows when the loop is busy"
    assert live["failureThreshold"] * live["periodSeconds"] >= 300, "a gate that restarts must not cost an engine"
    assert live["timeoutSeconds"] > 10, "longer than the gate waits"
    assert env(gate)["RLFLEET_ENGINE_TYPE"] == "VLLM"


def test_the_plugin_comes_by_an_init_container_of_the_gates_image_and_the_gate_stays_last() -> None:
    pod = build(pool(model="m"))
    assert [c["name"] for c in pod["spec"]["initContainers"]] == ["rlfleet-vllm", "gate"]
    init = container(pod, "rlfleet-vllm")
    assert init["image"] == "rlfleet:1"
    assert init["command"] == ["python", "-m", "rlfleet_vllm", "install", PLUGIN]
    assert init["volumeMounts"] == [{"name": "rlfleet-vllm", "mountPath": PLUGIN}]
    assert {"name": "rlfleet-vllm", "mountPath": PLUGIN, "readOnly": True} in container(pod, "engine")["volumeMounts"]
    assert {"name": "rlfleet-vllm", "emptyDir": {}} in pod["spec"]["volumes"]
    assert all(m["name"] != "rlfleet-vllm" for m in container(pod, "gate")["volumeMounts"])


def test_sglang_with_a_model_and_no_program_is_started_with_a_key_of_its_own() -> None:
    pod = build(pool("SGLang", model="m", args=["--mem-fraction-static=0.7"], allowUnknownVersion=True))
    engine, gate = container(pod, "engine"), container(pod, "gate")
    assert engine["command"] == ["python3", "-m", "sglang.launch_server"]
    assert engine["args"] == [
        *("--model-path", "$(RLFLEET_MODEL)", "--host", "$(RLFLEET_POD_IP)", "--port", "30000"),
        *("--admin-api-key=$(RLFLEET_ENGINE_ADMIN_KEY)", "--enable-metrics", "--mem-fraction-static=0.7"),
    ]
    assert engine["livenessProbe"]["httpGet"] == {"path": "/enginez", "port": 9440}
    assert env(gate)["RLFLEET_ENGINE_ALLOW_UNKNOWN_VERSION"] == "true"
    assert "rlfleet-vllm" not in str(pod)


def test_engines_that_are_to_sleep_are_started_so_that_they_can() -> None:
    pinned = {"mode": "Pinned", "devices": [{"node": "n", "devices": ["GPU-0", "GPU-1"]}]}
    for kind, flag in (("SGLang", "--enable-memory-saver"), ("VLLM", "--enable-sleep-mode")):
        assert flag in container(build(pool(kind, model="m", placement=pinned)), "engine")["args"]
        assert flag in container(build(pool(kind, model="m", shrink="Offload")), "engine")["args"]
        assert flag not in container(build(pool(kind, model="m")), "engine")["args"]


@pytest.mark.parametrize("kind", ["SGLang", "VLLM"])
def test_the_users_key_comes_from_a_secret_to_engine_and_gate(kind: str) -> None:
    pod = build(pool(kind, model="m", apiKeySecretRef={"name": "keys", "key": "user"}))
    said = {"secretKeyRef": {"name": "keys", "key": "user"}}
    assert env(container(pod, "engine"))["RLFLEET_ENGINE_API_KEY"] == said
    assert env(container(pod, "gate"))["RLFLEET_ENGINE_API_KEY"] == said
    assert "--api-key=$(RLFLEET_ENGINE_API_KEY)" in container(pod, "engine")["args"]


def test_the_start_of_an_engine_that_demands_the_users_key_is_asked_of_its_gate() -> None:
    """SGLang answers /model_info 401 without the key, and a probe has none; vLLM's /health is open."""
    keyed = {"model": "m", "apiKeySecretRef": {"name": "keys", "key": "user"}}
    probe = container(build(pool("SGLang", **keyed)), "engine")["startupProbe"]
    assert probe["httpGet"] == {"path": "/enginez", "port": 9440}
    assert probe["failureThreshold"] * probe["periodSeconds"] >= 3600
    assert probe["timeoutSeconds"] > LOOP_SECONDS
    secured = build_pod(pool("SGLang", **keyed), 0, "a-0-00000", public_keys={"kid": "key"}, tls_secret="certs")
    assert container(secured, "engine")["startupProbe"]["httpGet"]["scheme"] == "HTTPS"
    for kind, path in (("VLLM", "/health"), ("SGLang", "/model_info")):
        spec = keyed if kind == "VLLM" else {"model": "m"}
        found = container(build(pool(kind, **spec)), "engine")["startupProbe"]
        assert found["httpGet"] == {"path": path, "port": 30000}


def test_a_program_of_the_templates_own_stays_to_the_letter() -> None:
    own = {"command": ["sh", "-c", "exec my-sglang --port 30000"], "env": [{"name": "A", "value": "1"}]}
    pod = build(pool("SGLang", model="m", container=own))
    engine = container(pod, "engine")
    assert engine["command"] == own["command"]
    assert "args" not in engine
    assert "livenessProbe" not in engine
    assert [n for n in env(engine) if not n.startswith("RLFLEET_")] == ["A"]
    vllm = container(
        build(pool(container={"args": ["--model", "m", "--middleware", "rlfleet_vllm.ControlKey"]})), "engine"
    )
    assert vllm["args"] == ["--model", "m", "--middleware", "rlfleet_vllm.ControlKey"]
    assert "command" not in vllm
    assert env(vllm)["VLLM_SERVER_DEV_MODE"] == "1"
    assert env(vllm)["RLFLEET_ENGINE_ADMIN_KEY"] == "this-pods", "the middleware reads it"


def test_an_image_that_starts_sglang_by_itself_is_left_alone() -> None:
    engine = container(build(pool("SGLang")), "engine")
    assert "command" not in engine
    assert "args" not in engine


def test_what_is_only_usual_gives_way_to_the_template() -> None:
    own = {
        "env": [
            {"name": "NCCL_CUMEM_ENABLE", "value": "1"},
            {"name": "PYTHONPATH", "value": "/mine"},
            {"name": "VLLM_SERVER_DEV_MODE", "value": "1"},
            {"name": "VLLM_PLUGINS", "value": "mine, rlfleet"},
        ],
        "livenessProbe": {"exec": {}},
        "startupProbe": {"exec": {}},
    }
    engine = container(build(pool(model="m", container=own)), "engine")
    names = [e["name"] for e in engine["env"]]
    assert len(names) == len(set(names)), "no variable stands there twice"
    assert env(engine)["NCCL_CUMEM_ENABLE"] == "1"
    assert env(engine)["PYTHONPATH"] == f"{PLUGIN}:/mine"
    assert engine["livenessProbe"] == engine["startupProbe"] == {"exec": {}}
    unset = container(build(pool(model="m")), "engine")
    assert env(unset)["NCCL_CUMEM_ENABLE"] == "0"
    assert env(unset)["VLLM_HOST_IP"] == "$(RLFLEET_POD_IP)"


@pytest.mark.parametrize(
    ("kind", "engine", "container_", "message"),
    [
        ("VLLM", {}, {}, "neither spec.engine.model nor command of the template's container 'engine' is set"),
        ("SGLang", {"args": ["--x"]}, {}, "neither spec.engine.model nor command"),
        ("VLLM", {"model": "m", "args": ["--x"]}, {"command": ["c"]}, "spec.engine.args is set and so is command of"),
        ("SGLang", {"model": "m", "args": ["--x"]}, {"args": ["--y"]}, "spec.engine.args is set and so is args of"),
        ("SGLang", {}, {"args": ["--port", "1"]}, "runs with --port 1 and spec.engine.port is 30000: make them equal"),
        ("VLLM", {}, {"args": ["--port=1"]}, "runs with --port 1 and spec.engine.port is 30000"),
        (
            "VLLM",
            {"model": "m", "args": ["--port=30000"]},
            {},
            "has --port 30000, and spec.engine.port is 30000: leave",
        ),
        ("SGLang", {"model": "m", "args": ["--model", "n"]}, {}, "has --model n, and spec.engine.model is m"),
        ("SGLang", {"model": "m", "args": ["--api-key=k"]}, {}, "spec.engine.apiKeySecretRef names the key"),
        ("SGLang", {"model": "m", "args": ["--admin-api-key=k"]}, {}, "spec.engine.type SGLang sets it"),
        ("VLLM", {"model": "m", "args": ["--host", "::"]}, {}, "engines listen on their pod's address"),
        ("VLLM", {"model": "m", "args": ["--weight-transfer-config", "{}"]}, {}, "spec.engine.type VLLM sets it"),
        ("VLLM", {"model": "m", "args": ["-tp", "4"]}, {}, r"over 4 GPUs .* spec.engine.gpusPerEngine is 1: make them"),
        (
            "VLLM",
            {"model": "m"},
            {"env": [{"name": "VLLM_SERVER_DEV_MODE", "value": "0"}]},
            "sets VLLM_SERVER_DEV_MODE=0, and the engine can only be driven with VLLM_SERVER_DEV_MODE=1",
        ),
        (
            "VLLM",
            {"model": "m"},
            {"env": [{"name": "VLLM_PLUGINS", "value": "a"}]},
            "sets VLLM_PLUGINS=a, and spec.eng",
        ),
        ("VLLM", {"model": "m"}, {"env": [{"name": "PYTHONPATH", "valueFrom": {}}]}, "sets PYTHONPATH by valueFrom"),
        (
            "VLLM",
            {"model": "m"},
            {"env": [{"name": "VLLM_SERVER_DEV_MODE", "valueFrom": {}}]},
            "sets VLLM_SERVER_DEV_MODE by valueFrom, and the engine can only be driven with VLLM_SERVER_DEV_MODE=1",
        ),
    ],
)
def test_contradictions_name_both_sides(
    kind: str, engine: dict[str, Any], container_: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidPool, match=message):
        build(pool(kind, container=container_, **engine))


def test_sizes_that_multiply_to_the_engines_gpus_are_the_users() -> None:
    args = ["--tp-size", "2", "--pp-size", "2"]
    engine = container(build(pool("SGLang", model="m", size=4, args=args)), "engine")
    assert engine["args"].count("--tp-size") == 1
    assert engine["args"][-4:] == args
    # What only the running pod knows is not judged.
    build(pool(container={"args": ["--port", "$(PORT)"]}))


def test_names_of_the_plugin_are_the_operators() -> None:
    for spec in (
        {"containers": [{"name": "engine"}], "initContainers": [{"name": "rlfleet-vllm"}]},
        {"containers": [{"name": "engine"}], "volumes": [{"name": "rlfleet-vllm"}]},
        {"containers": [{"name": "engine", "volumeMounts": [{"mountPath": f"{PLUGIN}/x"}]}]},
    ):
        with pytest.raises(InvalidPool, match="is the operator's"):
            build(example(pod_spec=spec))


def test_only_an_engine_that_demands_the_key_gets_one() -> None:
    assert presets.wants_admin_key(pool(model="m"))
    assert presets.wants_admin_key(pool("SGLang", model="m"))
    assert not presets.wants_admin_key(pool(container={"args": ["--model", "m"]}))


def test_the_new_fields_shape_the_pod_and_their_absence_does_not() -> None:
    base = template.template_hash(pool("SGLang"))
    assert template.template_hash(pool("SGLang", args=[], allowUnknownVersion=False)) == base
    for changed in ({"args": ["--x"]}, {"apiKeySecretRef": {"name": "a", "key": "b"}}, {"allowUnknownVersion": True}):
        assert template.template_hash(pool("SGLang", **changed)) != base


def test_the_liveness_of_an_engine_is_asked_over_tls_where_its_gate_speaks_that() -> None:
    pod = build_pod(pool(model="m"), 0, "a-0-00000", public_keys={"kid": "key"}, tls_secret="certs")
    assert container(pod, "engine")["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"


@pytest.mark.parametrize("source", [{"adopt": {"selector": {"matchLabels": {"a": "b"}}}}, {"other": {}}])
def test_pods_that_others_make_have_no_command_line_of_ours(source: dict[str, Any]) -> None:
    theirs = pool("SGLang", model="m")
    theirs["spec"]["source"] = source
    assert not presets.fills(theirs)
    assert presets.engine_words(theirs) == []
    theirs["spec"]["engine"]["type"] = "Unheard"
    assert presets.engine_words(theirs) == []


def test_the_init_container_lives_within_the_gates_limits() -> None:
    limits = {"limits": {"cpu": "1", "memory": "2Gi"}}
    spec = pool(model="m")
    assert container(build(spec), "rlfleet-vllm")["resources"] == {"requests": {"cpu": "10m", "memory": "64Mi"}}
    spec["spec"]["gate"]["resources"] = limits
    assert container(build(spec), "rlfleet-vllm")["resources"] == limits
