"""How real engines run in pods of hollow nodes: command line and environment, by engine type.

Invariant: nothing listens but on the pod's address, as far as the engine lets us decide it; what it opens besides
stays in the network namespace that tests with real engines run in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.engines.environments import ENVIRONMENTS

#: Where pods see the folder of checkpoints.
MODELS_MOUNT = "/models"
SCRATCH_MOUNT = "/scratch"
SERVED_NAME = "tiny"
PORT = 30000
CONTEXT = 1024


def template(engine: str, models: Path, seed: int, *, arguments: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
    """A pod template whose engine starts with the checkpoint of ``seed`` in ``models``."""
    command, environment = _COMMANDS[engine](f"{MODELS_MOUNT}/{seed}")
    container = {
        "name": "engine",
        "image": f"rlfleet/{engine.lower()}-cpu",
        "command": [str(ENVIRONMENTS[engine].python), *command, *arguments],
        "env": [{"name": k, "value": v} for k, v in {**_COMMON, **environment, **env}.items()],
        "volumeMounts": [
            {"name": "models", "mountPath": MODELS_MOUNT, "readOnly": True},
            {"name": "scratch", "mountPath": SCRATCH_MOUNT},
        ],
    }
    volumes: list[dict[str, Any]] = [
        {"name": "models", "hostPath": {"path": str(models)}},
        {"name": "scratch", "emptyDir": {}},
    ]
    return {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container], "volumes": volumes}}


_COMMON = {
    "PYTHONPATH": "",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Two cores for everything: more threads only wait for each other.
    "OMP_NUM_THREADS": "1",
}


def _sglang(model: str) -> tuple[list[str], dict[str, str]]:
    command = [
        "-m", "sglang.launch_server", "--model-path", model, "--served-model-name", SERVED_NAME, "--dtype", "float32",
        "--host", "$(RLFLEET_POD_IP)", "--port", str(PORT), "--device", "cpu", "--attention-backend", "torch_native",
        "--disable-overlap-schedule", "--max-total-tokens", "8192", "--context-length", str(CONTEXT),
        "--max-running-requests", "8",
    ]  # fmt: skip
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1",
        # Its own store would listen on every interface. The file must be new: one engine per pod, one folder per pod.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{SCRATCH_MOUNT}/rendezvous",
    }
    return command, environment


def _vllm(model: str) -> tuple[list[str], dict[str, str]]:
    command = [
        "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", SERVED_NAME,
        "--dtype", "float32", "--host", "$(RLFLEET_POD_IP)", "--port", str(PORT), "--max-model-len", str(CONTEXT),
        "--max-num-seqs", "8", "--enforce-eager",
    ]  # fmt: skip
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "$(RLFLEET_POD_IP)",
        # The first request with log-probabilities would compile for seconds, and without a compiler end the engine.
        "TORCHDYNAMO_DISABLE": "1",
    }
    return command, environment


_COMMANDS = {"SGLang": _sglang, "VLLM": _vllm}
