"""Every router that a gate can drive, with requests flowing: rounds, a joiner, a router that is replaced."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.scenarios.kit import ROOT, Fleet, engine_url, http, wait_until
from e2e.scenarios.routers import NO_WORKER, PROGRAMS, Router, routed_fleet, router_entry, urls

pytestmark = pytest.mark.cluster


@contextmanager
def load(router: Router, summary: Path) -> Iterator[None]:
    """A client that asks the router all the time; at the end it waits for its answers and leaves its books."""
    command = [sys.executable, "-m", "e2e.sim.load", "--router", router.url, "--summary", str(summary)]
    client = subprocess.Popen([*command, "--concurrency", "3"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield
        client.send_signal(signal.SIGTERM)
        client.wait(120)
    finally:
        client.kill()
        client.wait()


def books_of(summary: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(summary.read_text())
    return found


def rounds(fleet: Fleet, router: Router, versions: range) -> None:
    """One round after the other; when one has ended nobody behind the router answers with anything older."""
    for version in versions:
        assert fleet.sync(version)["status"]["phase"] == "Succeeded"
        code, answer = router.generate()
        assert (code, answer["meta_info"]["weight_version"]) == (200, str(version))


@pytest.mark.slow  # a minute each
@pytest.mark.parametrize("kind", PROGRAMS)
def test_twenty_rounds_and_a_joiner_fail_no_request_and_send_none_to_an_unproven_engine(
    fleet: Fleet, tmp_path: Path, kind: str
) -> None:
    router, pods = routed_fleet(fleet, 2, kind)
    summary = tmp_path / "load.json"
    with load(router, summary):
        rounds(fleet, router, range(10))
        # A joiner starts with weights of nobody's, and its label says so.
        fleet.cluster.kubectl("scale", "epool/e", "--replicas=3", "-n", fleet.namespace)
        pods = fleet.ready_engines(3)
        wait_until(lambda: router.listed() == urls(pods), "the joiner in the router")
        rounds(fleet, router, range(10, 20))
        # One that goes leaves the router first, and ends what it runs.
        fleet.cluster.kubectl("scale", "epool/e", "--replicas=1", "-n", fleet.namespace)
        pods = fleet.ready_engines(1)
        assert router.listed() == urls(pods)
    books = books_of(summary)
    assert books["failures"] == {}, books
    assert books["answered"], "requests flowed, however many this machine had time for"
    # "default" is what an engine says whose weights nobody has proven.
    assert set(books["versions"]) <= {str(v) for v in range(-1, 20)}, books
    # The router forgets everything: the engines come back, and until then the client hears so.
    router = router.replaced()
    wait_until(lambda: router.listed() == urls(pods), "the entries of the new router")
    assert router.generate()[0] == 200
    # Gone for good: taken out of the list by whoever deletes the pool.
    fleet.cluster.kubectl("delete", "epool/e", "-n", fleet.namespace, "--wait=true", timeout=120)
    assert router.listed() == set()
    assert router.generate()[0] == NO_WORKER[kind]


class Completions(threading.Thread):
    """A client of vLLM's own path, all the time; and a look at whom the router lists meanwhile."""

    def __init__(self, router: Router, pods: list[dict[str, Any]]) -> None:
        super().__init__()
        self.router = router
        self.pods = {engine_url(pod): pod for pod in pods}
        self.answered = 0
        self.failures: list[str] = []
        self._stop_asking = threading.Event()

    def run(self) -> None:
        while not self._stop_asking.is_set():
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 24, "return_token_ids": True}
            code, answer = http("POST", self.router.url + "/v1/completions", body, timeout=120)
            (choice,) = answer["choices"] if code == 200 else [{}]
            if choice.get("finish_reason") == "length" and len(choice["token_ids"]) == 24:
                self.answered += 1
            else:
                self.failures.append(f"{code}: {answer}")
            for url in self.router.listed():
                if weight_label(self.pods[url]) == "default":
                    self.failures.append(f"{url} is listed with the weights that it started with")

    def ended(self) -> None:
        """Wait for the answer to the last request."""
        self._stop_asking.set()
        self.join(120)
        assert not self.is_alive()


def weight_label(pod: dict[str, Any]) -> str:
    """The label of a vLLM engine's weights, asked with the key that only its pod has."""
    env = next(c["env"] for c in pod["spec"]["containers"] if c["name"] == "engine")
    key = next(e["value"] for e in env if e["name"] == "RLFLEET_ENGINE_ADMIN_KEY")
    request = urllib.request.Request(engine_url(pod) + "/weight_info", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["weight_version"])


def vllm_face() -> dict[str, Any]:
    """Pods of the reference engine as vLLM, with a key of their own on its control paths."""
    command = [
        "python", "-m", "e2e.sim.engine", "--api", "vllm", "--host", "$(RLFLEET_POD_IP)", "--port", "30000",
        "--backend", "numpy", "--admin-api-key=$(RLFLEET_ENGINE_ADMIN_KEY)",
    ]  # fmt: skip
    # Beside the plug-in that the operator puts there.
    env = [{"name": "PYTHONPATH", "value": f"{ROOT / 'operator'}:{ROOT}"}]
    engine = {"name": "engine", "image": "rlfleet/reference-engine", "command": command, "env": env}
    return {"template": {"spec": {"terminationGracePeriodSeconds": 1, "containers": [engine]}}}


@pytest.mark.slow
def test_vllm_engines_behind_vllm_router_keep_their_requests_over_twenty_rounds(fleet: Fleet) -> None:
    """Keep, vLLM's default, and a router that passes any path on: the engine refuses what is not for users."""
    fleet.pipeline()
    router = Router(fleet, "VLLMRouter")
    engine = {"type": "VLLM", "gpusPerEngine": 1, "port": 30000}
    fleet.pool(2, engine=engine, source=vllm_face(), routers=[router_entry("VLLMRouter")])
    fleet.trainer()
    pods = fleet.ready_engines(2)
    assert router.listed() == set()
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    client = Completions(router, pods)
    client.start()
    try:
        for version in range(20):
            assert fleet.sync(version)["status"]["phase"] == "Succeeded"
            assert [weight_label(pod) for pod in pods] == [str(version)] * 2
            # What a client of the router may pause without a key would hold up requests for ever.
            assert http("POST", router.url + "/pause", {})[0] == 401
    finally:
        client.ended()
    assert client.failures == []
    assert client.answered, "requests flowed"


def test_every_router_of_a_pool_lists_the_engine_while_it_is_proven_and_one_that_is_replaced_is_healed(
    fleet: Fleet,
) -> None:
    """One router of each kind before one engine, one with a key, and the label that an InferencePool selects."""
    fleet.pipeline()
    keys = {"SMG": "secret-of-smg"}
    behind = {kind: Router(fleet, kind, kind.lower(), keys.get(kind, "")) for kind in PROGRAMS}
    gateway = {"name": "gateway", "type": "InferencePool"}
    fleet.pool(1, routers=[*(router_entry(k, k.lower(), keyed=k in keys) for k in PROGRAMS), gateway])
    fleet.trainer()
    (pod,) = fleet.ready_engines(1)
    for kind, router in behind.items():
        assert router.listed() == set()
        assert router.generate()[0] == NO_WORKER[kind], kind
    assert labelled(fleet) == []
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    for router in behind.values():
        assert router.listed() == {engine_url(pod)}
        code, answer = router.generate()
        assert (code, answer["meta_info"]["weight_version"]) == (200, "-1")
    wait_until(lambda: labelled(fleet) == [pod["metadata"]["name"]], "the label that an InferencePool selects")
    # Closed means paused: entries stay, so that requests wait instead of failing.
    rounds(fleet, behind["SMG"], range(2))
    assert all(router.listed() == {engine_url(pod)} for router in behind.values())
    # A router that is replaced has forgotten everything.
    behind = {kind: router.replaced() for kind, router in behind.items()}
    for router in behind.values():
        wait_until(lambda router=router: router.listed() == {engine_url(pod)}, "the entry")  # type: ignore[misc]
        assert router.generate()[0] == 200
    # An engine that a person takes out of service leaves them all.
    name = pod["metadata"]["name"]
    fleet.cluster.kubectl("annotate", "pod", name, "-n", fleet.namespace, "rlfleet.dev/quarantine=look")
    for router in behind.values():
        wait_until(lambda router=router: router.listed() == set(), "the entry to go")  # type: ignore[misc]
    wait_until(lambda: labelled(fleet) == [], "the label to go")
    # The operator itself reads every list before it lets a pool go, the one behind the key among them.
    fleet.cluster.kubectl("delete", "epool/e", "-n", fleet.namespace, "--wait=true", timeout=120)
    said = [e.get("note") or "" for e in fleet.cluster.get("events.events.k8s.io", "-n", fleet.namespace)["items"]]
    assert not [note for note in said if note.startswith("Deleted although")], said


def labelled(fleet: Fleet) -> list[str]:
    """Pods that the selector of an InferencePool finds, asked of the apiserver."""
    found = fleet.cluster.get("pods", "-n", fleet.namespace, "-l", "rlfleet.dev/pool=e,rlfleet.dev/serving=true")
    return [str(p["metadata"]["name"]) for p in found["items"]]
