"""Tests that need LMCache: `make lmcache-check` sets up an environment that has it. Elsewhere none is collected."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = importlib.util.find_spec("lmcache") is None

if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of LMCache and torch themselves
        importlib.import_module("tests.with_lmcache.managers")


def pytest_report_header() -> str | None:
    return "tests/with_lmcache: skipped, lmcache is not installed (make lmcache-check)" if MISSING else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/with_lmcache" in str(item.path):
            item.add_marker(pytest.mark.one_loop)
            item.add_marker(pytest.mark.filterwarnings("default"))  # LMCache and torch have warnings of their own


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short name (sockets live in it); sockets, caches and logs of the adapter go there."""
    directory = Path(tempfile.mkdtemp(prefix="tl."))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    logging.getLogger("lmcache.transferd").setLevel(logging.INFO)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
