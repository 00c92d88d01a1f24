"""A real vLLM with rlfleet's plug-in beside it, as an engine pod has it: found by PYTHONPATH alone, driven by HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed

from e2e.engines.environments import ENVIRONMENTS
from e2e.engines.prompts import PROMPTS, TOKENS
from rlfleet.api.manifest import TensorEntry
from rlfleet_vllm.__main__ import install
from rlfleet_vllm.control_key import KEY_ENV
from tests.netns import ROOT

KEY, USERS = "key-of-this-pod", "users-key"
ADDRESS = "http://127.0.0.1:8000"
#: Seconds that an engine may take to start on a machine that does other things too.
START_SECONDS = 240.0


def checkpoints(folder: Path, *seeds: int) -> dict[int, list[list[int]]]:
    """Write checkpoints ``folder/<seed>``; by seed, what transformers answers to every prompt."""
    environment = {"PATH": os.defpath, "PYTHONPATH": str(ROOT), "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [str(ENVIRONMENTS["VLLM"].python), "-m", "e2e.engines.tiny", str(folder), *map(str, seeds)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {int(seed): answers for seed, answers in json.loads((folder / "expected.json").read_text()).items()}


class VLLM:
    """One engine process with the checkpoint in ``model``."""

    def __init__(self, folder: Path, model: Path) -> None:
        install(folder / "plugin")
        self.log = folder / "vllm.log"
        environment = {
            "PATH": os.defpath,
            "HOME": str(folder),
            "PYTHONPATH": str(folder / "plugin"),
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            KEY_ENV: KEY,
        }
        command = [
            *(str(ENVIRONMENTS["VLLM"].python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--host", "127.0.0.1", "--port", "8000", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "1024", "--max-num-seqs", "8", "--api-key", USERS),
            *("--middleware", "rlfleet_vllm.ControlKey", "--weight-transfer-config", '{"backend":"rlfleet"}'),
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.http = httpx.Client(base_url=ADDRESS, timeout=60, trust_env=False)
        self._calls = ThreadPoolExecutor(1)

    def up(self) -> VLLM:
        """Wait until it answers."""
        until = time.monotonic() + START_SECONDS
        while True:
            assert self.process.poll() is None, self.log.read_text()[-8000:]
            assert time.monotonic() < until, self.log.read_text()[-8000:]
            try:
                if self.http.get("/health").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def close(self) -> None:
        """End it and its workers."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        self.http.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def call(self, path: str, body: Any = None, *, key: str | None = KEY) -> httpx.Response:
        """A control call. A connection of its own: vLLM closes one over which an error came without a word."""
        headers = {"Connection": "close"} | ({"Authorization": f"Bearer {key}"} if key else {})
        return self.http.post(path, json=body, headers=headers)

    def ok(self, path: str, body: Any = None) -> Any:
        """What a control call that must succeed answers."""
        answer = self.call(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, body: Any = None) -> str:
        """Why a control call fails in the engine."""
        answer = self.call(path, body)
        assert answer.status_code == 500, answer.text
        return str(answer.json()["error"]["message"])

    def soon(self, path: str, body: Any) -> Future[httpx.Response]:
        """A control call that answers only when a trainer does its part."""
        return self._calls.submit(self.call, path, body)

    def join(self, port: int, group: str, seconds: float = 60) -> Future[httpx.Response]:
        """Join a trainer's group on loopback as its only receiver."""
        info = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": group,
            "backend": "gloo",
            "timeout_s": seconds,
        }
        return self.soon("/init_weight_transfer_engine", {"init_info": info})

    def greedy(self) -> list[list[int]]:
        """Its continuations of all prompts, without what a prefix cache remembers."""
        assert self.ok("/reset_prefix_cache")["success"] is True
        self.ok("/resume")
        found = []
        for prompt in PROMPTS:
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            answer = self.call("/v1/completions", body | {"return_token_ids": True}, key=USERS)
            assert answer.status_code == 200, answer.text
            found.append([int(t) for t in answer.json()["choices"][0]["token_ids"]])
        self.ok("/pause?mode=keep")
        return found


class Trainer:
    """Rank 0 that sends what a test tells it to, and no more."""

    def __init__(self, engine: VLLM, port: int) -> None:
        dist: Any = torch.distributed
        joined = engine.join(port, "g")
        limit = timedelta(seconds=60)
        # Rank 0 listens on every interface, which is why these tests have a network of their own.
        store = dist.TCPStore("127.0.0.1", port, is_master=True, timeout=limit, wait_for_workers=False)
        for prefix in ("g", "g/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group = dist.ProcessGroupGloo(store, 0, 2, options)
        assert joined.result().status_code == 200, joined.result().text

    def send(self, weights: dict[str, torch.Tensor]) -> None:
        """One bucket."""
        self._group.broadcast(torch.cat([t.reshape(-1).view(torch.uint8) for t in weights.values()]), 0).wait()


def announce(weights: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
    """The body that announces weights as one bucket."""
    info = {
        "names": list(weights),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in weights.values()],
        "shapes": [list(t.shape) for t in weights.values()],
    }
    return {"update_info": info | more}


def bucket(tensors: tuple[TensorEntry, ...]) -> dict[str, Any]:
    """The body that announces a bucket of a broadcast."""
    info = {
        "names": [t.name for t in tensors],
        "dtype_names": [t.dtype for t in tensors],
        "shapes": [list(t.shape) for t in tensors],
    }
    return {"update_info": info}


def directory(path: Path) -> dict[str, Any]:
    """The body that names a directory of safetensors files."""
    return {"update_info": {"directory": str(path)}}
