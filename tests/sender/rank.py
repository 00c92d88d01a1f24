"""One receiver of broadcasts as its own process, with the reference engine's own groups.

Usage: rank.py HOST ADDRESS PORT GROUP RANK WORLD_SIZE MANIFEST_FILE OUT_FILE [stop-after-joining]
Writes what it received, as a state dict, to OUT_FILE. Exit code 3: it could not join; 4: it did not receive.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

from e2e.sim.engine.groups import BroadcastGroups
from e2e.sim.engine.groups_api import GroupError
from rlfleet.api.manifest import Manifest


def main() -> int:
    """Join, receive, write."""
    torch.set_num_threads(1)
    host, address, port, name, rank, world_size, manifest_file, out, *then = sys.argv[1:]
    manifest = Manifest.model_validate_json(Path(manifest_file).read_bytes())
    groups = BroadcastGroups(host, 60)
    try:
        groups.create(name, "gloo", address, int(port), int(rank), int(world_size))
    except GroupError as error:
        print(error, file=sys.stderr)
        return 3
    print("joined", flush=True)
    if then:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        buckets = groups.receive(name, list(manifest.bucket_bytes))
    except GroupError as error:
        print(error, file=sys.stderr)
        return 4
    groups.destroy(name)
    state = {}
    for t in manifest.tensors:
        data = bytearray(buckets[t.bucket][t.offset : t.offset + t.nbytes])
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        state[t.name] = flat.view(getattr(torch, t.dtype)).reshape(t.shape)
    torch.save(state, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
