"""Real routers as pods of hollow nodes, as a client sees them."""

from __future__ import annotations

from typing import Any

from e2e.scenarios.kit import Fleet, condition, engine_url, http, wait_until

ROUTER_PORT = 30001
METRICS_PORT = 29000
#: Type as an EnginePool spells it -> its command, and what it needs beside what all of them get.
PROGRAMS: dict[str, tuple[list[str], list[str]]] = {
    "SGLangRouter": (["python", "-m", "sglang_router.launch_router"], ["--disable-health-check"]),
    "SMG": (["python", "-m", "smg", "launch"], ["--disable-health-check"]),
    "VLLMRouter": (["python", "-m", "vllm_router.launch_router"], []),
}
#: What a client hears from a router that has no worker, once its retries (here: none) are spent.
NO_WORKER = {"SGLangRouter": 503, "SMG": 404, "VLLMRouter": 503}


#: The Secret with the keys of routers, which the cluster lets the operator read.
KEYS = "router-keys"


def router_pod(namespace: str, kind: str = "SGLangRouter", name: str = "router", key: str = "") -> dict[str, Any]:
    """A router that starts empty. Its worker start-up time-out is below the gates' quiet time."""
    program, more = PROGRAMS[kind]
    command = [
        *program, "--host", "$(POD_IP)", "--port", str(ROUTER_PORT), "--policy", "round_robin",
        "--prometheus-host", "$(POD_IP)", "--prometheus-port", str(METRICS_PORT),
        "--worker-startup-timeout-secs", "4", "--worker-startup-check-interval", "1", "--disable-retries", *more,
        *(["--api-key", key] if key else []),
    ]  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "router",
                    "image": kind.lower(),
                    "command": command,
                    "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
                    "readinessProbe": {
                        "httpGet": {"path": "/liveness", "port": ROUTER_PORT},
                        "periodSeconds": 1,
                        "failureThreshold": 30,
                    },
                }
            ],
        },
    }


def router_entry(kind: str = "SGLangRouter", name: str = "router", *, keyed: bool = False) -> dict[str, Any]:
    """The router's entry in ``spec.routers`` of an EnginePool."""
    return {
        "name": name if name != "router" else "main",
        "type": kind,
        "podSelector": {"matchLabels": {"app": name}},
        "port": ROUTER_PORT,
        "metricsPort": METRICS_PORT,
        **({"adminKeySecretRef": {"name": KEYS, "key": name}} if keyed else {}),
    }


class Router:
    """The router as a client sees it."""

    def __init__(self, fleet: Fleet, kind: str = "SGLangRouter", name: str = "router", key: str = "") -> None:
        self.fleet = fleet
        self.kind = kind
        self.name = name
        self.key = key
        if key:
            meta = {"name": KEYS, "namespace": fleet.namespace}
            fleet.cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {name: key}})
        fleet.cluster.apply(router_pod(fleet.namespace, kind, name, key))
        wait_until(lambda: condition(fleet.pod(name), "Ready") == "True", "the router to be Ready")
        self.url = f"http://{fleet.pod(name)['status']['podIP']}:{ROUTER_PORT}"

    def listed(self) -> set[str]:
        """URLs that the router sends requests to."""
        code, answer = http("GET", self.url + "/workers", headers=self._headers())
        assert code == 200, answer
        return {str(w["url"]).rstrip("/") for w in answer["workers"]}

    def generate(self) -> tuple[int, Any]:
        """One request through the router."""
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        return http("POST", self.url + "/generate", body, timeout=60, headers=self._headers())

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def replaced(self) -> Router:
        """Delete the router's pod at once and make a new one, whose list is empty."""
        cluster, namespace = self.fleet.cluster, self.fleet.namespace
        cluster.kubectl("delete", "pod", self.name, "-n", namespace, "--grace-period=0", "--force")
        wait_until(lambda: not cluster.get("pods", "-n", namespace, "-l", f"app={self.name}")["items"], "no router")
        return Router(self.fleet, self.kind, self.name, self.key)


def urls(pods: list[dict[str, Any]]) -> set[str]:
    """What routers know these engines by."""
    return {engine_url(p) for p in pods}


def routed_fleet(
    fleet: Fleet, replicas: int, kind: str = "SGLangRouter", *, engine_args: tuple[str, ...] = (), **pipeline: Any
) -> tuple[Router, list[dict[str, Any]]]:
    """Engines behind a router, none listed before the first round, all of them after it."""
    fleet.pipeline(**pipeline)
    router = Router(fleet, kind)
    fleet.pool(replicas, engine_args=engine_args, routers=[router_entry(kind)])
    fleet.trainer()
    pods = fleet.ready_engines(replicas)
    assert router.listed() == set()
    assert router.generate()[0] == NO_WORKER[kind]
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    assert router.listed() == urls(pods)
    return router, pods
