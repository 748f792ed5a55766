"""Test modules are rewritten once, for all processes that run tests (tests/support/rewritten.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import rewritten


def test_modules_are_rewritten_once_and_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewritten, "FEW", 1)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    module = tmp_path / "test_one.py"
    module.write_text("def test_it() -> None:\n    assert True\n")
    assert rewritten.rewrite(tmp_path) == [module]
    assert rewritten.rewrite(tmp_path) == []
    later = module.stat().st_mtime + 60
    os.utime(module, (later, later))
    assert rewritten._is_rewritten(module) is False
