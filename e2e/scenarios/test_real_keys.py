"""A key that users of a real SGLang must present: from a Secret into engine and gate, and past the router in front."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from e2e.engines.fixtures import DISK, SEEDS, SERIALIZED, Expected, pipeline, start, sync
from e2e.engines.prompts import PROMPTS
from e2e.engines.serving import pool
from e2e.engines.tiny import MODEL
from e2e.scenarios.kit import Fleet
from e2e.scenarios.routers import Router, router_entry
from e2e.scenarios.test_transports import FREE, pinned

pytestmark = [
    pytest.mark.usefixtures("private_network", "told"),
    pytest.mark.cluster,
    pytest.mark.engines,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
]

KEY = "for-users-only"
#: What a user asks, past any code of ours; and what only the gate may.
ASKED: dict[str, Any] = {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 1}}
RESERVED: dict[str, Any] = {"mode": "retract"}


def test_users_of_a_real_sglang_need_the_key_of_its_secret(fleet: Fleet, models: Path, expected: Expected) -> None:
    secret = {"metadata": {"name": "users", "namespace": fleet.namespace}, "stringData": {"token": KEY}}
    fleet.cluster.apply({"apiVersion": "v1", "kind": "Secret", **secret})
    # The gate itself asks like a user, too: it could not prove the weights without the key.
    pipeline(fleet, SERIALIZED, probeGeneration=True)
    router = Router(fleet)
    fleet.trainer(MODEL=MODEL)
    keyed = {**pool("SGLang", models, DISK)["engine"], "apiKeySecretRef": {"name": "users", "key": "token"}}
    (found,) = start(fleet, "SGLang", models, engine=keyed, routers=[router_entry()], placement=pinned(FREE))
    engine = dataclasses.replace(found, user=KEY)
    sync(fleet, 1, SEEDS[0])
    assert router.listed() == {engine.url}
    assert engine.label() == "1"
    assert engine.greedy() == expected[SEEDS[0]]
    assert engine.ask(PROMPTS[0], url=router.url).tokens == expected[SEEDS[0]][0]
    for url in (engine.url, router.url):
        for key in (None, "another", engine.key):
            assert engine.call("POST", url + "/generate", ASKED, key=key)[0] == 401, (url, key)
        assert engine.call("POST", url + "/generate", ASKED, key=KEY)[0] == 200
    # One key does not open the other's door.
    assert engine.call("POST", "/pause_generation", RESERVED, key=KEY)[0] == 401
