"""Whose an object of our making is. Pure.

Invariant: an owner is named by its UID, so that a successor of the same name inherits nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlfleet.api import labels


def controlled_by(kind: str, metadata: Mapping[str, Any], *, blocks: bool = True) -> list[dict[str, Any]]:
    """``ownerReferences`` of what the object of our ``kind`` with this ``metadata`` controls.

    ``blocks``: a foreground deletion of the owner waits for it.
    """
    return [
        {
            "apiVersion": labels.API_VERSION,
            "kind": kind,
            "name": metadata["name"],
            "uid": metadata["uid"],
            "controller": True,
            "blockOwnerDeletion": blocks,
        }
    ]
