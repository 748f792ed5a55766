"""These tests run on the machine of machine.py and on no other; `check` makes it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = any(type(finder).__module__ == "tests.machine.with_fastdeploy.gpu.machine" for finder in sys.meta_path)

if HERE:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Paddle and FastDeploy themselves
        import fastdeploy.worker.gpu_model_runner  # noqa: F401
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Instead of shared memory in place of a device: the device that FastDeploy's platform asks for."""
    monkeypatch.delenv("TRANSFERD_CACHE__DEVICE", raising=False)


@pytest.fixture
def place(place: Path) -> Iterator[Path]:
    from tests.machine.with_fastdeploy.gpu.machine import WRONG
    from tests.machine.with_fastdeploy.gpu.memory import release

    yield place
    release()
    logs = "\n".join(log.read_text(errors="replace") for log in place.rglob("transferd.log"))
    assert WRONG not in logs, logs[-3000:]
