"""Draw the pictures of the page in docs/: a real daemon with engines at work, in headless Chromium.

    python scripts/draw_page.py [DIRECTORY]

Three engines share memory above two disks; one of them evicts the others' blocks, one misses what was evicted, and one
is paused. Times and rates are those of the machine that draws.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.daemon.test_engines import Memory, described  # noqa: E402
from tests.integration.own_memory import read, write  # noqa: E402
from tests.support.browser import Browser  # noqa: E402
from transferd import Client  # noqa: E402
from transferd.cli.pool.master import free_port  # noqa: E402
from transferd.client.launch import running  # noqa: E402

RANKS, BLOCKS = 2, 8
NAMES = ("chat", "code", "batch")
SIZES = {"page": (1200, 1700), "page_phone": (390, 1600)}


def configured(directory: Path, port: int) -> dict[str, Any]:
    file = {"path": [str(directory / name) for name in ("nvme0", "nvme1")], "capacity": "1MiB", "reserve": "0B"}
    storage = {"levels": ["memory", "file"], "memory": {"capacity": "128KiB"}, "file": file}
    return {"storage": storage, "metrics": {"listen": f"127.0.0.1:{port}"}}


async def work(clients: dict[str, Client], stop: asyncio.Event) -> None:
    """Each engine writes a block and reads older ones, again and again; batch writes more than it ever reads."""
    number = 0
    while not stop.is_set():
        number += 1
        for name, client in clients.items():
            many = 6 if name == "batch" else 1
            keys = [f"{name} {number} {n}" for n in range(many)]
            await client.submit(write(f"{name}-w{number}", keys, list(range(many))))
            old = f"{name} {max(1, number - (60 if name == 'code' else 3))} 0"
            await client.match([old])
            await client.submit(read(f"{name}-r{number}", [old], [BLOCKS - 1]))
        await asyncio.sleep(0.03)


async def draw(directory: Path, seconds: float = 12.0) -> None:
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as place,
        Browser(Path(place) / "profile") as browser,
        running(configured(Path(place), port), Path(place) / "daemon") as process,
    ):
        browser.resize(*SIZES["page"])
        browser.open(f"http://127.0.0.1:{port}/")
        browser.until("document.getElementById('state')?.textContent === 'ready'")
        async with AsyncExitStack() as stack:
            clients = {}
            for name in NAMES:
                memory = await stack.enter_async_context(Memory(RANKS))
                client = Client(process.endpoint, engine=name, await_ready=False)
                clients[name] = await stack.enter_async_context(client)
                await client.register(described(RANKS, model=name))
                for rank in range(RANKS):
                    await client.offer(rank, memory.handle(rank))
                await client.wait_ready(60)
            stop = asyncio.Event()
            working = asyncio.ensure_future(work(clients, stop))
            await asyncio.sleep(seconds)
            stop.set()
            await working
            await clients["batch"].pause()
            story = "[...document.querySelectorAll('#tasks button')].find((b) => b.textContent.includes('code-r'))"
            await asyncio.to_thread(pictures, browser, directory, story)


def pictures(browser: Browser, directory: Path, story: str) -> None:
    browser.until("document.querySelector('#concerns .info') !== null")
    browser.ask(f"{story}.click()")
    browser.until("document.getElementById('story-why').textContent !== ''")
    for name, (width, height) in SIZES.items():
        browser.resize(width, height)
        browser.ask("scrollTo(0, 0)")
        browser.until(f"document.documentElement.scrollWidth <= {width}")
        browser.picture(directory / f"{name}.png")
    assert browser.complaints == [], browser.complaints


if __name__ == "__main__":
    asyncio.run(draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"))
