"""Tests that need Dynamo's runtime: `make dynamo-check` sets up an environment. Elsewhere none is collected."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support import with_engine

MISSING = importlib.util.find_spec("dynamo") is None

if MISSING:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    return with_engine.header("dynamo", MISSING)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    with_engine.mark(items, "dynamo")
