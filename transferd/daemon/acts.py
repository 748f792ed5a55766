"""What operators and engines have ordered, and who: the log has a line for each act, the report the last ones.

An act is noted once it has been carried out, not when it is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from transferd.daemon.clients import KnownClient
from transferd.observability.report import ActReport
from transferd.wire import protocol as wire

log = structlog.get_logger(__name__)

KEPT = 20  # in the report
ACTS: dict[type, str] = {
    wire.Purge: "purge",
    wire.Pin: "pin",
    wire.Unpin: "unpin",
    wire.SetGeneration: "generation",
    wire.Pause: "pause",
    wire.Resume: "resume",
    wire.Drain: "drain",
    wire.ChangeLevel: "level",
    wire.MakeCopies: "copies",
    wire.ClearCache: "clear cache",
    wire.RestoreCache: "restore cache",
}
UNSAID = ("holder", "proof", "detail", "type")  # fields of requests that say nothing about the act


class Acts:
    """One for the daemon. now: monotonic seconds.

    reload_refused: why the last reload was refused; "" after another.
    would_not_start: returns why the daemon would not start with the configuration as it is on disk; "" if it would.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._kept: deque[tuple[float, ActReport]] = deque(maxlen=KEPT)
        self._asked: dict[tuple[bytes, int], tuple[ActReport, dict[str, Any]]] = {}  # with what was wanted, as data
        self.reload_refused = ""
        self.would_not_start: Callable[[], str] = str

    def asked(self, client: KnownClient, seq: int, body: Any) -> None:
        """Remember who has asked for this, if it is an act, until it is answered."""
        what = ACTS.get(type(body))
        if what is None or getattr(body, "dry_run", False):
            return
        fields = {name: value for name, value in msgspec.structs.asdict(body).items() if name not in UNSAID}
        wanted = {name: len(value) if isinstance(value, list) else value for name, value in fields.items()}
        wanted = {name: value for name, value in wanted.items() if value not in (None, "")}
        words = ", ".join(f"{name} {value}" for name, value in wanted.items())
        report = ActReport(what, words, client.engine_name, *client.who, client.peer.decode(), 0.0)
        self._asked[client.peer, seq] = report, wanted

    def answered(self, client: KnownClient, seq: int, value: Any = None, *, refused: bool = False) -> None:
        """Note the act that this answers, if it was one. value: the answer."""
        one = self._asked.pop((client.peer, seq), None)
        if one is None or refused:
            return
        report, wanted = one
        found = value if isinstance(value, dict) else {}
        by = {"uid": report.uid, "pid": report.pid, "client": report.client}
        log.info("act", act=report.what, engine=report.engine, by=by, wanted=wanted, **found)
        self._kept.append((self._now(), report))

    def noted(self, what: str, wanted: str) -> None:
        """Note an act that no client has asked for."""
        self._kept.append((self._now(), ActReport(what, wanted)))

    def left(self, client: KnownClient) -> None:
        """Forget what a client that is gone has asked for: it is cancelled."""
        for key in [key for key in self._asked if key[0] == client.peer]:
            del self._asked[key]

    def report(self) -> list[ActReport]:
        """The last acts, the newest first."""
        return [msgspec.structs.replace(one, ago_s=self._now() - at) for at, one in reversed(self._kept)]
