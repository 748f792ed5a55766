"""The simulation finds bugs put in on purpose. All of them: `python -m tests.sim.mutants` (docs/testing.md)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load() -> ModuleType:
    path = Path(__file__).with_name("mutants.py")
    spec = importlib.util.spec_from_file_location("mutants", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


mutants = _load()
QUICK = ("a lease is returned when its put begins", "the footer is not checked", "a result is sent twice")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_that_a_mutant_changes_is_there_once(mutant: object, tmp_path: Path) -> None:
    target = tmp_path / mutant.file  # type: ignore[attr-defined]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text((mutants.PACKAGE / mutant.file).read_text())  # type: ignore[attr-defined]
    mutant.apply(tmp_path)  # type: ignore[attr-defined]
    compile(target.read_text(), mutant.file, "exec")  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_found(name: str) -> None:
    [mutant] = [mutant for mutant in mutants.MUTANTS if mutant.name == name]
    verdict = mutants.hunt(mutant, seeds=50, jobs=1)
    assert verdict.seed is not None, f"{name} survived"
    print(f"{name}: seed {verdict.seed}, {verdict.how}")


def test_the_table_in_the_documentation_names_every_mutant() -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "testing.md").read_text()
    missing = [mutant.name for mutant in mutants.MUTANTS if f"| {mutant.name} |" not in text]
    assert not missing
