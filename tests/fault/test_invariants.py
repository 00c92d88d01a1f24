"""The checker itself: a history that breaks one invariant is told from the same history that keeps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fault.calls import Call, Journal, api_label
from tests.fault.history import Revision
from tests.fault.invariants import LAG_SECONDS, Checker
from tests.fault.proxy import Fault
from tests.fault.sweep import Try, difference, sample

DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64


class History:
    """Feeds a checker; times are given by hand."""

    def __init__(self) -> None:
        self.checker = Checker()
        self.now = 100.0

    def see(
        self, plural: str, name: str, *, uid: str = "", spec: Any = None, generation: int = 1, **status: Any
    ) -> None:
        meta = {"name": name, "namespace": "n", "uid": uid or f"uid-{name}", "generation": generation}
        self.now += 1
        self.checker.revision(
            Revision(plural, {"metadata": meta, "spec": spec or {}, "status": status}, False, self.now)
        )

    def pipeline(self, fence: int, *, committed: Any = None, active: Any = None, **status: Any) -> None:
        self.see("rlpipelines", "p", fence=fence, committed=committed, activeOperation=active, **status)

    def round(self, name: str, phase: str, generation: int = 5, version: int = 1, **status: Any) -> None:
        lease = {"generation": generation, "holder": "me"}
        spec = {"pipeline": "p", "version": version}
        self.see("syncrounds", name, spec=spec, phase=phase, lease=lease, **status)

    def call(self, path: str, body: Any, *, answer: Any = None, began: float, ended: float, status: int = 200) -> None:
        self.checker.call(
            Call(1, "operator", "peer", "e-0", "uid-e-0", "POST", path, path, 1, body, began, "", ended, status, answer)
        )

    def write(self, method: str, path: str, plural: str, body: Any) -> None:
        self.checker.call(
            Call(1, "operator", "api", "apiserver", "", method, path, path, 1, body, 1.0, plural, 2.0, 200)
        )


def active(generation: int, *, holder: str = "me", committed: bool = False) -> dict[str, Any]:
    return {"uid": "uid-r1", "generation": generation, "holder": holder, "committed": committed, "kind": "Refresh"}


def weights(version: int, digest: str = DIGEST) -> dict[str, Any]:
    return {
        "version": version,
        "manifestDigest": digest,
        "engineDigests": [{"layout": "l", "digest": f"sum-{version}"}],
    }


def fence(generation: int) -> dict[str, Any]:
    return {"pipeline": "uid-p", "operation": "uid-r1", "generation": generation}


def fence_falls(h: History) -> None:
    h.pipeline(5)
    h.pipeline(4)


def two_holders(h: History) -> None:
    h.pipeline(5, active=active(5))
    h.pipeline(5, active=active(5, holder="you"))


def lease_falls(h: History) -> None:
    h.round("r1", "Staging", 5)
    h.round("r1", "Staging", 4)


def stale_call_is_accepted(h: History) -> None:
    h.call("/v1/fence", fence(9), began=1, ended=2)
    h.call("/v1/operations", fence(8), began=3, ended=4)


def reported_fence_falls(h: History) -> None:
    h.call("/v1/status", {}, answer={"fence": fence(9)}, began=1, ended=2)
    h.call("/v1/status", {}, answer={"fence": fence(8)}, began=3, ended=4)


def two_rounds(h: History) -> None:
    h.round("r1", "Staging")
    h.round("r2", "Planned", 6)


def success_without_proof(h: History) -> None:
    h.call("/v1/status", {}, answer={"engine": {}, "holds": None}, began=1, ended=2)
    plan = {"members": [{"engine": "e-0", "podUID": "uid-e-0"}]}
    members = [{"engine": "e-0", "result": "Ok"}]
    h.round("r1", "Succeeded", committed=True, manifestDigest=DIGEST, plan=plan, members=members)


def success_without_commit(h: History) -> None:
    h.round("r1", "Succeeded")


def end_is_not_final(h: History) -> None:
    h.round("r1", "Failed")
    h.round("r1", "Staging", 6)


def phase_goes_back(h: History) -> None:
    h.round("r1", "Pending")
    h.round("r1", "Staging")
    h.round("r1", "Planned")


def commit_without_operation(h: History) -> None:
    h.pipeline(5, committed=weights(1))


def commit_goes_back(h: History) -> None:
    h.pipeline(5, committed=weights(2), active=active(5, committed=True))
    h.pipeline(6, committed=weights(1), active=active(6, committed=True))


def observed_too_much(h: History) -> None:
    h.pipeline(5, observedGeneration=2)


def deleted_by_name(h: History) -> None:
    h.write("DELETE", "/api/v1/namespaces/n/pods/e-0-abcde", "pods", {})


def status_without_version(h: History) -> None:
    path = "/apis/rlfleet.dev/v1alpha1/namespaces/n/rlpipelines/p/status"
    h.write("PATCH", path, "rlpipelines", {"status": {"fence": 1}})


def old_weights_serve(h: History) -> None:
    h.pipeline(5, committed=weights(1), active=active(5, committed=True))
    h.pipeline(6, committed=weights(2), active=active(6, committed=True))
    h.checker.serving("n", "p", "e-0", "1", "sum-1", h.now + 1, h.now + 2)


def other_weights_serve(h: History) -> None:
    h.pipeline(5, committed=weights(1), active=active(5, committed=True))
    h.checker.serving("n", "p", "e-0", "1", "sum-2", h.now + 1, h.now + 2)


def uncommitted_answer(h: History) -> None:
    h.pipeline(5, committed=weights(1), active=active(5, committed=True))
    h.checker.answered("n", "p", "2", h.now + 1, h.now + 2)


BROKEN: list[tuple[str, Callable[[History], None]]] = [
    ("I1", fence_falls),
    ("I1", two_holders),
    ("I1", lease_falls),
    ("I2", stale_call_is_accepted),
    ("I3", reported_fence_falls),
    ("I4", two_rounds),
    ("I5", success_without_proof),
    ("I5", success_without_commit),
    ("I6", end_is_not_final),
    ("I6", phase_goes_back),
    ("I7", commit_without_operation),
    ("I7", commit_goes_back),
    ("I8", observed_too_much),
    ("I11", deleted_by_name),
    ("I11", status_without_version),
    ("I13", old_weights_serve),
    ("I13", other_weights_serve),
    ("I14", uncommitted_answer),
]


@pytest.mark.parametrize(("invariant", "history"), BROKEN, ids=[f"{i}-{f.__name__}" for i, f in BROKEN])
def test_a_broken_history_is_found(invariant: str, history: Callable[[History], None]) -> None:
    h = History()
    history(h)
    assert [v.partition(":")[0] for v in h.checker.violations] == [invariant], h.checker.violations


def test_an_ordinary_history_is_not_complained_of() -> None:
    h = History()
    h.pipeline(4)
    h.round("r1", "Pending")
    h.pipeline(5, active=active(5))
    h.call("/v1/fence", fence(5), answer={"fence": fence(5), "engine": {}, "holds": None}, began=1, ended=2)
    for phase in ("Planned", "Staging", "Quiescing", "Transferring"):
        h.round("r1", phase)
    # A successor takes the round over, under a higher generation, and plans anew.
    h.pipeline(6, active=active(6, holder="you"))
    h.round("r1", "Transferring", 6)
    h.call("/v1/operations", fence(5), began=3, ended=4, status=412)
    h.call("/v1/fence", fence(6), answer={"fence": fence(6)}, began=1.5, ended=5)
    h.round("r1", "Committed", 6)
    h.pipeline(6, active=active(6, holder="you", committed=True), committed=weights(1))
    holds = {"version": 1, "manifestDigest": DIGEST}
    h.call("/v1/status", {}, answer={"fence": fence(6), "engine": {}, "holds": holds}, began=6, ended=7)
    plan = {"members": [{"engine": "e-0", "podUID": "uid-e-0"}]}
    members = [{"engine": "e-0", "result": "Ok"}]
    h.round("r1", "Succeeded", 6, committed=True, manifestDigest=DIGEST, plan=plan, members=members)
    h.pipeline(6, committed=weights(1))
    h.round("r2", "Planned", 7)
    h.checker.serving("n", "p", "e-0", "1", "sum-1", h.now, h.now + 1)
    # Asked before a commit that was seen while the answer was made.
    h.pipeline(7, committed=weights(2, OTHER), active=active(7, committed=True))
    h.checker.answered("n", "p", "1", h.now - 1, h.now + 1)
    h.checker.answered("n", "p", "2", h.now - LAG_SECONDS, h.now - 0.5)
    assert h.checker.violations == []


def test_a_label_is_the_same_in_every_run() -> None:
    base = "/apis/rlfleet.dev/v1alpha1/namespaces/n"
    claim = {"metadata": {"resourceVersion": "7"}, "status": {"fence": 3, "activeOperation": active(3)}}
    assert api_label("PATCH", f"{base}/rlpipelines/p/status", claim)[0] == "PATCH rlpipelines/p/status claim Refresh"
    phase = {"status": {"phase": "Staging"}}
    label = api_label("PATCH", f"{base}/syncrounds/p-v4-0123456789/status", phase)[0]
    assert label == "PATCH syncrounds/round/status phase=Staging"
    assert api_label("DELETE", "/api/v1/namespaces/n/pods/e-1-0a1b2", {})[0] == "DELETE pods/e-1"
    create = {"metadata": {"name": "e-0-fffff"}}
    assert api_label("POST", "/api/v1/namespaces/n/pods", create)[0] == "POST pods/e-0"


def test_occurrences_are_counted_per_label() -> None:
    journal = Journal()
    paths = ["/api/v1/namespaces/n/pods/e-0-aaaaa", "/api/v1/namespaces/n/pods/e-1-aaaaa"] * 2
    points = [journal.begin_api("o", "DELETE", path, {}, None).point for path in paths]
    assert points == ["DELETE pods/e-0 #1", "DELETE pods/e-1 #1", "DELETE pods/e-0 #2", "DELETE pods/e-1 #2"]
    journal.reset()
    assert journal.begin_api("o", "DELETE", paths[0], {}, None).point == "DELETE pods/e-0 #1"


def test_differences_are_named_by_their_place() -> None:
    assert difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}) == "a.c: 3 instead of 2"


def test_a_sample_is_spread_and_repeats() -> None:
    everything = [Try(f"POST e-{n} Pause #1", Fault.DROP) for n in range(100)]
    assert sample(everything, 4) == [everything[n] for n in (0, 25, 50, 75)]
    assert sample(everything, 500) == everything
