"""The version: one place, which the installed package and the changelog agree with."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from transferd.runtime import version as versions
from transferd.runtime.version import RELEASE, RELEASED, VERSION, build_name


def test_the_installed_package_is_of_this_release() -> None:
    assert Version(version("transferd")).release == Version(VERSION).release == Version(RELEASE).release


def test_the_changelog_names_the_release_or_what_is_not_released_yet() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", RELEASE)
    changelog = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (f"## [{RELEASE}]" in changelog) == RELEASED
    assert "## [Unreleased]" in changelog


def test_each_commit_has_a_name_of_its_own_between_two_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "RELEASED", False)
    builds = [build_name(17, "0123456789ab"), build_name(18, "ba9876543210")]
    assert builds[0] == f"{RELEASE}.dev17+g0123456789ab"
    assert Version("0.3.0") < Version(builds[0]) < Version(builds[1]) < Version(RELEASE)
    monkeypatch.setattr(versions, "RELEASED", True)
    assert build_name(19, "0123456789ab") == f"{RELEASE}+g0123456789ab"
