"""sglang-router 0.3.2 behind the adapter protocol.

Facts this rests on, beside those in workers.py (seen on the real router):
- ``POST /workers`` answers 202 for anything and registers in a background job; an engine that does not answer is
  never listed. ``GET /workers/{id}`` shows ``job_status`` (processing, failed with a message; absent once it ended
  well), and the status of an older job stays visible, so "failed" counts only with our own job's time;
- adding what is listed fails with "already exists", which is as good as added;
- ``DELETE /workers/{id}`` answers 202 and unlists at once; an unknown id is 404; requests in flight finish.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

from rlfleet.calls import Answer, NoAnswer, Refused, explain
from rlfleet.router.adapter import normal
from rlfleet.router.workers import POLL_SECONDS, QUICK, WorkerList


class SGLangRouterAdapter(WorkerList):
    """One sglang-router."""

    type = "SGLangRouter"

    async def add(self, url: str, *, seconds: float) -> None:
        """Add ``url`` in its normal form and wait for the end of the router's job."""
        deadline = time.monotonic() + seconds
        if await self.lists(url, QUICK):
            return
        answer = await self._call("POST", "/workers", seconds=QUICK, body={"url": normal(url)})
        worker = answer.body.get("worker_id") if isinstance(answer.body, dict) else None
        if not isinstance(worker, str):
            raise Refused("POST /workers", answer.status, f"no worker_id in the answer: {explain(answer)}")
        # The router stamps whole seconds; a job of ours can not bear an older stamp than its first "processing".
        began: int | None = None
        while time.monotonic() < deadline:
            listed = await self.lists(url, QUICK)
            job = job_of(await self._ask("GET", f"/workers/{quote(worker, safe='')}", seconds=QUICK))
            if listed and job.get("status") != "processing":
                return
            if job.get("status") == "processing":
                began = job.get("timestamp") if isinstance(job.get("timestamp"), int) else began
            elif job.get("status") == "failed" and began is not None:
                raise Refused("POST /workers", 202, f"the router's job failed: {str(job.get('message'))[:300]}")
            await asyncio.sleep(POLL_SECONDS)
        raise NoAnswer(f"POST {self._http.base_url}/workers: {normal(url)} is not listed after {seconds:g} s")

    async def _delete(self, worker: dict[str, Any]) -> None:
        await delete_by_id(self._ask, worker)


def job_of(answer: Answer) -> dict[str, Any]:
    """What the router tells of the job of one worker; empty: nothing."""
    job = answer.body.get("job_status") if isinstance(answer.body, dict) else None
    return job if isinstance(job, dict) else {}


async def delete_by_id(ask: Any, worker: dict[str, Any]) -> None:
    """DELETE /workers/{id}; an entry that is gone meanwhile is as good as deleted."""
    answer: Answer = await ask("DELETE", f"/workers/{quote(str(worker.get('id')), safe='')}", seconds=QUICK)
    if answer.status != 404 and not 200 <= answer.status < 300:
        raise Refused("DELETE /workers", answer.status, explain(answer))
