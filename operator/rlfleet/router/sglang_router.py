"""sglang-router 0.3.2 behind the adapter protocol.

Facts this rests on (seen on the real router):
- ``POST /workers`` answers 202 for anything and registers in a background job; an engine that does not answer is
  never listed. ``GET /workers/{id}`` shows ``job_status`` (processing, failed with a message; absent once it ended
  well), and the status of an older job stays visible, so "failed" counts only with our own job's time;
- adding what is listed fails with "already exists", which is as good as added;
- the router compares URLs as strings: ``http://a:1`` and ``http://a:1/`` are two workers;
- ``DELETE /workers/{id}`` answers 202 and unlists at once; an unknown id is 404; requests in flight finish.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import quote

from rlfleet.calls import Answer, JsonClient, NoAnswer, Refused, explain
from rlfleet.router.adapter import normal

QUICK = 3.0
POLL_SECONDS = 0.05


class SGLangRouterAdapter:
    """One sglang-router, reached at ``url``."""

    type = "SGLangRouter"

    def __init__(self, url: str) -> None:
        self._http = JsonClient(url)

    async def close(self) -> None:
        """Close connections; touches nothing at the router."""
        await self._http.close()

    async def lists(self, url: str, seconds: float) -> bool:
        """Whether any spelling of ``url`` is in the router's list."""
        return bool(await self._ids(url, seconds))

    async def _ids(self, url: str, seconds: float) -> list[str]:
        answer = await self._http.call("GET", "/workers", seconds=seconds)
        workers = answer.body.get("workers") if isinstance(answer.body, dict) else None
        if not isinstance(workers, list):
            raise Refused("GET /workers", answer.status, "the answer holds no list of workers: is this the router?")
        return [
            str(w["id"])
            for w in workers
            if isinstance(w, dict) and isinstance(w.get("url"), str) and "id" in w and normal(w["url"]) == normal(url)
        ]

    async def add(self, url: str, *, seconds: float) -> None:
        """Add ``url`` in its normal form and wait for the end of the router's job."""
        deadline = time.monotonic() + seconds
        if await self.lists(url, QUICK):
            return
        answer = await self._http.call("POST", "/workers", seconds=QUICK, body={"url": normal(url)})
        worker = answer.body.get("worker_id") if isinstance(answer.body, dict) else None
        if not isinstance(worker, str):
            raise Refused("POST /workers", answer.status, f"no worker_id in the answer: {explain(answer)}")
        # The router stamps whole seconds; a job of ours can not bear an older stamp than its first "processing".
        began: int | None = None
        while time.monotonic() < deadline:
            listed = await self.lists(url, QUICK)
            job = _job(await self._http.ask("GET", f"/workers/{quote(worker, safe='')}", seconds=QUICK))
            if listed and job.get("status") != "processing":
                return
            if job.get("status") == "processing":
                began = job.get("timestamp") if isinstance(job.get("timestamp"), int) else began
            elif job.get("status") == "failed" and began is not None:
                raise Refused("POST /workers", 202, f"the router's job failed: {str(job.get('message'))[:300]}")
            await asyncio.sleep(POLL_SECONDS)
        raise NoAnswer(f"POST {self._http.base_url}/workers: {normal(url)} is not listed after {seconds:g} s")

    async def remove(self, url: str, *, seconds: float) -> None:
        """Delete every worker with this URL and read the list back."""
        deadline = time.monotonic() + seconds
        while True:
            ids = await self._ids(url, QUICK)
            if not ids:
                return
            for worker in ids:
                answer = await self._http.ask("DELETE", f"/workers/{quote(worker, safe='')}", seconds=QUICK)
                if answer.status != 404 and not 200 <= answer.status < 300:
                    raise Refused("DELETE /workers", answer.status, explain(answer))
            if time.monotonic() > deadline:
                raise NoAnswer(f"DELETE {self._http.base_url}/workers: {url} is still listed after {seconds:g} s")
            await asyncio.sleep(POLL_SECONDS)


def _job(answer: Answer) -> dict[str, Any]:
    job = answer.body.get("job_status") if isinstance(answer.body, dict) else None
    return job if isinstance(job, dict) else {}
