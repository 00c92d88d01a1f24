"""Rendezvous ports: claims of any pipelines never meet, and only proof ends one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rlfleet.api.v1alpha1.rlpipeline_status import MAX_CLAIMS, RendezvousClaim
from rlfleet.api.wire import SenderStatus
from rlfleet.plan.rendezvous import (
    Claim,
    Use,
    Wanted,
    Write,
    claims_of,
    doubtful,
    judged,
    leak_message,
    own,
    pick,
    rows,
    step,
    taken,
)
from tests.plan.rounds_kit import sender

MINE = Claim("10.0.0.5", 29500, "round-1", "s1", "trainer-0", "uid-t")
BY_URL = replace(MINE, pod="", pod_uid="")


def says(incarnation: str = "s1", *, pod_uid: str = "uid-t", in_flight: str | None = None) -> SenderStatus:
    return sender(incarnation=incarnation, pod_uid=pod_uid, in_flight=in_flight)


def test_a_claim_survives_the_way_into_status_and_back() -> None:
    for claim in (MINE, BY_URL, replace(MINE, leaked=True)):
        written = rows([claim])
        assert written is not None
        assert claims_of({"rendezvousClaims": written}) == (claim,)
        RendezvousClaim.model_validate(written[0])
    assert rows([]) is None
    assert claims_of({}) == ()


def test_only_the_claim_of_this_operation_and_sender_process_may_be_used() -> None:
    claims = (replace(MINE, leaked=True), replace(MINE, operation="round-0"), replace(MINE, incarnation="s0"))
    assert own(claims, operation="round-1", incarnation="s1") is None
    assert own((*claims, MINE), operation="round-1", incarnation="s1") == MINE


# ------------------------------------------------------------------------------------------ which port


def choose(claims: tuple[Claim, ...] = (), *, begin: int = 0, **more: Any) -> int | None:
    fields: dict[str, Any] = {"address": "10.0.0.5", "begin": begin, "others": frozenset(), "mine": claims}
    return pick(29500, 29503, **{**fields, **more})


def test_the_first_port_that_nobody_claims_is_taken() -> None:
    assert choose() == 29500
    assert choose(begin=7) == 29503
    assert choose(others=frozenset({("10.0.0.5", 29500)})) == 29501
    assert choose((replace(MINE, leaked=True),)) == 29501  # of ours, and nobody knows whether it is free
    assert choose(refused=frozenset({29500, 29501})) == 29502
    assert choose(refused=frozenset(range(29500, 29504))) is None
    # Elsewhere the same port is another one.
    assert choose((replace(MINE, address="10.0.0.6"),), others=frozenset({("10.0.0.7", 29500)})) == 29500


def test_one_address_in_two_spellings_is_one_address() -> None:
    other = {"metadata": {"uid": "p2"}, "status": {"rendezvousClaims": rows([replace(MINE, address="fd00:0::5")])}}
    assert pick(29500, 29501, address="FD00::5", begin=0, others=taken([other], but="p1"), mine=()) == 29501


def test_claims_that_no_status_can_hold_are_not_made() -> None:
    full = tuple(replace(MINE, port=30000 + i, leaked=True) for i in range(MAX_CLAIMS))
    assert choose(full) is None
    assert choose(full[1:]) == 29500


def test_ones_own_pipeline_is_not_among_the_others() -> None:
    pipelines = [
        {"metadata": {"uid": "p1"}, "status": {"rendezvousClaims": rows([MINE])}},
        {"metadata": {"uid": "p2"}, "status": {"rendezvousClaims": rows([replace(MINE, port=29501, leaked=True)])}},
        {"metadata": {"uid": "p3"}},
    ]
    assert taken(pipelines, but="p1") == {("10.0.0.5", 29501)}


# ------------------------------------------------------------------------------------------ never two at once


class Pipeline:
    """One pipeline, whose executions do what ``step`` says; each ``yield`` is where others may act."""

    def __init__(self, name: str, begin: int, cluster: list[Pipeline]) -> None:
        self.name = name
        self.wanted = Wanted("10.0.0.5", name, "s1", 29500, 29505, begin, "trainer-0", "uid-t")
        self.cluster = cluster
        self.claims: tuple[Claim, ...] = ()
        self.uses: int | None = None

    def _others(self) -> frozenset[tuple[str, int]]:
        objects = [{"metadata": {"uid": p.name}, "status": {"rendezvousClaims": rows(p.claims)}} for p in self.cluster]
        return taken(objects, but=self.name)

    def run(self) -> Iterator[None]:
        fresh: frozenset[int] = frozenset()
        while self.uses is None:
            others = self._others()
            yield
            next_step = step(self.claims, self.wanted, others, fresh=fresh)
            if isinstance(next_step, Use):
                self.uses = next_step.port
            elif next_step is not None:
                self.claims, fresh = next_step.claims, fresh | {next_step.port}
            yield


@given(st.lists(st.integers(0, 2), min_size=3, max_size=3), st.lists(st.integers(0, 2), max_size=60))
def test_pipelines_that_share_an_address_never_use_one_port(begins: list[int], order: list[int]) -> None:
    cluster: list[Pipeline] = []
    cluster.extend(Pipeline(f"p{i}", begin, cluster) for i, begin in enumerate(begins))
    running = [p.run() for p in cluster]
    for turn in [*order, *([0] * 60), *([1] * 60), *([2] * 60)]:
        next(running[turn], None)
        used = [p.uses for p in cluster if p.uses is not None]
        assert len(used) == len(set(used))
    assert all(p.uses is not None for p in cluster)
    # What was given up was never used, so nothing is left of it.
    assert [len(p.claims) for p in cluster] == [1, 1, 1]


WANTED = Wanted("10.0.0.5", "round-1", "s1", 29500, 29503, 0, "trainer-0", "uid-t")


def test_a_port_is_claimed_then_looked_at_then_used() -> None:
    first = step((), WANTED, frozenset())
    assert first == Write((MINE,), 29500)
    assert isinstance(first, Write)
    assert step(first.claims, WANTED, frozenset()) == Use(29500)


def test_a_port_that_the_sender_cannot_have_goes_and_the_next_comes() -> None:
    moved = step((MINE,), WANTED, frozenset(), refused=frozenset({29500}))
    assert moved == Write((replace(MINE, port=29501),), 29501)
    assert step((MINE,), WANTED, frozenset(), refused=frozenset(range(29500, 29504))) is None


def test_a_predecessors_claim_that_cannot_be_used_is_leaked_not_forgotten() -> None:
    """Its sender may have been asked to listen; only one that this execution made itself is known to be unused."""
    others = frozenset({("10.0.0.5", 29500)})
    leaked = (replace(MINE, leaked=True), replace(MINE, port=29501))
    assert step((MINE,), WANTED, others) == Write(leaked, 29501)
    assert step((MINE,), WANTED, others, fresh=frozenset({29500})) == Write((replace(MINE, port=29501),), 29501)


def test_another_sender_process_gets_a_port_of_its_own() -> None:
    old = replace(MINE, incarnation="s0")
    assert step((old,), WANTED, frozenset()) == Write((old, replace(MINE, port=29501)), 29501)


# ------------------------------------------------------------------------------------------ what ends a claim


def kept(claim: Claim, status: SenderStatus | None, **more: Any) -> tuple[Claim, ...]:
    return judged([claim], sender=status, **{"address": "10.0.0.5", **more})


def test_only_proof_releases_a_claim() -> None:
    leaked = (replace(MINE, leaked=True),)
    assert kept(MINE, says()) == ()  # nothing runs in that process
    assert kept(MINE, says("s2")) == ()  # another process stands in its place
    assert kept(MINE, None, gone=frozenset({"uid-t"})) == ()
    assert kept(MINE, None) == leaked  # silence
    assert kept(MINE, says(in_flight="op")) == leaked  # it may still listen
    assert kept(MINE, says("s2", pod_uid="uid-other")) == leaked  # the old pod may go on beside the new one
    assert kept(MINE, None, gone=frozenset({"uid-other"})) == leaked


def test_a_sender_named_by_url_is_known_by_its_address() -> None:
    assert kept(BY_URL, says("s2", pod_uid="outside")) == ()
    assert kept(BY_URL, says("s2", pod_uid="outside"), address="10.0.0.9") == (replace(BY_URL, leaked=True),)
    assert kept(BY_URL, None, gone=frozenset({""})) == (replace(BY_URL, leaked=True),)


def test_pods_are_asked_for_only_where_the_sender_does_not_release_the_claim() -> None:
    def asked(claim: Claim, status: SenderStatus | None) -> int:
        return len(doubtful([claim], sender=status, address="10.0.0.5"))

    assert [asked(MINE, says()), asked(MINE, None), asked(BY_URL, None)] == [0, 1, 0]


senders = st.none() | st.builds(
    says,
    st.sampled_from(["s1", "s2"]),
    pod_uid=st.sampled_from(["uid-t", "uid-o"]),
    in_flight=st.sampled_from([None, "x"]),
)


@given(senders, senders, st.frozensets(st.sampled_from(["uid-t", "uid-o"])))
def test_more_evidence_never_brings_a_claim_back(
    first: SenderStatus | None, second: SenderStatus | None, gone: frozenset[str]
) -> None:
    after = judged(kept(MINE, first), sender=second, address="10.0.0.5")
    assert set(judged(after, sender=second, address="10.0.0.5", gone=gone)) <= set(after)
    assert all(c.leaked for c in after)


def test_what_has_leaked_is_said_with_the_remedy() -> None:
    assert leak_message([MINE]) == ""
    assert leak_message([replace(MINE, leaked=True)]) == (
        "the sender never said how the broadcast ended that listened on 10.0.0.5:29500 of sender trainer-0: the ports "
        "are not used again until that sender answers or its pod is gone; restart the trainer if it hangs"
    )
    many = [replace(MINE, port=29500 + i, leaked=True) for i in range(6)]
    assert "10.0.0.5:29503 of sender trainer-0 and 2 more:" in leak_message(many)
