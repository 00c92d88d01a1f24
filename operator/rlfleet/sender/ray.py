"""A Ray actor as the weight sender: the weights live in a process of their own, and outlive the trainer's step.

    sender = ray_sender.start("10.0.0.7", public_keys=keys, backends=("gloo",))
    digest = sender.publish(step, model.state_dict())
    client.sync(step, sender_incarnation=sender.incarnation, manifest_digest=digest)

Tensors travel through Ray's object store a bucket at a time, at most two of them at once. Invariants:
- the actor holds complete weights or none of a version, as every sender: a trainer that dies in the middle of a publish
  leaves what was there before;
- an actor that Ray restarted is another sender process, with another incarnation and nothing in it: publish again.

Needs the extra ``rlfleet[ray]``; importing ``rlfleet.sender`` does not.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray

from rlfleet.api import wire
from rlfleet.sender import layout
from rlfleet.sender.errors import PublishTimeout, SenderError
from rlfleet.sender.sender import WeightSender

if TYPE_CHECKING:
    import torch

#: A tensor's bytes, as an array of uint8.
Bytes = Any

#: Seconds that the actor waits for the next bucket before it gives a publish up.
BUCKET_SECONDS = 300.0
#: Seconds between two looks at whether the other side has ended.
LOOK_SECONDS = 0.2
#: Seconds for the actor to say who it is; Ray may have to restart it first.
DESCRIBE_SECONDS = 120.0


class SenderActor:
    """What runs in the actor: one WeightSender, and publishes that come in pieces.

    Wrap it with ``ray.remote`` yourself where ``start`` does not fit (placement groups, other options).
    """

    def __init__(self, **options: Any) -> None:
        self._sender = WeightSender(**options).start()
        self._publish: _Publish | None = None

    @ray.method(max_task_retries=-1)  # asked while Ray restarts the actor, it is answered by the new process
    def describe(self) -> dict[str, str]:
        """Incarnation and URL of the sender in this process."""
        return {"incarnation": self._sender.incarnation, "url": self._sender.url}

    def begin(self, version: int, entries: dict[str, tuple[str, tuple[int, ...]]], options: dict[str, Any]) -> Any:
        """Begin a publish; the names of the tensors that ``add`` wants, bucket by bucket."""
        if self._publish is not None:
            self._publish.give_up("another publish was begun")
        slices, sizes = layout.cut(entries, self._sender.publisher.bucket_bytes)
        names: list[list[str]] = [[] for _ in sizes]
        for s in slices:
            names[s.bucket].append(s.name)
        self._publish = _Publish(self._sender, version, entries, options)
        return names

    def add(self, tensors: dict[str, Bytes]) -> None:
        """The bytes of the tensors of the next bucket; raises what ended the publish, if something did."""
        self._current().add(tensors)

    def end(self) -> str:
        """Wait until the version is visible; the digest of its bytes."""
        publish, self._publish = self._current(), None
        return publish.result()

    def close(self) -> None:
        """Stop serving."""
        self._sender.close()

    def _current(self) -> _Publish:
        if self._publish is None:
            raise SenderError("no publish was begun in this actor: it was restarted in between; publish again")
        return self._publish


class _Publish:
    """One publish in a thread of its own, which is handed the tensors bucket by bucket."""

    def __init__(self, sender: WeightSender, version: int, entries: layout.Layout, options: dict[str, Any]) -> None:
        self._sender = sender
        self._version = version
        self._entries = entries
        self._options = options
        self._buckets: queue.Queue[dict[str, Bytes]] = queue.Queue(maxsize=1)
        self._here: dict[str, Bytes] = {}
        self._why = ""
        self._ended = threading.Event()
        self._digest = ""
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="rlfleet-publish", daemon=True).start()

    def add(self, tensors: dict[str, Bytes]) -> None:
        """Hand a bucket over, as soon as the one before was begun."""
        while not self._ended.is_set():
            try:
                self._buckets.put(tensors, timeout=LOOK_SECONDS)
                return
            except queue.Full:
                continue
        self._raise()

    def give_up(self, why: str) -> None:
        """Take no more tensors: it ends without a result, unless it has all of them."""
        self._why = why

    def result(self) -> str:
        """Wait for the end."""
        self._ended.wait()
        self._raise()
        return self._digest

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._digest = self._work()
        except BaseException as e:  # noqa: BLE001 handed to the caller
            self._error = e
        finally:
            self._ended.set()

    def _work(self) -> str:
        publisher = self._sender.publisher
        with publisher.exclusively(self._version, self._options["timeout"]) as give_up:
            changed = publisher.admit(
                self._version,
                self._entries,
                allow_rollback=self._options["allow_rollback"],
                allow_layout_change=self._options["allow_layout_change"],
            )
            weights = publisher.build(self._version, self._entries, self._fetch, layout_changed=changed)
            return publisher.install(weights, self._entries, give_up).digest

    def _fetch(self, name: str) -> torch.Tensor:
        import torch

        until = time.monotonic() + BUCKET_SECONDS
        while name not in self._here:
            if self._why:
                raise SenderError(f"version {self._version}: {self._why}")
            if time.monotonic() >= until:
                raise PublishTimeout(
                    f"version {self._version}: no tensors came for {BUCKET_SECONDS:g} s: the trainer that began it is "
                    "gone"
                )
            with contextlib.suppress(queue.Empty):
                self._here = self._buckets.get(timeout=LOOK_SECONDS)
        dtype, shape = self._entries[name]
        # A copy: what lies in the object store is not to be written to, and torch warns of such memory.
        data = self._here.pop(name).copy()
        if not data.size:
            return torch.empty(shape, dtype=getattr(torch, dtype))
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)


class RaySender:
    """The trainer's side of a SenderActor: publishes to it."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    @property
    def incarnation(self) -> str:
        """The sender process that is there now. Asked each time: Ray may have restarted it."""
        return self._describe()["incarnation"]

    @property
    def url(self) -> str:
        """Where it answers, for ``spec.weights.sender.url``."""
        return self._describe()["url"]

    def publish(
        self,
        version: int,
        state_dict: Mapping[str, torch.Tensor | Any],
        *,
        timeout: float | None = None,
        allow_rollback: bool = False,
        allow_layout_change: bool = False,
    ) -> str:
        """``WeightSender.publish`` in the actor; the digest of the bytes. Tensors are copied to the CPU on the way.

        Raises what ``WeightSender.publish`` raises, and ``ray.exceptions.RayActorError`` when the actor dies in it:
        publish again, Ray restarts the actor.
        """
        entries = layout.check(state_dict)
        options = {
            "timeout": timeout,
            "allow_rollback": allow_rollback,
            "allow_layout_change": allow_layout_change,
        }
        before: list[Any] = []
        for names in ray.get(self.actor.begin.remote(version, entries, options)):
            tensors = {name: _bytes(state_dict[name]) for name in names}
            # The one before the last has been taken: two are on the way at most.
            ray.get(before)
            before = [self.actor.add.remote(tensors)]
        ray.get(before)
        return str(ray.get(self.actor.end.remote()))

    def close(self) -> None:
        """Stop the sender and end the actor."""
        ray.get(self.actor.close.remote())
        ray.kill(self.actor)

    def _describe(self) -> dict[str, str]:
        found: dict[str, str] = ray.get(self.actor.describe.remote(), timeout=DESCRIBE_SECONDS)
        return found


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor in C order: Ray moves arrays without a copy, and torch can not pickle every dtype."""
    import torch

    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    found: Bytes = flat.view(torch.uint8).numpy()
    return found


def start(
    host: str,
    port: int = wire.DEFAULT_SENDER_PORT,
    *,
    actor_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> RaySender:
    """Start a sender actor that serves at ``host``:``port``.

    ``actor_options``: of Ray (``name``, ``num_gpus``, ``resources``, ``scheduling_strategy``...); default: no CPU is
    reserved, and Ray restarts it whenever its process dies. It must land on the node of ``host``. ``options``: of
    WeightSender; ``public_keys`` as a mapping, or as a callable that can be pickled.
    """
    chosen = {"num_cpus": 0, "max_restarts": -1, **(actor_options or {})}
    actor = ray.remote(SenderActor).options(**chosen).remote(host=host, port=port, **options)
    made = RaySender(actor)
    made._describe()  # a port that cannot be had is an error here, not at the first publish
    return made
