"""The status of a pool: counts, versions, bounded lists, conditions that say unknown where it is unknown."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api import wire
from rlfleet.api.conditions import Reason
from rlfleet.api.v1alpha1.enginepool_status import EnginePoolStatus, EngineState
from rlfleet.plan.lifecycle import Derived, derive
from rlfleet.plan.pool_elastic import Row
from rlfleet.plan.pool_observed import Observed, Problem
from rlfleet.plan.pool_status import build_status, ranges
from rlfleet.plan.start_failures import StartFailure
from tests.plan.pool_kit import COMMITTED, OLD_DIGEST, fact, gate

S = EngineState
R = frozenset({"r"})
NOW = "2026-01-01T00:00:00Z"


def row(index: int, *, answered: bool = True, **status: Any) -> Row:
    found = gate(**({"routed": {"r": True}} | status))
    pod = fact(index)
    derived = derive(pod, found if answered else None, committed=COMMITTED, routers=R, previous=S.ACTIVE)
    return Row(pod, derived, found, answered)


def status(*rows: Row, replicas: int | None = None, old: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "generation": 3,
        "replicas": len(rows) if replicas is None else replicas,
        "rows": rows,
        "pool": "a",
        "routers": R,
        "template_hash": "v1-x",
        "committed": COMMITTED,
    }
    return build_status(Observed(**(values | more)), old or {}, now=NOW)


def condition(found: dict[str, Any], type_: str) -> tuple[str, str]:
    c = next(c for c in found["conditions"] if c["type"] == type_)
    return c["status"], c["reason"]


def test_a_gate_that_takes_no_order_of_this_release_is_named_with_what_to_do() -> None:
    old = replace(row(1), gate=gate().model_copy(update={"protocol_version": 0}))
    found = status(row(0), old)
    assert condition(found, "Degraded") == ("True", "GateTooOld")
    told = next(c["message"] for c in found["conditions"] if c["type"] == "Degraded")
    assert fact(1).name in told
    assert "spec.gate.image" in told
    assert condition(status(row(0), row(1)), "Degraded") == ("False", "AsExpected")


def test_engines_are_fenced_in_once_all_of_them_were_seen_to_refuse_strangers() -> None:
    yes, no, unknown = row(0, guarded=True), row(1, guarded=False), row(1)
    before: dict[str, Any] = {"fencing": "Enforced"}
    assert status(yes, row(1, guarded=True))["fencing"] == "Enforced"
    assert status(yes, no)["fencing"] == "Cooperative"
    assert status(yes, no, old=before)["fencing"] == "Cooperative"
    # What is not known yet (an engine that boots, an operator that just started) takes nothing back and adds nothing.
    for rows in ((yes, unknown), (unknown,), (), (replace(yes, gate=None),)):
        assert status(*rows)["fencing"] == "Cooperative"
        assert status(*rows, old=before)["fencing"] == "Enforced"


def test_healthy_pool() -> None:
    found = status(row(0), row(1))
    assert found["counts"]["active"] == 2
    assert found["versions"] == [{"version": 12, "engines": "0-1"}]
    assert found["selector"] == "rlfleet.dev/pool=a"
    assert condition(found, "Ready") == ("True", "AllEnginesActive")
    assert condition(found, "AdmissionOpen") == ("True", "EnginesOpen")
    assert condition(found, "VersionConsistent") == ("True", "VersionsAgree")
    assert condition(found, "Degraded") == ("False", "AsExpected")
    assert condition(found, "Progressing") == ("False", "Idle")
    engine = found["engines"][0]
    assert (engine["state"], engine["version"], engine["fence"], engine["routed"]) == ("Active", 12, 5, True)
    assert "failure" not in engine


def test_a_pool_of_adopted_pods_promises_less_owes_none_and_names_whom_nobody_replaces() -> None:
    adopted: dict[str, Any] = {"source": "adopt", "selector": "app=x", "template_hash": None}
    found = status(row(3), **adopted)
    assert (found["admissionGuarantee"], found["selector"]) == ("DetectOnly", "app=x")
    assert found["counts"]["pending"] == 0, "an index is a name here, not a place to fill"
    assert all(c["type"] != "TemplateOutdated" for c in found["conditions"])
    assert condition(found, "Ready") == ("True", "AllEnginesActive")
    assert condition(status(replicas=0, **adopted), "Ready") == ("False", "NoEngines")
    bad = Row(fact(0), Derived(S.QUARANTINED, Reason.POISONED, "a load began"), gate(), True)

    def text(**more: Any) -> str:
        conditions = status(bad, **adopted, **more)["conditions"]
        return next(str(c["message"]) for c in conditions if c["type"] == "Degraded")

    assert f"{bad.pod.name}: spec.sync.onFailure is Replace, but nobody but its maker" in text(replaces=True)
    assert "its maker" not in text()
    assert f"1 engines, among them {bad.pod.name}: " in text(), "an adopted engine is called as its pod"


def test_empty_pool_is_ready() -> None:
    found = status(replicas=0)
    assert condition(found, "Ready") == ("True", "NoEngines")
    assert condition(found, "AdmissionOpen") == ("False", "NoEngines")


def test_silent_gate_is_unknown_and_never_not_routed() -> None:
    found = status(row(0), row(1, answered=False))
    assert "routed" not in found["engines"][1]
    assert found["engines"][1]["state"] == "Active"
    assert found["engines"][1]["failure"].startswith("GatesUnreachable")
    assert condition(found, "Ready") == ("Unknown", "GatesUnreachable")
    assert condition(found, "VersionConsistent") == ("Unknown", "GatesUnreachable")
    assert condition(found, "AdmissionOpen") == ("True", "EnginesOpen")
    assert condition(status(row(0, answered=False)), "AdmissionOpen") == ("Unknown", "GatesUnreachable")


def test_engines_open_with_other_weights_are_said() -> None:
    found = status(row(0), row(1, holds=(11, OLD_DIGEST)))
    assert condition(found, "VersionConsistent") == ("False", "VersionsDiffer")
    assert condition(found, "Degraded") == ("True", "EnginesQuarantined")
    assert condition(found, "Ready") == ("False", "EnginesNotActive")


def test_missing_pods_count_as_pending_and_pipeline_not_found_is_said() -> None:
    found = status(replicas=3, pipeline_found=False)
    assert found["counts"]["pending"] == 3
    assert condition(found, "Ready") == ("False", "PipelineNotFound")
    assert condition(found, "Degraded") == ("True", "PipelineNotFound")


def test_engines_that_wait_for_a_round_say_so() -> None:
    waiting = row(0, holds=None, routed={"r": False})
    assert condition(status(waiting), "Ready") == ("False", "CatchUpPending")
    assert "failure" not in status(waiting)["engines"][0]


def test_engines_whose_attempts_are_spent_are_named() -> None:
    spent = Row(fact(1), Derived(S.QUARANTINED, Reason.CATCH_UP_EXHAUSTED, "delete the pod, or sync"))
    found = status(row(0), spent)
    assert condition(found, "Degraded") == ("True", "CatchUpExhausted")
    message = next(c["message"] for c in found["conditions"] if c["type"] == "Degraded")
    assert spent.pod.name in message
    assert found["engines"][1]["failure"].startswith("CatchUpExhausted")


def test_problems_and_waits_show() -> None:
    found = status(row(0), problems=(Problem(Reason.INVALID_SPEC, "spec.gate.image is missing", stops=True),))
    assert condition(found, "Ready") == ("False", "InvalidSpec")
    assert condition(found, "Degraded") == ("True", "InvalidSpec")
    waits = status(row(0), waits=((Reason.ROUND_IN_PROGRESS, "later"),))
    assert condition(waits, "Progressing") == ("True", "RoundInProgress")


def test_router_that_keeps_engines_from_starting_is_a_named_condition() -> None:
    kept = Row(fact(0), Derived(S.BOOTING, Reason.ROUTER_UNREACHABLE, "its start waits: main does not answer"))
    found = status(kept)
    assert condition(found, "Degraded") == ("True", "RouterUnreachable")
    assert found["engines"][0]["failure"].startswith("RouterUnreachable")


def test_engines_that_take_no_weights_are_said_in_the_words_of_their_gates() -> None:
    found = row(0)
    assert found.gate is not None
    report = found.gate.engine.model_copy(update={"refused": "SGLang 9.9 is not known"})
    refused = replace(found, gate=found.gate.model_copy(update={"engine": report}))
    said = status(refused, row(1))
    assert condition(said, "Degraded") == ("True", "Unsupported")
    message = next(c["message"] for c in said["conditions"] if c["type"] == "Degraded")
    assert "1 engines take no weights" in message
    assert "SGLang 9.9 is not known" in message


def test_an_engine_that_a_router_lists_and_sends_nothing_is_never_called_fine() -> None:
    ill = row(0, shunned={"r": "its circuit breaker is open"})
    some = status(ill, row(1))
    assert condition(some, "Degraded") == ("True", "EnginesShunned")
    assert "router r sends it no requests: its circuit breaker is open" in str(some["conditions"])
    assert condition(some, "AdmissionOpen") == ("True", "EnginesOpen")
    # What a router that is not the pool's any more thought of it is nobody's concern.
    assert condition(status(row(0, shunned={"old": "x"})), "Degraded") == ("False", "AsExpected")
    # No request gets through.
    assert condition(status(ill), "AdmissionOpen") == ("False", "EnginesShunned")
    # One router of two does send requests.
    both = row(0, routed={"r": True, "s": True}, shunned={"r": "x"})
    two = status(both, routers=frozenset({"r", "s"}))
    assert condition(two, "AdmissionOpen") == ("True", "EnginesOpen")
    assert condition(two, "Degraded") == ("True", "EnginesShunned")


def test_outdated_pods_are_counted() -> None:
    r = row(0)
    found = status(Row(r.pod, r.derived, r.gate, r.answered, outdated=True), row(1))
    assert condition(found, "TemplateOutdated") == ("True", "TemplateChanged")


def test_same_observation_same_status_so_that_nothing_is_written() -> None:
    rows = [row(0), row(1, answered=False)]
    first = status(*rows)
    again = build_status(
        Observed(3, 2, tuple(reversed(rows)), "a", R, "v1-x", COMMITTED), first, now="2027-01-01T00:00:00Z"
    )
    assert again == first


def test_large_pools_list_only_what_is_not_as_it_should_be() -> None:
    rows = [row(i) for i in range(500)]
    rows[77] = Row(rows[77].pod, Derived(S.FAILED, Reason.POD_FAILED, "exit 1"), None, False)
    found = status(*rows)
    assert [e["index"] for e in found["engines"]] == [77]
    assert found["versions"] == [{"version": 12, "engines": "0-76,78-499"}]
    assert found["counts"]["active"] == 499


@given(st.sets(st.integers(0, 1023)))
def test_ranges_are_lossless_and_minimal(indices: set[int]) -> None:
    text = ranges(indices)
    parts = [p.split("-") for p in text.split(",")] if text else []
    back = [i for p in parts for i in range(int(p[0]), int(p[-1]) + 1)]
    assert back == sorted(indices)
    assert all(int(b[0]) > int(a[-1]) + 1 for a, b in itertools.pairwise(parts))
    assert len(text) <= 8192


ROWS = st.lists(
    st.builds(
        row,
        st.integers(0, 1023),
        answered=st.booleans(),
        paused=st.sampled_from([True, False, None]),
        holds=st.sampled_from([None, (12, COMMITTED.manifest_digest), (11, OLD_DIGEST)]),
        routed=st.sampled_from([{}, {"r": True}, {"r": None}]),
    ),
    max_size=70,
    unique_by=lambda r: r.pod.index,
)


@given(ROWS, st.integers(0, 1024), st.booleans())
def test_any_observation_gives_a_status_that_the_schema_takes(rows: list[Row], replicas: int, found: bool) -> None:
    built = status(*rows, replicas=replicas, pipeline_found=found)
    parsed = EnginePoolStatus.model_validate(built)
    assert len(parsed.engines) <= 64
    assert len(built["conditions"]) == 9


def test_what_a_gate_reports_of_devices_and_a_long_selector_keep_no_status_from_being_written() -> None:
    """A status that the schema refuses is tried again for ever, and whatever it says stays as it is."""
    odd = wire.DeviceReport(source="Declared", node="n1", uuids=("GPU-a GPU-b",))
    told = replace(row(0), gate=gate(routed={"r": True}).model_copy(update={"devices": odd}))
    far = replace(row(1), pod=replace(fact(1), index=10**9))
    found = status(told, far, selector=",".join(f"{'k' * 317}={'v' * 63}" for _ in range(16)))
    assert "gpus" not in EnginePoolStatus.model_validate(found).to_dict()["engines"][0]


def test_a_pool_whose_pipeline_is_being_deleted_says_so_with_what_to_do() -> None:
    found = status(row(0), pipeline_deleting=True)
    assert condition(found, "Ready") == ("False", "PipelineDeleting")
    assert condition(found, "Progressing") == ("False", "PipelineDeleting")
    assert condition(found, "Degraded") == ("True", "PipelineDeleting")
    said = next(c["message"] for c in found["conditions"] if c["type"] == "Ready")
    assert "delete this pool" in said


def test_engines_that_serve_without_a_record_are_open_and_not_ready() -> None:
    def lost(index: int, **changes: Any) -> Row:
        found = gate(routed={"r": True}, **changes)
        pod = fact(index)
        return Row(pod, derive(pod, found, committed=None, routers=R, previous=S.ACTIVE), found, True)

    found = status(lost(0), lost(1), committed=None)
    assert condition(found, "Ready") == ("False", "CommittedUnknown")
    assert condition(found, "AdmissionOpen") == ("True", "EnginesOpen")
    assert condition(found, "VersionConsistent") == ("True", "VersionsAgree")
    assert "CommittedUnknown" in found["engines"][0]["failure"]
    differ = status(lost(0), lost(1, holds=(13, OLD_DIGEST)), committed=None)
    assert condition(differ, "VersionConsistent") == ("False", "VersionsDiffer")
    closed = status(lost(0, paused=True), committed=None)
    assert condition(closed, "AdmissionOpen") == ("False", "EnginesClosed")
    assert condition(closed, "Ready") == ("False", "NothingCommitted")


def test_what_keeps_failing_before_it_serves_is_named_with_its_node() -> None:
    failing = {0: StartFailure(4, "n1", 3, 1_000, "u"), 1: StartFailure(1, "n2", 1, 1_000, "v")}
    found = status(row(0), replicas=2, failures=failing, refused_since=5_000)
    assert condition(found, "Degraded") == ("True", "EnginesKeepFailing")
    degraded = next(c for c in found["conditions"] if c["type"] == "Degraded")
    assert "on node n1 3 engines in a row (index 0)" in degraded["message"]
    assert [f["index"] for f in found["startFailures"]] == [0, 1]
    assert found["podsRefusedSince"] == "1970-01-01T00:00:05Z"
    EnginePoolStatus.model_validate(found)
    many = {i: StartFailure(1 + i % 7, "", 1, 0, f"u{i}") for i in range(100)}
    listed = status(row(0), failures=many)["startFailures"]
    assert len(listed) == 64
    assert min(f["count"] for f in listed) >= 3, "those that fail most"
    well = status(row(0))
    assert (well.get("startFailures"), well.get("podsRefusedSince")) == (None, None)
    assert condition(well, "Degraded") == ("False", "AsExpected")
