"""What an engine of each type needs around it: command line, environment, probes, and the plug-in that vLLM loads.

Invariants:
- a template that names a program of its own (``command`` or ``args``) keeps its command line to the letter;
- what the template says goes before what is only usual; where both can not be true the pool is refused, and the
  message names both sides;
- pods of a pool that needs nothing of this look as they always did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rlfleet.plan.command_line import is_literal, value, values, words_of
from rlfleet.plan.elastic import shrinks_by_delete
from rlfleet.plan.template import (
    ADMIN_KEY_ENV,
    API_KEY_ENV,
    ENGINE,
    PLUGIN_DIR,
    InvalidPool,
    engine_of,
    engine_port,
    gpus_per_engine,
    template_of,
)

VLLM: Final = "VLLM"
#: The middleware that closes vLLM's control paths, and the weight transfer backend; both of package rlfleet_vllm.
MIDDLEWARE: Final = "rlfleet_vllm.ControlKey"
BACKEND: Final = "rlfleet"

_PORT: Final = ("--port",)
_API_KEY: Final = ("--api-key",)


@dataclass(frozen=True, slots=True)
class Preset:
    """One engine type. Flags are given with their other spellings."""

    program: tuple[str, ...]
    model: tuple[str, ...]
    tensor: tuple[str, ...]
    pipeline: tuple[str, ...]
    always: tuple[str, ...]
    offload: tuple[str, ...]
    """Without these the engine can not give device memory back (spec.shrink Offload)."""
    owned: tuple[str, ...]
    """Flags of ``always`` that may not be given again."""
    needs: Mapping[str, str] = field(default_factory=dict)
    """Environment without which the engine can not be driven."""
    usual: Mapping[str, str] = field(default_factory=dict)
    """Environment that the template may set otherwise."""
    start_is_keyed: bool = False
    """STARTED_PATH is one of users: with a key of users no kubelet can ask for it."""


PRESETS: Final[Mapping[str, Preset]] = {
    "SGLang": Preset(
        program=("python3", "-m", "sglang.launch_server"),
        model=("--model-path", "--model"),
        tensor=("--tp-size", "--tensor-parallel-size", "--tp"),
        pipeline=("--pp-size", "--pipeline-parallel-size", "--pp"),
        always=(f"--admin-api-key=$({ADMIN_KEY_ENV})", "--enable-metrics"),
        offload=("--enable-memory-saver",),
        owned=("--admin-api-key",),
        start_is_keyed=True,
    ),
    VLLM: Preset(
        program=("python3", "-m", "vllm.entrypoints.openai.api_server"),
        model=("--model",),
        tensor=("--tensor-parallel-size", "-tp"),
        pipeline=("--pipeline-parallel-size", "-pp"),
        always=("--middleware", MIDDLEWARE, "--weight-transfer-config", f'{{"backend":"{BACKEND}"}}'),
        offload=("--enable-sleep-mode",),
        owned=("--weight-transfer-config",),
        needs={"VLLM_SERVER_DEV_MODE": "1"},
        usual={
            "VLLM_HOST_IP": "$(RLFLEET_POD_IP)",
            # Trainer and engine must hand memory to each other in one way.
            "NCCL_CUMEM_ENABLE": "0",
        },
    ),
}


def _container(pool: Mapping[str, Any]) -> Mapping[str, Any]:
    containers = (template_of(pool).get("spec") or {}).get("containers") or []
    return next((c for c in containers if c.get("name") == ENGINE), {})


def fills(pool: Mapping[str, Any]) -> bool:
    """Whether the command line is ours: the template names no program, and the spec names a model."""
    container = _container(pool)
    ours = bool(container) and engine_of(pool).get("type") in PRESETS
    return ours and bool(engine_of(pool).get("model")) and not (container.get("command") or container.get("args"))


def has_plugin(pool: Mapping[str, Any]) -> bool:
    """Whether the pods need package rlfleet_vllm beside the engine."""
    return engine_of(pool).get("type") == VLLM


def command_line(pool: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """``command`` and ``args`` of the engine container, ours or the template's."""
    container, engine = _container(pool), engine_of(pool)
    if not fills(pool):
        return list(container.get("command") or []), list(container.get("args") or [])
    preset, given = PRESETS[engine["type"]], list(engine.get("args") or [])
    args = [preset.model[0], "$(RLFLEET_MODEL)", "--host", "$(RLFLEET_POD_IP)", "--port", str(engine_port(pool))]
    if gpus_per_engine(pool) > 1 and not values(given, (*preset.tensor, *preset.pipeline)):
        args += [preset.tensor[0], str(gpus_per_engine(pool))]
    args += preset.always
    if engine.get("apiKeySecretRef"):
        args.append(f"{_API_KEY[0]}=$({API_KEY_ENV})")
    if not shrinks_by_delete(pool):
        args += preset.offload
    return list(preset.program), [*args, *given]


def engine_words(pool: Mapping[str, Any]) -> list[str]:
    """The engine's command line, word by word."""
    command, args = command_line(pool)
    return words_of({"command": command, "args": args})


def wants_admin_key(pool: Mapping[str, Any]) -> bool:
    """Whether the engine demands a key of the pod's own on its control paths, which its gate is then told too.

    It does where its arguments or variables refer to the key, and where vLLM is given the middleware that reads it.
    """
    command, args = command_line(pool)
    words = [str(w) for w in [*command, *args]]
    values_ = [str(e.get("value") or "") for e in _container(pool).get("env") or []]
    refers = any(f"$({ADMIN_KEY_ENV})" in text for text in [*words, *values_])
    return refers or (has_plugin(pool) and any(MIDDLEWARE in word for word in words))


# ------------------------------------------------------------------------------------------------ conflicts


def validate(pool: Mapping[str, Any]) -> None:
    """Raise InvalidPool where the template and the engine's type contradict each other."""
    container, engine = _container(pool), engine_of(pool)
    preset, given = PRESETS[engine["type"]], list(engine.get("args") or [])
    own = next((f for f in ("command", "args") if container.get(f)), None)
    if given and own:
        raise InvalidPool(
            f"spec.engine.args is set and so is {own} of the template's container {ENGINE!r}: put all arguments into "
            "one of them"
        )
    if (given or engine["type"] == VLLM) and not own and not engine.get("model"):
        raise InvalidPool(
            f"neither spec.engine.model nor command of the template's container {ENGINE!r} is set: name the model, or "
            "the program"
        )
    _ports(pool, engine_words(pool))
    if given:
        _arguments(pool, preset, given)
    _variables(preset, container)


def _ports(pool: Mapping[str, Any], words: Sequence[str]) -> None:
    ports = [port for _, port in values(words, _PORT) if is_literal(port)]
    if ports and str(engine_port(pool)) not in ports:
        raise InvalidPool(
            f"the template's container {ENGINE!r} runs with --port {ports[-1]} and spec.engine.port is "
            f"{engine_port(pool)}: make them equal"
        )


def _arguments(pool: Mapping[str, Any], preset: Preset, given: Sequence[str]) -> None:
    engine = engine_of(pool)
    by_spec = {
        **dict.fromkeys(preset.model, f"spec.engine.model is {engine.get('model')}"),
        "--host": "engines listen on their pod's address",
        "--port": f"spec.engine.port is {engine_port(pool)}",
        **dict.fromkeys(preset.owned, f"spec.engine.type {engine['type']} sets it"),
        _API_KEY[0]: "spec.engine.apiKeySecretRef names the key, so that the gate knows it too",
    }
    for name, said in by_spec.items():
        for flag, text in values(given, (name,)):
            raise InvalidPool(f"spec.engine.args has {flag} {text}".rstrip() + f", and {said}: leave {flag} out")
    sizes = [value(given, names) or "1" for names in (preset.tensor, preset.pipeline)]
    if values(given, (*preset.tensor, *preset.pipeline)) and all(s.isdigit() for s in sizes):
        ranks = int(sizes[0]) * int(sizes[1])
        if ranks != gpus_per_engine(pool):
            raise InvalidPool(
                f"spec.engine.args spread the engine over {ranks} GPUs ({preset.tensor[0]} {sizes[0]}, "
                f"{preset.pipeline[0]} {sizes[1]}), and spec.engine.gpusPerEngine is {gpus_per_engine(pool)}: make "
                "them equal"
            )


def _variables(preset: Preset, container: Mapping[str, Any]) -> None:
    given = {str(e.get("name")): e for e in container.get("env") or []}
    at = f"the template's container {ENGINE!r} sets"
    for name, needed in preset.needs.items():
        if "valueFrom" in given.get(name, {}):
            raise InvalidPool(
                f"{at} {name} by valueFrom, and the engine can only be driven with {name}={needed}: leave it out"
            )
        text = (given.get(name) or {}).get("value")
        if text is not None and str(text) != needed:
            raise InvalidPool(
                f"{at} {name}={text}, and the engine can only be driven with {name}={needed}: leave it out"
            )
    if preset is not PRESETS[VLLM]:
        return
    plugins = (given.get("VLLM_PLUGINS") or {}).get("value")
    if plugins is not None and BACKEND not in [p.strip() for p in str(plugins).split(",")]:
        raise InvalidPool(
            f"{at} VLLM_PLUGINS={plugins}, and spec.engine.type {VLLM} needs plug-in {BACKEND!r}: add it to the list"
        )
    if "valueFrom" in given.get("PYTHONPATH", {}):
        raise InvalidPool(
            f"{at} PYTHONPATH by valueFrom, and {PLUGIN_DIR} must stand in it, where spec.engine.type {VLLM} has its "
            "plug-in: give it as a value"
        )
