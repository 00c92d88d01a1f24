"""A key that users of real engines must present: from a Secret into engine and gate, and past the router in front."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from e2e.engines.fixtures import DISK, LONG_RUNS, SEEDS, SERIALIZED, Expected, pipeline, start, sync
from e2e.engines.prompts import PROMPTS
from e2e.engines.serving import pool
from e2e.engines.tiny import MODEL
from e2e.scenarios.kit import Fleet
from e2e.scenarios.routers import Router, router_entry
from e2e.scenarios.test_transports import FREE, pinned

pytestmark = LONG_RUNS

KEY = "for-users-only"
#: Where users ask, and with what, past any code of ours.
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "SGLang": ("/generate", {"input_ids": PROMPTS[0], "sampling_params": {"max_new_tokens": 1}}),
    "VLLM": ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 1}),
}


#: A control path and a body that it would take.
DOOR: dict[str, tuple[str, Any]] = {"SGLang": ("/pause_generation", {"mode": "retract"}), "VLLM": ("/pause", None)}


@pytest.mark.parametrize(("kind", "in_front"), [("SGLang", "SGLangRouter"), ("VLLM", "VLLMRouter")])
def test_users_of_a_real_engine_need_the_key_of_its_secret(
    fleet: Fleet, models: Path, expected: Expected, kind: str, in_front: str
) -> None:
    secret = {"metadata": {"name": "users", "namespace": fleet.namespace}, "stringData": {"token": KEY}}
    fleet.cluster.apply({"apiVersion": "v1", "kind": "Secret", **secret})
    # The gate itself asks like a user, too: it could not prove the weights without the key.
    pipeline(fleet, SERIALIZED, probeGeneration=True)
    router = Router(fleet, in_front)
    fleet.trainer(MODEL=MODEL)
    keyed = {**pool(kind, models, DISK)["engine"], "apiKeySecretRef": {"name": "users", "key": "token"}}
    (found,) = start(fleet, kind, models, engine=keyed, routers=[router_entry(in_front)], placement=pinned(FREE))
    engine = dataclasses.replace(found, user=KEY)
    sync(fleet, 1, SEEDS[0])
    assert router.listed() == {engine.url}
    assert engine.label() == "1"
    assert engine.greedy() == expected[SEEDS[0]]
    assert engine.ask(PROMPTS[0], url=router.url).tokens == expected[SEEDS[0]][0]
    path, body = ASKED[kind]
    for url in (engine.url, router.url):
        for key in (None, "another", engine.key):
            assert engine.call("POST", url + path, body, key=key)[0] == 401, (url, key)
        assert engine.call("POST", url + path, body, key=KEY)[0] == 200
    # One key does not open the other's door.
    assert engine.call("POST", *DOOR[kind], key=KEY)[0] == 401
