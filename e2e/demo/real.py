"""The demo with a real engine in its pods: SGLang or vLLM, on this machine's CPU, in place of the reference engine.

The manifests stay the demo's; what differs is put into them here: the engine, its model (a Llama as the reference
engine's, but large enough for real kernels), the router that goes with it, and more patience. Invariant: the promises
are the same, and so is where their evidence comes from.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.demo import leg
from e2e.demo.follow import tail
from e2e.demo.proof import Proof
from e2e.demo.stage import DemoError, Obj, Stage
from e2e.engines.asking import RealEngine
from e2e.engines.making import make
from e2e.engines.prompts import PROMPTS
from e2e.engines.serving import pool, process
from e2e.engines.tiny import MODEL

#: How many times longer than with the reference engine anything may take.
PATIENCE = 4.0
#: The seed of the checkpoint that engines start with; the trainer's weights are others from the first round on.
SEED = 7
_START_SECONDS = 300.0
_STOP_SECONDS = 30.0
_DEADLINES = {"pendingSeconds": 600, "stagingSeconds": 60, "pausedSeconds": 60}
_ROUTERS = {"SGLang": "SGLangRouter", "VLLM": "VLLMRouter"}
_VLLM_ROUTER = (
    "--worker-startup-timeout-secs=4",
    "--worker-startup-check-interval=1",
    "--disable-retries",
    "--disable-circuit-breaker",
    "--log-level=warning",  # sglang-router calls it warn
)

_BANNER = """\
rlfleet demo with real {name}: a trainer learns, and after every step its new weights travel into all running engines.

  *** THE GPUs ARE SIMULATED. Nodes and devices exist as names only; engines and trainer compute on this CPU. ***
  Real: {name}, Kubernetes control plane, operator, gates, weight sender, gloo broadcast, {router}, the training.
  Not real: kubelet and containers (host processes), GPUs, the model's size (a Llama of half a million parameters).
"""


@dataclass(frozen=True)
class Real:
    """One real engine's part. ``models``: a folder for checkpoints."""

    engine: str
    models: Path

    @property
    def banner(self) -> str:
        """What is real and what is not."""
        router = "sglang-router" if self.engine == "SGLang" else "vllm-router"
        return _BANNER.format(name=self.engine.replace("VLLM", "vLLM"), router=router)

    @property
    def compared(self) -> str:
        """What the proof compares: vLLM's checksums mean nothing on a CPU, where weights are packed away."""
        return "checksum" if self.engine == "SGLang" else "greedy answers"

    def prepare(self, python: Path) -> None:
        """Make the checkpoint that engines start with. RuntimeError if that is not possible."""
        make(python, self.models, (SEED,))

    # ------------------------------------------------------------------------------------------ manifests

    def recast(self, obj: Obj) -> Obj:
        """An object of the demo's manifests with the real engine in it."""
        kind, spec = obj["kind"], obj.get("spec") or {}
        if kind == "RLPipeline":
            spec.setdefault("sync", {})["deadlines"] = _DEADLINES
            for node in (spec.get("trainer") or {}).get("gpus") or []:
                node["devices"] = node["devices"][:1]  # as many as there are engines on them
            if self.engine == "VLLM" and spec["sync"].get("verify") == "Required":
                # Checksums that mean nothing are no proof; a token that each engine generates is compared instead.
                spec["sync"] |= {"verify": "IfSupported", "probeGeneration": True}
        elif kind == "EnginePool":
            spec |= pool(self.engine, self.models, SEED)
            for router in spec["routers"]:
                router["type"] = _ROUTERS[self.engine]
            if spec.get("placement"):
                spec["replicas"] = 2
                spec["placement"]["devices"] = [
                    {**d, "devices": d["devices"][:1]} for d in spec["placement"]["devices"]
                ]
        elif kind == "Pod":
            self._recast_pod(spec["containers"][0])
        return obj

    def _recast_pod(self, container: Obj) -> None:
        program = container["command"][-1]
        if program == "e2e.sim.trainer":
            container["args"] = [a for a in container["args"] if not a.startswith(("--base-timeout", "--sync-timeout"))]
            container["args"] += ["--base-timeout=600", "--sync-timeout=300"]
            for variable in container["env"]:
                if variable["name"] == "NVIDIA_VISIBLE_DEVICES":
                    variable["value"] = variable["value"].split(",")[0]
        if program in ("e2e.sim.trainer", "e2e.sim.load"):
            container["args"] += [f"--model={MODEL}", f"--api={self.engine.lower()}"]
        if program == "sglang_router.launch_router" and self.engine == "VLLM":
            kept = ("--host", "--port", "--policy", "--prometheus-host", "--prometheus-port")
            container["command"] = ["python", "-m", "vllm_router.launch_router"]
            container["args"] = [a for a in container["args"] if a.split("=")[0] in kept] + list(_VLLM_ROUTER)

    # ------------------------------------------------------------------------------------------ proof

    def prove(self, stage: Stage, checkpoint: Path) -> Proof:
        """Compare the pool's engines with one that loads ``checkpoint``. Raises DemoError when it does not start."""
        pods = stage.items("pods", "-l", "rlfleet.dev/pool=engines")
        if not pods:
            raise DemoError("the engine pods are gone", stage.logs())
        told = {str(p["metadata"]["name"]): self._tell(RealEngine.of_pod(self.engine, p)) for p in pods}
        folder = self.models / "final"
        shutil.copytree(self.models / str(SEED), folder)
        shutil.copyfile(checkpoint / "model.safetensors", folder / "model.safetensors")
        with self._from_disk(folder, stage) as engine:
            return Proof(told, self._tell(engine))

    def _tell(self, engine: RealEngine) -> str | None:
        try:
            if self.engine == "SGLang":
                return engine.checksum()
            answers = [engine.ask(prompt, 64).tokens for prompt in PROMPTS]
        except (OSError, AssertionError):
            return None
        return hashlib.sha256(json.dumps(answers).encode()).hexdigest()

    @contextmanager
    def _from_disk(self, folder: Path, stage: Stage) -> Iterator[RealEngine]:
        log = stage.cluster.state / "engine-from-disk.log"
        scratch = stage.cluster.state / "engine-from-disk"
        scratch.mkdir()
        # This network namespace is ours alone: no other has the port.
        command, environment = process(self.engine, folder, "127.0.0.1", leg.ROUTER_PORT + 1, scratch)
        environment = {**stage.environment, **environment}
        with log.open("wb") as output:
            started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        engine = RealEngine(self.engine, "from-disk", f"http://127.0.0.1:{leg.ROUTER_PORT + 1}")
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not self._is_up(engine):
                if started.poll() is not None or time.monotonic() > deadline:
                    raise DemoError("the engine that loads from disk did not start", [("engine from disk", tail(log))])
                time.sleep(0.5)
            yield engine
        finally:
            started.terminate()
            try:
                started.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()

    def _is_up(self, engine: RealEngine) -> bool:
        try:
            return engine.call("GET", "/v1/models" if self.engine == "VLLM" else "/ready", seconds=5)[0] == 200
        except OSError:
            return False
