"""A trainer without training, for scenarios: a real weight sender whose publishes a test orders over HTTP.

``python -m e2e.scenarios.publisher`` in a pod. POST /publish {"version": n, "seed": s, "change": ...} puts a real
state dict of the reference model into the sender and answers the manifest's digest, or 409 with the sender's error.
MODEL names the model (of e2e.sim.model; "tiny").
"""

from __future__ import annotations

import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from e2e.scenarios.ports import CONTROL_PORT
from e2e.sim.model import MODELS
from e2e.sim.model_torch import torch_state
from rlfleet.api.tokens import PublicKeys
from rlfleet.sender import WeightSender


def state(seed: int, change: str | None, bulk_mib: int = 0, pieces: int = 1) -> dict[str, torch.Tensor]:
    """The reference model's weights for a seed, optionally broken in one way that a trainer might break them.

    ``bulk_mib``: that many MiB of ``pieces`` tensors that the engine does not know (it ignores such names, as real
    engines do), so that a transfer takes long enough to be interrupted.
    """
    weights = dict(torch_state(MODELS[os.environ.get("MODEL", "tiny")], seed))
    for piece in range(pieces if bulk_mib else 0):
        weights["bulk" if pieces == 1 else f"bulk.{piece}"] = torch.full(((bulk_mib << 18) // pieces,), float(seed))
    first = next(iter(weights))
    if change == "empty":
        return {}
    if change == "nan":
        weights[first] = weights[first].clone()
        weights[first].view(-1)[0] = float("nan")
    if change == "shape":
        weights[first] = weights[first][:-1].contiguous()
    if change == "names":
        # Engines answer success to names that they do not know, and load nothing ([engines] 5).
        return {f"wrong.{name}": tensor for name, tensor in weights.items()}
    if change == "dtype":
        weights[first] = weights[first].to(torch.float64)
    return weights


def devices(text: str) -> tuple[str, list[str]] | None:
    """``<node>/<uuid>,<uuid>``: the devices that this trainer says it uses; None for an empty text."""
    node, _, uuids = text.partition("/")
    return (node, uuids.split(",")) if text else None


def main() -> None:
    """Serve until killed."""
    torch.set_num_threads(1)
    host = os.environ["RLFLEET_POD_IP"]
    sender = WeightSender(
        host,
        pod_uid=os.environ["RLFLEET_POD_UID"],
        public_keys=PublicKeys.from_json(os.environ["RLFLEET_PUBLIC_KEYS"]),
        bucket_bytes=int(os.environ.get("BUCKET_BYTES", "1048576")),
        second_slot=os.environ.get("SECOND_SLOT") == "1",
        devices=devices(os.environ.get("DEVICES", "")),
    )
    sender.start()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            order: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bulk, pieces = int(order.get("bulk", 0)), int(order.get("pieces", 1))
            weights = state(int(order.get("seed", 0)), order.get("change"), bulk, pieces)
            if folder := order.get("save"):
                _save(Path(folder), weights)
            try:
                manifest = sender.publish(
                    int(order["version"]),
                    weights,
                    timeout=float(order.get("timeout", 30)),
                    allow_layout_change=bool(order.get("bulk")) or order.get("change") == "names",
                )
                code, answer = 200, {"digest": manifest.digest, "incarnation": sender.incarnation}
            except Exception as e:  # noqa: BLE001 - the test wants to see whatever a training loop would see
                code, answer = 409, {"error": type(e).__name__, "message": str(e)}
            body = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep the container's log for what matters."""

    ThreadingHTTPServer((host, CONTROL_PORT), Handler).serve_forever()


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))


if __name__ == "__main__":
    main()
