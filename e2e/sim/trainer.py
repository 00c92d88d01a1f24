"""``python -m e2e.sim.trainer``: a real policy-gradient loop whose rollouts come from the fleet that it keeps in sync.

Per version: rollouts through the router, log-probabilities recomputed and compared, one optimiser step, publish,
sync. A few long rollouts are started before each sync and collected after it, so that some cross the change of
weights in mid-answer; their tokens are checked span by span. They are not trained on.

Exit codes: 0 all steps done; 2 an engine's log-probabilities or version claims do not hold; 3 a version did not reach
the fleet; 4 a rollout was not answered as it must.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path

from .loop import Settings, SyncError, train
from .model import MODELS
from .policy import LogprobError
from .rollouts import APIS, RolloutClient, RolloutError

EXIT_LOGPROBS = 2
EXIT_SYNC = 3
EXIT_ROLLOUTS = 4


def _arguments() -> argparse.Namespace:
    defaults, env = Settings(), os.environ.get
    parser = argparse.ArgumentParser(prog="python -m e2e.sim.trainer", description=__doc__)
    parser.add_argument("--router", required=True, help="base URL that answers /generate")
    parser.add_argument("--api", choices=APIS, default="sglang", help="what the engines behind the router speak")
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--pipeline", required=True, help="name of the RLPipeline")
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--model", choices=sorted(MODELS), default=defaults.model)
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--carried", type=int, default=defaults.carried, help="long rollouts across each sync")
    parser.add_argument("--carried-tokens", type=int, default=defaults.carried_tokens)
    parser.add_argument(
        "--colocated", action="store_true", help="train on the GPUs of the engines, which sleep for each step"
    )
    parser.add_argument("--no-sync", action="store_true", help="engines keep the base version")
    parser.add_argument("--sync-timeout", type=float, default=300.0, help="seconds one sync may take")
    parser.add_argument("--base-timeout", type=float, default=300.0, help="seconds the first sync may take")
    parser.add_argument("--sender-host", default=env("RLFLEET_POD_IP", "127.0.0.1"))
    parser.add_argument("--sender-port", type=int, default=9450)
    parser.add_argument("--bucket-bytes", type=int, default=32768, help="small, so that even this model needs several")
    parser.add_argument("--kubeconfig", help="default: the pod's service account, or KUBECONFIG")
    parser.add_argument("--progress", type=Path, default=Path(env("RLFLEET_PROGRESS_FILE", os.devnull)))
    parser.add_argument("--checkpoint", type=Path, help="folder to create with the final weights")
    parser.add_argument("--stay", action="store_true", help="after the last step keep the sender up until SIGTERM")
    return parser.parse_args()


def main() -> int:
    """Connect to the fleet, train, and say how it went; see the module's exit codes."""
    arguments = _arguments()
    settings = Settings(
        steps=arguments.steps,
        seed=arguments.seed,
        model=arguments.model,
        batch=arguments.batch,
        carried=0 if arguments.colocated else arguments.carried,
        carried_tokens=arguments.carried_tokens,
        sync=not arguments.no_sync,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from .fleet import Fleet

    try:
        with ExitStack() as stack:
            fleet = stack.enter_context(
                Fleet(
                    namespace=arguments.namespace,
                    pipeline=arguments.pipeline,
                    host=arguments.sender_host,
                    port=arguments.sender_port,
                    pod_uid=os.environ.get("RLFLEET_POD_UID", "trainer"),
                    kubeconfig=arguments.kubeconfig,
                    bucket_bytes=arguments.bucket_bytes,
                    base_timeout=arguments.base_timeout,
                    timeout=arguments.sync_timeout,
                )
            )
            rollouts = stack.enter_context(RolloutClient(arguments.router, api=arguments.api))
            progress = stack.enter_context(arguments.progress.open("a"))
            step = fleet.train_gpus if arguments.colocated else nullcontext
            curve = train(settings, rollouts, fleet.publish, progress, arguments.checkpoint, step=step)
            if curve:
                print(f"mean reward: first {curve[0]:.3f}, last {curve[-1]:.3f}", flush=True)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # all steps are done
            while arguments.stay:
                signal.pause()
    except LogprobError as error:
        print(f"trainer: log-probability check failed: {error}", file=sys.stderr, flush=True)
        return EXIT_LOGPROBS
    except SyncError as error:
        print(f"trainer: sync failed: {error}", file=sys.stderr, flush=True)
        return EXIT_SYNC
    except RolloutError as error:
        print(f"trainer: rollout failed: {error}", file=sys.stderr, flush=True)
        return EXIT_ROLLOUTS
    return 0


if __name__ == "__main__":
    sys.exit(main())
