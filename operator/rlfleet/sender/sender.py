"""WeightSender: what a trainer creates once and publishes versions to.

Invariant: ``publish`` returns only when the version is complete and visible, or raises and leaves what was visible.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from rlfleet.api import wire
from rlfleet.api.manifest import Manifest
from rlfleet.devices import Devices, of_pod
from rlfleet.sender import cache, layout
from rlfleet.sender.access import Access, KeySource
from rlfleet.sender.errors import SenderClosed, SenderError
from rlfleet.sender.metrics import Metrics
from rlfleet.sender.publisher import Publisher
from rlfleet.sender.slots import Slots
from rlfleet.tls import AUTHORITY, ClientTLS, ServerTLS, TLSError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: The pod UID of a sender that runs outside the cluster (RLPipeline.spec.weights.sender.url).
OUTSIDE_CLUSTER = "rlfleet-sender"
_START_SECONDS = 30.0


class WeightSender:
    """Keeps the newest complete weights and serves them to rounds.

    - ``host``, ``port``: address to listen on, normally the pod's own; port 0 takes a free one.
    - ``pod_uid``: UID of the trainer's pod (downward API); tokens must name it.
    - ``public_keys``: the operator's keys, ``{kid: base64}``, or a callable that returns them (``Client.public_keys``),
      asked when a call cannot be verified. Until keys are there every call is refused; see ``set_public_keys``.
    - ``bucket_bytes``: bytes per bucket; a larger tensor gets a bucket of its own.
    - ``second_slot``: keep what a round holds beside a newer version, instead of making ``publish`` wait for the round.
      Memory: two copies of the weights (one complete, one being built or spare), three with a second slot.
    - ``backends``: process group backends that this trainer can broadcast with, among "gloo" and "nccl".
    - ``devices``: (node name, GPU UUIDs) of the trainer. Default: the environment's RLFLEET_NODE_NAME (downward API,
      spec.nodeName) and all that the driver (NVML) shows in this container. Status tells them with the memory in use.
    - ``peer_proxy``: ``http://`` URL of a forward proxy for pushes to gates, for a trainer outside of the pod network;
      default: the environment's RLFLEET_PEER_PROXY, else none. Broadcasts do not go through it.
    - ``tls_dir``: folder with tls.crt and tls.key to serve TLS with, and ca.crt to check gates with (a mounted Secret;
      files that are replaced there count at once); default: the environment's RLFLEET_TLS_DIR, else plain HTTP. Weights
      of a broadcast travel in the process group, which has no TLS.
    """

    def __init__(
        self,
        host: str,
        port: int = wire.DEFAULT_SENDER_PORT,
        *,
        pod_uid: str = OUTSIDE_CLUSTER,
        public_keys: KeySource | None = None,
        bucket_bytes: int = cache.DEFAULT_BUCKET_BYTES,
        second_slot: bool = False,
        backends: Sequence[Literal["gloo", "nccl"]] = ("gloo",),
        devices: tuple[str, Sequence[str]] | None = None,
        peer_proxy: str | None = None,
        tls_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError("bucket_bytes must be at least 1")
        if unknown := [b for b in backends if b not in ("gloo", "nccl")]:
            raise ValueError(f"backends: {unknown[0]!r} is not known; choose among gloo and nccl")
        if not pod_uid:
            raise ValueError("pod_uid is empty: give the pod's metadata.uid (downward API)")
        proxy = os.environ.get("RLFLEET_PEER_PROXY", "") if peer_proxy is None else peer_proxy
        if proxy and not proxy.startswith("http://"):
            raise ValueError(f"peer_proxy (RLFLEET_PEER_PROXY): {proxy!r} is not an http:// URL")
        folder = os.environ.get("RLFLEET_TLS_DIR", "") if tls_dir is None else tls_dir
        try:
            self._tls = ServerTLS(Path(folder)) if folder else None
            self._authorities = ClientTLS(Path(folder) / AUTHORITY) if folder else None
        except TLSError as e:
            raise SenderError(f"tls_dir (RLFLEET_TLS_DIR): {e}") from e
        self.incarnation = uuid.uuid4().hex
        self.pod_uid = pod_uid
        self._peer_proxy = proxy or None
        self._host = host
        self._port = port
        self._backends = tuple(backends)
        self._access = Access(pod_uid, public_keys)
        self._slots = Slots(second_slot=second_slot)
        self._metrics = Metrics()
        self._declared = devices
        self._capabilities = (
            "Serialized",
            *(f"Broadcast/{b}" for b in self._backends),
            *(("SecondSlot",) if second_slot else ()),
        )
        #: What ``publish`` and ``publish_sharded`` go through.
        self.publisher = Publisher(self._slots, self._metrics, bucket_bytes=bucket_bytes, cuda="nccl" in self._backends)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Base URL under which the server answers."""
        scheme = "https" if self._tls is not None else "http"
        return f"{scheme}://{f'[{self._host}]' if ':' in self._host else self._host}:{self._port}"

    @property
    def port(self) -> int:
        """The port; the real one after ``start`` when 0 was asked for."""
        return self._port

    def _device_reader(self) -> Devices:
        node, uuids = self._declared or (os.environ.get("RLFLEET_NODE_NAME", ""), None)
        return Devices(node, uuids, is_own=of_pod(self.pod_uid))

    def set_public_keys(self, public_keys: KeySource) -> None:
        """Keys (or a callable that returns them) to verify the operator's tokens with from now on."""
        self._access.set_keys(public_keys)

    def start(self) -> Self:
        """Begin to serve, in a thread of its own. SenderError when the address cannot be had."""
        if self._closed:
            raise SenderClosed("the sender was closed")
        if self._thread is not None:
            return self
        try:
            listener = socket.create_server(
                (self._host, self._port), family=socket.AF_INET6 if ":" in self._host else socket.AF_INET, backlog=128
            )
        except OSError as e:
            raise SenderError(
                f"cannot listen on {self._host}:{self._port}: {e.strerror or e}; give this pod's address and a port "
                "that is free (spec.weights.sender of the RLPipeline names the same)"
            ) from e
        self._port = listener.getsockname()[1]
        started = threading.Event()
        problem: list[BaseException] = []
        self._thread = threading.Thread(
            target=self._serve, args=(listener, started, problem), name="rlfleet-sender", daemon=True
        )
        self._thread.start()
        if not started.wait(_START_SECONDS) or problem:
            raise SenderError("the sender's server did not start") from (problem[0] if problem else None)
        return self

    def _serve(self, listener: socket.socket, started: threading.Event, problem: list[BaseException]) -> None:
        from rlfleet.sender.server import Server

        async def main() -> None:
            server = Server(
                pod_uid=self.pod_uid,
                incarnation=self.incarnation,
                access=self._access,
                slots=self._slots,
                metrics=self._metrics,
                backends=self._backends,
                capabilities=self._capabilities,
                devices=self._device_reader(),
                peer_proxy=self._peer_proxy,
                tls=self._tls,
                authorities=self._authorities,
            )
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            await server.serve(listener)
            started.set()
            try:
                await self._stop.wait()
            finally:
                await server.close()

        try:
            asyncio.run(main())
        except BaseException as e:
            problem.append(e)
            log.exception("the weight sender's server ended")
        finally:
            started.set()
            listener.close()

    def close(self, timeout: float = 30.0) -> None:
        """Stop serving; a publish that waits raises SenderClosed. Idempotent.

        A broadcast in progress ends by its own deadlines; after ``timeout`` seconds its thread is left to them.
        """
        self._closed = True
        self.publisher.close()
        if self._loop is not None and self._stop is not None and self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout)

    def observe_sample(self, meta_info: Mapping[str, Any]) -> int | None:
        """Count how stale a sample is that an engine answered, in versions, and return it.

        ``meta_info``: that of the engine's answer; its ``weight_versions`` (token spans), or else its
        ``weight_version``, name the weights that the tokens came from. The distance from the oldest of them to the
        newest published version goes into ``rlfleet_sender_sample_staleness_versions``. None, and nothing is counted,
        when the engine names no version or nothing is published yet.
        """
        return self._metrics.sample(meta_info)

    def publish(
        self,
        version: int,
        state_dict: Mapping[str, torch.Tensor | Any],
        *,
        timeout: float | None = None,
        allow_rollback: bool = False,
        allow_layout_change: bool = False,
    ) -> Manifest:
        """Make ``state_dict`` the sender's newest version and return its manifest.

        The tensors are copied: they may be changed as soon as this returns. While a round holds the bytes that this
        would replace, it waits up to ``timeout`` seconds (None: until the round lets go) unless there is a second slot.

        Raises InvalidStateDict, LayoutChanged (unless ``allow_layout_change``), VersionGoesBackwards (unless
        ``allow_rollback``), PublishTimeout and SenderClosed; what was published before stays as it was.
        """
        with self.publisher.exclusively(version, timeout) as give_up:
            entries = layout.check(state_dict)
            changed = self.publisher.admit(
                version, entries, allow_rollback=allow_rollback, allow_layout_change=allow_layout_change
            )
            weights = self.publisher.build(version, entries, state_dict.__getitem__, layout_changed=changed)
            return self.publisher.install(weights, entries, give_up)
