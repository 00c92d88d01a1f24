"""Rules that no single object can check: each has one reason, and all violations are found at once."""

from __future__ import annotations

from typing import Any

import pytest

from rlfleet.api.conditions import Reason
from rlfleet.plan.validate import quantity_bytes, stopped, violations
from tests.plan.pool_kit import pool as example

TRAIN = [{"node": "n0", "devices": ["GPU-0", "GPU-1"]}]


def pipeline(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p", "uid": "p-uid"}, "spec": {"transport": {"mode": "CPUSerialize"}} | spec}


def pool(name: str = "a", *, created: int = 0, args: list[str] | None = None, **spec: Any) -> dict[str, Any]:
    container = {"name": "engine", **({"args": args} if args else {}), **spec.pop("container", {})}
    made = example(name=name, pod_spec={"containers": [container]}, **spec)
    made["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{created:02}Z"
    return made


def pinned(*devices: str, node: str = "n0") -> dict[str, Any]:
    return {"mode": "Pinned", "devices": [{"node": node, "devices": list(devices)}]}


def engine(size: int = 1, **more: Any) -> dict[str, Any]:
    return {"type": "SGLang", "port": 30000, "gpusPerEngine": size, **more}


def claims(*blocks: str) -> dict[str, Any]:
    return {"mode": "Claims", "blocks": list(blocks)}


def blocks(*names: str, size: int = 1) -> dict[str, Any]:
    made = [{"name": n, "deviceClassName": "gpu.example.com", "slots": 2, "devicesPerSlot": size} for n in names]
    return {"blocks": made}


GPU = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
BOTH = {"resources": {"limits": {"nvidia.com/gpu": "1"}, "claims": [{"name": "x"}]}}
BROKEN: list[tuple[dict[str, Any], list[dict[str, Any]], Reason, str, set[str]]] = [
    (
        pipeline(trainer={"gpus": [*TRAIN, {"node": "n1", "devices": ["GPU-1"]}]}),
        [],
        Reason.DEVICE_LISTED_TWICE,
        "spec.trainer.gpus lists GPU-1 on n0 and n1; a UUID is one device on one node: remove the wrong one",
        set(),
    ),
    (
        pipeline(),
        [
            pool(
                placement={
                    "mode": "Pinned",
                    "devices": [{"node": "n0", "devices": ["x"]}, {"node": "n2", "devices": ["x"]}],
                }
            )
        ],
        Reason.DEVICE_LISTED_TWICE,
        "spec.placement.devices of pool a lists x on n0 and n2; a UUID is one device on one node: remove the wrong one",
        {"a"},
    ),
    (
        pipeline(),
        [pool(container=GPU)],
        Reason.ENGINE_SIZE_MISMATCH,
        "the engine container of pool a asks for 2 nvidia.com/gpu, and spec.engine.gpusPerEngine is 1; make them "
        "equal, or leave the resource out of the template",
        {"a"},
    ),
    (
        pipeline(),
        [pool(container=BOTH)],
        Reason.TWO_DEVICE_BOOKS,
        "the template of pool a asks for nvidia.com/gpu and uses a ResourceClaim; these are separate books of the same "
        "devices, use one of them",
        {"a"},
    ),
    (
        pipeline(),
        [pool(args=["--enable-lora", "--max-lora-rank", "8"])],
        Reason.ENGINE_LORA,
        "the engine of pool a runs with --enable-lora; adapters stay what they are when the weights under them change: "
        "leave it out and train merged weights",
        {"a"},
    ),
    (
        pipeline(),
        [pool(engine=engine(type="VLLM", model="m", args=["--speculative_config.method", "ngram"]))],
        Reason.ENGINE_DRAFT_MODEL,
        "the engine of pool a runs with --speculative_config.method ngram; rounds bring no weights to a draft model, "
        "which would go on guessing for the old policy: leave it out",
        {"a"},
    ),
    (
        pipeline(),
        [pool(container={"command": ["sh", "-c", "[ -n x ] && exec vllm serve m -q fp8"]})],
        Reason.ENGINE_QUANTIZED,
        "the engine of pool a runs with -q fp8; a round brings weights as the trainer has them, which had to be "
        "quantised anew: leave it out",
        {"a"},
    ),
    (
        pipeline(),
        [pool(args=["--ep-size=8"])],
        Reason.ENGINE_EXPERT_PARALLEL,
        "the engine of pool a runs with --ep-size 8; each rank holds experts of its own, which weights would "
        "have to be sorted for: leave it out",
        {"a"},
    ),
    (
        pipeline(),
        [pool(args=["--nnodes", "2"])],
        Reason.ENGINE_SPANS_PODS,
        "the engine of pool a runs with --nnodes 2; one pod is one engine: choose a parallelism that fits one node",
        {"a"},
    ),
    (
        pipeline(),
        [pool(args=["--dp=4"])],
        Reason.ENGINE_DATA_PARALLEL,
        "the engine of pool a runs with --dp 4; weights reach only one of its replicas: leave it out and raise "
        "spec.replicas",
        {"a"},
    ),
    (
        pipeline(),
        [pool(container={"command": ["sh", "-c", "exec python -m sglang --disaggregation-mode prefill"]})],
        Reason.ENGINE_DISAGGREGATED,
        "the engine of pool a runs with --disaggregation-mode prefill; prefill and decode engines answer only "
        "together, and a round would pause one without the other: leave it out",
        {"a"},
    ),
    (
        pipeline(),
        [pool(gate={"image": "g", "stagingMiB": 1024, "resources": {"limits": {"memory": "1Gi"}}})],
        Reason.STAGING_OVER_LIMIT,
        "pool a: spec.gate.resources.limits.memory is 1Gi, and what is staged (spec.gate.stagingMiB 1024) counts "
        "against it beside the gate itself: set it to 1280Mi or more, or lower stagingMiB",
        {"a"},
    ),
    (
        pipeline(),
        [pool("a", engine=engine(model="m1")), pool("b", engine=engine(model="m2")), pool("c")],
        Reason.MODELS_DIFFER,
        "all pools of a pipeline serve one model, spec.engine.model differs: m1 in a; m2 in b",
        {"a", "b"},
    ),
    (
        pipeline(),
        [pool("z", placement=pinned("GPU-7", "GPU-8")), pool("b", created=1, placement=pinned("GPU-8"))],
        Reason.DEVICES_SHARED_BY_POOLS,
        "pools z and b are both pinned to n0/GPU-8; give each pool devices of its own",
        {"b"},
    ),
    (
        pipeline(trainer=blocks("x", size=2)),
        [pool(placement=claims("x"))],
        Reason.ENGINE_SIZE_MISMATCH,
        "slots of train block x have 2 devices, and spec.engine.gpusPerEngine of pool a is 1; use a block with as many",
        {"a"},
    ),
    (
        pipeline(trainer=blocks("x")),
        [pool(placement=claims("x"), container={"resources": {"limits": {"nvidia.com/gpu": "1"}}})],
        Reason.TWO_DEVICE_BOOKS,
        "the template of pool a asks for nvidia.com/gpu and uses a ResourceClaim; these are separate books of the same "
        "devices, use one of them",
        {"a"},
    ),
    (
        pipeline(trainer=blocks("x", "y")),
        [pool(placement=claims("x", "y", "z"), replicas=4)],
        Reason.BLOCK_NOT_FOUND,
        "spec.placement.blocks of pool a names z, and spec.trainer.blocks of the RLPipeline has x, y; name one that is "
        "there, or add it there",
        {"a"},
    ),
    (
        pipeline(trainer=blocks("x")),
        [pool("z", placement=claims("x")), pool("b", created=1, placement=claims("x"))],
        Reason.BLOCKS_SHARED_BY_POOLS,
        "pools z and b both use train block x; give each pool blocks of its own",
        {"b"},
    ),
    (
        pipeline(trainer=blocks("x")),
        [pool(placement=claims("x"), replicas=3)],
        Reason.NOT_ENOUGH_DEVICES,
        "the train blocks of pool a have 2 slots, spec.replicas is 3; lower it or add a block",
        set(),
    ),
    (
        pipeline(trainer=blocks("x", "y")),
        [pool(placement=claims("x"))],
        Reason.PARTIAL_OVERLAP,
        "engines use train block x and not y; let pools use all blocks of spec.trainer.blocks or none",
        {"a"},
    ),
    (
        pipeline(trainer={"gpus": TRAIN}),
        [pool(placement=pinned("GPU-1", "GPU-2"))],
        Reason.PARTIAL_OVERLAP,
        "engines are pinned to n0/GPU-1 of the train pool and not to n0/GPU-0; pin engines to all devices of "
        "spec.trainer.gpus or to none",
        {"a"},
    ),
    (
        pipeline(trainer={"gpus": TRAIN}, transport={"mode": "Broadcast"}),
        [pool(placement=pinned("GPU-0", "GPU-1"))],
        Reason.ENGINES_ON_TRAIN_DEVICES,
        "transport mode Broadcast is impossible for a-0, a-1 (shares devices with the trainer); train pool: n0/GPU-0, "
        "n0/GPU-1. Use Auto or CPUSerialize",
        {"a"},
    ),
    (
        pipeline(trainer={"gpus": TRAIN}, transport={"mode": "Auto", "assertMixed": True}),
        [pool(placement=pinned("GPU-0", "GPU-1"))],
        Reason.MIXED_TRANSPORT_IMPOSSIBLE,
        "spec.transport.assertMixed is set but every engine would use Serialized: the pool needs at least one engine "
        "on the train devices and one off them. Add it, or leave assertMixed out",
        {"a"},
    ),
]


@pytest.mark.parametrize(("line", "pools", "reason", "message", "stops"), BROKEN, ids=[str(b[2]) for b in BROKEN])
def test_one_reason_per_rule_with_its_words(
    line: dict[str, Any], pools: list[dict[str, Any]], reason: Reason, message: str, stops: set[str]
) -> None:
    found = violations(line, pools)
    assert [(v.reason, v.message) for v in found] == [(reason, message)]
    assert found[0].pools == stops
    for p in pools:
        name = p["metadata"]["name"]
        assert bool(stopped(found, name)) == (name in stops)


def test_all_at_once_structure_first() -> None:
    bad = pool(args=["--nnodes=2", "--dp", "2"], placement=pinned("GPU-1"), container={}, engine=engine(model="x"))
    other = pool("b", engine=engine(model="y"), created=1, placement=pinned("GPU-1"))
    found = violations(pipeline(trainer={"gpus": TRAIN}), [bad, other])
    assert [v.reason.value for v in found] == [
        "EngineSpansPods",
        "EngineDataParallel",
        "ModelsDiffer",
        "DevicesSharedByPools",
        "PartialOverlap",
    ]


FINE: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    (pipeline(), []),
    (pipeline(), [pool(), pool("b", engine=engine(4))]),  # pools may differ in size
    (pipeline(trainer={"gpus": TRAIN}), [pool(placement=pinned("GPU-0", "GPU-1", "GPU-2"))]),
    (pipeline(trainer={"gpus": TRAIN}), [pool(placement=pinned("GPU-2"))]),
    (pipeline(trainer={"gpus": TRAIN}), [pool(placement=pinned("GPU-0")), pool("b", placement=pinned("GPU-1"))]),
    # Another pool's devices are not known before it runs, so what they all are together is not either.
    (pipeline(trainer={"gpus": TRAIN}), [pool(placement=pinned("GPU-0")), pool("b")]),
    (pipeline(), [pool(container=GPU, engine=engine(2))]),
    (pipeline(), [pool(args=["--dp-size", "1", "--nnodes=1", "--disaggregation-mode", "null"])]),
    (
        pipeline(),
        [pool(args=["--quantization", "none", "--ep-size=1", "--moe-a2a-backend", "none"])],
    ),
    # Before the engine's program one letter is somebody else's.
    (pipeline(), [pool(container={"command": ["sh", "-c", "pip -q x; test -n y; exec vllm serve m"]})]),
    (pipeline(), [pool(container={"command": ["sh", "-c", "echo 'unbalanced"]})]),
    (pipeline(), [pool(gate={"image": "g", "stagingMiB": 1024, "resources": {"limits": {"memory": "1.25Gi"}}})]),
    (pipeline(), [pool("a", engine=engine(model="m")), pool("b", engine=engine(model="m"))]),
    (pipeline(), [pool("a", placement=pinned("GPU-1")), pool("b", placement=pinned("GPU-1", node="n1"))]),
    (pipeline(trainer=blocks("x", "y")), [pool(placement=claims("x")), pool("b", placement=claims("y"))]),
    (pipeline(trainer=blocks("x", "y")), [pool()]),
    # The whole list can mix, though only two engines are wanted now.
    (
        pipeline(trainer={"gpus": TRAIN}, transport={"mode": "Auto", "assertMixed": True}),
        [pool(placement=pinned("GPU-0", "GPU-1", "GPU-2"), replicas=2)],
    ),
    (
        pipeline(trainer={"gpus": TRAIN}, transport={"mode": "Broadcast"}),
        [pool(placement=pinned("GPU-2", "GPU-0", "GPU-1"), replicas=1)],
    ),
]


@pytest.mark.parametrize(("line", "pools"), FINE)
def test_what_fits_is_left_alone(line: dict[str, Any], pools: list[dict[str, Any]]) -> None:
    assert violations(line, pools) == ()


def test_pools_that_go_and_pools_of_others_break_nothing_but_share_devices() -> None:
    going = pool("b", engine=engine(model="y"), placement=pinned("GPU-1"))
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    mine = pool(engine=engine(model="x"), placement=pinned("GPU-1"), created=5)
    assert violations(pipeline(), [mine, going]) == ()
    others = pool("b", engine=engine(model="y"), placement=pinned("GPU-1"), pipeline="q")
    assert [v.reason for v in violations(pipeline(), [mine, others])] == [Reason.DEVICES_SHARED_BY_POOLS]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1Gi", 2**30),
        ("512Mi", 2**29),
        ("1.5Gi", 3 * 2**29),
        ("2G", 2 * 10**9),
        (1000, 1000),
        ("1e9", 10**9),
        ("5000m", 5),
        ("5000000u", 5),
        ("1n", 0),
        ("1e999", 2**63),
    ],
)
def test_memory_quantities(text: int | str, size: int) -> None:
    assert quantity_bytes(text) == size
