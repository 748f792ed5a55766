"""What the tests under an engine's own packages share (tests/machine/with_vllm, with_sglang, with_lmcache, …)."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def header(package: str, missing: bool) -> str | None:
    """pytest's line about tests that cannot run here."""
    where = f"tests/machine/with_{package}"
    return f"{where}: skipped, {package} is not installed (make {package}-check)" if missing else None


def mark(items: list[pytest.Item], package: str) -> None:
    """One event loop for all; the engine and torch have warnings of their own."""
    for item in items:
        if f"tests/machine/with_{package}" in str(item.path):
            item.add_marker(pytest.mark.one_loop)
            item.add_marker(pytest.mark.filterwarnings("default"))


@contextlib.contextmanager
def short_place(package: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short name (sockets live in it); sockets, caches and logs of the adapter go there."""
    directory = Path(tempfile.mkdtemp(prefix=f"t{package[0]}."))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
    monkeypatch.delenv("TRANSFERD_ENDPOINT", raising=False)
    logging.getLogger(f"{package}.transferd").setLevel(logging.INFO)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
