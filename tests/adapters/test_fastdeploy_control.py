"""A control request that meets a daemon which has just been started again waits until that has the engine's weights."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.adapters.fastdeploy import control
from transferd.adapters.fastdeploy.control import DONE, FAILED, PASSING, Control
from transferd.adapters.fastdeploy.items import ControlItem
from transferd.errors import RequestError


class Daemon:
    """Behind a group's client: it refuses a number of requests for one reason, then does what it is asked."""

    generation, boot_id = "step1", "boot"

    def __init__(self, reason: str, refusals: float) -> None:
        self.reason, self.refusals = reason, refusals
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            if self.refusals > 0:
                self.refusals -= 1
                raise RequestError("not now", code=self.reason)
            self.done.append(name)

        return call


class Group:
    """What requests act on, without an engine."""

    def __init__(self, daemon: Daemon) -> None:
        self.client: Any = daemon
        self.closing = threading.Event()
        self.first: Any = SimpleNamespace(
            creates=True, ranks=2, frees_host=False, host_blocks=4, version_file=Path("/nonexistent")
        )
        self.signals: Any = SimpleNamespace(
            await_released=lambda *_: None, paused=lambda _: None, cache_ready=lambda _: None,
            swap_space_ready=lambda _: None,
        )  # fmt: skip
        self.hold = self.release = self.have_daemon = self.join_memory = lambda: None
        self.daemon_lives = lambda: True


def ask(asked: Control, method: str) -> tuple[int, str]:
    return asked.obey(ControlItem(request=None, method=method, args={}))


@pytest.mark.parametrize("method", ["sleep", "wakeup"])
@pytest.mark.parametrize("reason", PASSING)
def test_a_daemon_that_does_not_have_the_engine_yet_is_asked_again(reason: str, method: str) -> None:
    """Another client of the engine, such as a worker's, may reach the new daemon first, with the weights of before."""
    daemon = Daemon(reason, 0)
    asked = Control(Group(daemon))
    if method == "wakeup":
        assert ask(asked, "sleep")[0] == DONE
    daemon.refusals, daemon.done = 3, []
    assert ask(asked, method)[0] == DONE
    done = {"sleep": ["detach", "detach", "clear_cache"], "wakeup": ["restore_cache"]}[method]
    assert daemon.done == ["set_generation"] * (reason == "generation_mismatch") + done  # the engine's is right


@pytest.mark.parametrize("method", ["sleep", "wakeup"])
def test_a_permanent_error_is_answered_at_once(method: str) -> None:
    daemon = Daemon("no_room", 0)
    asked = Control(Group(daemon))
    if method == "wakeup":
        ask(asked, "sleep")
    daemon.refusals = 1
    assert ask(asked, method) == (FAILED, f"Failed to execute {method}: not now")


@pytest.mark.parametrize("method", ["sleep", "wakeup"])
def test_a_lasting_error_is_answered_while_fastdeploy_waits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_TIMEOUT_S", 0.0)
    daemon = Daemon("generation_mismatch", 0)
    asked = Control(Group(daemon))
    if method == "wakeup":
        ask(asked, "sleep")
    daemon.refusals = float("inf")
    assert ask(asked, method) == (FAILED, f"Failed to execute {method}: not now")
