"""Publishing a state dict whose tensors are spread over ranks (FSDP2, DTensor): gathered on the way into the buckets.

Every rank calls ``publish_sharded`` with its own shards; exactly one has the sender, and only its memory ever holds the
full weights, in CPU buckets. Invariants:
- one tensor is whole at a time: it is gathered, copied into its bucket by the owner, and dropped by everybody;
- what is wrong on any rank (no owner, two owners, other tensors, another version) is an error on every rank before the
  first tensor is gathered;
- no rank waits longer than the deadline for the others, and a publish that fails leaves what the sender held before.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlfleet.sender import layout
from rlfleet.sender.cache import Weights
from rlfleet.sender.errors import GatherFailed, GatherTimeout, SenderError
from rlfleet.sender.sender import WeightSender

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class _Told:
    """What each rank tells the others first. ``problem``: why it can not take part."""

    version: int
    layout: str
    bucket_bytes: int | None
    problem: str | None


def publish_sharded(
    version: int,
    state_dict: Mapping[str, Any],
    *,
    sender: WeightSender | None,
    group: dist.ProcessGroup | None = None,
    deadline_seconds: float = 600.0,
    timeout: float | None = None,
    allow_rollback: bool = False,
    allow_layout_change: bool = False,
) -> str:
    """Gather a sharded state dict into ``sender``, as version ``version``; the digest of its bytes, on every rank.

    A collective call: every rank of ``group`` (None: the default group) makes it, with the same version and the same
    names in the same order. Exactly one rank gives its ``sender``: it owns the only cache, and keeps alone what was
    gathered. All others give None and are done as soon as the last tensor was gathered; the owner then waits up to
    ``timeout`` seconds for a round that holds what this would replace, as ``WeightSender.publish`` does.

    DTensors are gathered over their own mesh, whatever their placements; a plain tensor is taken as it is on the owner.
    ``deadline_seconds`` bounds the whole gather on this rank.

    Raises, beside what ``publish`` raises: GatherFailed when ranks do not fit together, or one went away in the middle;
    GatherTimeout when the deadline passed. What the sender held before is still there. When a rank went away or froze,
    the process groups are of no use any more: restart the ranks.
    """
    with _Publication(sender, version, timeout) as publication:
        work = _Gather(publication, version, state_dict, group, allow_rollback, allow_layout_change)
        weights = _bounded(work, version, deadline_seconds)
        return publication.finish(weights, work)


class _Publication:
    """The owner's publish as one block; nothing on the other ranks."""

    def __init__(self, sender: WeightSender | None, version: int, timeout: float | None) -> None:
        self.publisher = None if sender is None else sender.publisher
        self._block = None if sender is None else sender.publisher.exclusively(version, timeout)
        self._give_up: float | None = None

    def __enter__(self) -> _Publication:
        if self._block is not None:
            self._give_up = self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._block is not None:
            self._block.__exit__(*error)

    def finish(self, gathered: Weights | str, work: _Gather) -> str:
        """Make what was gathered visible; its digest."""
        if isinstance(gathered, str):
            return gathered
        assert self.publisher is not None
        return self.publisher.install(gathered, work.entries, self._give_up).digest


class _Gather:
    """The collective part, in the same order on every rank."""

    def __init__(
        self,
        publication: _Publication,
        version: int,
        state_dict: Mapping[str, Any],
        group: dist.ProcessGroup | None,
        allow_rollback: bool,
        allow_layout_change: bool,
    ) -> None:
        self.entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._publisher = publication.publisher
        self._version = version
        self._state = state_dict
        self._group = group
        self._allow_rollback = allow_rollback
        self._allow_layout_change = allow_layout_change
        self._layout_changed = False
        self._given_up = threading.Event()

    def run(self) -> Weights | str:
        """Weights on the owner, their digest elsewhere."""
        bucket_bytes = self._agree()
        gathered: Weights | None = None
        failure: Exception | None = None
        waiting = [s.name for s in layout.cut(self.entries, bucket_bytes)[0]]

        def fetch(name: str) -> torch.Tensor:
            waiting.remove(name)
            return self._whole(name)

        if self._publisher is not None:
            try:
                gathered = self._publisher.build(
                    self._version, self.entries, fetch, layout_changed=self._layout_changed
                )
            except GatherFailed:
                raise
            except Exception as e:  # noqa: BLE001 raised below
                # The others are in the middle of it: take part to the end, and tell them then.
                failure = e
        for name in tuple(waiting):
            fetch(name)
        digest = self._tell_end(None if gathered is None else gathered.digest, failure)
        if failure is not None:
            raise failure
        return digest if gathered is None else gathered

    def give_up(self) -> None:
        """Nobody waits for the result any more: touch nothing of the sender's from now on."""
        self._given_up.set()

    def _agree(self) -> int:
        """Tell the others what this rank is about to do, and hear them; the owner's bucket size."""
        import torch.distributed as dist

        problem: Exception | None = None
        try:
            self.entries = layout.check(self._state, sharded=True)
            if self._publisher is not None:
                self._layout_changed = self._publisher.admit(
                    self._version,
                    self.entries,
                    allow_rollback=self._allow_rollback,
                    allow_layout_change=self._allow_layout_change,
                )
        except SenderError as e:
            problem = e
        mine = _Told(
            version=self._version,
            layout=hashlib.sha256(json.dumps(list(self.entries.items())).encode()).hexdigest(),
            bucket_bytes=None if self._publisher is None else self._publisher.bucket_bytes,
            problem=None if problem is None else str(problem),
        )
        told: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(told, mine, group=self._group)
        self._go_on()
        if problem is not None:
            raise problem
        return _agreed(told)

    def _whole(self, name: str) -> torch.Tensor:
        """This tensor in full; a collective call where it is sharded."""
        self._go_on()
        tensor = self._state[name]
        try:
            whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        except RuntimeError as e:
            raise GatherFailed(f"version {self._version}: gathering tensor {name!r} failed: {_first_line(e)}") from e
        return whole

    def _go_on(self) -> None:
        if self._given_up.is_set():
            raise GatherTimeout(f"version {self._version}: given up")

    def _tell_end(self, digest: str | None, failure: Exception | None) -> str:
        import torch.distributed as dist

        ends: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(ends, (digest, None if failure is None else str(failure)), group=self._group)
        for rank, (_, said) in enumerate(ends):
            if said is not None and failure is None:
                raise GatherFailed(f"version {self._version}: rank {rank} could not keep it: {said}")
        return next((known for known, _ in ends if known is not None), "")


def _agreed(told: list[_Told]) -> int:
    """The owner's bucket size; GatherFailed when the ranks do not fit together."""
    for rank, one in enumerate(told):
        if one.problem is not None:
            raise GatherFailed(f"rank {rank} can not take part: {one.problem}")
    versions = {rank: one.version for rank, one in enumerate(told)}
    if len(set(versions.values())) > 1:
        raise GatherFailed(f"the ranks publish different versions: {_by_rank(versions)}; give all the same")
    odd = [rank for rank, one in enumerate(told) if one.layout != told[0].layout]
    if odd:
        raise GatherFailed(
            f"names, dtypes, shapes or their order differ between rank 0 and rank {odd[0]}: every rank must give the "
            "same state dict, sharded"
        )
    owners = {rank: one.bucket_bytes for rank, one in enumerate(told) if one.bucket_bytes is not None}
    if len(owners) != 1:
        raise GatherFailed(
            f"exactly one rank owns the cache and gives its sender, here {_ranks(list(owners))}; give sender=None on "
            "all others"
        )
    return next(iter(owners.values()))


def _by_rank(values: Mapping[int, Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in list(values.items())[: layout.NAMED])


def _ranks(ranks: list[int]) -> str:
    if not ranks:
        return "no rank does"
    return f"{len(ranks)} do: ranks {', '.join(map(str, ranks[: layout.NAMED]))}"


def _bounded(work: _Gather, version: int, seconds: float) -> Weights | str:
    """Run collective calls in a thread of their own: a peer that froze must not freeze this rank with it."""
    import torch

    ended: list[Weights | str] = []
    failed: list[BaseException] = []
    # Collectives follow what the caller has enqueued on its stream.
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    def run() -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(stream):
                ended.append(work.run())
        except BaseException as e:  # noqa: BLE001 handed to the caller
            failed.append(e)

    thread = threading.Thread(target=run, name="rlfleet-gather", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        work.give_up()
        raise GatherTimeout(
            f"version {version}: not gathered within {seconds:g} s (deadline_seconds): a rank does not take part. "
            "Restart the ranks; the sender keeps what it held"
        )
    if failed:
        if isinstance(failed[0], RuntimeError):
            raise GatherFailed(
                f"version {version}: a collective failed, as it does when a rank went away: {_first_line(failed[0])}"
            ) from failed[0]
        raise failed[0]
    return ended[0]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
