"""The debug page in a real browser."""

from __future__ import annotations

import asyncio
import shutil
from html import unescape
from pathlib import Path

from aiohttp.test_utils import TestServer

from picker.io.http import create_app

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


async def test_decisions_are_shown_and_hostile_names_stay_text(stack, tmp_path: Path) -> None:
    for _ in range(2):
        stack.serve("p" * 640, HOSTILE)
    app = create_app(stack.director, stack.hub, not_ready=lambda: None, config=dict)
    chromium = shutil.which("chromium") or "chromium-browser"
    async with TestServer(app) as server:
        browser = await asyncio.create_subprocess_exec(
            chromium,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000", "--dump-dom"),
            f"{server.make_url('/debug/scores')}#2",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(60):
            output, _ = await browser.communicate()
    dom = output.decode()
    assert "<title>picker · scores</title>" in dom
    assert "<img" not in dom
    assert unescape(dom).count(HOSTILE) == 3, "two in the list, and one in the decision that is open"
    assert dom.count("data-number=") == 2
    assert "10/10" in dom
    assert dom.count('class="n heat"') == 6, "two endpoints: two plugins and their sum"
