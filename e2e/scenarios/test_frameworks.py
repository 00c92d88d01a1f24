"""docs/examples for training frameworks, run as they stand against one fleet: engines serve what each brings in.

What a framework sends is replayed from the file of it that docs/guides/frameworks.md names. verl installs without GPUs,
so there the hook is a rollout of verl's own base class.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from aiohttp import web
from safetensors.torch import save_file

from e2e.cluster.local import ROOT, LocalCluster
from e2e.frameworks import verl
from e2e.scenarios.examples import EXAMPLES, example, state, with_the_reference_model
from e2e.scenarios.kit import Fleet, Operator, engine_url, free_port, wait_until
from rlfleet.client import Client
from rlfleet.sender import WeightSender
from rlfleet.sender.sender import OUTSIDE_CLUSTER

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


class Stand:
    """One pipeline ``demo`` with two engines, and a sender outside of the cluster."""

    def __init__(self, fleet: Fleet, operator: Operator) -> None:
        self.fleet = fleet
        self.discovery = f"http://127.0.0.1:{operator.env['DYN_RL_PORT']}/namespaces/{fleet.namespace}/pipelines/p"
        self.host = f"127.{random.randint(64, 250)}.{random.randint(0, 250)}.{random.randint(1, 250)}"
        fleet.pipeline(weights={"sender": {"url": f"http://{self.host}:9450"}})
        fleet.pool(2)
        self.pods = fleet.ready_engines(2)

    def client(self) -> Client:
        return Client(self.fleet.namespace, "p", self.fleet.cluster.kubeconfig)

    @contextlib.contextmanager
    def trainer(self) -> Iterator[tuple[Client, WeightSender]]:
        with self.client() as client, WeightSender(self.host, public_keys=client.public_keys) as sender:
            yield client, sender

    def serves(self, version: int) -> None:
        """Both engines are open with exactly these weights."""
        for pod in self.pods:
            self.fleet.serving(pod, version)
        committed = self.fleet.status("rlpipeline", "p")["committed"]
        assert committed["version"] == version
        assert {self.fleet.checksum(pod) for pod in self.pods} == {d["digest"] for d in committed["engineDigests"]}


@pytest.fixture(scope="module")
def operator(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """An operator that serves discovery."""
    one = Operator(cluster, tmp_path_factory.mktemp("operator"), DYN_ENABLE_RL="true", DYN_RL_PORT=str(free_port()))
    one.start()
    yield one
    one.stop()


def test_examples_bring_their_weights_into_the_engines(
    fleet: Fleet, operator: Operator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(fleet, operator)
    nobody_is_open(stand)
    torch_loop(stand, monkeypatch)
    engine_lists(stand)
    prime_rl(stand, tmp_path)
    verl_and_nemo_rl(stand)
    verl_itself(stand)
    slime_and_miles(stand)


def nobody_is_open(stand: Stand) -> None:
    module = example("external_engines")
    assert module.open_engines(stand.discovery) == []
    assert module.main([stand.discovery]) == 1, "the argument would stand there without an address"
    assert module.main([stand.discovery, "--urls"]) == 0
    assert module.main(["http://127.0.0.1:1"]) == 1, "nothing is known, which is not that there is none"


def torch_loop(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    module = with_the_reference_model(example("torch_loop"))
    for name, value in {
        "NAMESPACE": stand.fleet.namespace, "POD_IP": stand.host, "POD_UID": OUTSIDE_CLUSTER,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "Client", lambda namespace, _: stand.client())
    module.main(steps=2)
    stand.serves(1)


def engine_lists(stand: Stand) -> None:
    """The list names those that are open, and follows."""
    module = example("external_engines")
    first, second = sorted(stand.pods, key=engine_url)
    both = [engine_url(first), engine_url(second)]
    wait_until(lambda: module.open_engines(stand.discovery) == both, "both engines to be listed")
    hosts = [url.removeprefix("http://") for url in both]
    # As slime and miles declare the argument.
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollout-external-engine-addrs", type=str, nargs="+")
    assert parser.parse_args(module.text(both, as_urls=False).split()).rollout_external_engine_addrs == hosts
    command = [sys.executable, str(EXAMPLES / "external_engines.py"), stand.discovery, "--urls", "--follow", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        try:
            prints(follower, both)
            quarantine(stand.fleet, first, "rlfleet.dev/quarantine=look")
            prints(follower, both[1:])
            quarantine(stand.fleet, first, "rlfleet.dev/quarantine-")
            prints(follower, both)
        finally:
            follower.kill()


def prints(follower: subprocess.Popen[str], wanted: list[str]) -> None:
    """Read on until it has printed exactly these lines last."""
    assert follower.stdout is not None
    lines: list[str] = []
    while lines[-len(wanted) :] != wanted:
        lines.append(follower.stdout.readline().strip())
        assert lines[-1], f"it ended, after {lines}"


def quarantine(fleet: Fleet, pod: dict[str, Any], annotation: str) -> None:
    """Take an engine out of service, or give it back, as a person does."""
    fleet.cluster.kubectl("annotate", "pod", pod["metadata"]["name"], "-n", fleet.namespace, annotation)


def prime_rl(stand: Stand, folder: Path) -> None:
    """The orchestrator's calls, by prime-rl's src/prime_rl/utils/client.py (see docs/guides/frameworks.md)."""
    module = example("prime_rl_admin")
    with stand.trainer() as (client, sender), served(module.Admin(client, sender, "tiny").app()) as url:

        async def update(step: int) -> list[int]:
            """Pause, update, resume, on every admin URL; resume whatever came of the update."""
            folder_of = folder / f"step_{step}"
            codes = []
            async with httpx.AsyncClient(base_url=url, timeout=120) as admin:
                assert (await admin.get("/health")).status_code == 200
                assert [m["id"] for m in (await admin.get("/v1/models")).json()["data"]] == ["tiny"]
                paused = await admin.post("/pause", params={"mode": "keep", "clear_cache": "false"})
                codes.append(paused.status_code)
                (folder_of / "NCCL_READY").touch()
                body = {"weight_dir": folder_of.as_posix()}
                # Twice at once, as after a lost answer.
                both = await asyncio.gather(*(admin.post("/update_weights", json=body) for _ in range(2)))
                codes += [r.status_code for r in both]
                codes.append((await admin.post("/resume")).status_code)
                return codes

        for step in (2, 3):
            write(folder / f"step_{step}", state(step))
            assert asyncio.run(update(step)) == [200] * 4
            stand.serves(step)
        # What cannot be a version of this model reaches no engine, and no resume opens anything else.
        write(folder / "step_4", {"wrong": torch.zeros(2)})
        assert asyncio.run(update(4)) == [200, 409, 409, 200]
        stand.serves(3)
        (folder / "step_5").mkdir()
        assert asyncio.run(update(5)) == [200, 409, 409, 200], "a broadcast by NCCL leaves no weights in its folder"
        with httpx.Client(base_url=url) as admin:
            assert admin.post("/update_weights", json={"weight_dir": None}).status_code == 400
            assert admin.post("/load_lora_adapter", json={}).status_code == 404


def write(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """As prime-rl's trainer broadcasts them through the file system."""
    folder.mkdir()
    save_file(weights, str(folder / "model.safetensors"))


@contextlib.contextmanager
def served(app: web.Application) -> Iterator[str]:
    """The application on a loopback port of its own, in a thread."""
    loop = asyncio.new_event_loop()
    port = free_port()
    runner = web.AppRunner(app, access_log=None)

    async def up() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    loop.run_until_complete(up())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def verl_and_nemo_rl(stand: Stand) -> None:
    """The calls of verl's workers after a step, and NeMo-RL's refit (see docs/guides/frameworks.md)."""
    module = example("refit_hook")
    buffer: dict[str, torch.Tensor] = {}

    def gathered(version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """One tensor after the other in the same buffer, as a gatherer yields them."""
        for name, tensor in state(version).items():
            space = buffer.setdefault(str(tuple(tensor.shape)), torch.empty_like(tensor))
            space.copy_(tensor)
            yield name, space

    with stand.trainer() as (client, sender):
        refit = module.Refit(client, sender)
        rollout, other_rank = module.RlfleetRollout(refit), module.RlfleetRollout(module.Refit())

        async def verl(version: int) -> None:
            for each in (other_rank, rollout):
                await each.resume(tags=["weights"])
                await each.update_weights(gathered(version), global_steps=version)
                await each.resume(tags=["kv_cache"])

        asyncio.run(verl(5))
        stand.serves(5)
        with pytest.raises(ValueError, match="whole tensors"):
            asyncio.run(rollout.update_weights(gathered(6), wire_format="delta_flush", global_steps=6))

        nemo_rl = module.RlfleetSynchronizer(refit, lambda: gathered(6), version=6)
        nemo_rl.init_communicator()
        assert nemo_rl.is_stale
        nemo_rl.sync_weights()
        assert not nemo_rl.is_stale
        stand.serves(6)
        nemo_rl.sync_weights()
        assert stand.fleet.status("rlpipeline", "p")["committed"]["version"] == 6, "nothing new, no round"
        nemo_rl.mark_stale()
        with pytest.raises(ValueError, match="kv_scales"):
            nemo_rl.sync_weights(kv_scales={"layer": 1.0})
        nemo_rl.shutdown()


def verl_itself(stand: Stand) -> None:
    """The same hook, in an environment that has verl."""
    command = [str(verl.install()), "-m", "e2e.frameworks.verl_rollout"]
    env = {
        "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT}", "PATH": os.environ["PATH"], "HOST": stand.host, "VERSION": "7",
        "NAMESPACE": stand.fleet.namespace, "KUBECONFIG": str(stand.fleet.cluster.kubeconfig),
    }  # fmt: skip
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("verl 0.9.1 ['Rollout', 'RlfleetRollout', 'BaseRollout'"), done.stdout
    stand.serves(7)


class Chunks:
    """Gathers as slime's HfWeightIteratorBase does: lists of (name, tensor), each gone when the next one comes."""

    def __init__(self, *, args: object, model: object, model_name: str, quantization_config: object) -> None:
        assert (model_name, quantization_config) == ("tiny", None)

    def get_hf_weight_chunks(self, weights: dict[str, torch.Tensor]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        names = list(weights)
        for at in range(0, len(names), 2):
            chunk = [(name, weights[name].clone()) for name in names[at : at + 2]]
            yield chunk
            for _, tensor in chunk:
                tensor.zero_()


def slime_and_miles(stand: Stand) -> None:
    """What their actor does with its weight updater after a step (see docs/guides/frameworks.md)."""
    module = example("refit_hook")
    trained: dict[str, torch.Tensor] = {}
    with stand.trainer() as (client, sender):
        ranks = [
            module.RlfleetUpdater(
                None, [], weights_getter=lambda: trained, model_name="tiny", quantization_config=None,
                refit=refit, chunks=Chunks, version=7,
            )
            for refit in (module.Refit(), module.Refit(client, sender))
        ]  # fmt: skip
        for version in (8, 9):
            trained = state(version)
            for updater in ranks:
                if version == 8:  # as for engines that are new to it
                    updater.connect_rollout_engines([], None, engine_gpu_counts=[1, 1], engine_gpu_offsets=[0, 1])
                updater.update_weights()
                assert updater.weight_version == version
            stand.serves(version)
            assert {stand.fleet.label(pod) for pod in stand.pods} == {str(version)}, "what it compares with its own"
