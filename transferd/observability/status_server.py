"""The daemon's answers over HTTP: metrics, health, its report, and a page for people."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection
from typing import Any

from transferd.observability.concerns import concerns
from transferd.observability.http import MAX_CONNECTIONS, Asked, HttpServer, Page, Route
from transferd.observability.page import PageParts, front_page, live_page, story_page
from transferd.observability.report import Report, tree
from transferd.observability.task_log import TaskMetrics
from transferd.runtime.descriptors import spare

Reporter = Callable[[], Report]


class StatusServer:
    """Serves /metrics, /healthz, /readyz, /status, the page at / and what that page polls.

    report: returns the daemon's report.
    alive: whether the dispatcher makes progress or is idle.
    not_ready: why it is not ready, or "".
    live: the page's sources besides the report.
    explain: called with a task and its engine, returns its story. Without these two there is no page.
    """

    def __init__(
        self,
        listen: str,
        report: Reporter,
        alive: Callable[[], bool],
        not_ready: Callable[[], str],
        *,
        live: PageParts | None = None,
        explain: Callable[[str, str], dict[str, Any]] | None = None,
        hosts: Collection[str] = (),
        tasks: TaskMetrics | None = None,
    ) -> None:
        """Serve nothing before `start`.

        hosts: see HttpServer.
        tasks: metrics besides those of the report.
        """
        self._report = report
        self._alive = alive
        self._not_ready = not_ready
        self._tasks = tasks
        self._exposition: Callable[[], bytes] | None = None
        routes: dict[str, Route] = {
            "/metrics": self._metrics,
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/status": self._status,
        }
        asked: dict[str, Asked] = {}
        if live is not None and explain is not None:
            page = front_page()  # read now: an upgrade under a running daemon must not change or remove it
            routes["/"] = lambda: page
            asked["/live"] = functools.partial(self._live, live)
            asked["/explain"] = functools.partial(story_page, explain)
        if listen:
            self._prepare()  # loads prometheus_client now: at a scrape it would hold up the event loop for 0.1 s
        most = spare(MAX_CONNECTIONS)
        self.http = HttpServer(listen, routes, asked=asked, hosts=hosts, max_connections=most) if listen else None

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

    def _prepare(self) -> Callable[[], bytes]:
        if self._exposition is None:
            from transferd.observability.metrics import exposition

            self._exposition = exposition(self._report, self._not_ready, self._tasks)
        return self._exposition

    def _metrics(self) -> Page:
        return Page(self._prepare()(), "text/plain; version=0.0.4; charset=utf-8")

    def _healthz(self) -> Page:
        stalled = b"dispatcher stalled: tasks are running and a deadline is overdue\n"
        return Page(b"ok\n") if self._alive() else Page(stalled, status=503)

    def _readyz(self) -> Page:
        reason = self._not_ready()
        return Page(f"{reason}\n".encode(), status=503) if reason else Page(b"ready\n")

    def _live(self, live: PageParts, query: str) -> Page:
        report = self._report()
        shown = {"report": tree(report), "not_ready": self._not_ready(), "concerns": concerns(report)}
        return live_page(shown, live, query)

    def _status(self) -> Page:
        return Page(json.dumps(tree(self._report()), default=str).encode() + b"\n", "application/json")
