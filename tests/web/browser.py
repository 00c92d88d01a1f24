"""A real headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import pytest

PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: Seconds for anything the browser is asked; it only ends a broken test.
PATIENCE = 120.0


def program() -> str:
    """The browser. Without one the tests are skipped, or fail where RLFLEET_BROWSER=required (as in .ci/run)."""
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        text = "no Chromium: apt-get install chromium-headless-shell (or chromium)"
        if os.environ.get("RLFLEET_BROWSER") == "required":
            pytest.fail(text)
        pytest.skip(text)
    return found


class Browser:
    """One browser with one page. ``complaints``: what its console and its security policy said."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0
        self._page: str | None = None
        self.complaints: list[str] = []

    async def __aenter__(self) -> Self:
        self._start()
        self._session = aiohttp.ClientSession()
        self._socket = await self._session.ws_connect(await self._address(), max_msg_size=0)
        self._reader = asyncio.get_running_loop().create_task(self._read())
        target = await self._send("Target.createTarget", url="about:blank")
        attached = await self._send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._page = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self._send(f"{domain}.enable")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        if self._process is not None:
            # It has children of its own; all are in the group that was made for it.
            os.killpg(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [
                program(),
                "--headless",
                "--no-sandbox",  # the tests may run as root, where Chromium's own sandbox refuses to start
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--no-proxy-server",
                "--hide-scrollbars",
                "--remote-debugging-port=0",
                f"--user-data-dir={self._folder}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _address(self) -> str:
        """Where it listens: it writes that into its profile."""
        assert self._process is not None
        file = self._folder / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE):
            while True:
                text = await asyncio.to_thread(lambda: file.read_text() if file.exists() else "")
                if len(lines := text.split()) == 2:
                    return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
                assert self._process.poll() is None, f"the browser ended with {self._process.returncode}"
                await asyncio.sleep(0.05)

    async def _read(self) -> None:
        assert self._socket is not None
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Log.entryAdded":
                self.complaints.append(event["params"]["entry"]["text"])
            elif event["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["params"]["exceptionDetails"])[:2000])

    async def _send(self, method: str, **params: Any) -> dict[str, Any]:
        assert self._socket is not None
        self._count += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._count] = answer
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": self._page} if self._page else {}))
        async with asyncio.timeout(PATIENCE):
            found = await answer
        assert "error" not in found, (method, found)
        return dict(found["result"])

    async def dress(self, *, width: int, height: int = 900, scheme: str = "light") -> None:
        """The size of the window, and light or dark."""
        await self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def go(self, url: str) -> None:
        """Open a page and wait for its script."""
        await self._send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = await self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    async def until(self, expression: str, good: Callable[[Any], bool] = bool) -> Any:
        """Wait until an expression is as wanted; its value."""
        value: Any = None
        try:
            async with asyncio.timeout(PATIENCE):
                while not good(value := await self.ask(expression)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"waited {PATIENCE:g} s for {expression}; last: {value!r}") from None
        return value

    async def picture(self, file: Path) -> bytes:
        """A picture of the whole page."""
        size = await self._send("Page.getLayoutMetrics")
        box = size["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": box["width"], "height": min(box["height"], 4000), "scale": 1}
        shot = await self._send("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        data = base64.b64decode(shot["data"])
        await asyncio.to_thread(file.write_bytes, data)
        return data
