"""One pod's life on a hollow node: volumes, containers in order, status, orderly end.

The order is the kubelet's. Init containers one after the other; a sidecar counts as done when its start-up probe has
passed; then all main containers. When the main containers have ended for good, or the pod is deleted, main containers
are stopped first and sidecars after them in reverse order. Status is written only when it differs from what was written
last, bundled over a short moment, and always guarded by the pod's uid: a recreated name is another pod.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp

from e2e.cluster.hollow import status
from e2e.cluster.hollow.api import STRATEGIC_MERGE, Api, ApiError, Object
from e2e.cluster.hollow.claims import NotPrepared, prepare
from e2e.cluster.hollow.container import Container, Kind, Launch
from e2e.cluster.hollow.devices import Devices, share
from e2e.cluster.hollow.environment import ConfigError, MountPaths, PodFacts, command_line, environment
from e2e.cluster.hollow.hardware import Hardware
from e2e.cluster.hollow.timestamps import now
from e2e.cluster.hollow.volumes import SERVICE_ACCOUNT_MOUNT, Volumes
from e2e.cluster.nursery import Nursery
from e2e.cluster.processes import CLUSTER_MARK

_BUNDLE_SECONDS = 0.03
_RETRY_SECONDS = 0.5
# A kubelet takes up to a minute or so.
_REFRESH_SECONDS = 1.0
# How long a pod waits for devices that an earlier pod is about to give back.
_DEVICE_SECONDS = 15.0
# What a sidecar gets when the main containers have used up the grace period.
_MINIMUM_GRACE_SECONDS = 2.0

log = logging.getLogger("hollow.pod")


@dataclass(frozen=True)
class Host:
    """What all pods of one hollow kubelet share."""

    api: Api
    probes: aiohttp.ClientSession
    root: Path
    folder: Path
    memory_folder: Path
    mark: str
    devices: Devices
    hardware: Hardware
    nurseries: Sequence[Nursery]
    stalls: list[tuple[str, str, str]] = field(default_factory=list)
    """Containers that stop as they start, once each: (namespace, beginning of the pod's name, container)."""

    def stalls_now(self, namespace: str, pod: str, container: str) -> bool:
        """Whether this start is one of ``stalls``, which it then uses up."""
        found = next((s for s in self.stalls if (s[0], s[2]) == (namespace, container) and pod.startswith(s[1])), None)
        if found is not None:
            self.stalls.remove(found)
        return found is not None


def everywhere(root: Path) -> dict[str, str]:
    """Variables of all containers."""
    return {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(root / "operator"), str(root)]),
        "PYTHONUNBUFFERED": "1",
        "LANG": "C.UTF-8",
    }


class Pod:
    """The worker of one pod. ``run`` returns when the pod is gone from the apiserver and nothing of it is left."""

    def __init__(self, host: Host, pod: Object, facts: PodFacts) -> None:
        self._host = host
        self._pod = pod
        self._facts = facts
        metadata, spec = pod["metadata"], pod["spec"]
        self.uid: str = metadata["uid"]
        self.name: str = metadata["name"]
        self.namespace: str = metadata["namespace"]
        self._policy: str = spec.get("restartPolicy", "Always")
        self._folder = host.folder / "pods" / self.uid
        self.log_folder = host.folder / "logs" / f"{self.namespace}_{self.name}_{self.uid}"
        self._volumes = Volumes(pod, self._folder / "volumes", host.memory_folder / self.uid, facts)
        self._deleted = asyncio.Event()
        self._dirty = asyncio.Event()
        self._started_at = now()
        self._sandbox = False
        self._initialized = False
        self._ended: str | None = None
        self._written: Object | None = None
        self._transitions: dict[str, tuple[tuple[str, str], str]] = {}
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._refusal: dict[str, str] = {}
        self._devices: dict[str, list[str]] = {}
        self.containers = [self._container(c) for c in [*spec.get("initContainers", []), *spec["containers"]]]

    def update(self, pod: Object) -> None:
        """Takes a newer version of the object."""
        self._pod = pod
        if pod["metadata"].get("deletionTimestamp"):
            self._deleted.set()
        self._dirty.set()

    def container(self, name: str) -> Container | None:
        """A container by name."""
        return next((c for c in self.containers if c.name == name), None)

    async def run(self) -> None:
        """The whole life. Cancelled when the pod object is gone: then everything is killed at once."""
        writer = asyncio.create_task(self._write_status())
        refresh = asyncio.create_task(self._refresh_secrets())
        life = asyncio.create_task(self._live())
        deletion = asyncio.create_task(self._deleted.wait())
        try:
            await asyncio.wait({life, deletion}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
            await self._deleted.wait()
            life.cancel()
            await asyncio.wait({life})
            await self._stop_all()
            await self._finish()
        finally:
            for container in self.containers:
                container.kill()
            tasks = {writer, refresh, life, deletion}
            for task in tasks:
                task.cancel()
            try:
                await asyncio.wait({*tasks, *self._runs.values()})
            finally:
                # Also when the watch reports the object gone (and cancels) while this still waits.
                self._volumes.remove()
                shutil.rmtree(self._folder, ignore_errors=True)
                self._host.devices.give_back(self.uid)

    async def _live(self) -> None:
        try:
            async with asyncio.timeout(_DEVICE_SECONDS):
                held = await self._host.devices.take(self.uid, self._pod["spec"])
        except TimeoutError:
            message = f"node {self._pod['spec']['nodeName']} has not as many free GPUs as the pod needs"
            self._refusal = {"reason": "UnexpectedAdmissionError", "message": message}
            self._end()
            return
        self._devices = share(self._pod["spec"], held) | await self._prepare_claims()
        await self._prepare_volumes()
        self._sandbox = True
        self._dirty.set()
        for container in self.containers:
            if container.kind is Kind.MAIN:
                continue
            run = self._start(container)
            if container.kind is Kind.SIDECAR:
                await container.started.wait()
                continue
            await asyncio.wait({run})
            if container.exit_code != 0:
                await self._stop_all()
                self._end()
                return
        self._initialized = True
        self._dirty.set()
        mains = {self._start(c) for c in self.containers if c.kind is Kind.MAIN}
        await asyncio.wait(mains)
        await self._stop_all()
        self._end()

    async def _prepare_volumes(self) -> None:
        while True:
            try:
                await self._volumes.prepare(self._fetch, self._token)
                return
            except ConfigError as error:
                problem = str(error)
            except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = repr(error)
            log.info("pod %s/%s waits for its volumes: %s", self.namespace, self.name, problem)
            for container in self.containers:
                container.state = {"waiting": {"reason": "ContainerCreating", "message": problem}}
            self._dirty.set()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _refresh_secrets(self) -> None:
        while self._volumes.secrets:
            await asyncio.sleep(_REFRESH_SECONDS)
            try:
                await self._volumes.refresh(self._fetch)
            except (ConfigError, ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
                log.info("pod %s/%s keeps its Secrets as they are: %r", self.namespace, self.name, error)

    async def _prepare_claims(self) -> dict[str, list[str]]:
        """The devices of the pod's claims by container; waits as a kubelet does until they can be used."""
        while True:
            try:
                return await prepare(self._pod, self._claim)
            except NotPrepared as error:
                problem = str(error)
            except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = repr(error)
            log.info("pod %s/%s waits for its claims: %s", self.namespace, self.name, problem)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _claim(self, name: str) -> Object | None:
        path = f"/apis/resource.k8s.io/v1/namespaces/{self.namespace}/resourceclaims/{quote(name)}"
        try:
            return await self._host.api.request("GET", path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def _start(self, container: Container) -> asyncio.Task[None]:
        task = asyncio.create_task(container.run())
        self._runs[container.name] = task
        return task

    async def _stop_all(self) -> None:
        """Main and init containers together, then the sidecars in reverse order, within one grace period."""
        grace = self._pod["metadata"].get("deletionGracePeriodSeconds", self._grace())
        deadline = time.monotonic() + grace
        first = [c for c in self.containers if c.kind is not Kind.SIDECAR]
        await asyncio.gather(*(c.stop(grace) for c in first))
        for container in reversed([c for c in self.containers if c.kind is Kind.SIDECAR]):
            await container.stop(max(_MINIMUM_GRACE_SECONDS, deadline - time.monotonic()))
        if self._runs:
            await asyncio.wait(self._runs.values())

    def _end(self) -> None:
        # Before the phase or the deletion is written: the scheduler counts an ended pod's GPUs as free from then on.
        self._host.devices.give_back(self.uid)
        self._ended = status.phase(self.containers, self._policy, ended=True)
        self._dirty.set()

    async def _finish(self) -> None:
        """Writes how it ended, then removes the object: watchers see the exit codes of a deleted pod too."""
        self._end()
        path = self._path()
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self.uid},
        }
        while True:
            try:
                await self._write_once()
                await self._host.api.request("DELETE", path, body)
                return
            except ApiError as error:
                if error.status in (404, 409):
                    return
                problem = repr(error)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                problem = repr(error)
            log.info("removal of %s/%s: %s", self.namespace, self.name, problem)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _write_status(self) -> None:
        self._dirty.set()
        while True:
            await self._dirty.wait()
            await asyncio.sleep(_BUNDLE_SECONDS)
            self._dirty.clear()
            try:
                await self._write_once()
            except ApiError as error:
                if error.status in (404, 409):
                    return  # gone, or another pod by now: the watch says the same in a moment
                log.warning("status of %s/%s: %s", self.namespace, self.name, error)
                self._dirty.set()
                await asyncio.sleep(_RETRY_SECONDS)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log.info("status of %s/%s: %r", self.namespace, self.name, error)
                self._dirty.set()
                await asyncio.sleep(_RETRY_SECONDS)

    async def _write_once(self) -> None:
        wanted = self._status()
        if wanted == self._written:
            return
        body = {"metadata": {"uid": self.uid}, "status": wanted}
        await self._host.api.request("PATCH", f"{self._path()}/status", body, content_type=STRATEGIC_MERGE)
        self._written = wanted

    def _status(self) -> Object:
        policy, containers = self._policy, self.containers
        gates = {gate["conditionType"]: False for gate in self._pod["spec"].get("readinessGates", [])}
        for condition in self._pod.get("status", {}).get("conditions", []):
            if condition["type"] in gates:
                gates[condition["type"]] = condition["status"] == "True"
        wanted = status.conditions(
            containers, gates, initialized=self._initialized, sandbox=self._sandbox, ended=self._ended
        )
        result: Object = {
            "phase": self._ended or status.phase(containers, policy, ended=False),
            "hostIP": self._facts.host_ip,
            "hostIPs": [{"ip": self._facts.host_ip}],
            "podIP": self._facts.pod_ip,
            "podIPs": [{"ip": self._facts.pod_ip}],
            "startTime": self._started_at,
            "conditions": [self._condition(kind, value) for kind, value in wanted.items()],
            "containerStatuses": [status.container_status(c) for c in containers if c.kind is Kind.MAIN],
        }
        result.update(self._refusal)
        others = [status.container_status(c) for c in containers if c.kind is not Kind.MAIN]
        if others:
            result["initContainerStatuses"] = others
        return result

    def _condition(self, kind: str, value: tuple[str, str]) -> Object:
        known = self._transitions.get(kind)
        if known is None or known[0][0] != value[0]:
            known = (value, now())
        self._transitions[kind] = (value, known[1])
        # An empty reason removes an earlier one: a strategic merge keeps what is not named.
        return {"type": kind, "status": value[0], "reason": value[1] or None, "lastTransitionTime": known[1]}

    def _container(self, spec: Object) -> Container:
        inits = {c["name"] for c in self._pod["spec"].get("initContainers", [])}
        kind = Kind.MAIN
        if spec["name"] in inits:
            kind = Kind.SIDECAR if spec.get("restartPolicy") == "Always" else Kind.INIT

        async def launch() -> Launch:
            return await self._launch(spec)

        container = Container(
            spec, kind, self._policy, self._facts.pod_ip, self._grace(), launch, self._dirty.set, self._host.probes
        )
        if not inits:
            container.state = {"waiting": {"reason": "ContainerCreating"}}
        return container

    async def _launch(self, spec: Object) -> Launch:
        try:
            given = await environment(self._pod, spec, self._facts, self._fetch)
        except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ConfigError(f"cannot read what the environment refers to: {error!r}") from error
        mounts = self._volumes.mounts(spec)
        paths = MountPaths(mounts)
        folder = self._folder / "containers" / spec["name"]
        folder.mkdir(parents=True, exist_ok=True)
        self.log_folder.mkdir(parents=True, exist_ok=True)
        server = urlsplit(self._host.api.server)
        base = everywhere(self._host.root) | {
            "HOME": str(folder),
            "HOSTNAME": self._pod["spec"].get("hostname") or self.name,
            "KUBERNETES_SERVICE_HOST": server.hostname or "",
            "KUBERNETES_SERVICE_PORT": str(server.port or 443),
        }
        if SERVICE_ACCOUNT_MOUNT in mounts:
            base["RLFLEET_SERVICE_ACCOUNT_DIR"] = mounts[SERVICE_ACCOUNT_MOUNT]
        base |= self._host.hardware.environment(self._pod["spec"]["nodeName"])
        if spec["name"] in self._devices:
            base["NVIDIA_VISIBLE_DEVICES"] = ",".join(self._devices[spec["name"]])
        variables = base | {name: paths.replace(value) for name, value in given.items()}
        words = [paths.replace(word) for word in command_line(spec, base | given)]
        wanted = _existing(paths.replace(spec["workingDir"])) if spec.get("workingDir") else folder
        variables[CLUSTER_MARK] = self._host.mark
        if self._host.stalls_now(self.namespace, self.name, spec["name"]):
            # Stopped before its first instruction, however busy the machine is.
            words = ["/bin/sh", "-c", 'kill -STOP $$; exec "$@"', "sh", *words]
        return Launch(words, variables, wanted, self.log_folder / f"{spec['name']}.log", self._host.nurseries)

    def _grace(self) -> float:
        return float(self._pod["spec"].get("terminationGracePeriodSeconds", 30))

    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"

    async def _fetch(self, kind: str, name: str) -> Object | None:
        try:
            return await self._host.api.request("GET", f"/api/v1/namespaces/{self.namespace}/{kind}/{quote(name)}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def _token(self, audience: str, seconds: int) -> str:
        account = self._pod["spec"].get("serviceAccountName") or "default"
        reference = {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}
        spec: dict[str, Any] = {"expirationSeconds": seconds, "boundObjectRef": reference}
        if audience:
            spec["audiences"] = [audience]
        answer = await self._host.api.request(
            "POST",
            f"/api/v1/namespaces/{self.namespace}/serviceaccounts/{quote(account)}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        return str(answer["status"]["token"])


def _existing(folder: str) -> Path:
    if not Path(folder).is_dir():
        raise ConfigError(f"workingDir {folder} does not exist")
    return Path(folder)
