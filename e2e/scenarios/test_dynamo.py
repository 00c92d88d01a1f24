"""Dynamo workers as members of rounds: the guide's own manifests, with the real runtime and a scripted engine.

Frontend, registration, discovery and system servers are Dynamo's; the engine behind the routes is e2e/dynamo/worker.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.dynamo.fixtures import installed
from e2e.dynamo.install import ensure
from e2e.dynamo.runtime import WORKER, Runtime, environment, post
from e2e.scenarios.adopting import shell
from e2e.scenarios.kit import ROOT, Fleet, wait_until

pytestmark = pytest.mark.cluster

SYNC = {"deadlines": {"pendingSeconds": 30, "stagingSeconds": 30, "pausedSeconds": 30}, "drainSeconds": 2}


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[Runtime]:
    """A Dynamo frontend beside the cluster."""
    installed()
    one = Runtime(tmp_path / "dynamo")
    try:
        one.start_frontend()
        yield one
    finally:
        one.stop()


def example(frontend: Runtime) -> tuple[dict[str, Any], dict[str, Any]]:
    """The documented StatefulSet and pool, with the scripted engine in place of vLLM."""
    workload, pool = yaml.safe_load_all((ROOT / "docs/examples/dynamo.yaml").read_text())
    engine = workload["spec"]["template"]["spec"]["containers"][0]
    engine.pop("args")
    engine["command"] = [str(ensure()), str(WORKER)]
    known = {e["name"] for e in engine["env"]}
    own = environment(frontend.store, "$(POD_IP)")
    engine["env"] += [{"name": k, "value": v} for k, v in own.items() if k not in known]
    workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    pool["spec"]["pipeline"] = "p"
    # Services lead nowhere on hollow nodes.
    pool["spec"]["source"]["dynamo"].pop("service")
    pool["spec"]["source"]["dynamo"]["url"] = frontend.url
    return workload, pool


def start(fleet: Fleet, frontend: Runtime, folder: Path) -> None:
    """Carry out the guide's first block."""
    fleet.pipeline(sync=SYNC)
    wait_until(lambda: fleet.status("rlpipeline", "p").get("publicKeys"), "the operator's public keys")
    page = (ROOT / "docs/guides/dynamo.md").read_text()
    come = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    (folder / "docs/examples").mkdir(parents=True)
    (folder / "docs/examples/dynamo.yaml").write_text(yaml.safe_dump_all(example(frontend)))
    shell(fleet, folder, come.replace("rlpipeline demo", "rlpipeline p"))


def worker(fleet: Fleet, name: str) -> dict[str, Any]:
    """What the scripted engine of a pod is now."""
    found: dict[str, Any] = post(f"http://{fleet.pod(name)['status']['podIP']}:8081/engine/tell_state")
    return found


def rows(fleet: Fleet) -> dict[str, dict[str, Any]]:
    """The engines as status shows them, by pod name."""
    return {e["name"]: e for e in fleet.status("enginepool", "workers").get("engines") or []}


def states(fleet: Fleet) -> dict[str, str]:
    """State of each engine by pod name."""
    return {name: str(e["state"]) for name, e in rows(fleet).items()}


def said(fleet: Fleet, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition of the pool."""
    conditions = fleet.status("enginepool", "workers").get("conditions") or []
    return next(((c["status"], c["reason"], c["message"]) for c in conditions if c["type"] == kind), ("", "", ""))


NAMES = ["demo-workers-0", "demo-workers-1"]


def test_the_guide_makes_workers_members_of_rounds(fleet: Fleet, frontend: Runtime, tmp_path: Path) -> None:
    start(fleet, frontend, tmp_path)
    fleet.trainer()
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    base = {n: worker(fleet, n)["weights"] for n in NAMES}
    done = fleet.sync(1)
    assert {m["engine"]: m["result"] for m in done["status"]["members"]} == dict.fromkeys(NAMES, "Ok")
    now = {n: worker(fleet, n) for n in NAMES}
    assert [(w["version"], w["paused"]) for w in now.values()] == [("1", False)] * 2
    assert len({w["weights"] for w in now.values()}) == 1
    assert not {w["weights"] for w in now.values()} & set(base.values()), "other bytes than before"
    wait_until(lambda: states(fleet) == dict.fromkeys(NAMES, "Active"), "both to be shown as Active")
    status = fleet.status("enginepool", "workers")
    assert (status["admissionGuarantee"], status["fencing"]) == ("DetectOnly", "Cooperative")
    wait_until(lambda: said(fleet, "Degraded")[:2] == ("False", "AsExpected"), "nothing to be wrong")
    told = {e["name"]: e["instance"] for e in status["engines"]}
    assert all(re.fullmatch(r"[0-9]{1,20}", i) for i in told.values()), told


@pytest.mark.slow
def test_workers_that_are_not_listed_restarted_or_unknown(fleet: Fleet, frontend: Runtime, tmp_path: Path) -> None:
    start(fleet, frontend, tmp_path)
    fleet.trainer()
    assert fleet.sync(-1, seed=100)["status"]["phase"] == "Succeeded"
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"
    wait_until(lambda: states(fleet) == dict.fromkeys(NAMES, "Active"), "both to be shown as Active")
    first, second = NAMES
    instance = rows(fleet)[first]["instance"]

    # It runs on, and its frontend does not list it: closed and kept out, and in nobody's way.
    frontend.unlist(instance)
    wait_until(lambda: str(rows(fleet)[first].get("failure")).startswith("WorkerNotListed"), "it to be named")
    wait_until(lambda: worker(fleet, first)["paused"], "it to be closed")
    assert said(fleet, "Degraded")[:2] == ("True", "WorkerNotListed")
    done = fleet.sync(2)
    assert done["status"]["phase"] == "Succeeded"
    assert [m["engine"] for m in done["status"]["members"]] == [second]
    assert (worker(fleet, first)["version"], worker(fleet, first)["paused"]) == ("1", True)
    assert (worker(fleet, second)["version"], worker(fleet, second)["paused"]) == ("2", False)
    assert fleet.pod(first)["status"]["phase"] == "Running", "what is not listed is not gone"

    # Started again it has another instance id at the same URL, and catches up.
    fleet.cluster.hollow.crash(fleet.namespace, first, "engine")
    wait_until(lambda: rows(fleet)[first].get("instance") not in (None, instance), "another process to be seen")
    wait_until(lambda: states(fleet) == dict.fromkeys(NAMES, "Active"), "it to have caught up")
    assert (worker(fleet, first)["version"], worker(fleet, first)["paused"]) == ("2", False)
    assert worker(fleet, first)["weights"] == worker(fleet, second)["weights"]

    # No frontend: nothing is known, so nothing is opened, closed or taken along.
    frontend.processes[0].kill()
    wait_until(lambda: said(fleet, "Ready")[:2] == ("Unknown", "DiscoveryUnreachable"), "the pool to say so")
    refused = fleet.sync(3)
    assert refused["status"]["phase"] == "Failed"
    assert "DiscoveryUnreachable" in str(refused["status"]["conditions"]), refused["status"]
    assert [(worker(fleet, n)["version"], worker(fleet, n)["paused"]) for n in NAMES] == [("2", False)] * 2
    frontend.start_frontend()
    wait_until(lambda: said(fleet, "Ready")[0] == "True", "the frontend to be heard again")
    assert fleet.sync(3, attempt=2)["status"]["phase"] == "Succeeded"
    assert [(worker(fleet, n)["version"], worker(fleet, n)["paused"]) for n in NAMES] == [("3", False)] * 2
