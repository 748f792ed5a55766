"""Tests that need LMCache: `make lmcache-check` sets up an environment that has it. Elsewhere none is collected."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import with_engine

MISSING = importlib.util.find_spec("lmcache") is None

if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of LMCache and torch themselves
        importlib.import_module("tests.machine.with_lmcache.managers")
        importlib.import_module("lmcache.v1.multiprocess.token_hasher")


def pytest_report_header() -> str | None:
    return with_engine.header("lmcache", MISSING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with_engine.mark(items, "lmcache")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with with_engine.short_place("lmcache", monkeypatch) as directory:
        yield directory
