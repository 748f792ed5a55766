"""The page at / of the metrics port: what it may load, what it shows, and a browser that says so."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.cli.conftest import NASTY
from tests.support.browser import Browser, executable
from tests.support.waits import wait_until
from transferd import ReadStorageTask, SyncClient, WriteStorageTask
from transferd.cli.pool.master import free_port
from transferd.client.launch import DaemonProcess, start
from transferd.observability.concerns import concerns
from transferd.observability.page import front_page
from transferd.observability.report import read

pytestmark = pytest.mark.one_loop

EVIL = "<img src=x onerror=\"document.title='owned'\">\u202e\x1b[2J"


def fetch(url: str) -> tuple[int, Any, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def serve(directory: Path, port: int) -> tuple[DaemonProcess, str]:
    daemon = start({"cache": {"device_blocks": 8}, "metrics": {"listen": f"127.0.0.1:{port}"}}, directory)
    return daemon, f"http://127.0.0.1:{port}/"


def work(daemon: DaemonProcess, *task_ids: str) -> None:
    with SyncClient(daemon.endpoint) as client:
        for rank in range(2):
            client.attach(rank)
        for task_id in task_ids:
            assert client.submit(WriteStorageTask(task_id=task_id, keys=[task_id], gpu_block_ids=[1])).status == "ok"
        assert client.submit(ReadStorageTask(task_id="read", keys=[task_ids[0]], gpu_block_ids=[2])).status == "ok"


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else() -> None:
    page = front_page()
    headers, text = dict(page.headers), page.body.decode()
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert "unsafe" not in headers["content-security-policy"]
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        assert policy[name] == f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"
    assert not re.findall(r'(?:src|href)="(?!data:)', text), "one file, from no other host"
    assert not re.findall(r"\son\w+=|style=|innerHTML|document\.write|eval\(", text)


def test_the_page_polls_tasks_concerns_and_stories(tmp_path: Path) -> None:
    daemon, url = serve(tmp_path, free_port())
    try:
        work(daemon, "one", NASTY)
        status, headers, body = fetch(url)
        assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert headers["x-content-type-options"] == "nosniff"
        assert body == front_page().body
        live = json.loads(fetch(f"{url}live")[2])
        assert (live["not_ready"], live["report"]["boot_id"]) == ("", json.loads(fetch(f"{url}status")[2])["boot_id"])
        assert [task["task_id"] for task in live["tasks"]] == ["read", NASTY, "one"]
        assert [len(task["stages"]) for task in live["tasks"]] == [2, 2, 2]
        assert live["tasks"][2]["stages"][1]["storage_s"] > 0
        story = json.loads(fetch(f"{url}explain?task={quote(NASTY)}")[2])
        assert (story["task_id"], story["lives"][0]["status"]) == (NASTY, "ok")
        for query in ("", "?", "?task=", "?task=unknown", f"?task={'%ff' * 40}", "?" + "a=1&" * 99):
            status, _, body = fetch(f"{url}explain{query}")
            assert status == 404, query
            assert (body.count(b"\n"), body[:-1].decode().isprintable()) == (1, True)
    finally:
        daemon.stop()


def test_what_the_page_says_of_engines_is_what_their_pages_say() -> None:
    docs = Path(__file__).parents[2] / "docs"
    told = "".join((docs / f"{name}.md").read_text() for name in ("vllm", "sglang", "lmcache", "fastdeploy"))
    (starts,) = re.findall(r"(?ms)^const STARTS = \[\n(.*?)^\];", front_page().body.decode())
    commands = [
        quoted or plain for quoted, plain in re.findall(r'^  \["\w+", (?:`(.*)`|"(.*)")\],$', starts, re.MULTILINE)
    ]
    assert len(commands) == 4
    assert [command for command in commands if command not in told] == []


@pytest.mark.skipif(executable() is None, reason="chromium is not installed")
def test_a_browser_shows_tasks_and_a_story(tmp_path: Path) -> None:
    port = free_port()
    daemon, url = serve(tmp_path, port)
    try:
        with Browser(tmp_path / "profile") as browser:
            work(daemon, "one", EVIL)
            browser.open(url)
            browser.until("document.querySelectorAll('#tasks tr').length === 3")
            assert browser.ask("document.getElementById('state').textContent") == "ready"

            def agree() -> bool:
                lines = concerns(read(json.loads(fetch(f"{url}live")[2])["report"]))  # this machine may give it some
                shown = browser.ask("document.getElementById('concerns').textContent")
                return ("all is well" in shown) is (not lines)

            wait_until(agree, "the page follows the report")
            assert browser.ask("document.title") == f"{socket.gethostname()} · transferd"
            names = browser.ask("[...document.querySelectorAll('#tasks button')].map((b) => b.textContent)")
            assert names == ["read", "<img src=x onerror=\"document.title='owned'\">\\u{202e}\\u{1b}[2J", "one"]
            assert browser.ask("document.querySelectorAll('#timeline rect').length") >= 2
            browser.ask("document.querySelectorAll('#tasks button')[1].click()")
            browser.until("document.getElementById('story-text').textContent.includes('stored')")
            assert browser.ask("document.querySelectorAll('img').length") == 0
            backgrounds = []
            for dark in (False, True):
                browser.dark(dark)
                backgrounds.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
            assert len(set(backgrounds)) == 2
            assert browser.complaints == []
    finally:
        daemon.stop()
