"""Whether pipeline and pools fit together: the rules that no single object can check ([coordinator] 1.2).

Invariants:
- one reason per rule, and every violation is found at once, in the order of the rules here (structure first);
- a violation names the pools that it keeps from making pods. Pods that run are never touched because of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlfleet.api.conditions import Reason
from rlfleet.plan.blocks import blocks_of, slots_of
from rlfleet.plan.engine_arguments import refused
from rlfleet.plan.presets import engine_words
from rlfleet.plan.template import (
    ENGINE,
    GPU_RESOURCE,
    asks_claims,
    asks_gpu,
    assignments,
    engine_of,
    gpus_per_engine,
    is_claims,
    is_pinned,
    staging_mib,
    template_of,
)
from rlfleet.plan.topology import Device, device_names, train_devices
from rlfleet.plan.transport import Refusal, choose

Obj = Mapping[str, Any]

#: Memory that a gate needs beside what is staged.
GATE_MIB: Final = 256

_SUFFIXES: Final[Mapping[str, int]] = {
    **{s: 1024 ** (i + 1) for i, s in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{s: 1000 ** (i + 1) for i, s in enumerate(("k", "M", "G", "T", "P", "E"))},
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule, in words that name the objects and the remedy.

    ``pools``: those that make no pods until it is mended.
    """

    reason: Reason
    message: str
    pools: frozenset[str] = frozenset()


def violations(pipeline: Obj, pools: Iterable[Obj]) -> tuple[Violation, ...]:
    """Every broken rule of one pipeline.

    ``pools``: all EnginePools of its namespace; those that are being deleted do not count.
    """
    namespace = [p for p in pools if not p["metadata"].get("deletionTimestamp")]
    mine = [p for p in namespace if p["spec"].get("pipeline") == pipeline["metadata"]["name"]]
    return (
        *_devices_listed_twice(pipeline, mine),
        *_engine_sizes(pipeline, mine),
        *_device_books(mine),
        *_whole_engines(mine),
        *_staging(mine),
        *_block_names(pipeline, mine),
        *_models(mine),
        *_pinned_together(mine, namespace),
        *_blocks_together(mine),
        *_enough_slots(pipeline, mine),
        *_partial_overlap(pipeline, mine),
        *_transports(pipeline, mine),
    )


def _named(pools: Iterable[Obj]) -> frozenset[str]:
    return frozenset(_name(p) for p in pools)


def _name(pool: Obj) -> str:
    return str(pool["metadata"]["name"])


def _engine(pool: Obj) -> Obj:
    containers = (template_of(pool).get("spec") or {}).get("containers") or []
    return next((c for c in containers if c.get("name") == ENGINE), {})


def _blocks(pool: Obj) -> list[str]:
    return [str(b) for b in (pool["spec"].get("placement") or {}).get("blocks") or []] if is_claims(pool) else []


def pinned_devices(pool: Obj) -> frozenset[Device]:
    """Every device that a Pinned pool lists, whether or not an engine needs it now."""
    if not is_pinned(pool):
        return frozenset()
    return train_devices((pool["spec"].get("placement") or {}).get("devices")) or frozenset()


# ------------------------------------------------------------------------------------------------ structure


def _devices_listed_twice(pipeline: Obj, pools: Sequence[Obj]) -> Iterable[Violation]:
    """One UUID is one device: it lies on one node."""
    lists = [("spec.trainer.gpus", (pipeline["spec"].get("trainer") or {}).get("gpus"), frozenset[str]())]
    lists += [
        (f"spec.placement.devices of pool {_name(p)}", (p["spec"].get("placement") or {}).get("devices"), _named([p]))
        for p in pools
    ]
    for where, gpus, stopped in lists:
        nodes: dict[str, set[str]] = {}
        for device in train_devices(gpus) or ():
            nodes.setdefault(device.uuid, set()).add(device.node)
        for uuid, found in sorted(nodes.items()):
            if len(found) > 1:
                yield Violation(
                    Reason.DEVICE_LISTED_TWICE,
                    f"{where} lists {uuid} on {' and '.join(sorted(found))}; a UUID is one device on one node: "
                    "remove the wrong one",
                    stopped,
                )


def _engine_sizes(pipeline: Obj, pools: Sequence[Obj]) -> Iterable[Violation]:
    """All engines of a pool have the size that engine.gpusPerEngine says; pools may differ."""
    known = blocks_of(pipeline)
    for pool in pools:
        for name in _blocks(pool):
            held = int(known[name].get("devicesPerSlot") or 1) if name in known else gpus_per_engine(pool)
            if held != gpus_per_engine(pool):
                yield Violation(
                    Reason.ENGINE_SIZE_MISMATCH,
                    f"slots of train block {name} have {held} devices, and spec.engine.gpusPerEngine of pool "
                    f"{_name(pool)} is {gpus_per_engine(pool)}; use a block with as many",
                    _named([pool]),
                )
        resources = _engine(pool).get("resources") or {}
        asked = (resources.get("limits") or resources.get("requests") or {}).get(GPU_RESOURCE)
        size = gpus_per_engine(pool)
        if asked is not None and str(asked) != str(size):
            yield Violation(
                Reason.ENGINE_SIZE_MISMATCH,
                f"the engine container of pool {_name(pool)} asks for {asked} {GPU_RESOURCE}, and "
                f"spec.engine.gpusPerEngine is {size}; make them equal, or leave the resource out of the template",
                _named([pool]),
            )


def _device_books(pools: Sequence[Obj]) -> Iterable[Violation]:
    """Device plugins and DRA keep separate books: the scheduler would give one device out twice."""
    for pool in pools:
        spec = template_of(pool).get("spec") or {}
        containers = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
        if any(asks_gpu(c) for c in containers) and (is_claims(pool) or any(asks_claims(c) for c in containers)):
            yield Violation(
                Reason.TWO_DEVICE_BOOKS,
                f"the template of pool {_name(pool)} asks for {GPU_RESOURCE} and uses a ResourceClaim; these are "
                "separate books of the same devices, use one of them",
                _named([pool]),
            )


def _whole_engines(pools: Sequence[Obj]) -> Iterable[Violation]:
    """One pod is one engine that is updated as a whole."""
    for pool in pools:
        for reason, what in refused(engine_words(pool)):
            yield Violation(reason, f"the engine of pool {_name(pool)} {what}", _named([pool]))


def _staging(pools: Sequence[Obj]) -> Iterable[Violation]:
    """What is staged counts against the gate's memory limit: over it the kernel kills the gate in mid-round."""
    for pool in pools:
        if (short := staging_over_limit(pool)) is not None:
            yield Violation(Reason.STAGING_OVER_LIMIT, f"pool {_name(pool)}: {': '.join(short)}", _named([pool]))


def staging_over_limit(pool: Obj) -> tuple[str, str] | None:
    """Why its gates would be killed for their memory, and what to do; None: they would not, or nothing limits them."""
    limits = ((pool["spec"].get("gate") or {}).get("resources") or {}).get("limits") or {}
    needed = staging_mib(pool) + GATE_MIB
    if "memory" not in limits or quantity_bytes(limits["memory"]) >= needed * 2**20:
        return None
    return (
        f"spec.gate.resources.limits.memory is {limits['memory']}, and what is staged (spec.gate.stagingMiB "
        f"{staging_mib(pool)}) counts against it beside the gate itself",
        f"set it to {needed}Mi or more, or lower stagingMiB",
    )


def quantity_bytes(value: int | str) -> int:
    """Bytes of a memory quantity, rounded down. The schema has seen to its form, but not to how much that is."""
    text, factor = str(value), 1.0
    for suffix, times in (*_SUFFIXES.items(), ("m", 1e-3), ("u", 1e-6), ("n", 1e-9)):
        if text.endswith(suffix):
            text, factor = text.removesuffix(suffix), float(times)
            break
    return int(min(float(text) * factor, 2.0**63))


def _block_names(pipeline: Obj, pools: Sequence[Obj]) -> Iterable[Violation]:
    """Slots are slots of blocks that the pipeline has."""
    known = blocks_of(pipeline)
    for pool in pools:
        missing = [b for b in _blocks(pool) if b not in known]
        if missing:
            yield Violation(
                Reason.BLOCK_NOT_FOUND,
                f"spec.placement.blocks of pool {_name(pool)} names {', '.join(missing)}, and spec.trainer.blocks of "
                f"the RLPipeline has {', '.join(sorted(known)) or 'none'}; name one that is there, or add it there",
                _named([pool]),
            )


# ------------------------------------------------------------------------------------------------ meaning


def _models(pools: Sequence[Obj]) -> Iterable[Violation]:
    """A pipeline has one policy: exactly one model takes its weights."""
    models: dict[str, list[str]] = {}
    for pool in pools:
        model = engine_of(pool).get("model")
        if model:
            models.setdefault(str(model), []).append(_name(pool))
    if len(models) > 1:
        said = "; ".join(f"{model} in {', '.join(sorted(names))}" for model, names in sorted(models.items()))
        yield Violation(
            Reason.MODELS_DIFFER,
            f"all pools of a pipeline serve one model, spec.engine.model differs: {said}",
            frozenset(n for names in models.values() for n in names),
        )


def _pinned_together(mine: Sequence[Obj], namespace: Sequence[Obj]) -> Iterable[Violation]:
    """Nobody else keeps two Pinned pools off one device. The older pool keeps it."""
    for pool in mine:
        own = pinned_devices(pool)
        for other in namespace:
            both = own & pinned_devices(other) if other is not pool else frozenset()
            if both and _age(other) < _age(pool):
                yield Violation(
                    Reason.DEVICES_SHARED_BY_POOLS,
                    f"pools {_name(other)} and {_name(pool)} are both pinned to {device_names(both)}; "
                    "give each pool devices of its own",
                    _named([pool]),
                )


def _blocks_together(mine: Sequence[Obj]) -> Iterable[Violation]:
    """A slot has one engine. The older pool keeps the block."""
    for pool in mine:
        for other in mine:
            both = set(_blocks(pool)) & set(_blocks(other)) if other is not pool else set()
            if both and _age(other) < _age(pool):
                yield Violation(
                    Reason.BLOCKS_SHARED_BY_POOLS,
                    f"pools {_name(other)} and {_name(pool)} both use train block {', '.join(sorted(both))}; give each "
                    "pool blocks of its own",
                    _named([pool]),
                )


def _enough_slots(pipeline: Obj, mine: Sequence[Obj]) -> Iterable[Violation]:
    """Engines beyond the slots are not made; those that have one are."""
    for pool in mine:
        if not is_claims(pool):
            continue
        room, wanted = len(slots_of(pool, pipeline)), int(pool["spec"].get("replicas", 1))
        if wanted > room:
            yield Violation(
                Reason.NOT_ENOUGH_DEVICES,
                f"the train blocks of pool {_name(pool)} have {room} slots, spec.replicas is {wanted}; lower it or "
                "add a block",
            )


def _age(pool: Obj) -> tuple[str, str]:
    return str(pool["metadata"].get("creationTimestamp") or ""), _name(pool)


def _partial_overlap(pipeline: Obj, pools: Sequence[Obj]) -> Iterable[Violation]:
    """The train pool lies within the engines' devices or apart from them: who trains must know whom to displace."""
    used = {b for p in pools for b in _blocks(p)}
    idle = set(blocks_of(pipeline)) - used
    if used and idle:
        yield Violation(
            Reason.PARTIAL_OVERLAP,
            f"engines use train block {', '.join(sorted(used))} and not {', '.join(sorted(idle))}; let pools use all "
            "blocks of spec.trainer.blocks or none",
            _named(p for p in pools if _blocks(p)),
        )
    train = train_devices((pipeline["spec"].get("trainer") or {}).get("gpus"))
    if train is None or not pools or not all(is_pinned(p) for p in pools):
        return
    engines = frozenset(d for p in pools for d in pinned_devices(p))
    if train & engines and not train <= engines:
        yield Violation(
            Reason.PARTIAL_OVERLAP,
            f"engines are pinned to {device_names(train & engines)} of the train pool and not to "
            f"{device_names(train - engines)}; pin engines to all devices of spec.trainer.gpus or to none",
            _named(pools),
        )


def _transports(pipeline: Obj, pools: Sequence[Obj]) -> Iterable[Violation]:
    """What the listed devices alone say of the transport: a round with these engines would be refused."""
    transport = pipeline["spec"].get("transport") or {}
    mode = str(transport.get("mode") or "CPUSerialize")
    train = train_devices((pipeline["spec"].get("trainer") or {}).get("gpus"))
    if mode == "CPUSerialize" or train is None or not pools or not all(is_pinned(p) for p in pools):
        return
    wanted: dict[str, frozenset[Device] | None] = {}
    listed: dict[str, frozenset[Device] | None] = {}
    for pool in pools:
        for index, slot in enumerate(assignments(pool)):
            name, devices = f"{_name(pool)}-{index}", frozenset(Device(slot.node, uuid) for uuid in slot.devices)
            listed[name] = devices
            if index < int(pool["spec"].get("replicas", 1)):
                wanted[name] = devices
    mixed = bool(transport.get("assertMixed"))
    choice = choose(mode, wanted, train, assert_mixed=mixed, fleet=listed)
    if isinstance(choice, Refusal):
        yield Violation(choice.reason, choice.message, _named(pools))


def stopped(found: Iterable[Violation], pool: str) -> tuple[Violation, ...]:
    """The violations that keep a pool from making pods."""
    return tuple(v for v in found if pool in v.pools)
