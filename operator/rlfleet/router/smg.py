"""smg 1.13.0, the successor of sglang-router, behind the adapter protocol.

Facts this rests on, beside those in workers.py (seen on the real router):
- ``POST /workers`` answers 202 and registers in a background job; 409 says that the URL is listed, or that a job for it
  is still under way. A job that came to nothing is forgotten: ``GET /workers/{id}`` is 404 then. An engine that did not
  answer at first is asked again after ``--worker-startup-check-interval`` seconds, 30 unless it is set, whatever the
  start-up timeout says: our manifests set both, so that no job outlives the gates' quiet time;
- ``DELETE /workers/{id}`` answers 202. The entry is ``draining`` from then on, so that it gets no new requests, for
  ``drain_settle_secs`` (5 unless the worker says otherwise), and then it is unlisted **by its URL**: whoever deletes a
  draining entry again unlists it at once, and an entry added anew within those seconds vanishes when they are over.
  So every entry of ours asks for 0 seconds, and an entry that drains is never deleted twice;
- requests in flight finish, with 0 seconds, too.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

from rlfleet.calls import NoAnswer, Refused, explain
from rlfleet.router.adapter import normal
from rlfleet.router.sglang_router import delete_by_id, job_of
from rlfleet.router.workers import POLL_SECONDS, QUICK, WorkerList

_DRAINING = "draining"
#: Registered, and not yet seen well by a health check: gets no requests yet.
_PENDING = "pending"


class SMGAdapter(WorkerList):
    """One smg."""

    type = "SMG"

    async def add(self, url: str, *, seconds: float) -> None:
        """Add ``url`` in its normal form and wait for the end of the router's job; a draining entry ends first."""
        deadline = time.monotonic() + seconds
        worker: str | None = None
        while time.monotonic() < deadline:
            mine = await self._mine(url, QUICK)
            if any(w.get("status") not in (_DRAINING, _PENDING) for w in mine):
                return
            if not mine and worker is None:
                worker = await self._begin(url)
            elif not mine and worker is not None:
                await self._still_under_way(worker, url)
            await asyncio.sleep(POLL_SECONDS)
        raise NoAnswer(f"POST {self._http.base_url}/workers: {normal(url)} is not listed after {seconds:g} s")

    async def _begin(self, url: str) -> str | None:
        """Ask for the entry; the id of the job's worker, or None where somebody else's job is under way."""
        body = {"url": normal(url), "health": {"drain_settle_secs": 0}}
        answer = await self._ask("POST", "/workers", seconds=QUICK, body=body)
        if answer.status == 409:
            return None
        worker = answer.body.get("worker_id") if isinstance(answer.body, dict) else None
        if answer.status != 202 or not isinstance(worker, str):
            raise Refused("POST /workers", answer.status, explain(answer))
        return worker

    async def _still_under_way(self, worker: str, url: str) -> None:
        """Raise where the job has ended and left no entry."""
        answer = await self._ask("GET", f"/workers/{quote(worker, safe='')}", seconds=QUICK)
        job = job_of(answer)
        failed = job.get("status") == "failed" and job.get("job_type") == "AddWorker"
        # Listed and forgotten between our two questions is a job that ended well.
        if (answer.status == 404 or failed) and not await self.lists(url, QUICK):
            why = job.get("message") or "the engine did not answer its questions; its log says more"
            raise Refused("POST /workers", 202, f"the router's job failed: {str(why)[:300]}")

    async def _delete(self, worker: dict[str, Any]) -> None:
        if worker.get("status") != _DRAINING:
            await delete_by_id(self._ask, worker)
