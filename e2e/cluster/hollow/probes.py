"""Probes as the pod spec asks for them: httpGet, tcpSocket, exec; periods, thresholds and timeouts included.

A probe has three outcomes for its owner: nothing changed, it crossed its success threshold, it crossed its failure
threshold. A probe that cannot be carried out counts as failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, ClassVar

import aiohttp

Object = dict[str, Any]
# (command, timeout) -> whether it exited with 0.
Execute = Callable[[list[str], float], Awaitable[bool]]

#: Eager looks: for how long after the start, how far apart while no more than so many probers look, and for how long.
_EAGER_SECONDS = 20.0
_LOOK_SECONDS = 0.25
_FEW = 6
_LOOK_TIMEOUT_SECONDS = 1.0


class Prober:
    """Carries out probes against one container."""

    #: How many of them look between their probes.
    _waiting: ClassVar[int] = 0

    def __init__(self, container: Object, pod_ip: str, session: aiohttp.ClientSession, execute: Execute) -> None:
        self._container = container
        self._ip = pod_ip
        self._session = session
        self._execute = execute

    async def verdicts(self, probe: Object, *, eager: bool = False) -> AsyncGenerator[bool, None]:
        """Yields True or False whenever the probe's threshold for it is reached (and again with every later result).

        ``eager``: for a while after the start it is also looked between the probes, so that a container is not called
        down for the rest of a period in which it came up. Such looks never count as failures.
        """
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        eager_until = clock() + (_EAGER_SECONDS if eager and "httpGet" in probe else 0.0)
        streak, last = 0, None
        result = await self._once(probe)
        while True:
            streak = streak + 1 if result == last else 1
            last = result
            threshold = probe.get("successThreshold", 1) if result else probe.get("failureThreshold", 3)
            if streak >= threshold:
                yield result
            due = clock() + probe.get("periodSeconds", 10)
            early = not result and await self._came_up(probe, min(eager_until, due))
            if not early:
                await asyncio.sleep(max(0.0, due - clock()))
            result = early or await self._once(probe)

    async def _came_up(self, probe: Object, until: float) -> bool:
        """Looks again and again until then (loop seconds); whether a look succeeded."""
        short = {**probe, "timeoutSeconds": min(_LOOK_TIMEOUT_SECONDS, float(probe.get("timeoutSeconds", 1)))}
        clock = asyncio.get_running_loop().time
        Prober._waiting += 1
        try:
            while True:
                # Where many come up at once, looking at them must not keep them from it.
                pause = _LOOK_SECONDS * max(1.0, Prober._waiting / _FEW)
                if clock() + pause >= until:
                    return False
                await asyncio.sleep(pause)
                if await self._once(short):
                    return True
        finally:
            Prober._waiting -= 1

    async def _once(self, probe: Object) -> bool:
        timeout = float(probe.get("timeoutSeconds", 1))
        try:
            if "httpGet" in probe:
                return await self._http(probe["httpGet"], timeout)
            if "tcpSocket" in probe:
                return await self._tcp(probe["tcpSocket"], timeout)
            if "exec" in probe:
                return await self._execute(probe["exec"]["command"], timeout)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False
        return False

    async def _http(self, action: Object, timeout: float) -> bool:
        scheme = action.get("scheme", "HTTP").lower()
        url = f"{scheme}://{action.get('host') or self._ip}:{self._port(action['port'])}{action.get('path', '/')}"
        headers = {"User-Agent": "kube-probe/1.34", "Connection": "close"}
        headers.update({header["name"]: header["value"] for header in action.get("httpHeaders", [])})
        async with self._session.get(
            url,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=timeout),
            # As the kubelet: a probe asks whether something answers, not who.
            ssl=False,
            allow_redirects=False,
        ) as response:
            await response.read()
            return 200 <= response.status < 400

    async def _tcp(self, action: Object, timeout: float) -> bool:
        async with asyncio.timeout(timeout):
            _, writer = await asyncio.open_connection(action.get("host") or self._ip, self._port(action["port"]))
        writer.close()
        await writer.wait_closed()
        return True

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        for known in self._container.get("ports", []):
            if known.get("name") == port:
                return int(known["containerPort"])
        return int(port)
