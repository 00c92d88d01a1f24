"""The hollow kubelet: hands pods that are bound to its nodes to one worker each, and obeys commands.

One list + watch serves all nodes. A worker is known by the pod's uid, never by its name. Commands (crash, freeze, thaw,
stall) come over a unix socket and act on the container's process group.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import aiohttp

from e2e.cluster.hollow.addresses import AddressBlock
from e2e.cluster.hollow.api import Api, ApiError, Object
from e2e.cluster.hollow.container import Container
from e2e.cluster.hollow.control import short_path
from e2e.cluster.hollow.devices import Devices
from e2e.cluster.hollow.environment import PodFacts
from e2e.cluster.hollow.hardware import Hardware
from e2e.cluster.hollow.nodes import ALLOCATABLE, Nodes
from e2e.cluster.hollow.pod import Host, Pod, everywhere
from e2e.cluster.nursery import Nursery
from e2e.cluster.processes import CLUSTER_MARK

#: Programs that most pods of tests run, by nursery; the last one has imported torch.
_NURSED = (("rlfleet.gate", "e2e.sim.engine"), ("e2e.scenarios.publisher", "e2e.sim.engine"))

log = logging.getLogger("hollow.kubelet")


class HollowKubelet:
    """Plays the kubelet for all nodes until it is cancelled; then every container is killed.

    ``nursery``: gates, engines and publishers are forked by a process that has imported them.
    """

    def __init__(
        self,
        kubeconfig: Path,
        root: Path,
        folder: Path,
        memory_folder: Path,
        nodes: int,
        mark: str,
        *,
        nursery: bool = False,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._root = root
        self._folder = folder
        self._memory_folder = memory_folder
        self._count = nodes
        self._mark = mark
        self._nursed = _NURSED if nursery else ()
        self._pods: dict[str, Pod] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._done: set[str] = set()

    async def run(self) -> None:
        """Registers the nodes, marks itself ready, serves for ever."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._memory_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._addresses = AddressBlock(self._mark)
        probing = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            Api(self._kubeconfig) as api,
            aiohttp.ClientSession(connector=probing, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False) as probes,
        ):
            self._api = api
            self._nodes = Nodes(api, self._count, self._addresses)
            devices = Devices({name: self._nodes.devices(name) for name in self._nodes.addresses})
            hardware = Hardware(self._folder, self._nodes.devices)
            await asyncio.to_thread(hardware.install_driver)
            environment = everywhere(self._root) | hardware.driver
            environment |= {"HOME": str(self._folder), CLUSTER_MARK: self._mark}
            with ExitStack() as stack:
                nurseries = [stack.enter_context(Nursery(modules, environment)) for modules in self._nursed]
                self._host = Host(
                    api, probes, self._root, self._folder, self._memory_folder, self._mark, devices, hardware, nurseries
                )
                await self._serve()

    async def _serve(self) -> None:
        await self._nodes.register()
        server = await self._serve_commands()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._nodes.renew())
                group.create_task(self._nodes.watch())
                group.create_task(self._follow_pods())
                (self._folder / "ready").touch()
        finally:
            server.close()
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())
            self._addresses.close()

    async def _follow_pods(self) -> None:
        async for event, pod in self._api.follow("/api/v1/pods", "fieldSelector=spec.nodeName!="):
            uid = pod["metadata"]["uid"]
            if event == "GONE":
                self._done.discard(uid)
                if uid in self._tasks:
                    self._tasks[uid].cancel()
            elif uid in self._pods:
                self._pods[uid].update(pod)
            elif pod["spec"]["nodeName"] in self._nodes.addresses and uid not in self._done:
                await self._admit(pod)

    async def _admit(self, pod: Object) -> None:
        uid = pod["metadata"]["uid"]
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            if pod["metadata"].get("deletionTimestamp"):
                await self._remove(pod)
            return
        host_ip = self._nodes.addresses[pod["spec"]["nodeName"]]
        address = host_ip if pod["spec"].get("hostNetwork") else self._addresses.take()

        worker = Pod(self._host, pod, PodFacts(address, host_ip, ALLOCATABLE))
        worker.update(pod)
        self._pods[uid] = worker
        task = asyncio.create_task(worker.run())
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._forget(uid, address, done))

    def _forget(self, uid: str, address: str, task: asyncio.Task[None]) -> None:
        pod = self._pods.pop(uid)
        del self._tasks[uid]
        self._addresses.release(address)
        if task.cancelled():
            return  # its object is gone already
        # The watch may deliver the object once more before it reports it gone.
        self._done.add(uid)
        if (problem := task.exception()) is not None:
            log.error("worker of %s/%s ended", pod.namespace, pod.name, exc_info=problem)

    async def _remove(self, pod: Object) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": metadata["uid"]}}
        try:
            await self._api.request("DELETE", path, body)
        except (ApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
            log.warning("removal of %s/%s: %r", metadata["namespace"], metadata["name"], error)

    async def _serve_commands(self) -> asyncio.Server:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(self._folder) as path:
            listener.bind(path)
        return await asyncio.start_unix_server(self._command, sock=listener)

    async def _command(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = json.loads(await reader.readline())
            try:
                answer = await self._obey(request)
            except LookupError as error:
                answer = {"error": str(error.args[0])}
            writer.write(json.dumps(answer).encode())
            await writer.drain()
        finally:
            writer.close()

    async def _obey(self, request: Object) -> Object:
        command, namespace, name = request["command"], request["namespace"], request["pod"]
        if command == "log":
            return {"path": str(self._log(namespace, name, request["container"]))}
        if command == "stall":
            self._host.stalls.append((namespace, name, request["container"]))
            return {}
        container = self._find(namespace, name, request["container"])
        process = container.process
        if command == "thaw":
            container.thawed = True  # a probe that is under way met it frozen, and may still fail
        if process is None or process.exit_code is not None:
            if command == "thaw":
                return {}  # Its liveness probe may have ended it at any moment: what does not run is not frozen.
            raise LookupError(f"container {container.name} of {namespace}/{name} does not run")
        if command == "crash":
            process.signal(signal.SIGKILL)
            await process.wait()
        elif command == "freeze":
            container.spared, container.thawed = request["spared"], False
            process.signal(signal.SIGSTOP)
        elif command == "thaw":
            process.signal(signal.SIGCONT)
        elif command not in ("pid", "environment"):
            raise LookupError(f"unknown command {command}")
        return {"pid": process.pid, "environment": process.environment}

    def _find(self, namespace: str, name: str, container: str) -> Container:
        for pod in self._pods.values():
            if (pod.namespace, pod.name) == (namespace, name):
                found = pod.container(container)
                if found is None:
                    raise LookupError(f"pod {namespace}/{name} has no container {container}")
                return found
        raise LookupError(f"no pod {namespace}/{name} on the hollow nodes")

    def _log(self, namespace: str, name: str, container: str) -> Path:
        """The newest log of that name: of a running pod, or of one that is gone."""
        found = list((self._folder / "logs").glob(f"{namespace}_{name}_*/{container}.log"))
        if not found:
            raise LookupError(f"no output of {namespace}/{name} {container}")
        return max(found, key=lambda path: path.parent.stat().st_mtime_ns)
