"""The text of a daemon's metrics, without HTTP."""

from __future__ import annotations

from transferd.daemon.daemon import Daemon
from transferd.observability.metrics import exposition


def exposed(daemon: Daemon) -> str:
    """What /metrics would say now."""
    return exposition(lambda: daemon.not_ready, daemon.reports.tasks)(daemon.report())().decode()
