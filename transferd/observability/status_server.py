"""The daemon's answers over HTTP: metrics, health, its report, and a page for people."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from transferd.observability.http import MAX_CONNECTIONS, HttpServer, Page, Route
from transferd.observability.page import PageParts, front_page, live_page, story_page
from transferd.observability.report import Report, parts_of, tree
from transferd.observability.report_memory import ReportMemory
from transferd.observability.task_log import TaskMetrics
from transferd.runtime.aio import then
from transferd.runtime.descriptors import spare
from transferd.runtime.threads import Crew


@dataclass(eq=False, repr=False)
class StatusServer:
    """Serves /metrics, /healthz, /readyz, /status, the page at / and what that page polls. Nothing before `start`.

    reports: the daemon's.
    alive: whether the dispatcher makes progress or is idle.
    not_ready: why it is not ready, or "".
    live: the page's sources besides the report.
    explain: called with a task and its engine, returns its story.
    hosts: see HttpServer.
    tasks: metrics besides those of the report.
    """

    listen: str
    reports: ReportMemory
    alive: Callable[[], bool]
    not_ready: Callable[[], str]
    live: PageParts
    explain: Callable[[str, str], dict[str, Any]]
    hosts: Collection[str] = ()
    tasks: TaskMetrics | None = None

    def __post_init__(self) -> None:
        self._exposed: tuple[Report | None, asyncio.Future[Page]] | None = None
        self._thread = Crew("transferd-report", 1)
        page = front_page()  # read now: an upgrade under a running daemon must not change or remove it
        routes: dict[str, Route] = {
            "/": lambda _: page,
            "/metrics": lambda _: then(self.reports.report(), self._text),
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": lambda _: self.reports.made(_status),
            "/live": self._live,
            "/explain": functools.partial(story_page, self.explain),
        }
        self.http: HttpServer | None = None
        if self.listen:
            # Loads prometheus_client now: at a scrape that would hold up the event loop for 0.1 s.
            from transferd.observability.metrics import exposition

            self._exposition = exposition(self.not_ready, self.tasks)
            self.http = HttpServer(self.listen, routes, self.hosts, spare(MAX_CONNECTIONS))

    def refused(self) -> dict[str, int]:
        """HTTP requests and connections that were refused, by reason."""
        return {} if self.http is None else dict(self.http.refused)

    async def start(self) -> None:
        """Listen. Raises ConfigError if the address cannot be bound."""
        if self.http is not None:
            await self.http.start()

    async def close(self) -> None:
        if self.http is not None:
            await self.http.close()
        self._thread.close()

    def _text(self, report: Report) -> asyncio.Future[Page]:
        """The text is made in a thread, once for each report; it takes much longer than the report."""
        if self._exposed is None or (self._exposed[0] is not report and self._exposed[1].done()):
            text = self._exposition(report)
            self._exposed = report, asyncio.ensure_future(self._in_thread(text))
        return self._exposed[1]

    async def _in_thread(self, text: Callable[[], bytes]) -> Page:
        def make() -> tuple[bytes, float]:
            began = time.thread_time()
            return text(), time.thread_time() - began

        body, cost = await self._thread.run(make, "text of /metrics")
        self.reports.spend(cost)
        return Page(body, "text/plain; version=0.0.4; charset=utf-8")

    def _healthz(self, _: str) -> Page:
        stalled = b"dispatcher stalled: tasks are running and a deadline is overdue\n"
        return Page(b"ok\n") if self.alive() else Page(stalled, status=503)

    def _readyz(self, _: str) -> Page:
        reason = self.not_ready()
        return Page(f"{reason}\n".encode(), status=503) if reason else Page(b"ready\n")

    def _live(self, query: str) -> Page | asyncio.Future[Page]:
        def page(report: dict[str, Any]) -> Page:
            return live_page({"not_ready": self.not_ready(), "report": report}, self.live, query)

        return then(self.reports.made(tree), page)


def _status(report: Report) -> Page:
    return Page(msgspec.json.encode(parts_of(report), enc_hook=str) + b"\n", "application/json")
