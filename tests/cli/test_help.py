"""The help: verbs in groups, every text as it was written, and the old names of what has moved."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from transferd.cli.main import VERBS, app


def transferd(*arguments: str) -> str:
    command = [sys.executable, "-m", "transferd", *arguments]
    environment = {"COLUMNS": "200", "PATH": "", "HOME": "/nowhere", "TERM": "dumb"}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=environment).stdout


def commands(command: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    found = [(path, command)]
    for name, inner in getattr(command, "commands", {}).items():
        found += commands(inner, *path, name)
    return found


def test_each_verb_is_in_a_group_and_the_groups_are_in_order() -> None:
    text = transferd("--help")
    panels = re.findall(r"─ ([A-Z].+?) ─", text)
    assert [panel for panel in panels if panel != "Options"] == list(VERBS)
    assert "check-config" not in text
    there = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert sum(map(len, VERBS.values())) == len(there) - 1


def test_brackets_in_help_texts_are_printed() -> None:
    """rich takes `[cache]` for the name of a style."""
    whole = typer.main.get_command(app)
    bracketed = {path for path, one in commands(whole) for part in (one, *one.params) if "\\[" in (part.help or "")}
    assert ("generation", "set") in bracketed
    for path in bracketed:
        assert re.search(r"\[cache\]|\[[a-z]+\]", transferd(*path, "--help")), path
    assert "engine of [cache])" in transferd("generation", "set", "--help")


@pytest.mark.parametrize("verb", [["config", "check"], ["check-config"]])
def test_a_configuration_is_checked_under_both_names(verb: list[str], tmp_path: Path) -> None:
    file = tmp_path / "t.toml"
    file.write_text('[cache]\nlayers = 7\n[storage]\nbackend = "none"\n[log]\nlevel = "info"\n')
    changed = transferd(*verb, "--config", str(file), "--changed", "--format", "json")
    assert json.loads(changed) == {"cache": {"layers": 7}, "storage": {"backend": "none"}}
    assert json.loads(transferd(*verb, "--config", str(file), "--format", "json"))["log"]["level"] == "info"
    assert transferd(*verb, "--config", str(file), "--changed").splitlines()[0] == "[cache]"
