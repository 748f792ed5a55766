"""The page of a daemon with 1 and 4 engines, in a browser: totals, filters, failures, narrow screens, a lost daemon."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.integration.own_memory import write
from tests.integration.test_totals import World
from tests.support.browser import Browser, executable
from transferd import Status, WriteStorageTask
from transferd.cli.pool.master import free_port
from transferd.client.launch import running, start
from transferd.observability.page import front_page

pytestmark = [pytest.mark.one_loop, pytest.mark.skipif(executable() is None, reason="chromium is not installed")]

MOST_BYTES = 60_000
LONG = "a" * 90 + " \u202e/of a client that likes long names"
TEXT = "document.getElementById('{}')?.textContent"
TASKS = "[...document.querySelectorAll('#tasks tr')]"
# The contrast of each text that is shown with what lies behind it, as WCAG 2 computes it: the least of them.
CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => 0.2126 * linear(c[0] / 255) + 0.7152 * linear(c[1] / 255) + 0.0722 * linear(c[2] / 255);
  const behind = (e) => {
    const c = rgb(getComputedStyle(e).backgroundColor);
    return c[3] === 0 ? behind(e.parentElement) : c;
  };
  return Math.min(...[...document.querySelectorAll('b, span, td, th, h1, h2, li, button, label, select')]
    .filter((e) => e.innerText)
    .map((e) => [light(rgb(getComputedStyle(e).color)), light(behind(e))].sort((a, b) => b - a))
    .map(([a, b]) => (a + 0.05) / (b + 0.05))); })()"""


def choose(browser: Browser, name: str, value: str) -> None:
    browser.ask(
        f"(() => {{ const s = document.getElementById('{name}'); s.value = '{value}';"
        " s.dispatchEvent(new Event('change')); })()"
    )


@pytest.fixture(params=[1, 4], ids=lambda number: f"{number}-engines")
async def world(request: pytest.FixtureRequest, tmp_path: Path, browser: Browser) -> AsyncIterator[World]:
    """The browser is there first: its start blocks the loop, and engines whose clients are silent would be gone."""
    port = free_port()
    tree = {"storage": {"backend": "memory"}, "metrics": {"listen": f"127.0.0.1:{port}"}}
    with running(tree, tmp_path / "daemon") as process:
        async with AsyncExitStack() as stack:
            world = World(process, port, request.param)
            await world.work(stack)
            yield world


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def test_the_page_is_small() -> None:
    assert len(front_page().body) < MOST_BYTES


def keeps(browser: Browser) -> None:
    """What has the focus, what is marked, and where the page is stay while it follows the daemon."""
    browser.ask("""(() => {
      const [button] = document.querySelectorAll('#tasks button'), cell = document.querySelector('#engines td');
      button.focus();
      getSelection().selectAllChildren(document.querySelector('#tasks td.id button'));
      scrollTo(0, 200);
      window.kept = [button, cell, getSelection().toString(), document.getElementById('who').textContent];
    })()""")
    browser.until("document.getElementById('who').textContent !== kept[3]")  # its uptime
    browser.ask("look()")
    assert browser.ask("document.activeElement === kept[0]")
    assert browser.ask("kept[0].isConnected && kept[1].isConnected"), "rows are patched, not replaced"
    assert browser.ask("getSelection().toString() === kept[2] && kept[2] !== ''")
    assert browser.ask("scrollY > 0"), "where it is anchored: what is above may grow by a line"
    browser.ask("document.getElementById('timeline').focus()")
    browser.ask(
        "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowRight', bubbles: true}))"
    )
    assert browser.ask("document.querySelectorAll('#timeline rect.here').length") >= 1
    browser.ask("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}))")
    browser.until(f"{TEXT.format('story-text')}.includes('admitted')")
    browser.ask("document.getElementById('close').click()")
    assert browser.ask("location.hash") == ""


async def test_all_engines_and_one_of_them(world: World, browser: Browser) -> None:
    names, last = world.names, world.names[-1]
    wrote = len(names) * (len(names) + 1) // 2
    client = world.clients[last]
    await client.pause()
    late = await client.submit(WriteStorageTask(task_id="too late", keys=["never"], gpu_block_ids=[1], timeout=5.0))
    await client.resume()
    assert late.status is Status.EXPIRED
    failed = {name: one["errors"] for name, one in (await client.stats())["engines"].items()}
    assert failed == {name: {} for name in names} | {last: {"expired": 1}}
    refused = await client.submit(write(LONG, ["x"], [10_000]))
    assert refused.status is Status.REJECTED

    def look() -> None:
        browser.open(f"http://127.0.0.1:{world.port}/")
        browser.until(f"{TASKS}.length === {min(25, wrote + len(names) + 1)}")
        lanes = "[...document.querySelectorAll('#lanes tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        assert next(row for row in browser.ask(lanes) if row[0] == "write")[3:5] == [str(wrote), "0"]
        engines = [row[0] for row in browser.ask(lanes.replace("#lanes", "#engines"))]
        assert sorted(engines) == [*sorted(["each level"]), *names]
        cells = "[...document.querySelector('#engines tr').cells].map((c) => c.innerText)"
        name, hits, why, p99, *_, held = browser.ask(cells)
        assert (name, hits) == (names[0], "0 %"), "it has looked up one block, and missed"
        assert why == "never stored 1"
        assert "s" in p99
        assert "iB" in held or " B" in held
        assert browser.ask("document.getElementById('start').hidden")
        acts = browser.ask(
            "[...document.querySelectorAll('#acts tr')].map((r) => [...r.cells].map((c) => c.textContent))"
        )
        assert [act[0] for act in acts[:2]] == ["resume", "pause"], "the newest first"
        assert f"of engine {last}" in acts[0][1]
        assert f"uid {os.getuid()}, pid {os.getpid()}" in acts[0][2]
        labels = browser.ask("[...document.querySelectorAll('#timeline text')].map((t) => t.textContent)")
        assert "now" in labels, "the time axis"
        assert any(label.startswith("−") for label in labels)
        rows = [f"{name} {rank}" for name in names for rank in range(2)] if len(names) > 1 else ["rank 0", "rank 1"]
        assert sorted(label for label in labels if label in rows) == rows
        tiers = browser.ask(TEXT.format("tiers"))
        assert "level memory" in tiers
        assert "hits 0 % since the start" in tiers
        assert browser.ask("document.querySelectorAll('#tiers td.bar rect').length") >= 4, "host, staging, memory"
        assert browser.ask("[...document.querySelectorAll('#tiles > div')].map((d) => d.textContent)")[3].startswith(
            "0 %"
        )
        browser.until("document.querySelectorAll('#tiles polyline').length >= 3")
        keeps(browser)

        if len(names) > 1:
            choose(browser, "engine", last)
            browser.until(f"{TASKS}.length === {len(names) + 2}")
            assert browser.ask("location.hash") == f"#engine={last}"
            assert browser.ask(f"{TASKS}.every((r) => r.textContent.startsWith('[{last}] '))")
            assert browser.ask(TEXT.format("lanes-of")) == f" of engine {last}"
            write_row = next(row for row in browser.ask(lanes) if row[0] == "write")
            assert write_row[3] == str(len(names))
            labels = browser.ask("[...document.querySelectorAll('#timeline text')].map((t) => t.textContent)")
            assert not [label for label in labels if label.startswith("engine-0")]
        choose(browser, "show", "failed")
        browser.until(f"{TASKS}.length === 2")
        failed = browser.ask(f"{TASKS}.map((r) => [...r.cells].map((c) => c.innerText))")
        assert [row[2] for row in failed] == ["rejected", "expired"]
        assert failed[0][0] == f"[{last}] {'a' * 90} \\u{{202e}}/of a client that likes long names"
        assert failed[1][4].startswith("expired: ")
        browser.ask("document.querySelectorAll('#tasks button')[1].click()")
        browser.until(f"{TEXT.format('story-text')}.includes('expired after ')")
        shown = browser.ask("location.hash")
        browser.open("about:blank")
        browser.open(f"http://127.0.0.1:{world.port}/{shown}")
        browser.until(f"{TEXT.format('story-text')}?.includes('expired after ')")
        browser.until(f"{TASKS}.length === 2")
        assert "show=failed" in shown, "the view is in the URL"
        browser.ask("document.querySelectorAll('#tasks button')[0].click()")
        browser.until(f"{TEXT.format('story-text')}.includes('rejected')")
        assert "not answered" not in browser.ask(TEXT.format("story-text"))
        choose(browser, "show", "slow")
        browser.until(f"{TASKS}.length > 2")
        assert browser.ask(f"{TASKS}[0].cells[2].textContent") == "expired", "it took the longest"

        browser.ask("document.getElementById('pause').click()")
        assert browser.ask(TEXT.format("state")).startswith("paused at ")
        browser.ask("document.getElementById('pause').click()")
        browser.until(f"{TEXT.format('state')} === 'ready'")

        for width in (390, 1200):
            browser.resize(width, 800)
            for dark in (False, True):
                browser.dark(dark)
                browser.until(f"document.documentElement.scrollWidth <= {width}")
                assert browser.ask(CONTRAST) >= 4.5, (width, dark)
        assert browser.complaints == []
        outside = [url for url in browser.requested if not url.startswith((f"http://127.0.0.1:{world.port}/", "data:"))]
        assert outside == []

    await asyncio.to_thread(look)


def test_old_figures_never_look_alive(tmp_path: Path, browser: Browser) -> None:
    """A daemon that hangs, and one that is gone; then another one at its place, without the chosen engine."""
    port = free_port()
    tree = {"storage": {"backend": "memory"}, "metrics": {"listen": f"127.0.0.1:{port}"}}
    grey = "document.body.classList.contains('lost')"
    daemon = start(tree, tmp_path / "daemon")
    try:
        browser.open(f"http://127.0.0.1:{port}/")
        browser.until(f"{TEXT.format('state')} === 'ready' && !{grey}")
        before = browser.ask(TEXT.format("who"))
        daemon.signal(signal.SIGSTOP)
        browser.until(f"{grey} && {TEXT.format('state')}.startsWith('no answer since ')")
        assert browser.ask("document.title").startswith("! ")
        for shown in ("section", "article"):
            assert float(browser.ask(f"getComputedStyle(document.querySelector('{shown}')).opacity")) < 1
        daemon.signal(signal.SIGCONT)
        browser.until(f"{TEXT.format('state')} === 'ready' && !{grey}")
        daemon.stop()
        browser.until(f"{grey} && {TEXT.format('state')}.includes('these are old figures')")
        assert re.fullmatch(
            r"no answer since .*\d.* \(\d.*\); these are old figures; trying again", browser.ask(TEXT.format("state"))
        )
        daemon = start(tree, tmp_path / "daemon")
        browser.until(f"{TEXT.format('state')} === 'ready' && !{grey}")
        assert browser.ask("document.title").endswith(" · transferd")
        assert browser.ask(TEXT.format("who"))[:30] != before[:30], "another life of the daemon"
        assert browser.ask("getComputedStyle(document.querySelector('section')).opacity") == "1"
        assert {line for line in browser.complaints if "ERR_CONNECTION" not in line} == set()
    finally:
        daemon.signal(signal.SIGCONT)
        daemon.stop()
