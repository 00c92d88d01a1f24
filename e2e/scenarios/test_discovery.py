"""Worker discovery as an operator process serves it: workers follow pods, and what is not known is never promised."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.fixtures import await_rights
from e2e.cluster.local import OPERATOR_NAMESPACE, LocalCluster
from e2e.scenarios.kit import Fleet, Operator, free_port, http, wait_until
from rlfleet.plan.discovery import instance_id

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def operator(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator that serves discovery."""
    one = Operator(cluster, tmp_path_factory.mktemp("operator"), **discovery())
    one.start()
    yield one
    one.stop()


def discovery() -> dict[str, str]:
    return {"DYN_ENABLE_RL": "true", "DYN_RL_PORT": str(free_port())}


def workers(operator: Operator, namespace: str, before: str = "", token: str = "") -> tuple[int, Any]:
    url = f"http://127.0.0.1:{operator.env['DYN_RL_PORT']}{before}/namespaces/{namespace}/v1/rl/workers"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        return e.code, json.load(e)


def listed(operator: Operator, fleet: Fleet, token: str = "") -> dict[int, dict[str, Any]]:
    code, body = workers(operator, fleet.namespace, token=token)
    assert code == 200, body
    assert (body["protocol_version"], body["namespace"]) == (1, "dynamo")
    return {w["instance_id"]: w for w in body["workers"]}


def numbers(pods: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {instance_id(p["metadata"]["uid"]): p for p in pods}


def listing(operator: Operator, fleet: Fleet, pods: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Wait until exactly these pods are listed, all of them well: the view of pods is a moment late."""

    def look() -> dict[int, dict[str, Any]] | None:
        found = listed(operator, fleet)
        well = not any("error" in w for w in found.values())
        return found if found.keys() == numbers(pods).keys() and well else None

    return wait_until(look, "all pods to be listed")


def serving(operator: Operator, fleet: Fleet, version: int) -> dict[int, dict[str, Any]] | None:
    """The list, if all workers in it are open with this version."""
    found = listed(operator, fleet)
    well = all((w["rlfleet"].get("version"), w["rlfleet"].get("open")) == (version, True) for w in found.values())
    return found if well else None


def test_workers_follow_pods_and_say_what_gates_say(cluster: LocalCluster, operator: Operator, fleet: Fleet) -> None:
    assert listed(operator, fleet) == {}
    fleet.pipeline()
    fleet.pool(2)
    fleet.trainer()
    pods = fleet.ready_engines(2)
    found = listing(operator, fleet, pods)
    assert [w["rlfleet"]["open"] for w in found.values()] == [False, False]  # nothing is proven yet
    fleet.sync(-1)
    fleet.sync(1)
    found = wait_until(lambda: serving(operator, fleet, 1), "both engines to serve version 1")
    assert list(found) == sorted(numbers(pods))
    for number, worker in found.items():
        pod = numbers(pods)[number]
        ours = worker.pop("rlfleet")
        address = pod["status"]["podIP"]
        assert ours["pod"] == pod["metadata"]["name"]
        assert (ours["pod_uid"], ours["engine_url"]) == (pod["metadata"]["uid"], f"http://{address}:30000")
        assert ours["fence"] == fleet.status("rlpipeline", "p")["fence"]
        gate = f"http://{address}:9440"
        assert worker == {
            "namespace": "dynamo", "component": "e", "endpoint": "rl", "instance_id": number,
            "transport": {"http": gate}, "request_plane_url": "dyn://dynamo.e.rl", "system_url": gate,
            "routes": [], "model": worker["model"], "world_size": 1,
        }  # fmt: skip
        # What is advertised is what is there: nothing below /engine/.
        assert http("POST", f"{worker['system_url']}/engine/pause_generation", {})[0] == 404
    # For clients that take no member which they do not know.
    assert all("rlfleet" not in w for w in workers(operator, fleet.namespace, "/strict")[1]["workers"])
    # A gate that does not answer is an error of that worker alone, with nothing to call.
    frozen = min(numbers(pods))
    name = numbers(pods)[frozen]["metadata"]["name"]
    cluster.hollow.freeze(fleet.namespace, name, "gate", spared=True)
    try:
        silent = listed(operator, fleet)[frozen]
        assert "no answer" in silent["error"]
        assert silent["routes"] == []
        assert not {"system_url", "world_size"} & silent.keys()
        assert not {"version", "open"} & silent["rlfleet"].keys()
        well = max(numbers(pods))
        wait_until(lambda: "error" not in listed(operator, fleet)[well], "the other worker to answer beside it")
    finally:
        cluster.hollow.thaw(fleet.namespace, name, "gate")
    listing(operator, fleet, pods)
    # A pod that goes takes its worker along; the one in its place is another worker.
    cluster.kubectl("delete", "pod", name, f"--namespace={fleet.namespace}")
    now = fleet.ready_engines(2)
    assert frozen not in listing(operator, fleet, now)


def test_a_standby_serves_it_too_and_with_tokens_the_apiserver_judges_readers(
    cluster: LocalCluster, operator: Operator, fleet: Fleet, tmp_path: Path
) -> None:
    fleet.pipeline()
    fleet.pool(1)
    pods = fleet.ready_engines(1)
    found = listing(operator, fleet, pods)
    lease = {"holderIdentity": "another", "leaseDurationSeconds": 3600, "leaseTransitions": 1}
    lease_of = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": lease}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    lease |= {"renewTime": now, "acquireTime": now}
    meta = {"name": "rlfleet-operator", "namespace": OPERATOR_NAMESPACE}
    cluster.apply({**lease_of, "metadata": meta})
    standby = Operator(
        cluster, tmp_path / "standby", **discovery(), RLFLEET_LEADER_ELECT="true", RLFLEET_DISCOVERY_AUTH="token"
    )
    cluster.kubectl("create", "serviceaccount", "reader", f"--namespace={fleet.namespace}")
    token = cluster.kubectl("create", "token", "reader", f"--namespace={fleet.namespace}").strip()
    try:
        standby.start()
        assert workers(standby, fleet.namespace)[0] == 401
        code, body = workers(standby, fleet.namespace, token=token)
        assert (code, body["error"]) == (403, "denied")
        who = f"--serviceaccount={fleet.namespace}:reader"
        cluster.kubectl("create", "rolebinding", "reader", "--clusterrole=view", who, f"--namespace={fleet.namespace}")
        user = f"system:serviceaccount:{fleet.namespace}:reader"
        for kind in ("pods", "enginepools.rlfleet.dev"):
            await_rights(cluster, user, fleet.namespace, "list", kind)
        assert found.keys() == listed(standby, fleet, token).keys()
        wait_until(lambda: listed(standby, fleet, token) == listed(operator, fleet), "both to say the same")
        # It still stands by: what it said, it said without the Lease.
        held = cluster.get("lease", meta["name"], "-n", meta["namespace"])["spec"]["holderIdentity"]
        assert held == "another"
    finally:
        standby.stop()
        cluster.kubectl("delete", "lease", meta["name"], f"--namespace={meta['namespace']}")
