"""Reading a Dynamo frontend's list, and joining it with pods: every rule, and what holds for any answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlfleet.plan.dynamo import (
    REQUIRED,
    Candidate,
    Listing,
    ProtocolRefused,
    Standing,
    Unreadable,
    Worker,
    join,
    parse,
    strangers,
)

HUGE = 12298635699951225666  # above 2^63, as instance ids are


def entry(number: int = HUGE, **edits: Any) -> dict[str, Any]:
    """A healthy entry as Dynamo 1.6.1 answers; None removes a member."""
    whole = {
        "namespace": "dynamo",
        "component": "backend",
        "endpoint": "rl",
        "instance_id": number,
        "transport": {"tcp": "10.0.0.1:41000/abc/dynamo/backend/rl"},
        "request_plane_url": "dyn://dynamo.backend.rl",
        "system_url": "http://10.0.0.1:8081",
        "routes": sorted(REQUIRED),
        "world_size": 2,
        **edits,
    }
    return {k: v for k, v in whole.items() if v is not None}


def answer(*entries: Any, **edits: Any) -> dict[str, Any]:
    return {"protocol_version": 1, "namespace": "dynamo", "workers": list(entries), **edits}


def read(*entries: Any) -> Listing:
    return parse(200, json.loads(json.dumps(answer(*entries))))


def pod(instance: str | None = str(HUGE), ip: str = "10.0.0.1", uid: str = "u1") -> Candidate:
    return Candidate(uid, f"pod-{uid}", ip, instance)


def standing(listing: Listing, *pods: Candidate, port: int = 8081, **how: Any) -> list[Standing]:
    found = join(listing, pods, port=port, **how)
    return [found[p.uid].standing for p in pods]


# ------------------------------------------------------------------------------------------------ reading


def test_an_id_beyond_what_many_readers_can_hold_keeps_every_digit() -> None:
    worker = read(entry()).workers[0]
    assert worker.instance_id == "12298635699951225666"
    assert (worker.system_url, worker.world_size, worker.error) == ("http://10.0.0.1:8081", 2, "")
    assert worker.routes == REQUIRED


@pytest.mark.parametrize("version", [None, 1])
def test_known_protocols(version: int | None) -> None:
    body = answer() if version is not None else {k: v for k, v in answer().items() if k != "protocol_version"}
    assert parse(200, body).protocol == version


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, [1]])
def test_other_protocols_are_refused(version: Any) -> None:
    with pytest.raises(ProtocolRefused, match="protocol_version"):
        parse(200, answer(protocol_version=version))


def test_an_error_closes_an_entry_whatever_else_it_says() -> None:
    for error in ("Unavailable: gone", ""):
        worker = read(entry(error=error)).workers[0]
        assert worker.error
        assert (worker.routes, worker.system_url) == (frozenset(), None)


def test_a_failed_discovery_is_no_empty_list() -> None:
    with pytest.raises(Unreadable, match="HTTP 500: etcd is away"):
        parse(500, {"error": "discovery_failed", "message": "etcd is away"})
    assert parse(200, answer()).workers == ()


@pytest.mark.parametrize(
    "broken",
    [
        entry(routes=None),
        entry(routes="pause_generation"),
        entry(routes=["pause_generation", ""]),
        entry(routes=["pause_generation", 7]),
        entry(instance_id=str(HUGE)),
        entry(instance_id=-1),
        entry(instance_id=2**64),
        entry(instance_id=1.5),
        entry(instance_id=True),
        entry(namespace=None),
        entry(component=""),
        entry(system_url=5),
        entry(world_size=0),
        entry(world_size=True),
        entry(error={}),
        "backend",
    ],
)
def test_one_malformed_entry_spoils_the_list(broken: Any) -> None:
    with pytest.raises(Unreadable, match=r"workers\[1\]"):
        parse(200, answer(entry(1), broken))


@pytest.mark.parametrize("body", [None, [], "ok", {}, {"workers": {}}, {"workers": [], "namespace": 3}])
def test_what_is_no_list_at_all(body: Any) -> None:
    with pytest.raises(Unreadable):
        parse(200, body)


def test_one_identity_twice_is_no_list() -> None:
    with pytest.raises(Unreadable, match="listed twice"):
        parse(200, answer(entry(7), entry(7, component="other"), entry(7)))
    assert len(read(entry(7), entry(7, component="other")).workers) == 2


def test_a_blank_url_is_none() -> None:
    assert [w.system_url for w in read(entry(1, system_url="  "), entry(2, system_url=None)).workers] == [None, None]
    assert read(entry(1, system_url=" http://10.0.0.1:8081 ")).workers[0].system_url == "http://10.0.0.1:8081"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(_JSON, st.sampled_from([200, 204, 404, 500]))
def test_any_answer_is_a_whole_list_or_an_error(body: Any, status: int) -> None:
    try:
        listing = parse(status, body)
    except Unreadable:
        return
    assert status == 200
    assert len(listing.workers) == len(body["workers"])


@given(st.data())
def test_no_entry_is_ever_lost(data: st.DataObject) -> None:
    entries = [
        entry(n, **data.draw(st.fixed_dictionaries({}, optional={"error": _JSON, "routes": _JSON, "model": _JSON})))
        for n in range(data.draw(st.integers(0, 3)))
    ]
    try:
        listing = parse(200, answer(*entries))
    except Unreadable:
        return
    assert [w.instance_id for w in listing.workers] == [str(e["instance_id"]) for e in entries]
    for worker, given_entry in zip(listing.workers, entries, strict=True):
        assert bool(worker.error) == (given_entry.get("error") is not None)
        assert not (worker.error and (worker.routes or worker.system_url))


# ------------------------------------------------------------------------------------------------ joining


def test_the_process_that_a_gate_sees_is_what_joins() -> None:
    assert standing(read(entry()), pod()) == [Standing.JOINED]


def test_an_address_alone_joins_nothing() -> None:
    """A worker was started again, or another pod has the address by now: the entry is another process's."""
    assert standing(read(entry()), pod(instance="7")) == [Standing.UNLISTED]
    assert standing(read(entry()), pod(instance=None)) == [Standing.UNTOLD]


def test_the_address_has_to_agree() -> None:
    for edits in (
        {"system_url": "http://10.0.0.2:8081"},
        {"system_url": "http://10.0.0.1:8082"},
        {"system_url": "http://10.0.0.1"},
        {"system_url": "http://worker-0:8081"},
        {"system_url": "http://[::1:8081"},
        {"system_url": None},
    ):
        assert standing(read(entry(**edits)), pod()) == [Standing.CONTRADICTED], edits
    same = read(entry(system_url="http://[fd00:0::1]:8081"))
    assert standing(same, pod(ip="fd00::1")) == [Standing.JOINED], "two spellings of one address"


def test_two_entries_of_one_process_or_two_pods_with_one_process_join_nothing() -> None:
    twice = read(entry(), entry(component="prefill"))
    assert standing(twice, pod()) == [Standing.CONTRADICTED]
    assert standing(twice, pod(), components=frozenset({"backend"})) == [Standing.JOINED]
    assert standing(read(entry()), pod(uid="a"), pod(uid="b")) == [Standing.CONTRADICTED] * 2


def test_error_and_missing_routes_keep_out_and_say_which() -> None:
    failing = join(read(entry(error="Unavailable")), [pod()], port=8081)["u1"]
    assert (failing.standing, "Unavailable" in failing.message) == (Standing.FAILING, True)
    lacking = join(read(entry(routes=sorted(REQUIRED - {"flush_cache"}))), [pod()], port=8081)["u1"]
    assert (lacking.standing, "flush_cache" in lacking.message) == (Standing.LACKING, True)


@given(
    st.lists(st.sampled_from([1, 2, HUGE]), max_size=3, unique=True),
    st.lists(st.sampled_from([None, "1", "2", str(HUGE)]), max_size=4),
    st.sampled_from(["http://10.0.0.1:8081", "http://10.0.0.2:8081", None]),
)
def test_whoever_joins_is_the_only_one_and_listed_healthy(
    numbers: list[int], told: list[str | None], url: str | None
) -> None:
    listing = read(*(entry(n, system_url=url) for n in numbers))
    pods = [pod(i, uid=f"u{k}") for k, i in enumerate(told)]
    found = join(listing, pods, port=8081)
    assert set(found) == {p.uid for p in pods}, "every pod has a verdict, listed or not"
    joined = [p.instance for p in pods if found[p.uid].joined]
    assert len(joined) == len(set(joined))
    assert all(i in {str(n) for n in numbers} for i in joined)


def test_workers_in_no_pod_with_a_gate_are_named() -> None:
    listing = read(entry(1), entry(2, system_url="http://10.0.0.2:8081"), entry(3, error="x"), entry(4, component="o"))
    known = strangers(listing, ["10.0.0.1", ""], components=frozenset({"backend"}))
    assert [w.instance_id for w in known] == ["2"], "one at a known address, one that fails, one of another component"
    assert [w.instance_id for w in strangers(listing, [], components=frozenset())] == ["1", "2", "4"]
    nowhere = Worker("n", "c", "rl", "5")
    assert strangers(Listing("n", (nowhere,)), ["10.0.0.1"], components=frozenset()) == (nowhere,)
