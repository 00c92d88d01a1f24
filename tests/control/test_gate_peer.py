"""Where the operator finds a pod's gate, and whether it must present a certificate."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.control import pool_gates
from rlfleet.control.rounds.pods import engine_ports, gate_peer
from rlfleet.plan.lifecycle import pod_fact
from rlfleet.plan.pods import build_pod
from tests.plan.pool_kit import pool

KEYS = {"k1": "AAAA"}


def test_where_a_gate_serves_tls_is_read_from_its_pod() -> None:
    status = {"podIP": "10.0.0.7"}
    meta = {"namespace": "team-a", "uid": "u"}
    for secret, url, name in (
        ("certs", "https://10.0.0.7:9440", "gate.team-a.rlfleet.internal"),
        ("", "http://10.0.0.7:9440", ""),
    ):
        pod = build_pod(pool(), 0, "a-0-00000", public_keys=KEYS, tls_secret=secret) | {"status": status}
        pod["metadata"] |= meta
        peer = gate_peer(pod)
        assert peer is not None
        assert (peer.url, peer.server_name, peer.pod_uid) == (url, name, "u")
        # Pools, which enroll gates, and rounds find them alike.
        of_pool = {**pool(), "metadata": {**pool()["metadata"], "namespace": "team-a"}}
        found = pool_gates.gate_peer(of_pool, pod_fact(pod, owner_uid="p"))
        assert (found.url, found.server_name, found.pod_uid) == (url, name, "u")


@pytest.mark.parametrize(
    ("variable", "port"),
    [
        ({"value": "http://$(RLFLEET_POD_IP):30000"}, 30000),
        ({"value": "http://127.0.0.1:30001/"}, 30001),
        ({"value": "http://localhost"}, None),
        ({"value": "http://localhost:port"}, None),
        ({"valueFrom": {"configMapKeyRef": {"name": "engine", "key": "url"}}}, None),
        ({}, None),
    ],
)
def test_whoever_makes_an_adopted_pod_may_name_its_engine_in_any_way(
    variable: dict[str, Any], port: int | None
) -> None:
    """What can not be read there ends no look of a round: it waits for this very engine, and all others are paused."""
    gate = {"name": "gate", "env": [{"name": "RLFLEET_ENGINE_URL", **variable}]}
    assert engine_ports({"spec": {"initContainers": [gate], "containers": [{"name": "engine"}]}}) == {port} - {None}
