"""When the plugin starts a daemon again that has ended."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from transferd.adapters.common import companion
from transferd.adapters.common.companion import FIRST_PAUSE_S, LONGEST_PAUSE_S
from transferd.adapters.fastdeploy.companion import Companion


class Ended:
    """A daemon's process that has ended."""

    log_file = Path("1.log")

    def ended(self) -> str:
        return "the transferd daemon ended (exit code 1): its last line"

    def stop(self) -> None:
        """It has."""


def restarts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, deaths: list[float]) -> list[float]:
    """After how many seconds a daemon that ends at these times, or as soon as it is started, is started again."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(companion, "spawn", lambda *_, **__: Ended())
    ended: Any = Ended()
    endpoint = f"ipc://{tmp_path}/d.sock"
    made = Companion(endpoint=endpoint, registers=True, sections={}, directory=tmp_path, process=ended)
    waited = []
    for death in deaths:
        now[0] = max(now[0], 1000.0 + death)
        died = now[0]
        while not made.look():
            now[0] += 0.25
        waited.append(now[0] - died)
    return waited


def test_a_daemon_that_keeps_ending_is_started_after_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waited = restarts(monkeypatch, tmp_path, [0.0] * 10)
    assert waited[:4] == [0.0, FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert waited[-1] == LONGEST_PAUSE_S


def test_a_daemon_that_has_lived_for_long_is_started_at_once_and_so_is_its_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hours = [0.0] * 8 + [3600.0, 3601.0]
    assert restarts(monkeypatch, tmp_path, hours)[-2:] == [0.0, 0.0]
