"""The commands that README and docs tell a reader to type: each is typed here.

A shell block is fenced with ```sh. What stands before a fence decides:

    <!-- not run: REASON -->    it is skipped, with that reason
    <!-- needs: PROGRAM -->     it is skipped where that program is not installed

The blocks of one page run in one shell, in order, at the root of a tree that looks like this one. What is in
/tmp/transferd… lies in a directory of the test's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from transferd.cli.main import app
from transferd.config import from_tree
from transferd.runtime.compat import tomllib

pytestmark = pytest.mark.one_loop

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- (not run|needs): (.*?) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ |sudo |transferd |systemctl |pip |docker |make |promtool )", re.MULTILINE)


def blocks(page: Path, language: str) -> list[tuple[str, str, str]]:
    """(what stands before, its text, the block) of each block in that language."""
    return [
        (kind, reason, text) for kind, reason, fenced, text in FENCE.findall(page.read_text()) if fenced == language
    ]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_looks_like_a_command_is_in_a_shell_block(page: Path) -> None:
    for language in ("", "bash", "text", "console"):
        for _, _, text in blocks(page, language):
            assert not COMMAND.search(text), text


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_configuration_in_the_docs_is_valid(page: Path) -> None:
    for _, _, text in blocks(page, "toml"):
        from_tree(tomllib.loads(text))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_programs_in_the_docs_are_python(page: Path) -> None:
    for _, _, text in blocks(page, "python"):
        wrapped = "async def main():\n" + "".join(f"    {line}\n" for line in text.splitlines())  # some await
        compile(wrapped, str(page), "exec")


def test_each_command_is_in_the_docs() -> None:
    text = "".join(page.read_text() for page in PAGES)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert "serve" in commands
    assert [name for name in commands if f"transferd {name}" not in text] == []


SHELL = [(page, *block) for page in PAGES for block in blocks(page, "sh")]


def test_every_block_that_is_skipped_says_why() -> None:
    assert SHELL
    for page, kind, reason, _ in SHELL:
        assert not kind or reason, page


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", sorted({page for page, kind, _, _ in SHELL if kind != "not run"}), ids=name)
def test_the_commands_of_a_page_work(page: Path, tmp_path: Path) -> None:
    todo = [(kind, reason, text) for kind, reason, text in blocks(page, "sh") if kind != "not run"]
    absent = [reason for kind, reason, _ in todo if kind == "needs" and shutil.which(reason) is None]
    text = "\n".join(text for kind, reason, text in todo if reason not in absent)
    if not text:
        pytest.skip(f"{', '.join(absent)} is not installed")
    for entry in ("examples", "deploy", "systemd", "scripts"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, arguments in (("transferd", " -m transferd"), ("python", "")):  # as in an activated environment
        (programs / program).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{arguments} "$@"\n')
        (programs / program).chmod(0o755)
    text = text.replace("/tmp/transferd", f"{tmp_path}/transferd").replace(". .venv/bin/activate\n", "")
    # The doctor exits 1 where this machine lacks something; what it says is tested elsewhere.
    text = re.sub(r"^(transferd doctor [^#\n]*)", r"\1 || [ $? = 1 ] ", text, flags=re.MULTILINE)
    # A machine that is busy with other tests may need longer than a reader's to start a daemon, and to answer.
    text = re.sub(
        r"^(transferd (?:ping|stats|top)\b.*?)(?: --timeout \d+)?$", r"\1 --timeout 60", text, flags=re.MULTILINE
    )
    end = "trap '{ kill $(jobs -p); wait; } 2>/dev/null || true' EXIT"
    script = f"set -euo pipefail\n{end}\n{text}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=os.environ
        | {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TRANSFERD_METRICS__LISTEN": "",
            "TRANSFERD_RECORDER__DIRECTORY": str(tmp_path / "flight"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
