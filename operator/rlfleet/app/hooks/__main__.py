"""Command line of the chart's jobs: ``python -m rlfleet.app.hooks crds|uninstall|test``.

Invariant: exit code 0 says that the job's whole purpose is reached; anything else is a line on standard error that says
what to do, and exit code 1, which stops the Helm command that waits for it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from rlfleet.app.hooks.check import check
from rlfleet.app.hooks.crds import upgrade
from rlfleet.app.hooks.steps import HookError
from rlfleet.app.hooks.uninstall import Release, uninstall
from rlfleet.kube.client import KubeClient
from rlfleet.kube.config import ConfigError, credential_source
from rlfleet.kube.errors import ApiError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlfleet.app.hooks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="JOB")
    commands.add_parser("crds", help="bring the installed CRDs to this release")
    ending = commands.add_parser("uninstall", help="stop the operator and take its finalizers off all objects")
    ending.add_argument("--namespace", required=True, help="namespace of the release")
    ending.add_argument("--deployment", required=True, help="the operator's Deployment")
    ending.add_argument("--lease", required=True, help="the operator's Lease, which is deleted")
    ending.add_argument("--signing-key-secret", default="", help="the signing key, deleted too; empty: kept")
    ending.add_argument("--watch-namespaces", default="", help="namespaces served, by comma; empty: all")
    ending.add_argument("--drain-seconds", type=float, default=60.0, help="for objects that are being deleted already")
    test = commands.add_parser("test", help="an installed operator answers")
    test.add_argument("--namespace", required=True, help="a namespace that it serves")
    test.add_argument("--name", required=True, help="of the pipeline that is made, and deleted again")
    test.add_argument("--seconds", type=float, default=120.0, help="for the operator's answer")
    chosen = parser.parse_args(arguments)

    async def run() -> None:
        async with KubeClient(credential_source(), field_manager="rlfleet-hooks", user_agent="rlfleet-hooks") as kube:
            if chosen.command == "crds":
                await upgrade(kube)
            elif chosen.command == "uninstall":
                release = Release(
                    namespace=chosen.namespace,
                    deployment=chosen.deployment,
                    lease=chosen.lease,
                    secret=chosen.signing_key_secret,
                    namespaces=tuple(n for n in chosen.watch_namespaces.split(",") if n),
                )
                await uninstall(kube, release, drain_seconds=chosen.drain_seconds)
            else:
                await check(kube, chosen.namespace, chosen.name, seconds=chosen.seconds)

    try:
        asyncio.run(run())
    except (HookError, ApiError, ConfigError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
