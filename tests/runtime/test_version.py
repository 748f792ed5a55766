"""The version: one place, which the installed package and the changelog agree with."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

from transferd.runtime.version import VERSION


def test_the_installed_package_has_this_version() -> None:
    assert version("transferd") == VERSION


def test_it_is_a_release_that_the_changelog_names() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{VERSION}]" in changelog
