"""Process of the hollow nodes; started by ``python -m e2e.cluster up``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from pathlib import Path

from e2e.cluster.hollow.kubelet import HollowKubelet


async def _serve(kubelet: HollowKubelet) -> None:
    task = asyncio.create_task(kubelet.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        logging.getLogger("hollow").info("stopped: all containers ended")


def main() -> None:
    """Parses the arguments and serves until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster.hollow")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--memory-folder", type=Path, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--mark", required=True)
    parser.add_argument("--nursery", action="store_true", help="fork gates and engines instead of starting them")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    root = Path(__file__).resolve().parents[3]
    asyncio.run(
        _serve(
            HollowKubelet(
                options.kubeconfig,
                root,
                options.folder,
                options.memory_folder,
                options.nodes,
                options.mark,
                nursery=options.nursery,
            )
        )
    )


if __name__ == "__main__":
    main()
