"""Tests that need SGLang: `make sglang-check` sets up an environment that has it. Elsewhere none is collected."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import with_engine

MISSING = importlib.util.find_spec("sglang") is None

if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SGLang and torch themselves
        for name in ("standins", "pools"):  # the second one imports SGLang
            importlib.import_module(f"tests.machine.with_sglang.{name}")
        importlib.import_module("sglang.test.kits.unified_radix_cache.mixins")


def pytest_report_header() -> str | None:
    return with_engine.header("sglang", MISSING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with_engine.mark(items, "sglang")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with with_engine.short_place("sglang", monkeypatch) as directory:
        yield directory
