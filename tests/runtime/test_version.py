"""The version: one place, which the installed package and the changelog agree with."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

from scripts.build_name import build_name
from transferd.runtime import version as versions
from transferd.runtime.version import RELEASE, RELEASED, VERSION

ROOT = Path(__file__).parents[2]


def test_the_installed_package_is_of_this_release() -> None:
    assert Version(version("transferd")).release == Version(VERSION).release == Version(RELEASE).release


def test_the_changelog_names_the_release_or_what_is_not_released_yet() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", RELEASE)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (f"## [{RELEASE}]" in changelog) == RELEASED
    assert "## [Unreleased]" in changelog


HASH = "0123456789abcdef0123456789abcdef01234567"


def test_each_commit_has_a_name_of_its_own_before_a_release_and_after_it() -> None:
    def name(seconds: int, subject: str, release: str = "0.4.0", *, released: bool) -> Version:
        return Version(build_name(release, released=released, commit=f"{HASH} {seconds} {subject}"))

    before = [name(1795940018, "a bug is mended", released=False), name(1795940019, "release: 0.4.0", released=False)]
    after = [name(1795940021, "a bug is mended", released=True), name(1795940022, "release: 0.3.0", released=True)]
    release = name(1795940020, "release: 0.4.0", released=True)
    later = [name(1795940030, "the next one", "0.4.1", released=False), Version("0.4.1")]
    order = [Version("0.3.0"), Version("0.4.0.dev2197+gf3a89097c96c"), *before, release, *after, *later]
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    assert [str(one) for one in (before[0], release, after[0])] == [
        "0.4.0.dev20261129081338+g0123456789ab",
        "0.4.0+g0123456789ab",
        "0.4.0.post20261129081341+g0123456789ab",
    ]
    changed = build_name("0.4.0", released=True, commit=f"{HASH} 1795940020 release: 0.4.0", digest="ab" * 20)
    assert changed == "0.4.0.post20261129081340+g0123456789ab.sabababababab", "not the release's own files"
    assert build_name("0.4.0", released=False, commit="", digest="cd" * 20) == "0.4.0.dev0+scdcdcdcdcdcd"
    assert build_name("0.4.0", released=False, commit=HASH) == "0.4.0.dev0+g0123456789ab", "without its time"


def test_a_build_says_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    for build, commit in (
        ("0.4.0+g0123456789ab", "0123456789ab"),
        ("0.4.0.dev1+g0123456789ab.scdcdcdcdcdcd", "0123456789ab"),
        ("0.4.0.dev0+scdcdcdcdcdcd", ""),
        ("0.4.0.dev0", ""),
    ):
        monkeypatch.setattr(versions, "VERSION", build)
        assert versions.commit() == commit


def run(where: Path, *command: str) -> str:
    """What a command prints there, at the time of the commits."""
    author = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    environment = {"PATH": os.environ["PATH"], "HOME": str(where), **author}
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def named(where: Path) -> str:
    return run(where, sys.executable, "scripts/build_name.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What makes a name, as a repository of one commit."""
    where = tmp_path / "tree"
    for name in (".commit", ".gitattributes", "scripts/build_name.py", "transferd/runtime/version.py"):
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, where / name)
    run(where, "git", "init", "--quiet")
    commit(where, "the first")
    return where


def commit(where: Path, subject: str, old: str = "", new: str = "") -> str:
    """Commit all that is there, with this change of version.py; return the name of the build."""
    file = where / "transferd/runtime/version.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new) + "\n")
    run(where, "git", "add", "--all")
    run(where, "git", "commit", "--quiet", "-m", subject, "-m", "What else the message says.")
    return named(where)


def cloned_and_archived(tree: Path, place: Path) -> set[str]:
    """The names in a shallow clone without tags, and in an archive."""
    archive = place / "archive"
    archive.mkdir(parents=True)
    run(place, "git", "clone", "--quiet", "--depth=1", "--no-tags", f"file://{tree}", "shallow")
    run(tree, "git", "archive", "--output", str(place / "tar"), "HEAD")
    run(archive, "tar", "-xf", "../tar")
    return {named(place / "shallow"), named(archive)}


def test_a_clone_without_tags_and_history_and_an_archive_have_the_name_of_the_commit(
    tree: Path, tmp_path: Path
) -> None:
    before = commit(tree, "a bug is mended", "RELEASED = True", "RELEASED = False") if RELEASED else named(tree)
    release = commit(tree, f"release: {RELEASE}", "RELEASED = False", "RELEASED = True")
    assert cloned_and_archived(tree, tmp_path / "release") == {release}
    after = commit(tree, "the next")
    assert cloned_and_archived(tree, tmp_path / "after") == {after}
    assert re.fullmatch(rf"{re.escape(RELEASE)}\+g[0-9a-f]{{12}}", release)
    assert Version(before) < Version(release) < Version(after)
    assert after.startswith(f"{RELEASE}.post20"), "nobody has named the next release yet"
    assert Version(named(tree)) < Version(commit(tree, "on", f'"{RELEASE}"', '"99.0.0"'))


def test_files_that_are_no_commits_change_the_name(tree: Path) -> None:
    clean = named(tree)
    (tree / "notes").write_text("not shipped")
    assert named(tree) == clean
    extra = tree / "transferd/extra.py"
    extra.write_text("1")
    first = named(tree)
    extra.write_text("2")
    assert len({clean, first, named(tree)}) == 3
    shutil.rmtree(tree / ".git")  # nothing knows the commit
    second = named(tree)
    extra.write_text("3")
    assert len({first, second, named(tree)}) == 3
