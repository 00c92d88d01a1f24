"""How real engines run in pods of hollow nodes: what a user would write, with arguments and environment for a CPU.

The command line is that of the engine type (spec.engine.model names the model, no template names a program). Invariant:
nothing listens but on the pod's address, as far as the engine lets us decide it; what it opens besides stays in the
network namespace that tests with real engines run in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from e2e.engines.environments import ENVIRONMENTS

#: Where pods see the folder of checkpoints.
MODELS_MOUNT = "/models"
SCRATCH_MOUNT = "/scratch"
PORT = 30000
CONTEXT = 1024
#: What vLLM's Python loads at its start, so that it leaves processor time to others.
PATIENCE = Path(__file__).resolve().parent / "patience"

#: float32: what an engine says can then be compared with what others compute, token by token.
_ARGUMENTS = {
    "SGLang": (
        "--dtype", "float32", "--device", "cpu", "--attention-backend", "torch_native", "--disable-overlap-schedule",
        "--max-total-tokens", "8192", "--context-length", str(CONTEXT), "--max-running-requests", "8",
    ),
    "VLLM": (
        "--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "8", "--enforce-eager",
        "--enable-scale-out",  # /inference/v1/generate, which alone tells the version of each token
    ),
}  # fmt: skip
_ENVIRONMENT = {
    "SGLang": {
        "SGLANG_USE_CPU_ENGINE": "1",
        # Its own store would listen on every interface. The file must be new: one engine per pod, one folder per pod.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{SCRATCH_MOUNT}/rendezvous",
    },
    "VLLM": {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # The first request with log-probabilities would compile for seconds, and without a compiler end the engine.
        "TORCHDYNAMO_DISABLE": "1",
    },
}


def model(seed: int) -> str:
    """Where an engine sees the checkpoint of a seed."""
    return f"{MODELS_MOUNT}/{seed}"


def pool(engine: str, models: Path, seed: int) -> dict[str, Any]:
    """What of an EnginePool makes engines start with the checkpoint of ``seed`` in ``models``."""
    return {
        # Neither engine can give memory back on a CPU, and SGLang's command line for that needs a package of CUDA.
        "shrink": "Delete",
        "engine": {
            "type": engine,
            "port": PORT,
            "gpusPerEngine": 1,
            "model": model(seed),
            "args": list(_ARGUMENTS[engine]),
        },
        "source": {"template": _template(engine, models)},
    }


def process(engine: str, folder: Path, host: str, port: int, scratch: Path) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of an engine outside of any pod, with the checkpoint in ``folder``.

    ``scratch``: an empty folder of its own.
    """
    program = {
        "SGLang": ["sglang.launch_server", "--model-path"],
        "VLLM": ["vllm.entrypoints.openai.api_server", "--model"],
    }[engine]
    address = ["--host", host, "--port", str(port)]
    command = [str(ENVIRONMENTS[engine].python), "-m", *program, str(folder), *address, *_ARGUMENTS[engine]]
    variables = {k: v.replace(SCRATCH_MOUNT, str(scratch)) for k, v in _variables(engine).items()}
    return command, variables | {"HOME": str(scratch), "VLLM_HOST_IP": host, "VLLM_SERVER_DEV_MODE": "1"}


def _variables(engine: str) -> dict[str, str]:
    return {
        # The image: its python3 is the one of the engine's environment, which sees nothing of ours.
        "PATH": f"{ENVIRONMENTS[engine].python.parent}:/usr/local/bin:/usr/bin:/bin",
        # Hollow pods see the machine's files.
        "PYTHONPATH": str(PATIENCE) if engine == "VLLM" else "",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Few cores for everything: more threads only wait for each other.
        "OMP_NUM_THREADS": "1",
        **_ENVIRONMENT[engine],
    }


def _template(engine: str, models: Path) -> dict[str, Any]:
    container = {
        "name": "engine",
        "image": f"rlfleet/{engine.lower()}-cpu",
        "env": [{"name": k, "value": v} for k, v in _variables(engine).items()],
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
