"""Joined ResourceClaims that need no second look at ResourceSlices.

Invariant: an entry is believed only for the very resourceVersion of the claim that it was made from. A driver does not
change a device that is in use, and a claim that is freed and allocated again has another version.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from rlfleet.plan.dra import Allocation


@dataclass(slots=True)
class ClaimMemory:
    """Allocations by namespace and UID of their claim. Only whole ones: what could not be joined is looked at again."""

    _known: dict[str, dict[str, tuple[str, Allocation]]] = field(default_factory=dict)

    def get(self, namespace: str, uid: str, version: str) -> Allocation | None:
        """What was joined of this version of the claim."""
        found = self._known.get(namespace, {}).get(uid)
        return found[1] if found is not None and found[0] == version else None

    def put(self, namespace: str, version: str, allocation: Allocation) -> None:
        """Remember an allocation whose every device is known."""
        if allocation.given is not None and all(g.device is not None for g in allocation.given):
            self._known.setdefault(namespace, {})[allocation.uid] = (version, allocation)

    def keep(self, namespace: str, uids: Collection[str]) -> None:
        """Forget claims of this namespace that are gone."""
        known = {uid: entry for uid, entry in self._known.get(namespace, {}).items() if uid in uids}
        if known:
            self._known[namespace] = known
        else:
            self._known.pop(namespace, None)
