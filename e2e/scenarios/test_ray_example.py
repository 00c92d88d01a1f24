"""docs/examples/ray_trainer.py as it stands, in a real Ray of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.scenarios.examples import example, with_the_reference_model
from e2e.scenarios.kit import Fleet
from rlfleet.client import Client
from rlfleet.sender.sender import OUTSIDE_CLUSTER
from tests.netns import inside
from tests.ray_kit import local_ray

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_the_ray_example_brings_its_weights_into_the_engines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not inside(request, tmp_path, seconds=580):
        return
    fleet: Fleet = request.getfixturevalue("fleet")
    fleet.pipeline(weights={"sender": {"url": "http://127.0.0.1:9450"}})
    fleet.pool(1)
    (pod,) = fleet.ready_engines(1, 300)
    module = with_the_reference_model(example("ray_trainer"))
    monkeypatch.setattr(module, "Client", lambda namespace, _: Client(namespace, "p", fleet.cluster.kubeconfig))
    for name, value in {"NAMESPACE": fleet.namespace, "POD_IP": "127.0.0.1", "POD_UID": OUTSIDE_CLUSTER}.items():
        monkeypatch.setenv(name, value)
    with local_ray():
        module.main(steps=2)
    fleet.serving(pod, 1)
    committed = fleet.status("rlpipeline", "p")["committed"]
    assert [d["digest"] for d in committed["engineDigests"]] == [fleet.checksum(pod)]
