"""A pool of type VLLM: what the operator puts into its pods arrives in the engine, and only the gate controls it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from e2e.scenarios.kit import ROOT, Fleet, engine_url, http, wait_until

pytestmark = pytest.mark.cluster

#: The reference engine with vLLM's HTTP surface, its control paths locked as our middleware locks vLLM's.
ENGINE = [
    "python", "-m", "e2e.sim.engine", "--api", "vllm", "--host", "$(RLFLEET_POD_IP)", "--port", "30000", "--backend",
    "numpy", "--admin-api-key=$(RLFLEET_ENGINE_ADMIN_KEY)",
]  # fmt: skip


def template() -> dict[str, Any]:
    """As a user would write it, with where this checkout lies in place of an image."""
    path = {"name": "PYTHONPATH", "value": f"{ROOT / 'operator'}:{ROOT}"}
    container = {"name": "engine", "image": "reference", "command": ENGINE, "env": [path]}
    return {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}


def test_the_plugin_arrives_in_the_engine_and_only_the_gate_controls_it(fleet: Fleet) -> None:
    fleet.pipeline()
    fleet.trainer()
    fleet.pool(1, engine={"type": "VLLM", "gpusPerEngine": 1}, source={"template": template()})
    (pod,) = fleet.ready_engines(1)
    (process,) = (p for p in psutil.process_iter(["cmdline"]) if mine(p, pod))
    folder, *rest = process.environ()["PYTHONPATH"].split(":")
    assert rest == [str(ROOT / "operator"), str(ROOT)], "the user's path stays, behind ours"
    found = {path.name for path in Path(folder).iterdir()}
    assert "rlfleet_vllm" in found
    assert any(name.startswith("rlfleet_vllm-") and name.endswith(".dist-info") for name in found)
    assert process.environ()["VLLM_SERVER_DEV_MODE"] == "1"

    fleet.sync(1)
    wait_until(lambda: fleet.status("enginepool", "e").get("fencing") == "Enforced", "the door to be seen shut")
    for path in ("/pause", "/collective_rpc", "/update_weight_version"):
        assert http("POST", engine_url(pod) + path, {"new_version": "evil"})[0] == 401
    assert fleet.status("rlpipeline", "p")["committed"]["version"] == 1


def mine(process: psutil.Process, pod: dict[str, Any]) -> bool:
    """Whether it is the engine of this pod."""
    words = process.info["cmdline"] or []
    return "e2e.sim.engine" in words and pod["status"]["podIP"] in words
