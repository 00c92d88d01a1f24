"""What the engine is called and what it says of itself: labels that callers write, not facts about bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Answer = dict[str, Any]

VERSION = "0.5.23"


class Refused(Exception):
    """The engine answers 400 with this message in an error object."""


def outcome(success: bool, message: str, **more: Any) -> Answer:
    """The usual body of a control call."""
    return {"success": success, "message": message, **more}


@dataclass
class Labels:
    """Names of one engine. A disk load renames it; the version label is whatever was written last."""

    model_path: str
    served_model_name: str
    weight_version: str = "default"
    started_with: Answer = field(init=False)

    def __post_init__(self) -> None:
        self.started_with = {"model_path": self.model_path, "served_model_name": self.served_model_name}

    def model_info(self) -> Answer:
        """Answered by the front end alone, also while the scheduler is stuck."""
        return {
            "model_path": self.model_path,
            "tokenizer_path": "",
            "served_model_name": self.served_model_name,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": self.weight_version,
            "load_format": "auto",
            "disaggregation_mode": "null",
            "model_type": "rlfleet-reference",
        }

    def server_info(self, running: int, context_length: int, *, memory_saver: bool) -> Answer:
        """What the engine was started with, which weight changes do not touch."""
        return {
            **self.started_with,
            "tokenizer_path": "",
            "tp_size": 1,
            "dp_size": 1,
            "pp_size": 1,
            "version": VERSION,
            "weight_version": "default",
            "context_length": context_length,
            "enable_memory_saver": memory_saver,
            "internal_states": [{"num_running_reqs": running}],
        }
