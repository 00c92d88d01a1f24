"""Serialized rounds on real processes: what is committed, what engines hold, what is written, what is refused."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from e2e.cluster.fixtures import temporary_namespace
from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import (
    ROOT,
    Fleet,
    Operator,
    condition,
    engine_url,
    free_port,
    http,
    wait_until,
)

pytestmark = pytest.mark.cluster

OPERATOR = "system:serviceaccount:rlfleet-system:"


def serialized_fleet(fleet: Fleet, replicas: int = 2, **pipeline: Any) -> list[dict[str, Any]]:
    """A pipeline with ready engines and a trainer whose base is committed."""
    fleet.pipeline(**pipeline)
    fleet.pool(replicas)
    fleet.trainer()
    pods = fleet.ready_engines(replicas)
    base = fleet.sync(-1, seed=100)
    assert base["status"]["phase"] == "Succeeded", base["status"]
    return pods


@dataclass(frozen=True)
class Idle:
    """A fleet of which nobody asks anything."""

    fleet: Fleet
    mark: int
    """Position in the audit log since when it has nothing to do."""
    until: datetime
    """A minute after that."""


@pytest.fixture(scope="module")
def idle(cluster: LocalCluster, operator: Operator) -> Iterator[Idle]:
    """It stands there while the tests of this module run, and they cost the minute that it is watched for."""
    with temporary_namespace(cluster) as namespace:
        fleet = Fleet(cluster, namespace)
        serialized_fleet(fleet, 2)
        wait_quiet(cluster, fleet)
        yield Idle(fleet, cluster.audit_mark(), datetime.now(UTC) + timedelta(minutes=1))


@pytest.mark.usefixtures("idle")
def test_engines_hold_what_the_trainer_published(fleet: Fleet, tmp_path: Path) -> None:
    pods = serialized_fleet(fleet)
    before = {p["metadata"]["name"]: fleet.checksum(p) for p in pods}
    saved = tmp_path / "saved"
    digest = fleet.publish(1, seed=5, save=str(saved))
    done = fleet.ended(fleet.order(1))

    status = done["status"]
    assert status["phase"] == status["outcome"] == "Succeeded"
    assert status["committed"] is True
    assert status["manifestDigest"] == digest
    assert status["plan"]["serialized"] == len(pods)
    assert [m["result"] for m in status["members"]] == ["Ok"] * len(pods)
    assert condition(done, "Complete") == "True"
    assert {"stageMs", "quiesceMs", "transferMs", "verifyMs", "publishMs", "pausedMs", "totalMs"} <= set(
        status["timings"]
    )
    committed = fleet.status("rlpipeline", "p")["committed"]
    assert (committed["version"], committed["manifestDigest"]) == (1, digest)

    # Asked of the engines themselves, and of another engine that loaded the same state dict from disk.
    assert [fleet.label(p) for p in pods] == ["1"] * len(pods)
    assert not any(fleet.paused(p) for p in pods)
    sums = {fleet.checksum(p) for p in pods}
    assert len(sums) == 1
    assert not sums & set(before.values())
    assert sums == {checksum_from_disk(saved)}
    assert sums == {d["digest"] for d in committed["engineDigests"]}


def checksum_from_disk(folder: Path) -> str:
    """Checksum of an engine of our own that loaded a folder of safetensors."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, "-m", "e2e.sim.engine", "--host", "127.0.0.1", "--port", str(port), "--backend", "numpy",
         "--no-health-generation"],
        cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}", "PATH": "/usr/bin:/bin"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"

            def up() -> bool:
                try:
                    return http("GET", url + "/model_info", timeout=2)[0] == 200
                except OSError:
                    return False

            wait_until(up, "an engine of our own")
            assert http("POST", url + "/update_weights_from_disk", {"model_path": str(folder)})[0] == 200
            return str(http("POST", url + "/weights_checker", {"action": "checksum"})[1]["per_engine_checksum"])
        finally:
            process.terminate()


def test_a_request_in_flight_survives_the_round_and_names_its_spans(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(1, engine_args=("--step-ms", "30"))
    fleet.trainer()
    pod = fleet.ready_engines(1)[0]
    fleet.sync(-1, seed=100)
    body = {
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 60, "temperature": 1.0},
        "return_logprob": True,
    }
    script = "import sys,json,urllib.request as u;print(u.urlopen(u.Request(sys.argv[1],sys.argv[2].encode(),{'Content-Type':'application/json'})).read().decode())"  # noqa: E501
    import json

    with subprocess.Popen(
        [sys.executable, "-c", script, engine_url(pod) + "/generate", json.dumps(body)], stdout=subprocess.PIPE
    ) as request:
        wait_until(lambda: http("GET", engine_url(pod) + "/v1/loads")[1]["loads"][0]["num_running_reqs"], "a request")
        done = fleet.sync(1)
        assert done["status"]["phase"] == "Succeeded"
        out, _ = request.communicate(timeout=60)
    answer = json.loads(out)
    spans = answer["meta_info"]["weight_versions"]
    assert [s["version"] for s in spans] == ["-1", "1"]
    assert len(answer["output_ids"]) == 60


def test_writes_of_a_round_stay_within_the_budget(fleet: Fleet, cluster: LocalCluster) -> None:
    serialized_fleet(fleet, 4)
    fleet.sync(1)
    wait_quiet(cluster, fleet)
    mark = cluster.audit_mark()
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    wait_quiet(cluster, fleet)
    writes = writes_of(cluster, fleet, mark)
    assert 0 < len(writes) <= 14 + 1, writes


def writes_of(cluster: LocalCluster, fleet: Fleet, mark: int) -> list[str]:
    """Writes to this namespace by the operator and by whoever ordered the round; Events and leases apart."""
    return [
        f"{e.verb} {e.resource}/{e.subresource or ''} {e.name} {e.user}"
        for e in cluster.audit(since=mark)
        if e.namespace == fleet.namespace
        and e.verb in ("create", "update", "patch", "delete")
        and e.resource in ("rlpipelines", "enginepools", "syncrounds", "pods")
        and "hollow" not in e.user
        and "controller" not in e.user
        and "scheduler" not in e.user
    ]


def wait_quiet(cluster: LocalCluster, fleet: Fleet, seconds: float = 4.0) -> None:
    """Wait until nobody has written to the fleet's objects for a few polls of the operator."""
    last = [cluster.audit_mark(), time.monotonic()]

    def quiet() -> bool:
        if writes_of(cluster, fleet, int(last[0])):
            last[:] = [cluster.audit_mark(), time.monotonic()]
        return time.monotonic() - last[1] > seconds

    wait_until(quiet, "writes to end")


def test_an_empty_fleet_commits_for_those_to_come(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.pool(0)
    fleet.trainer()
    done = fleet.sync(3)
    assert done["status"]["phase"] == "Succeeded"
    assert done["status"]["committed"] is True
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == 3
    # Nobody has loaded these bytes yet, so what engines make of them is not known: the first one tells.
    assert not fleet.status("rlpipeline", "p")["committed"].get("engineDigests")
    fleet.pool(1)
    pod = fleet.ready_engines(1)[0]
    fleet.serving(pod, 3)
    committed = fleet.status("rlpipeline", "p")["committed"]
    assert [d["digest"] for d in committed["engineDigests"]] == [fleet.checksum(pod)]
    assert committed["manifestDigest"] == done["status"]["manifestDigest"]
    assert fleet.sync(4)["status"]["phase"] == "Succeeded"
    assert fleet.label(pod) == "4"
    assert not fleet.paused(pod)


def test_a_round_for_the_committed_bytes_ends_at_once(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 1)
    again = fleet.sync(-1, seed=100, attempt=2)
    assert again["status"]["phase"] == "Succeeded"
    assert condition(again, "Complete") == "True"
    assert "plan" not in again["status"]
    assert fleet.label(pods[0]) == "-1"


def test_a_version_that_goes_backwards_is_refused_unless_meant(fleet: Fleet) -> None:
    pods = serialized_fleet(fleet, 1)
    assert fleet.sync(5)["status"]["phase"] == "Succeeded"
    sum_of_5 = fleet.checksum(pods[0])
    code, answer = http("POST", fleet.trainer_url(), {"version": 4, "seed": 4})
    assert code == 409, answer
    refused = fleet.ended(fleet.order(4))
    assert refused["status"]["failure"]["reason"] == "VersionGoesBackwards"
    assert "expectedCommitted: 5" in refused["status"]["failure"]["message"]
    assert fleet.checksum(pods[0]) == sum_of_5
    assert not fleet.paused(pods[0])


def test_of_two_rounds_at_once_the_newer_wins_and_both_say_so(fleet: Fleet) -> None:
    serialized_fleet(fleet, 1)
    fleet.publish(7)
    older, newer = fleet.order(6), fleet.order(7)
    first, second = fleet.ended(older), fleet.ended(newer)
    assert second["status"]["phase"] == "Succeeded"
    assert first["status"]["phase"] in ("Superseded", "Failed")
    assert first["status"]["failure"]["reason"] in ("Superseded", "VersionNotHeld")
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == 7


def test_sync_before_the_sender_has_the_version_waits_and_says_why(fleet: Fleet) -> None:
    serialized_fleet(fleet, 1)
    name = fleet.order(1)
    said = wait_until(
        lambda: next(
            (c for c in fleet.status("syncround", name).get("conditions") or [] if c["reason"] == "SenderNotReady"),
            None,
        ),
        "the round to say what it waits for",
    )
    assert (said["type"], "publish it" in said["message"]) == ("Progressing", True)
    fleet.publish(1)
    assert fleet.ended(name)["status"]["phase"] == "Succeeded"


def test_a_round_for_an_unknown_pipeline_says_so(fleet: Fleet) -> None:
    spec = {"pipeline": "nobody", "version": 1, "senderIncarnation": "x"}
    fleet.apply("SyncRound", "lonely", spec)
    said = wait_until(
        lambda: next(iter(fleet.status("syncround", "lonely").get("conditions") or []), None), "the round to say so"
    )
    assert (said["type"], said["status"], said["reason"]) == ("Progressing", "False", "PipelineNotFound")
    assert "no RLPipeline 'nobody'" in said["message"]


def test_without_a_sender_the_pending_deadline_ends_the_round(fleet: Fleet) -> None:
    fleet.pipeline(sync={"deadlines": {"pendingSeconds": 3}})
    fleet.pool(1)
    pod = fleet.ready_engines(1)[0]
    fleet.incarnation = "nobody"
    done = fleet.ended(fleet.order(1))
    assert done["status"]["phase"] == "Expired"
    assert done["status"]["failure"]["reason"] == "PendingDeadline"
    assert "no running pod matches" in done["status"]["failure"]["message"]
    assert fleet.label(pod) == "default"
    problem = next(c for c in fleet.status("rlpipeline", "p")["conditions"] if c["type"] == "SenderReady")
    assert (problem["status"], problem["reason"]) == ("False", "SenderAbsent")


def test_bad_weights_are_refused_at_publish(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.trainer()
    fleet.publish(-1, seed=100)
    for change, error, words in (
        ("empty", None, "empty"),
        ("shape", "LayoutChanged", "allow_layout_change"),
        ("dtype", "LayoutChanged", "allow_layout_change"),
    ):
        code, answer = http("POST", fleet.trainer_url(), {"version": 1, "change": change})
        assert code == 409, change
        assert error is None or answer["error"] == error, change
        assert words in answer["message"].lower(), change
    # None of them left anything behind: the version is still to be had.
    assert http("POST", fleet.trainer_url(), {"version": 1, "seed": 5})[0] == 200


def test_nan_is_legal_but_said(fleet: Fleet) -> None:
    serialized_fleet(fleet, 1)
    fleet.publish(1, change="nan")
    assert fleet.ended(fleet.order(1))["status"]["phase"] == "Succeeded"
    said = next(c for c in fleet.status("rlpipeline", "p")["conditions"] if c["type"] == "SenderReady")
    assert (said["status"], said["reason"]) == ("True", "NaNWeights")


def test_a_published_pipeline_is_readable_at_a_glance(fleet: Fleet, cluster: LocalCluster) -> None:
    serialized_fleet(fleet, 1)
    wait_until(lambda: condition(fleet.get("rlpipeline", "p"), "Ready") == "True", "the pipeline to be Ready")
    cluster.kubectl("wait", "--for=condition=Ready", "rlp/p", "epool/e", "-n", fleet.namespace, "--timeout=180s")
    shown = cluster.kubectl("get", "rlfleet", "-n", fleet.namespace)
    assert "rlpipeline.rlfleet.dev/p" in shown
    assert "enginepool.rlfleet.dev/e" in shown
    assert "Succeeded" in shown


def test_an_idle_fleet_makes_no_writes_for_a_minute(idle: Idle, cluster: LocalCluster) -> None:
    wait_until(lambda: datetime.now(UTC) > idle.until, "a minute to pass", every=1)
    # Everything in the namespace: no Event, no label, nothing at its pods. (Other tests' fleets are not idle.)
    seen = [e for e in cluster.audit(since=idle.mark) if e.namespace == idle.fleet.namespace and "rlfleet" in e.user]
    minute = [e for e in seen if datetime.fromisoformat(e.at) <= idle.until]
    assert any(OPERATOR in e.user for e in minute), "the operator does look"
    assert [e for e in minute if e.verb not in ("get", "list", "watch")] == []
