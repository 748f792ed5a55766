"""Where FastDeploy is importable, it is imported once, with the plugin switched on as a user does it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = next((name for name in ("paddle", "fastdeploy") if importlib.util.find_spec(name) is None), None)

if MISSING is None:
    os.environ.setdefault("FD_PLUGINS", "transferd")
    os.environ.setdefault("FD_LOG_DIR", tempfile.mkdtemp(prefix="tfd-log."))  # FastDeploy logs from its import on
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Paddle and FastDeploy themselves
        import fastdeploy.cache_manager.prefix_cache_manager
        import fastdeploy.engine.common_engine

    from transferd.adapters.fastdeploy.engine_queue import queue_for

    # FastDeploy logs a plugin that cannot be loaded, and goes on without it.
    for module in (fastdeploy.cache_manager.prefix_cache_manager, fastdeploy.engine.common_engine):
        assert module.EngineCacheQueue is queue_for, f"the plugin did not reach {module.__name__}; see the log above"
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return (
        None
        if MISSING is None
        else f"tests/machine/with_fastdeploy: skipped, {MISSING} is not installed (make fastdeploy-check)"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/machine/with_fastdeploy" in str(item.path):
            item.add_marker(pytest.mark.one_loop)
            item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::UserWarning"))


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the tests here, and of no others: pytest imports this file before it runs any test."""
    if "TRANSFERD_CACHE__DEVICE" not in os.environ:
        monkeypatch.setenv("TRANSFERD_CACHE__DEVICE", "shm")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short name (sockets live in it) that is the engine's for the time of a test."""
    directory = Path(tempfile.mkdtemp(prefix="tfd."))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("FD_LOG_DIR", str(directory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
