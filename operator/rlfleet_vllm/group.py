"""One process group with a trainer, for one update: join it, receive buckets from rank 0, leave.

Invariants:
- key space and ranks are those of SGLang's weight update groups, so one sender serves both kinds of engine;
- every wait ends: joining and each collective have a deadline of their own;
- a group that failed is left, never used again.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

# What process groups are made of is not in torch's type stubs.
dist: Any = torch.distributed
_POLL_SECONDS = 0.002
#: Between two tries to reach a trainer that is not there yet.
_POLL_MEETING_SECONDS = 0.05
#: gloo ends a late collective itself; a group with work in it blocks whoever drops it, so its end is awaited.
_GRACE_SECONDS = 2.0
BACKENDS = ("gloo", "nccl")


@dataclass
class Rendezvous:
    """Where and as whom to join. ``timeout_s``: seconds for joining, and for each collective unless told otherwise."""

    master_address: str
    master_port: int
    rank: int
    world_size: int
    group_name: str
    backend: str
    timeout_s: float


class TransferError(RuntimeError):
    """Joining or receiving failed; the message says at what."""


class Group:
    """A joined group. Making one blocks until every rank is there; TransferError when that takes too long."""

    def __init__(self, at: Rendezvous, device: torch.device) -> None:
        if at.backend not in BACKENDS:
            raise ValueError(f"backend {at.backend!r} is not known: use one of {', '.join(BACKENDS)}")
        if at.backend == "nccl" and device.type != "cuda":
            raise ValueError(f"backend nccl needs CUDA devices, and this worker's model lies on {device.type}")
        self._seconds = at.timeout_s
        self._nccl = at.backend == "nccl"
        #: Where buckets are received.
        self.device = device if self._nccl else torch.device("cpu")
        until = time.monotonic() + at.timeout_s
        try:
            _meet(at.master_address, at.master_port, until)
            self._group: Any = self._join(at, until)
        except (RuntimeError, OSError) as e:
            raise TransferError(
                f"group {at.group_name} at {at.master_address}:{at.master_port} was not joined as rank {at.rank} of "
                f"{at.world_size} within {at.timeout_s:g} s: {_first_line(e)}"
            ) from None

    def _join(self, at: Rendezvous, until: float) -> Any:
        store = dist.TCPStore(
            at.master_address, at.master_port, is_master=False, timeout=_left(until), wait_for_workers=False
        )
        for prefix in (at.group_name, f"{at.group_name}/", "cuda/" if self._nccl else "cpu/"):
            store = dist.PrefixStore(prefix, store)
        store.set_timeout(_left(until))
        if not self._nccl:
            gloo = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = _left(until)
            options._devices = [_device(at.master_address, at.master_port)]
            return gloo(store, at.rank, at.world_size, options)
        nccl = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _left(until)
        made = nccl(store, at.rank, at.world_size, options)
        # NCCL meets its peers at the first collective unless told to do it now.
        made.eager_connect_single_device(self.device)
        return made

    def receive(self, nbytes: int, seconds: float | None = None) -> torch.Tensor:
        """The next bucket, as bytes in memory of its own (what is loaded later may still look at it)."""
        if self._group is None:
            raise TransferError("the group was left")
        seconds = self._seconds if seconds is None else seconds
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            if self._nccl:
                self._wait(self._group.broadcast([buffer], options), seconds)
            else:
                options.timeout = timedelta(seconds=seconds)
                self._group.broadcast([buffer], options).wait(timedelta(seconds=seconds + _GRACE_SECONDS))
        except RuntimeError as e:
            self.leave()
            raise TransferError(f"{nbytes} bytes did not arrive within {seconds:g} s: {_first_line(e)}") from None
        return buffer

    def _wait(self, work: Any, seconds: float) -> None:
        until = time.monotonic() + seconds
        # wait() would only order CUDA streams; the end itself is polled.
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("the collective did not end in time")
            time.sleep(_POLL_SECONDS)
        if (error := work.exception()) is not None:
            raise RuntimeError(str(error))

    def leave(self) -> None:
        """Leave; a group that was left already stays left."""
        group, self._group = self._group, None
        if group is not None and self._nccl:
            # A communicator whose peer is gone never ends by itself.
            group.abort()


def views(flat: torch.Tensor, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> Any:
    """(name, tensor) of every tensor of a bucket, in the order of its bytes, without a copy where that is possible."""
    start = 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype, size = dtype_of(dtype_name), nbytes_of(dtype_name, shape)
        part = flat[start : start + size]
        if start % dtype.itemsize:
            part = part.clone()  # a view of this dtype could not begin here
        yield name, part.view(dtype).view(tuple(shape))
        start += size


def dtype_of(name: str) -> torch.dtype:
    """A dtype by the name that torch gives it; ValueError for something else."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype of torch")
    return found


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    size = dtype_of(dtype).itemsize
    for n in shape:
        if n < 0:
            raise ValueError(f"shape {list(shape)} has a negative dimension")
        size *= n
    return size


def _device(address: str, port: int) -> Any:
    """The network device of gloo: the address by which the trainer is reached, unless GLOO_SOCKET_IFNAME names one."""
    gloo = dist.ProcessGroupGloo
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo.create_device(interface=interface.split(",")[0])
    family, kind, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing: it only makes the kernel choose a route
        return gloo.create_device(hostname=probe.getsockname()[0])


def _meet(address: str, port: int, until: float) -> None:
    """Wait until the trainer's store can be reached; OSError with the remedy when it can not.

    torch's own client tries for more than twice its timeout, and never says that a name is unknown.
    """
    while True:
        try:
            socket.create_connection((address, port), _left(until).total_seconds()).close()
            return
        except socket.gaierror as e:
            why = (
                f"this pod finds no address for {address!r} ({e.strerror}): let spec.weights.sender name a "
                "podSelector, or a host that its DNS knows"
            )
        except OSError as e:
            why = f"nobody answers there ({e.strerror or e}): see that the trainer runs and rendezvousPorts are open"
        if time.monotonic() + _POLL_MEETING_SECONDS > until:
            raise OSError(why)
        time.sleep(_POLL_MEETING_SECONDS)


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(0.001, until - time.monotonic()))


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300]
