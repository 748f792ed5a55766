"""Tests that need vLLM: `make vllm-check` sets up an environment that has it. Elsewhere none is collected."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = importlib.util.find_spec("vllm") is None

if MISSING:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vLLM and torch themselves
        importlib.import_module("vllm.v1.kv_offload.tiering.spec")
        # vLLM looks at a model's class in a process that imports everything again, half a minute of a core
        registry = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda look: look()  # type: ignore[attr-defined]
    gc.freeze()


def pytest_report_header() -> str | None:
    return "tests/with_vllm: skipped, vllm is not installed (make vllm-check)" if MISSING else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/with_vllm" in str(item.path):
            item.add_marker(pytest.mark.one_loop)
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM and torch have warnings of their own


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short name (sockets live in it); sockets, caches and logs of the adapter go there."""
    directory = Path(tempfile.mkdtemp(prefix="tv."))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    logging.getLogger("vllm.transferd").setLevel(logging.INFO)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
