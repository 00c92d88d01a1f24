"""Broadcast: the sender as rank 0 of a process group that the engines join for one operation.

Invariants:
- the rendezvous store listens on a socket that we bound ourselves to the address that was asked for: torch's own
  would listen on every interface;
- every wait has a deadline inside this process (rendezvous, the whole transport, each collective), so a receiver
  that never joins, dies or freezes ends the operation and nothing else;
- a group is used for one operation and never again; whatever happened, the next one begins from nothing.

Key space and ranks are those of SGLang's weight update groups, which real engines and the reference engine build.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlfleet.api import wire
from rlfleet.api.budgets import Bounds, Split
from rlfleet.sender.cache import Weights
from rlfleet.sender.errors import Refused
from rlfleet.threads import in_daemon

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: gloo ends a late collective itself, and then its threads are idle; we only wait so much longer for that to happen,
#: because a group that is destroyed with work in it blocks the interpreter until the work ends.
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.002


def listen(address: str, port: int) -> socket.socket:
    """A listening socket at exactly this address; Refused TransportFailed at once when it cannot be had."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        # Connections of an earlier round in TIME_WAIT do not matter; a listener on the port still does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
        return listener
    except OSError as e:
        if listener is not None:
            listener.close()
        words = "address already in use" if e.errno == errno.EADDRINUSE else (e.strerror or str(e))
        raise Refused(
            wire.ErrorReason.TRANSPORT_FAILED, f"cannot listen on {address}:{port} for the rendezvous: {words}"
        ) from e


class Broadcast:
    """One BroadcastOrder. Creating it claims the port; ``run`` does the rest in a thread of its own."""

    def __init__(self, weights: Weights, order: wire.BroadcastOrder, backends: Sequence[str]) -> None:
        if order.group.backend not in backends:
            raise Refused(
                wire.ErrorReason.UNSUPPORTED,
                f"group.backend: this sender broadcasts with {', '.join(backends) or 'nothing'}, not "
                f"{order.group.backend}: change spec.transport.backend, or WeightSender(backends=...)",
            )
        self._weights = weights
        self._order = order
        self._received = time.monotonic()
        self._listener = listen(order.group.master_address, order.group.master_port)

    async def run(self) -> dict[str, object]:
        """Carry the order out; the result is BroadcastOrder's. Refused RendezvousTimeout or TransportFailed."""
        return await in_daemon(self._guarded, "rlfleet-broadcast")

    def _guarded(self) -> dict[str, object]:
        try:
            return self._work()
        except Refused as e:
            reason, message = e.reason, e.message
        except Exception as e:
            log.exception("broadcast in group %s failed in a way that has no word", self._order.group.group_name)
            reason, message = wire.ErrorReason.INTERNAL, f"{type(e).__name__}: {e}"
        # Only words leave: an exception that is kept, even in a local here, keeps the frames below it, and with them
        # the group, the store and its port, until some collector comes by.
        raise Refused(reason, message)

    def close(self) -> None:
        """Give the port back if ``run`` never got to use it."""
        self._listener.close()

    def _work(self) -> dict[str, object]:
        order = self._order
        started = time.monotonic()
        split = Split(
            order.rendezvous_seconds, order.transport_seconds, order.collective_seconds, order.teardown_seconds
        )
        # Counted from the reception of the order: the thread that runs this may have started late.
        bounds = Bounds.counted_from(self._received, split, order.budget_seconds)
        rendezvous_until = bounds.rendezvous_until
        store: Any = None
        group: Any = None
        try:
            try:
                store = self._store(rendezvous_until)
                group = self._group(store, rendezvous_until)
            except RuntimeError as e:
                raise self._no_rendezvous(e, started, rendezvous_until) from e
            joined = time.monotonic()
            self._send_all(group, bounds, bounds.transport_until(joined))
            ended = time.monotonic()
        finally:
            self._tear_down(group, bounds)
            del group, store
        return {
            "bytes": self._weights.manifest.total_bytes,
            "rendezvousMs": int((joined - started) * 1000),
            "transportMs": int((ended - joined) * 1000),
        }

    def _store(self, until: float) -> Any:
        dist: Any = _distributed()

        name = self._order.group.group_name
        # From here on the store owns the socket and closes it with itself.
        store: Any = dist.TCPStore(
            self._order.group.master_address,
            self._order.group.master_port,
            is_master=True,
            timeout=_left(until),
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
            use_libuv=True,
        )
        device = "cuda" if self._order.group.backend == "nccl" else "cpu"
        for prefix in (name, f"{name}/", f"{device}/"):
            store = dist.PrefixStore(prefix, store)
        return store

    def _group(self, store: Any, until: float) -> Any:
        dist: Any = _distributed()

        group = self._order.group
        if group.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()
            options._timeout = _left(until)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=group.master_address)]
            return dist.ProcessGroupGloo(store, 0, group.world_size, options)
        return self._nccl_group(store, until)

    def _nccl_group(self, store: Any, until: float) -> Any:
        import torch

        dist: Any = _distributed()

        device = self._cuda()
        torch.cuda.set_device(device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _left(until)
        made = dist.ProcessGroupNCCL(store, 0, self._order.group.world_size, options)
        # NCCL meets its peers at the first collective unless told to do it now.
        made.eager_connect_single_device(device)
        return made

    def _cuda(self) -> torch.device:
        import torch

        if self._weights.cuda_device is None:
            raise Refused(
                wire.ErrorReason.UNSUPPORTED,
                "group.backend nccl: this trainer has no CUDA device; use spec.transport.backend gloo",
            )
        return torch.device("cuda", self._weights.cuda_device)

    def _send_all(self, group: Any, bounds: Bounds, until: float) -> None:
        for index, bucket in enumerate(self._weights.buckets):
            seconds = bounds.collective(time.monotonic(), until)
            if seconds <= 0:
                raise Refused(
                    wire.ErrorReason.TRANSPORT_FAILED,
                    f"transportSeconds ({self._order.transport_seconds:g} s, or what was left of budgetSeconds) passed "
                    f"before bucket {index} of {len(self._weights.buckets)}",
                )
            try:
                if self._order.group.backend == "gloo":
                    _send_gloo(group, bucket, seconds)
                else:
                    _send_nccl(group, bucket.to(self._cuda()), seconds)
            except RuntimeError as e:
                raise Refused(
                    wire.ErrorReason.TRANSPORT_FAILED,
                    f"bucket {index} of {len(self._weights.buckets)} was not broadcast within {seconds:.1f} s or a "
                    f"receiver went away: {_first_line(e)}",
                ) from e

    def _tear_down(self, group: Any, bounds: Bounds) -> None:
        self._listener.close()
        if group is None or self._order.group.backend != "nccl":
            return
        # A NCCL communicator with a dead peer never ends by itself.
        ended = threading.Thread(target=group.abort, name="rlfleet-abort", daemon=True)
        ended.start()
        seconds = bounds.left(time.monotonic(), self._order.teardown_seconds)
        ended.join(seconds)
        if ended.is_alive():
            raise Refused(
                wire.ErrorReason.TRANSPORT_FAILED,
                f"the NCCL group was not torn down within {seconds:.1f} s",
            )

    def _no_rendezvous(self, error: RuntimeError, started: float, until: float) -> Refused:
        passed, allowed = time.monotonic() - started, max(until - started, 0.001)
        group = self._order.group
        # torch has no error class for it, and its words differ: what counts is whether the time is used up.
        if passed >= 0.9 * allowed:
            return Refused(
                wire.ErrorReason.RENDEZVOUS_TIMEOUT,
                f"not all {group.world_size - 1} receivers joined group {group.group_name} at {group.master_address}:"
                f"{group.master_port} within {allowed:.3g} s",
            )
        return Refused(wire.ErrorReason.TRANSPORT_FAILED, f"the group did not form: {_first_line(error)}")


def _distributed() -> Any:
    # What process groups are made of is not in torch's type stubs.
    import torch.distributed

    return torch.distributed


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(0.001, until - time.monotonic()))


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().split("\n", 1)[0][:300]


def _send_gloo(group: Any, bucket: torch.Tensor, seconds: float) -> None:
    dist: Any = _distributed()

    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timedelta(seconds=seconds)
    group.broadcast([bucket], options).wait(timedelta(seconds=seconds + _GRACE_SECONDS))


def _send_nccl(group: Any, bucket: torch.Tensor, seconds: float) -> None:
    dist: Any = _distributed()

    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    work = group.broadcast([bucket], options)
    until = time.monotonic() + seconds
    # wait() would only order CUDA streams; the end itself is polled.
    while not work.is_completed():
        if time.monotonic() > until:
            raise RuntimeError("the collective did not end in time")
        time.sleep(_POLL_SECONDS)
    if (error := work.exception()) is not None:
        raise RuntimeError(str(error))
