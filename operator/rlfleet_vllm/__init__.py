"""What rlfleet brings into a vLLM engine: a weight transfer backend, and a lock on the engine's control paths.

- ``--weight-transfer-config '{"backend":"rlfleet"}'``: engines join a trainer's process group (gloo, nccl) for one
  update, or load what was staged in a directory (rlfleet_vllm.backend);
- ``--middleware rlfleet_vllm.ControlKey``: whatever is no path of users needs the key of this engine
  (rlfleet_vllm.control_key).

Invariant: this package stands alone. It imports nothing of rlfleet and nothing that a vLLM image lacks, and torch and
vLLM only where a worker of vLLM has loaded them already. Where ``python -m rlfleet_vllm install DIRECTORY`` has put it,
``PYTHONPATH=DIRECTORY`` is all that vLLM needs to find it.
"""

from __future__ import annotations

from rlfleet_vllm.control_key import ControlKey

__all__ = ["BACKEND", "ControlKey", "register"]

#: Name of the weight transfer backend.
BACKEND = "rlfleet"


def register() -> None:
    """Make the backend known. vLLM calls this in each of its processes (entry point group ``vllm.general_plugins``)."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # A second copy on the path (an image that has the wheel installed, too) registers the same.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rlfleet_vllm.backend", "RlfleetWeights")
