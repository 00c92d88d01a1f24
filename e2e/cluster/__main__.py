"""Command line of the local cluster: ``python -m e2e.cluster up|down|status|crash|freeze|thaw|logs``."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from pathlib import Path

from e2e.cluster.hollow.control import HollowError
from e2e.cluster.local import DEFAULT_STATE, ClusterError, LocalCluster, kubectl_hint
from e2e.cluster.programs import BuildError


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description="A local Kubernetes with hollow nodes.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text)
        sub.add_argument("--state", type=Path, default=DEFAULT_STATE, help="state folder (default: .cluster)")
        return sub

    up = command("up", "start the cluster, or what of it does not run")
    up.add_argument("--nodes", type=int, default=8, help="hollow nodes (default: 8)")
    up.add_argument("--provider", choices=["local"], default="local", help="where the cluster runs")
    up.add_argument("--bare", action="store_true", help="without CRDs and chart ('install' adds them)")
    command("down", "stop every process and remove every file")
    command("status", "processes, and how to use the cluster")
    command("install", "apply CRDs and chart again")
    command("guard", "wait until standard input ends, then take the cluster down (started by its owner)")
    for name, text in (
        ("crash", "SIGKILL one container"),
        ("freeze", "SIGSTOP one container"),
        ("thaw", "SIGCONT one container"),
        ("logs", "print a container's output"),
    ):
        sub = command(name, text)
        sub.add_argument("pod")
        sub.add_argument("container", nargs="?" if name == "logs" else None)
        sub.add_argument("-n", "--namespace", default="default")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; problems go to standard error with exit code 1."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (ClusterError, BuildError, HollowError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    cluster = LocalCluster(options.state, getattr(options, "nodes", 0), _say, bare=getattr(options, "bare", False))
    if options.command == "up":
        try:
            cluster.up()
        except BaseException:
            cluster.down()
            raise
        for line in kubectl_hint(cluster):
            _say(f"  {line}")
    elif options.command == "down":
        found = cluster.state.exists()
        cluster.down()
        _say(f"the cluster in {cluster.state} is gone" if found else f"no cluster in {cluster.state}")
    elif options.command == "install":
        cluster.install()
    elif options.command == "guard":
        # Whoever ends everything of this checkout ends the owner too, and its cluster has yet to be taken down.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.stdin.buffer.read()
        cluster.down()
    elif options.command == "status":
        return _status(cluster)
    elif options.command == "logs":
        _logs(cluster, options.namespace, options.pod, options.container)
    else:
        getattr(cluster.hollow, options.command)(options.namespace, options.pod, options.container)
        _say(f"{options.command}: {options.namespace}/{options.pod} {options.container}")
    return 0


def _status(cluster: LocalCluster) -> int:
    processes = cluster.processes()
    if not processes:
        _say(f"no cluster in {cluster.state}")
        return 1
    for name, process in processes.items():
        alive = process is not None and process.alive()
        _say(f"{name:26} {'running' if alive else 'STOPPED':8} {process.pid if process else '-'}")
    for line in kubectl_hint(cluster):
        _say(f"  {line}")
    return 0 if cluster.running() else 1


def _logs(cluster: LocalCluster, namespace: str, pod: str, container: str | None) -> None:
    if container is None:
        spec = cluster.get("pod", pod, "-n", namespace)["spec"]
        container = str(spec["containers"][0]["name"])
    with cluster.hollow.log(namespace, pod, container).open("rb") as log:
        sys.stdout.flush()
        shutil.copyfileobj(log, sys.stdout.buffer)


if __name__ == "__main__":
    sys.exit(main())
