"""Every way in which real engines were seen to misbehave, in each phase where it can happen.

The rows are failure runs of real SGLang and vLLM servers, as scripts of the reference engine. One of three engines
misbehaves in one call of a round that may miss one of them. What must come out is a table: how the round ends, what
becomes of the engine that misbehaved, and always: the others serve what is committed, and the odd one serves only if
it is proven to hold that too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from e2e.cluster.fixtures import temporary_namespace
from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Fleet, Operator, condition, wait_until
from e2e.scenarios.test_rounds import serialized_fleet

pytestmark = pytest.mark.cluster

ENGINES = 3
LOAD = "update_weights_from_disk"
SYNC = {
    "deadlines": {"pendingSeconds": 60, "stagingSeconds": 60, "pausedSeconds": 12},
    "maxUnavailable": 1,
    "onFailure": "Replace",
}


@dataclass(frozen=True)
class Row:
    """One misbehaviour. ``outcome``: of the round; ``result``: of the engine as a member; ``stage``: of a failure."""

    what: str
    call: str
    fault: dict[str, Any]
    outcome: str
    result: str
    stage: str = ""
    slow: bool = False
    #: Only the kubelet proves a death. A round that gets no answer before it was told ends as Failed, in this stage.
    unless_told: str = ""

    @property
    def committed(self) -> bool:
        """The round's version is committed whatever becomes of its odd member."""
        return self.outcome == "Succeeded" or self.stage == "Committed"


def once(action: str, **more: Any) -> dict[str, Any]:
    return {"action": action, "times": 1, **more}


ROWS = (
    # Quiescing: an engine that is not proven paused ends the round; nothing was loaded, and all go on as before.
    Row("pause is refused", "pause_generation", once("http500"), "Failed", "Failed", "Quiescing"),
    Row("pause says 200, goes on", "pause_generation", {"action": "lie"}, "Failed", "Failed", "Quiescing", slow=True),
    Row("pause is never answered", "pause_generation", once("hang"), "Failed", "Failed", "Quiescing", slow=True),
    Row("the engine dies in the pause", "pause_generation", once("die"), "Succeeded", "Lost", unless_told="Quiescing"),
    # Transferring: whatever was answered, only proof counts.
    Row("500, nothing loaded", LOAD, once("http500"), "Succeeded", "Unknown"),
    Row("500, but loaded", LOAD, once("http500", when="after"), "Succeeded", "Unknown"),
    Row("400, but loaded", LOAD, once("http400", when="after"), "Succeeded", "Unknown"),
    Row("400, half loaded", LOAD, once("partial"), "Succeeded", "Unknown"),
    Row("200, nothing loaded", LOAD, {"action": "lie"}, "Succeeded", "Unknown"),
    Row("200, half loaded", LOAD, {"action": "subset"}, "Succeeded", "Unknown"),
    Row("the load is never answered", LOAD, once("hang"), "Succeeded", "Unknown", slow=True),
    Row("loaded, but never answered", LOAD, once("hang", when="after"), "Succeeded", "Unknown", slow=True),
    Row("the engine dies in the load", LOAD, once("die"), "Succeeded", "Lost"),
    Row("the core dies, the process stays", LOAD, once("zombie"), "Succeeded", "Unknown", slow=True),
    # Verify: an engine that can not be asked is not proven.
    Row("the flush is refused", "flush_cache", {"action": "http400"}, "Succeeded", "Unknown", slow=True),
    Row("the flush fails", "flush_cache", {"action": "http500"}, "Succeeded", "Unknown"),
    # The checksum is read before the load too: without one to compare with, no load begins.
    Row("the checksum fails", "weights_checker", {"action": "http500"}, "Succeeded", "Failed"),
    Row("the engine dies in the flush", "flush_cache", once("die"), "Succeeded", "Lost"),
    # Publish: the label is read back.
    Row("the label is not written", "update_weight_version", {"action": "lie"}, "Succeeded", "Unknown"),
    Row("the label is refused", "update_weight_version", {"action": "http500"}, "Succeeded", "Unknown"),
    # Reopen: committed, and forward only.
    Row("resume says 200, stays", "continue_generation", {"action": "lie"}, "Failed", "Ok", "Committed", slow=True),
    Row("resume is refused", "continue_generation", {"action": "http500"}, "Failed", "Ok", "Committed"),
    Row(
        "the engine dies in the resume", "continue_generation", once("die"), "Succeeded", "Ok", unless_told="Committed"
    ),
)


@dataclass
class Stand:
    """A fleet that lives through all rows, each of which is the next version."""

    fleet: Fleet
    version: int = -1

    def engines(self) -> list[dict[str, Any]]:
        """All engines, ready, open and at what is committed: how every row begins."""

        def look() -> list[dict[str, Any]] | None:
            pods = self.fleet.ready_engines(ENGINES)
            label = str(self.fleet.status("rlpipeline", "p")["committed"]["version"])
            well = [p for p in pods if self.fleet.label(p) == label and not self.fleet.paused(p)]
            return pods if len(well) == ENGINES else None

        try:
            return wait_until(look, "all engines to serve the committed version", seconds=60, every=0.3)
        except AssertionError:
            # A row that failed may have left engines closed until the next version: it must not fail the others, too.
            self.sync()
            return wait_until(look, "all engines to serve the committed version", every=0.3)

    def sync(self) -> dict[str, Any]:
        """The next version; its round."""
        self.version += 1
        return self.fleet.sync(self.version)


@pytest.fixture(scope="module")
def stand(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """Engines whose base is committed, under an operator of their own."""
    operator = Operator(cluster, tmp_path_factory.mktemp("operator"))
    operator.start()
    with temporary_namespace(cluster) as namespace:
        fleet = Fleet(cluster, namespace)
        serialized_fleet(fleet, ENGINES, sync=SYNC)
        yield Stand(fleet)
    operator.stop()


@pytest.mark.parametrize("row", [pytest.param(r, id=r.what, marks=[pytest.mark.slow] if r.slow else []) for r in ROWS])
def test_an_engine_misbehaves(stand: Stand, row: Row) -> None:
    fleet = stand.fleet
    odd, *others = stand.engines()
    before = fleet.status("rlpipeline", "p")["committed"]["version"]
    fleet.fault(odd, row.call, **row.fault)
    status = stand.sync()["status"]

    if row.unless_told and status["phase"] == "Failed":
        row = replace(row, outcome="Failed", result="", stage=row.unless_told)
    assert status["phase"] == row.outcome, status
    assert status.get("failure", {}).get("stage", "") == row.stage
    results = {m["engine"]: m["result"] for m in status.get("members") or []}
    if results and row.result:
        assert results[odd["metadata"]["name"]] == row.result, status
    committed = fleet.status("rlpipeline", "p")["committed"]
    assert committed["version"] == (stand.version if row.committed else before)
    assert status["committed"] is row.committed
    digests = {d["digest"] for d in committed["engineDigests"]}
    for pod in others:
        assert fleet.label(pod) == str(committed["version"])
        assert fleet.checksum(pod) in digests
        assert not fleet.paused(pod)
    known = {p["metadata"]["uid"] for p in (odd, *others)}
    for pod in fleet.engines():
        # A successor that has just started is closed by its gate before it is ready; nobody is sent to it until then.
        if pod["metadata"]["uid"] in known or condition(pod, "Ready") == "True":
            serves_only_what_is_committed(fleet, pod, digests)
    # The misbehaviour ends, and so does its effect: nobody has to mend anything.
    if any(p["metadata"]["uid"] == odd["metadata"]["uid"] for p in fleet.ready_engines(ENGINES)):
        with contextlib.suppress(OSError):  # a zombie listens to nobody any more
            fleet.heal(odd)
    healed = stand.sync()["status"]
    assert healed["phase"] == "Succeeded", healed


def serves_only_what_is_committed(fleet: Fleet, pod: dict[str, Any], digests: set[str]) -> None:
    try:
        if not fleet.paused(pod):
            assert fleet.checksum(pod) in digests, pod["metadata"]["name"]
    except OSError:
        return  # it answers nobody, so it serves nobody
