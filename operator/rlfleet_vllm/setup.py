"""``GET /rlfleet/setup``: what this engine was started with, for its gate.

vLLM's own ``/server_info`` collects facts of the whole machine first: it takes a second, runs ``pip list``, and answers
500 in an image without pip.

Invariant: the answer has the form of ``/server_info?config_format=json``, as far as it goes.
"""

from __future__ import annotations

from typing import Any

#: A path that vLLM has not.
PATH = "/rlfleet/setup"

_MODEL = ("model", "served_model_name", "quantization", "enable_sleep_mode")
_PARALLEL = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "prefill_context_parallel_size",
    "enable_expert_parallel",
)


def describe(config: Any) -> dict[str, Any]:
    """The parts of a VllmConfig that a gate asks for; a part that this version of vLLM has not is null."""
    model = _part(getattr(config, "model_config", None), _MODEL)
    model["dtype"] = str(getattr(getattr(config, "model_config", None), "dtype", None))
    return {
        "vllm_config": {
            "model_config": model,
            "parallel_config": _part(getattr(config, "parallel_config", None), _PARALLEL),
            "weight_transfer_config": _part(getattr(config, "weight_transfer_config", None), ("backend",)),
            "lora_config": _there(getattr(config, "lora_config", None)),
            "speculative_config": _there(getattr(config, "speculative_config", None)),
        }
    }


def _part(of: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(of, name, None) for name in names}


def _there(value: Any) -> dict[str, Any] | None:
    """Whether it is set at all is what counts."""
    return None if value is None else {}
