"""The broadcast leg: the sender's Broadcast operation, against a bare gloo collective. Budget: >= 0.9 of its rate.

The same two receiver processes, the same bytes in the same buckets, the same kind of group; what differs is who is
rank 0: the sender, or a plain loop of broadcasts in this process. Timed without the rendezvous, which both need: it is
printed apart, with its share of the whole leg. Usage: broadcast_leg.py [MiB] [repetitions]
"""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "operator")]

import torch  # noqa: E402
import torch.distributed as torch_distributed  # noqa: E402
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: E402

from bench.machine import describe, report  # noqa: E402
from e2e.sim.engine.groups import BroadcastGroups  # noqa: E402
from rlfleet.api import wire  # noqa: E402
from rlfleet.sender import WeightSender  # noqa: E402
from rlfleet.sender.broadcast import listen  # noqa: E402
from tests.gate.kit import free_port  # noqa: E402
from tests.sender.caller import POD_UID, Operator, public  # noqa: E402

ADDRESS = "127.0.0.1"
RECEIVERS = 2
SECONDS = 60.0
dist: Any = torch_distributed


def receive(rank: int) -> None:
    """A receiver process: for each line "port group size..." on standard input, join and receive."""
    torch.set_num_threads(1)
    groups = BroadcastGroups(ADDRESS, SECONDS)
    for line in sys.stdin:
        port, name, *sizes = line.split()
        groups.create(name, "gloo", ADDRESS, int(port), rank, RECEIVERS + 1)
        groups.receive(name, [int(size) for size in sizes])
        groups.destroy(name)
        print("received", flush=True)


def bare(port: int, name: str, buckets: list[torch.Tensor]) -> float:
    """The baseline's rank 0; seconds from the formed group to the last broadcast."""
    timeout = timedelta(seconds=SECONDS)
    store = dist.TCPStore(
        ADDRESS,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen(ADDRESS, port).detach(),
        use_libuv=True,
    )
    for prefix in (name, f"{name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=ADDRESS)]
    group = dist.ProcessGroupGloo(store, 0, RECEIVERS + 1, options)
    started = time.perf_counter()
    for bucket in buckets:
        group.broadcast(bucket, 0).wait()
    return time.perf_counter() - started


def main() -> None:
    """Run both, alternating."""
    if sys.argv[1:2] == ["receive"]:
        receive(int(sys.argv[2]))
        return
    mib = int(sys.argv[1]) if len(sys.argv) > 1 else 256
    repetitions = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    torch.set_num_threads(1)
    print(describe())
    receivers = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "receive", str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, RECEIVERS + 1)
    ]
    try:
        run(receivers, mib, repetitions)
    finally:
        for receiver in receivers:
            receiver.kill()
            receiver.communicate()


def run(receivers: list[subprocess.Popen[str]], mib: int, repetitions: int) -> None:
    """Publish, then broadcast by turns."""
    key = Ed25519PrivateKey.generate()
    ours: list[float] = []
    baseline: list[float] = []
    met: list[int] = []

    def tell(port: int, name: str, sizes: tuple[int, ...]) -> None:
        for receiver in receivers:
            assert receiver.stdin is not None
            print(port, name, *sizes, file=receiver.stdin, flush=True)

    def done() -> None:
        for receiver in receivers:
            assert receiver.stdout is not None
            assert receiver.stdout.readline() == "received\n"

    with WeightSender(ADDRESS, 0, pod_uid=POD_UID, public_keys={"k1": public(key)}, bucket_bytes=mib * 2**18) as sender:
        state = {f"t{i}": torch.randint(0, 256, (mib * 2**15,), dtype=torch.uint8) for i in range(32)}
        manifest = sender.publish(1, state)
        buckets = [torch.cat(list(state.values())[i : i + 8]) for i in range(0, 32, 8)]
        assert tuple(b.numel() for b in buckets) == manifest.bucket_bytes
        caller = Operator(sender.url, key, sender.incarnation)
        try:
            for attempt in range(1, repetitions + 2):
                group = wire.BroadcastGroup(
                    master_address=ADDRESS,
                    master_port=free_port(ADDRESS),
                    group_name=f"ours-{attempt}",
                    world_size=RECEIVERS + 1,
                    backend="gloo",
                )
                order = wire.BroadcastOrder(manifest_digest=manifest.digest, group=group, rendezvous_seconds=SECONDS)
                request = caller.request(order, attempt)
                assert caller.post("/v1/operations", request).status_code == 202
                tell(group.master_port, group.group_name, manifest.bucket_bytes)
                record = caller.ended(request["id"])
                assert record.state is wire.OperationState.SUCCEEDED, record
                done()
                ours.append(record.result["transportMs"] / 1000)
                met.append(record.result["rendezvousMs"])
                port, name = free_port(ADDRESS), f"bare-{attempt}"
                tell(port, name, manifest.bucket_bytes)
                baseline.append(bare(port, name, buckets))
                done()
        finally:
            caller.http.close()
    # The first of each warms up.
    report(f"broadcast leg, {RECEIVERS} receivers", manifest.total_bytes, ours[1:], baseline[1:], 0.9)
    print(f"  rendezvous of ours, warm: {min(met[1:])}-{max(met[1:])} ms")
    shares = sorted(m / 1000 / (m / 1000 + o) for m, o in zip(met[1:], ours[1:], strict=True))
    # What groups that are kept from round to round could save, were keeping them free (decision 0034).
    print(f"  share of the rendezvous in the leg: {shares[len(shares) // 2]:.2f} ({shares[0]:.2f}-{shares[-1]:.2f})")


if __name__ == "__main__":
    main()
