"""SGLang, vLLM and reference engines in one pipeline: the same weights in all of them after each round, under load."""

from __future__ import annotations

from pathlib import Path

from e2e.engines.asking import RealEngine
from e2e.engines.fixtures import DISK, LONG_RUNS, SEEDS, SERIALIZED, Expected, pipeline, start, sync
from e2e.engines.load import Clients
from e2e.engines.prompts import PROMPTS
from e2e.engines.reference import untrue
from e2e.engines.tiny import MODEL
from e2e.scenarios.kit import Fleet, wait_until
from e2e.scenarios.routers import Router, router_entry
from e2e.scenarios.test_transports import FREE, TRAIN, pinned

pytestmark = LONG_RUNS


def test_one_fleet_of_three_makes_by_both_transports_under_load(fleet: Fleet, models: Path, expected: Expected) -> None:
    """Reference engines on the trainer's devices get their weights serialized, the real ones elsewhere by broadcast."""
    mixed = {"mode": "Auto", "assertMixed": True, "backend": "gloo"}
    pipeline(fleet, {**mixed, "assertMixed": False})  # until there is somebody on either side
    router, other = Router(fleet), Router(fleet, "VLLMRouter", "other")
    fleet.trainer(MODEL=MODEL)
    fleet.pool(
        2, name="reference", backend="torch", engine_args=("--model", MODEL), routers=[router_entry()],
        placement=pinned(TRAIN),
    )  # fmt: skip
    fleet.ready_engines(2)
    start(fleet, "SGLang", models, name="sglang", routers=[router_entry()], placement=pinned([FREE[0]]), present=2)
    behind = [router_entry("VLLMRouter", "other")]
    start(fleet, "VLLM", models, name="vllm", routers=behind, placement=pinned([FREE[1]]), present=3)
    pods = fleet.ready_engines(4)
    kinds = {"sglang": "SGLang", "vllm": "VLLM", "reference": "SGLang"}
    engines = [RealEngine.of_pod(kinds[p["metadata"]["labels"]["rlfleet.dev/pool"]], p) for p in pods]
    (vllm,) = [e for e in engines if e.engine == "VLLM"]
    others = [e for e in engines if e is not vllm]

    pipeline(fleet, mixed)
    status = sync(fleet, -1, DISK)
    assert (status["plan"]["serialized"], status["plan"]["broadcast"]) == (2, 2)
    assert router.listed() == {e.url for e in others}
    assert other.listed() == {vllm.url}
    seeds = {"-1": DISK}
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[1][:300]]
    with (
        Clients(lambda prompt: others[0].ask(prompt, 40, url=router.url), prompts) as routed,
        Clients(lambda prompt: vllm.ask(prompt, 40, url=other.url), prompts[:2]) as theirs,
    ):
        for version in range(1, 5):
            seeds[str(version)] = SEEDS[version % len(SEEDS)]
            pipeline(fleet, SERIALIZED if version == 3 else mixed)
            status = sync(fleet, version, seeds[str(version)])
            how = (status["plan"].get("serialized", 0), status["plan"].get("broadcast", 0))
            assert how == ((4, 0) if version == 3 else (2, 2))
            for engine in engines:
                assert engine.label() == str(version)
                assert engine.greedy() == expected[seeds[str(version)]], (engine.name, version)
            answered = len(routed.done) + 4, len(theirs.done) + 2

            def asked_anew(answered: tuple[int, int] = answered) -> bool:
                enough = len(routed.done) >= answered[0] and len(theirs.done) >= answered[1]
                return enough or bool(routed.failures or theirs.failures)

            wait_until(asked_anew, "clients to be answered by these weights")
    assert not routed.failures
    assert not theirs.failures
    for asked in [*routed.done, *theirs.done]:
        assert asked.answer.reason == "length"
        assert untrue(asked.prompt, asked.answer.tokens, asked.answer.spans, seeds) is None
