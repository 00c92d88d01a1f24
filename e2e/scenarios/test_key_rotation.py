"""The signing key is rotated by the commands of the guide while a fleet serves, and rounds go on."""

from __future__ import annotations

import re
import subprocess
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster.local import OPERATOR_NAMESPACE, ROOT, LocalCluster
from e2e.scenarios.kit import Fleet, Operator, wait_until
from rlfleet.api.tokens import Scope
from rlfleet.control.keys import SECRET_NAME, SigningKeys

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GUIDE = ROOT / "docs/guides/security.md"


@pytest.fixture
def operator(cluster: LocalCluster, tmp_path: Path) -> Iterator[Operator]:
    one = Operator(cluster, tmp_path / "operator", RLFLEET_KEY_SECONDS="0.5")
    one.start()
    yield one
    one.stop()


def run(cluster: LocalCluster, commands: str) -> None:
    """Run a block of the guide."""
    path = f"{cluster.program('kubectl').parent}:/usr/bin:/bin"
    env = {"PATH": path, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(cluster.state)}
    subprocess.run(["bash", "-euo", "pipefail", "-c", commands], check=True, env=env, timeout=120)


def seed(cluster: LocalCluster) -> bytes:
    secret = cluster.get("secret", SECRET_NAME, "-n", OPERATOR_NAMESPACE)
    return b64decode(secret["data"]["ed25519.seed"])


def believes(fleet: Fleet, key: bytes) -> bool:
    """Whether every gate answers a token of this key."""
    for pod in fleet.engines():
        token = SigningKeys(key).current.sign(
            audience=[pod["metadata"]["uid"]], scope=Scope.READ, pipeline="p", operation="", generation=0
        )
        code, _ = asked(f"http://{pod['status']['podIP']}:9440/v1/status", token)
        if code == 401:
            return False
        assert code == 200
    return True


def asked(url: str, token: str) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode()


def test_a_fleet_goes_on_under_a_new_key(operator: Operator, cluster: LocalCluster, namespace: str) -> None:
    begin, end = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    fleet = Fleet(cluster, namespace)
    fleet.pipeline()
    fleet.pool(2)
    fleet.trainer()
    pods = fleet.ready_engines(2)
    assert fleet.sync(-1)["status"]["phase"] == "Succeeded"
    old = seed(cluster)
    assert believes(fleet, old)

    run(cluster, begin)
    new = seed(cluster)
    assert new != old
    # Not waited for: a round that begins in the middle goes on under whichever key each part knows.
    assert fleet.sync(0)["status"]["phase"] == "Succeeded"
    wait_until(lambda: believes(fleet, new), "gates to be told the new key")
    assert believes(fleet, old)
    wait_until(lambda: len(fleet.status("rlpipeline", "p")["publicKeys"]) == 2, "both keys in the pipeline's status")
    assert fleet.sync(1)["status"]["phase"] == "Succeeded"

    run(cluster, end)
    wait_until(lambda: not believes(fleet, old), "gates to forget the old key")
    wait_until(lambda: len(fleet.status("rlpipeline", "p")["publicKeys"]) == 1, "one key in the pipeline's status")
    assert believes(fleet, new)
    # This trainer was given the old key at its start; its successor reads the new one.
    cluster.kubectl("delete", "pod", "trainer", "-n", namespace, "--wait=true", timeout=60)
    fleet.trainer()
    assert fleet.sync(2)["status"]["phase"] == "Succeeded"
    assert [p["metadata"]["uid"] for p in fleet.engines()] == [p["metadata"]["uid"] for p in pods]
