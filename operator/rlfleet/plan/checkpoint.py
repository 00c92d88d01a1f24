"""Pipelines whose weights come from checkpoints: what stands in for a sender, and where a version lies for an engine.

Nobody reports what lies at a path, so a round must name its bytes, (version, manifest digest), and what it names is
taken to be there until the engines' gates have read it: they hash it before any engine is paused.

Invariant: an engine is only told a path below the volume that it and its gate mount.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from rlfleet.api import checkpoint
from rlfleet.api.wire import PROTOCOL_VERSION, SenderStatus

#: ``spec.transport.mode`` of a plan whose members read checkpoints; no user writes it.
MODE: Final = "Checkpoint"

#: Stands where planning asks for the sender. It holds what it is asked for by digest (``plan.rounds.held``).
SHELF: Final = SenderStatus(
    protocol_version=PROTOCOL_VERSION, capabilities=(MODE,), pod_uid="", incarnation=checkpoint.INCARNATION
)


def is_shelf(sender: SenderStatus | None) -> bool:
    """Whether it is the stand-in, not a process."""
    return sender is SHELF


def path_template(spec: Mapping[str, Any]) -> str | None:
    """``spec.weights.checkpoint.pathTemplate`` of an RLPipeline; None: its weights come from a sender."""
    found = ((spec.get("weights") or {}).get("checkpoint") or {}).get("pathTemplate")
    return None if found is None else str(found)


def checkpoint_path(spec: Mapping[str, Any], version: int) -> str | None:
    """Where a version of this RLPipeline lies, as pods mount it; None: its weights come from a sender."""
    template = path_template(spec)
    return None if template is None else checkpoint.directory(template, version)


def mode_of(spec: Mapping[str, Any]) -> str:
    """How weights reach the engines of a pipeline: ``spec.transport.mode``, or Checkpoint."""
    return str(spec["transport"]["mode"]) if path_template(spec) is None else MODE


def below(mount: str | None, path: str) -> str | None:
    """``path`` relative to a mounted volume; None where the volume is not mounted, or does not hold it."""
    if mount is None:
        return None
    asked, root = PurePosixPath(path), PurePosixPath(mount)
    if ".." in asked.parts or not asked.is_relative_to(root) or asked == root:
        return None
    return str(asked.relative_to(root))
