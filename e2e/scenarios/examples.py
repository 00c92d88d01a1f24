"""docs/examples as modules, with the reference model in the place of the reader's."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from e2e.cluster.local import ROOT
from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state

EXAMPLES = ROOT / "docs/examples"


def example(name: str) -> Any:
    """An example, as it stands in the documentation."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def state(version: int) -> dict[str, torch.Tensor]:
    """The reference model's weights for a version."""
    return dict(torch_state(MODELS["tiny"], 1000 + version))


class Model:
    """The reference model, as a trainer's loop sees it: a state dict that a step changes."""

    def __init__(self) -> None:
        self.version = -1

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What it holds now."""
        return state(self.version)


def with_the_reference_model(module: Any) -> Any:
    """What the example says is yours: a model, and what a step makes of it."""
    module.build = Model
    module.train = lambda model, step: setattr(model, "version", step)
    return module
