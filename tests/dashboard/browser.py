"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

_FLAGS = (
    *("--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu"),
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-extensions", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--no-default-browser-check", "--hide-scrollbars"),
)


def find_chromium() -> str | None:
    """Path of the browser, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class PageError(AssertionError):
    """Something on the page raised, or did not come true in time."""


class Page:
    """One tab; collects what the console and the network complain about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        self.urls: list[str] = []
        """Of all requests."""
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run one command of the protocol."""
        number = next(self._ids)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(30):
            return await answer

    async def evaluate(self, expression: str) -> Any:
        """The value of a script on the page."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise PageError(result["exceptionDetails"]["exception"].get("description"))
        return result["result"].get("value")

    async def wait_for(self, expression: str, timeout_s: float = 20) -> Any:
        """The value of `expression` as soon as it is true."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # While a page is exchanged for the next one nothing can be asked of it.
                    with contextlib.suppress(PageError):
                        if value := await self.evaluate(expression):
                            return value
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.evaluate("document.body.innerText")
            raise PageError(f"never true: {expression}\n{text}\n{self.complaints}") from None

    async def open(self, url: str) -> None:
        """Load `url` and wait until its script has run."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def resize(self, width: int, height: int, *, is_mobile: bool = False) -> None:
        """Give the page another size."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_mobile else 1,
            mobile=is_mobile,
        )

    async def prefer(self, scheme: str) -> None:
        """Be a system that prefers `light` or `dark`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        event = {"key": key, "windowsVirtualKeyCode": code}
        # Forms are sent by the character, not by the key.
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    async def write(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self, path: str, *, is_whole: bool = True) -> None:
        """Save the page as PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=is_whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    async def _read(self) -> None:
        async for message in self._socket:
            event = message.json()
            waiting = self._pending.pop(event.get("id", 0), None)
            if waiting is not None:
                if "error" in event:
                    waiting.set_exception(PageError(str(event["error"])))
                else:
                    waiting.set_result(event["result"])
            else:
                self._note(event.get("method", ""), event.get("params", {}))

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.complaints.append(str(details.get("exception", details)))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.complaints.append(str(told["args"]))
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.urls.append(told["request"]["url"])

    async def close(self) -> None:
        """Let go of the tab."""
        await self._socket.close()
        await self._reader


@contextlib.asynccontextmanager
async def chromium(program: str) -> AsyncIterator[Page]:
    """A fresh browser with one empty tab; ends with the context."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            *(program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            port = await _debugging_port(profile)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    targets = await response.json()
                target = next(target for target in targets if target["type"] == "page")
                socket = await session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
                page = Page(socket)
                try:
                    yield page
                finally:
                    await page.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _debugging_port(profile: str) -> int:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError, ValueError, IndexError):
                return int(Path(profile, "DevToolsActivePort").read_text("ascii").split()[0])
            await asyncio.sleep(0.05)
