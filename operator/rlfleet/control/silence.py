"""Which gates are silent, as far as status says so.

Invariant: a gate that gave no answer is unknown to every decision at once. Only what people read waits: one lost answer
is no news, and would be written and taken back within seconds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

#: Looks in a row, and seconds, for which a gate must be silent before status says so.
LOOKS = 2
SECONDS = 2.0


@dataclass(slots=True)
class _Missed:
    since: float
    looks: int = 0
    silent: bool = False


@dataclass(slots=True)
class Silence:
    """Missed answers by pod UID."""

    _missed: dict[str, _Missed] = field(default_factory=dict)

    def heard(self, uid: str) -> None:
        """The gate answered."""
        self._missed.pop(uid, None)

    def missed(self, uid: str, now: float) -> None:
        """The gate gave no answer at ``now`` (seconds that never go back)."""
        one = self._missed.setdefault(uid, _Missed(now))
        one.looks += 1
        one.silent = one.looks >= LOOKS and now - one.since >= SECONDS

    def lasts(self, uid: str) -> bool:
        """The gate has been silent for long enough to say so."""
        one = self._missed.get(uid)
        return one is not None and one.silent

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget the others."""
        for uid in [u for u in self._missed if u not in uids]:
            del self._missed[uid]
