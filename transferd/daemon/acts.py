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
        self.reload_refused = ""
        self.would_not_start: Callable[[], str] = str

    def done(self, client: KnownClient, body: Any, value: Any) -> None:
        """Note what a client has asked for, if it is an act. value: the answer."""
        what = ACTS.get(type(body))
        if what is None or getattr(body, "dry_run", False):
            return
        fields = {name: value for name, value in msgspec.structs.asdict(body).items() if name not in UNSAID}
        wanted = {name: len(value) if isinstance(value, list) else value for name, value in fields.items()}
        wanted = {name: value for name, value in wanted.items() if value not in (None, "")}
        words = ", ".join(f"{name} {value}" for name, value in wanted.items())
        found = value if isinstance(value, dict) else {}
        (uid, pid), name = client.who, client.peer.decode()
        by = {"uid": uid, "pid": pid, "client": name}
        log.info("act", act=what, engine=client.engine_name, by=by, wanted=wanted, **found)
        self._kept.append((self._now(), ActReport(what, words, client.engine_name, uid, pid, name)))

    def noted(self, what: str, wanted: str) -> None:
        """Note an act that no client has asked for."""
        self._kept.append((self._now(), ActReport(what, wanted)))

    def report(self) -> list[ActReport]:
        """The last acts, the newest first."""
        return [msgspec.structs.replace(one, ago_s=self._now() - at) for at, one in reversed(self._kept)]
