"""Whether the cluster's CRDs are at least those of this version, asked before this process is a candidate to lead.

Invariant: under older CRDs the apiserver would silently drop what this version writes. So it does not begin: it says
what is missing and what to do, stays alive and not ready, and begins by itself once the CRDs are replaced. Meanwhile a
leader that fits them goes on: a rolling upgrade stops at the first new process that is not ready.
"""

from __future__ import annotations

import asyncio
import logging

from rlfleet import __version__
from rlfleet.api import served
from rlfleet.kube.client import KubeClient
from rlfleet.kube.errors import ApiError, Forbidden, NotFound

log = logging.getLogger(__name__)

#: Seconds between two looks.
LOOK_SECONDS = 1.0
#: So many of the differences are named.
_SHOWN = 5
REMEDY = (
    "Apply those of this version (Helm does not): rlfleet crds | kubectl apply --server-side --force-conflicts -f -"
)


class ServedKinds:
    """``problem`` says why this process does not begin; empty once it may."""

    def __init__(self) -> None:
        self.problem = "the CRDs have not been looked at yet"

    async def wait(self, kube: KubeClient, *, timeout: float) -> None:
        """Return when every kind is served as this version needs it; ``timeout``: seconds of one look."""
        told = ""
        while True:
            try:
                self.problem = await self._look(kube, timeout)
            except ApiError as e:
                self.problem = f"the schemas of the CRDs can not be read: {e}"
            if not self.problem:
                return
            if self.problem != told:
                log.error("%s", self.problem)
                told = self.problem
            await asyncio.sleep(LOOK_SECONDS)

    @staticmethod
    async def _look(kube: KubeClient, timeout: float) -> str:
        try:
            lack = served.lacking(served.kinds(await kube.published(timeout=timeout)))
        except NotFound:
            lack = served.lacking({})
        except Forbidden as e:
            # Every authenticated user may read them, unless an administrator has taken that away: no reason to stop.
            log.warning("the schemas of the CRDs may not be read, and are taken as they are: %s", e)
            return ""
        if not lack:
            return ""
        more = f"; and {len(lack) - _SHOWN} more" if len(lack) > _SHOWN else ""
        return (
            f"the CRDs in the cluster are older than this operator ({__version__}): {'; '.join(lack[:_SHOWN])}{more}. "
            f"{REMEDY}"
        )
