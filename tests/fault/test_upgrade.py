"""A rolling upgrade of the operator in the middle of a round, and a leader whose right to act is nearly over.

Two operators under election behind a real router that users ask all the time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from e2e.cluster.local import OPERATOR_NAMESPACE, LocalCluster
from e2e.scenarios.kit import condition, http, wait_until
from e2e.scenarios.routers import ROUTER_PORT, router_pod
from tests.fault.calls import Call
from tests.fault.proxy import Fault, Rule
from tests.fault.scenarios import plain_round
from tests.fault.stand import Instance, Stand
from tests.fault.test_leadership import DISK, LEASE_NAME, grant, mutations, renewals, roles

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: Long, so that there is time between the end of a leader's right to act and the end of its process: a tenth of it.
RENEW_SECONDS = 40


@pytest.fixture(scope="module")
def pair(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """Two operators of one Lease; three engines behind a router, their base committed."""
    env = {
        "RLFLEET_LEASE_NAME": LEASE_NAME,
        "RLFLEET_LEASE_SECONDS": str(RENEW_SECONDS + 5),
        "RLFLEET_LEASE_RENEW_SECONDS": str(RENEW_SECONDS),
        "RLFLEET_LEASE_RETRY_SECONDS": "0.5",
    }
    grant(cluster)
    router = {"name": "main", "type": "SGLangRouter", "podSelector": {"matchLabels": {"app": "router"}}}
    with Stand(
        cluster,
        tmp_path_factory.mktemp("pair"),
        instances=2,
        engines=3,
        base=False,
        routed=True,
        # Loads that outlast a leader get half of pausedSeconds.
        pipeline={"sync": {"deadlines": {"pendingSeconds": 120, "stagingSeconds": 120, "pausedSeconds": 120}}},
        pool={"routers": [router | {"port": ROUTER_PORT}]},
        operator_env=env,
    ) as made:
        cluster.apply(router_pod(made.namespace))
        wait_until(lambda: condition(made.fleet.pod("router"), "Ready") == "True", "the router to be Ready", 120)
        made.make_fleet()
        made.router_url = f"http://{made.fleet.pod('router')['status']['podIP']}:{ROUTER_PORT}"
        yield made
    cluster.kubectl("delete", "lease", LEASE_NAME, "-n", OPERATOR_NAMESPACE, "--ignore-not-found")


def loading(stand: Stand, seconds: float) -> str:
    """A round whose loads take so long, in Transferring; its name."""
    version = stand.next_version()
    stand.fleet.publish(version)
    for pod in stand.fleet.engines():
        stand.fleet.fault(pod, DISK, action="delay", seconds=seconds, times=1, when="before")
    name = stand.fleet.order(version)
    wait_until(lambda: stand.fleet.phase(name) == "Transferring", "Transferring", every=0.02)

    wait_until(lambda: len({c.peer for c in loads(stand)}) == stand.engines, "every engine to load", every=0.02)
    return name


def loads(stand: Stand) -> list[Call]:
    """Loads that gates took since the journal was reset, each as often as it was asked for."""
    calls = list(stand.journal.calls)
    return [c for c in calls if c.method == "POST" and c.label.endswith(" Load") and c.status in (200, 202)]


def test_a_rolling_upgrade_in_the_middle_of_a_round_loses_nothing(pair: Stand) -> None:
    leader, standby = roles(pair)
    before = [p["metadata"]["uid"] for p in pair.fleet.engines()]
    wait_until(lambda: pair.prober.answers > 0, "users to be answered")
    refused = pair.prober.refusals
    for instance in pair.operators:
        assert instance.proxy is not None
        instance.proxy.rules = []
    pair.journal.reset()
    name = loading(pair, 20.0)
    generation = pair.fleet.status("syncround", name)["lease"]["generation"]
    # As a Deployment rolls: one goes, a new one is there, the next one goes.
    for old in (leader, standby):
        assert old.operator.process is not None
        process = old.operator.process
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, old.operator.tail()
        old.restart()
    done = pair.fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    assert [m["result"] for m in done["status"]["members"]] == ["Ok"] * pair.engines
    assert done["status"]["lease"]["generation"] > generation, "the round was to outlast the operator that began it"
    # Nothing was done twice, nobody was replaced, and no user noticed.
    assert {int(c.body["attempt"]) for c in loads(pair)} == {1}
    pair.wait_steady("the fleet to be ready")
    pods = pair.fleet.engines()
    assert [p["metadata"]["uid"] for p in pods] == before
    assert [pair.fleet.label(p) for p in pods] == [str(pair.version)] * pair.engines
    answered = pair.prober.answers
    wait_until(lambda: pair.prober.answers > answered, "users to be answered after it")
    assert pair.prober.refusals == refused
    plain_round(pair)
    assert pair.violations() == []


def refusals(instance: Instance, target: str) -> float:
    """How many mutations of this kind the process has refused to send."""
    _, text = http("GET", f"http://127.0.0.1:{instance.operator.port}/metrics")
    prefix = f'rlfleet_mutations_refused_total{{target="{target}"}} '
    return sum(float(line.removeprefix(prefix)) for line in str(text).splitlines() if line.startswith(prefix))


def test_a_leader_whose_validity_is_nearly_over_sends_nothing_to_gates_and_routers(pair: Stand) -> None:
    """Between the end of its right and the end of its process there is work for it: it refuses all of that itself."""
    leader, _ = roles(pair)
    assert leader.proxy is not None
    pods = pair.fleet.engines()
    frozen = [str(p["metadata"]["name"]) for p in pods[:2]]
    pair.journal.reset()
    # The loads outlast most of its validity, and nobody hears of their end before it is over: gates are frozen then,
    # and not for longer than their liveness probes bear.
    name = loading(pair, RENEW_SECONDS - 7.0)
    whose = leader.proxy.name
    leader.proxy.strike(Rule(lambda c: c.plural == "leases", Fault.BUSY, times=0))
    # One that was on its way may still have succeeded; the one that is refused comes after it.
    wait_until(leader.proxy.fired.is_set, "a renewal to be refused", 30, every=0.05)
    right_ends = max(c.began for c in renewals(pair, 0) if c.who == whose) + 0.9 * RENEW_SECONDS
    wait_until(lambda: time.monotonic() > right_ends - 8, "its right to act to be nearly over", 60, every=0.05)
    for pod in frozen:
        pair.cluster.hollow.freeze(pair.namespace, pod, "gate", spared=True)
    try:
        wait_until(lambda: time.monotonic() > right_ends + 0.2, "its right to act to be over", 60, every=0.05)
    finally:
        for pod in frozen:
            pair.cluster.hollow.thaw(pair.namespace, pod, "gate")
    # The loads have ended: it wants to verify them. And an engine vanishes: it wants its address out of the router.
    gone = str(pods[2]["metadata"]["name"])
    pair.cluster.kubectl("delete", "pod", gone, "-n", pair.namespace, "--force", "--grace-period=0", "--wait=false")
    for target in ("peer", "router"):
        wait_until(lambda target=target: refusals(leader, target) > 0, f"a refusal to a {target}", 3.5, every=0.02)  # type: ignore[misc]
    assert leader.running(), "the end of its process is not what keeps it from acting"
    assert leader.operator.process is not None
    assert leader.operator.process.wait(60) == 1, leader.operator.tail()
    assert [m for m in mutations(pair, leader, right_ends + 0.1) if "leases" not in m] == []
    done = pair.fleet.ended(name)
    assert done["status"]["phase"] == "Succeeded", done["status"]
    leader.restart()
    pair.fleet.ready_engines(pair.engines)
    pair.wait_steady("the fleet to be ready")
    plain_round(pair)
    assert pair.violations() == []
