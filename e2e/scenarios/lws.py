"""The real controller of LeaderWorkerSets, for one namespace of a local cluster.

Its definition, webhooks and program are those of the module that ``e2e/cluster/lws`` pins. Invariant: its webhooks are
asked about that namespace alone, so a controller that is gone keeps nobody else from making pods.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import pki
from e2e.cluster.local import ClusterError, LocalCluster
from e2e.cluster.programs import CONTROLLERS, ensure_programs, module_folder
from e2e.scenarios.kit import await_kind, free_port, http, wait_until

GROUP = "leaderworkerset.x-k8s.io"
MODULE = "sigs.k8s.io/lws"
_ADDRESS = "127.0.0.1"


@contextmanager
def lws_controller(cluster: LocalCluster, namespace: str, folder: Path) -> Iterator[None]:
    """A controller that runs, with the kind LeaderWorkerSet served; both are gone afterwards."""
    program = ensure_programs(["lws-manager"], say=print, catalog=CONTROLLERS)["lws-manager"]
    source = module_folder("lws", MODULE)
    folder.mkdir(parents=True, exist_ok=True)
    definition = source / f"config/crd/bases/{GROUP}_leaderworkersets.yaml"
    cluster.kubectl("apply", "--server-side", "-f", str(definition))
    await_kind(cluster, f"leaderworkersets.{GROUP}")
    authority = pki.Authority(folder / "pki")
    pair = authority.issue("tls", "lws-webhook", addresses=(_ADDRESS,))
    port, health = free_port(), free_port()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_configuration(port, health, pair.certificate.parent)))
    hooks = _webhooks(source, namespace, port, authority.certificate.read_bytes())
    log = folder / "lws.log"
    with log.open("wb") as out:
        # It ends with the thread that starts it, as operators do.
        setpriv = shutil.which("setpriv")
        process = subprocess.Popen(
            [*([setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []), str(program), f"--config={config}"],
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
            stdout=out, stderr=out, cwd=folder, start_new_session=True,
        )  # fmt: skip
        try:
            wait_until(lambda: _ready(process, health, log), "the controller of LeaderWorkerSets to be ready")
            cluster.apply(*hooks)
            probe = _probe(namespace)
            wait_until(lambda: _takes(cluster, probe), f"its webhooks to answer; its log: {log}", every=0.5)
            yield
        finally:
            for hook in hooks:
                cluster.kubectl("delete", hook["kind"], hook["metadata"]["name"], "--ignore-not-found")
            # While its owner lives: LeaderWorkerSets go with the kind, and their pods with them.
            cluster.kubectl("delete", f"crd/leaderworkersets.{GROUP}", "--wait=false")
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _configuration(port: int, health: int, certificates: Path) -> dict[str, Any]:
    return {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": _ADDRESS, "port": port, "certDir": str(certificates)},
        "health": {"healthProbeBindAddress": f"{_ADDRESS}:{health}"},
        "metrics": {"bindAddress": "0"},
    }


def _webhooks(source: Path, namespace: str, port: int, authority: bytes) -> list[dict[str, Any]]:
    """The module's own webhook configurations, at this controller's address."""
    found = list(yaml.safe_load_all((source / "config/webhook/manifests.yaml").read_text()))
    for hook in found:
        hook["metadata"]["name"] = f"{namespace}-lws"
        for one in hook["webhooks"]:
            path = one["clientConfig"]["service"]["path"]
            one["clientConfig"] = {
                "url": f"https://{_ADDRESS}:{port}{path}",
                "caBundle": base64.b64encode(authority).decode(),
            }
            one["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
            if path.endswith("-pod"):
                # As the module's installation narrows it.
                labelled = {"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}
                one["objectSelector"] = {"matchExpressions": [labelled]}
    return found


def _ready(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    text = log.read_text(errors="replace")[-3000:]
    assert process.poll() is None, f"the controller of LeaderWorkerSets ended ({process.returncode}):\n{text}"
    try:
        return http("GET", f"http://{_ADDRESS}:{port}/readyz", timeout=2)[0] == 200
    except OSError:
        return False


def _probe(namespace: str) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "c", "image": "i"}]}}
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": "probe", "namespace": namespace},
        "spec": {"leaderWorkerTemplate": {"workerTemplate": template}},
    }


def _takes(cluster: LocalCluster, thing: dict[str, Any]) -> bool:
    """The apiserver would take this object. It answers 404 for the kind, or reaches no webhook, for a moment."""
    try:
        cluster.kubectl("create", "--dry-run=server", "-f", "-", input=yaml.safe_dump(thing))
    except ClusterError:
        return False
    return True
