"""vllm-router 0.1.17 behind the adapter protocol.

Facts this rests on, beside those in workers.py (seen on the real router):
- ``POST /workers`` answers when the engine has answered its health check, or 400 when it did not within
  ``--worker-startup-timeout-secs``; it asks again every ``--worker-startup-check-interval`` seconds (30 unless it is
  set). A caller that goes away ends the addition: nothing is listed later. What is listed already is 400, too;
- a removal during an addition changes nothing: the entry is listed when the engine has answered;
- ``POST /remove_worker?url=`` answers 200 whether or not the URL is listed; requests in flight finish;
- a path that it does not know is passed on to some engine, also ``/pause`` and the like: an engine behind it must
  refuse its control paths to whoever has no key.
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from rlfleet.calls import NoAnswer, Refused, explain
from rlfleet.router.adapter import normal
from rlfleet.router.workers import QUICK, WorkerList


class VLLMRouterAdapter(WorkerList):
    """One vllm-router."""

    type = "VLLMRouter"

    async def add(self, url: str, *, seconds: float) -> None:
        """Add ``url`` in its normal form; the router's answer is the end of its job, and the list is read back."""
        deadline = time.monotonic() + seconds
        if await self.lists(url, QUICK):
            return
        left = max(0.1, deadline - time.monotonic())
        answer = await self._ask("POST", "/workers", seconds=left, body={"url": normal(url)})
        # Somebody else's addition of the same URL may have been quicker: what counts is the list.
        if await self.lists(url, QUICK):
            return
        if answer.status != 200:
            raise Refused("POST /workers", answer.status, f"the router's job failed: {explain(answer)}")
        raise NoAnswer(f"POST {self._http.base_url}/workers: {normal(url)} is not listed although it says so")

    async def _delete(self, worker: dict[str, Any]) -> None:
        await self._call("POST", f"/remove_worker?url={quote(worker['url'], safe='')}", seconds=QUICK)
