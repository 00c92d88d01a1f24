"""What the gate needs of an engine, whatever its make: the adapter protocol.

Invariants every adapter keeps:
- a method returns only what was observed in an answer; success means that the engine's state was read back where the
  engine allows it, never that a call returned 200;
- a definite refusal raises Refused, no connection raises NotSent, and no answer raises NoAnswer (rlfleet.calls), so
  the caller can tell "did not happen" from "unknown";
- no mutating call is repeated blindly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from rlfleet.api.wire import BroadcastGroup, MemoryTag, PauseMode


class Capability(StrEnum):
    """What an engine of this flavour and version can do (GateStatus.capabilities)."""

    SERIALIZED = "Serialized"  # loads a directory of safetensors files
    PARTS = "Serialized/Parts"  # ... also part by part, as staging Bucket needs it
    BROADCAST = "Broadcast"  # receives through a collective group
    CHECKSUM = "Checksum"  # hashes its own parameters, and the hash means something
    LABEL = "WeightLabel"  # the version label can be written without loading
    OFFLOAD = "Offload"  # gives device memory back, tag by tag, and takes it again
    PAUSE_RETRACT = "Pause/Retract"
    PAUSE_KEEP = "Pause/Keep"
    PAUSE_ABORT = "Pause/Abort"
    PAUSE_WAIT = "Pause/Wait"

    @classmethod
    def of_pause(cls, mode: PauseMode) -> Capability:
        """What an engine must be able to do for this mode."""
        return cls(f"Pause/{mode.value}")


@dataclass(frozen=True, slots=True)
class Facts:
    """What does not change while the engine process lives.

    ``world_size``: ranks it takes in a broadcast group. ``layout``: hash of all that must agree between two engines
    for their checksums to be comparable.
    """

    version: str
    world_size: int
    layout: str
    model: str
    capabilities: frozenset[Capability]
    memory_tags: tuple[MemoryTag, ...] = ()
    """Parts of device memory that it can give back (with capability Offload)."""
    refused: str | None = None
    """Why no weights may be brought to this engine at all, and what to do; None: nothing speaks against it."""


@dataclass(frozen=True, slots=True)
class View:
    """What the engine says now. None: it did not say, which is not the same as no.

    ``reachable``: its HTTP server answered. ``admitting``: it takes requests (True proves "not paused"; False has
    several causes, pause among them).
    """

    reachable: bool
    admitting: bool | None = None
    label: str | None = None
    model: str | None = None
    running: int | None = None
    waiting: int | None = None
    instance: str | None = None
    """What the engine calls its own process, where its kind tells one process from the next."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What an engine must be told about one broadcast: the tensors in the order of their bytes."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Checksum:
    """The engine's own hash of its parameters; ``meaningful`` False: it answered without hashing anything usable."""

    digest: str
    meaningful: bool


@dataclass(frozen=True, slots=True)
class Token:
    """One greedy token, and the weight version that the engine says it was made with (None: it does not say)."""

    token: int
    label: str | None


class EngineAdapter(Protocol):
    """One engine process. All durations are seconds."""

    type: str
    offload_remedy: str
    """What to set so that an engine of this type can give memory back."""
    default_pause: PauseMode
    """How this type holds running requests unless told otherwise: none is lost, and caches can be flushed after it."""
    tells_pause: bool
    """``View.admitting`` False is the engine's own word for "paused"; else it may also be a failed health check."""
    released_before: ClassVar[Mapping[MemoryTag, MemoryTag]]
    """By tag: the one that this engine type gives back along with it, so it must be released before. Empty: none."""

    async def close(self) -> None:
        """Close connections; touches nothing at the engine."""

    async def facts(self, seconds: float) -> Facts:
        """Detect version, layout and capabilities."""

    async def guarded(self, seconds: float) -> bool | None:
        """Whether the engine refuses a control call of somebody who has only what its users have; None: not known.

        Asks for nothing that would change the engine if it obeyed.
        """

    async def view(self, seconds: float) -> View:
        """Read the present state; never raises for an engine that does not answer."""

    async def pause(self, mode: PauseMode, *, drain_seconds: float, seconds: float, still: Callable[[], None]) -> None:
        """Stop generation and prove it, within ``seconds`` after draining. The caller saw the engine admit requests.

        ``drain_seconds``: how long requests get to end with mode Wait. A mode that the engine lacks is Refused.
        ``still``: asked between draining and the pause; raises where the engine must not be paused any more.
        """

    async def resume(self) -> None:
        """Let generation go on, and see that the engine admits requests again."""

    async def heal_readiness(self, seconds: float) -> bool:
        """Whether the engine admits requests, after giving it the chance to correct a stale "not ready"."""

    async def recover(self, seconds: float) -> None:
        """Clear what a load that failed or broke off left behind, so that another can begin; Refused where it cannot.

        Called only when such a load came before and the engine cannot hash its parameters. What they hold afterwards
        is worth nothing.
        """

    async def load_directory(self, path: str, *, seconds: float) -> None:
        """Load every tensor of the safetensors files in ``path``, keeping caches and the version label."""

    async def begin_parts(self, seconds: float) -> None:
        """Before the first ``load_part`` (capability Serialized/Parts)."""

    async def load_part(self, path: str, *, seconds: float) -> None:
        """As ``load_directory`` for some of all tensors; which ones share a part is the sender's choice."""

    async def end_parts(self, seconds: float) -> None:
        """After the last ``load_part``: nothing is missing."""

    async def join_group(self, group: BroadcastGroup, *, rank: int, seconds: float) -> None:
        """Join it as ``rank`` and those after it; returns when all ranks are there. Leaves the weights alone."""

    async def begin_update(self, seconds: float) -> None:
        """Open an update session where the engine's version needs one."""

    async def receive(self, bucket: Bucket, *, group: str, seconds: float) -> None:
        """Receive one flattened bucket from rank 0 and load it, keeping caches and the version label."""

    async def end_update(self, seconds: float) -> None:
        """Close the update session."""

    async def leave_group(self, group: str, seconds: float) -> None:
        """Leave the group; one that does not exist counts as left."""

    async def flush(self, seconds: float) -> None:
        """Drop every cache that was computed with older weights, and see that the engine says so."""

    async def checksum(self, seconds: float) -> Checksum | None:
        """The engine's hash of its parameters, or None where it has none."""

    async def write_label(self, label: str, seconds: float) -> str:
        """Write the version label once, aborting nothing; return what is read back."""

    async def probe(self, seconds: float) -> Token:
        """Generate one greedy token for a fixed prompt, as a user's request would; Refused when none comes."""

    async def idle(self, seconds: float, *, memory_here: bool) -> bool | None:
        """Whether nothing that was asked of the engine before is still in progress.

        False: no answer proves it. None: it answers, and has no path by which it could be proven.
        ``memory_here`` False: ask it nothing that reads device memory, for some of that is given back.
        """

    async def release_memory(self, tag: MemoryTag, *, seconds: float) -> None:
        """Give one tag back, once. Returns when the engine says so, which does not say that memory is free.

        The caller knows that the engine is paused and idle and that the tag is here: anything else may kill it. After
        any failure but NotSent the tag may be here or gone.
        """

    async def resume_memory(self, tag: MemoryTag, *, seconds: float) -> None:
        """Take one tag back, once; the caller knows that it is given back. What weights held is gone."""
