"""An operator that meets CRDs of an older version says what is missing and waits for the right ones."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.local import LocalCluster
from e2e.scenarios.kit import Operator, http, wait_until

pytestmark = pytest.mark.cluster

FIELD = "residualMemoryGiB"
#: As it stands in JSON: texts of other fields name it too.
KEY = f'"{FIELD}":'


@pytest.fixture
def old_crds(cluster: LocalCluster) -> Iterator[None]:
    """EnginePool without one field of its spec."""
    at = f"/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/{FIELD}"
    patch = json.dumps([{"op": "remove", "path": at}])
    cluster.kubectl("patch", "crd", "enginepools.rlfleet.dev", "--type=json", "-p", patch)

    def published() -> str:
        return cluster.kubectl("get", "--raw", "/openapi/v3/apis/rlfleet.dev/v1alpha1")

    wait_until(lambda: KEY not in published(), "the apiserver to publish the older schema")
    yield
    cluster.install()
    wait_until(lambda: KEY in published(), "the apiserver to publish the schema of this version again")


def test_it_waits_and_begins_by_itself(cluster: LocalCluster, old_crds: None, tmp_path: Path) -> None:
    one = Operator(cluster, tmp_path / "operator", RLFLEET_LEADER_ELECT="true")
    one.start(wait=False)
    try:

        def told() -> bool:
            assert one.process is not None
            assert one.process.poll() is None, one.tail()
            return f"EnginePool.spec.{FIELD} is not known" in one.tail()

        wait_until(told, "the operator to name what the CRDs lack")
        assert "rlfleet crds | kubectl apply --server-side --force-conflicts -f -" in one.tail()
        code, answer = http("GET", f"http://127.0.0.1:{one.port}/readyz")
        assert code == 503
        assert "the CRDs in the cluster are older than this operator" in answer
        # It is no candidate: an operator that fits these CRDs would go on leading.
        assert "\nrlfleet_leader 0.0" in http("GET", f"http://127.0.0.1:{one.port}/metrics")[1]
        # Told to end it ends, as if it had begun.
        assert one.process is not None
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(60) == 0, one.tail()
        assert "Traceback" not in one.tail(500)
        one.log.unlink()
        one.start(wait=False)
        wait_until(told, "the operator to name what the CRDs lack, again")
        cluster.install()
        wait_until(one.ready, "the operator to begin", 120)
        assert one.tail(500).count("older than this operator") == 1, "once, not every second"
    finally:
        one.stop()
