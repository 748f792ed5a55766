"""Shell completion and the man page: made from the parser, and tried in the programs that read them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from transferd.cli import completion, manual
from transferd.cli.completion import Shell
from transferd.cli.grammar import Command, grammar
from transferd.cli.main import app

pytestmark = pytest.mark.one_loop

GRAMMAR = grammar(app, "transferd")
COMMANDS = {command.path[1:]: command for command in GRAMMAR.walk()}

# What is typed, with the cursor at its end, and what a shell must offer.
TYPED = [
    (["transferd", "p"], {"ping", "pool"}),
    (["transferd", "pool", ""], {"master", "status", "--help"}),
    (["transferd", "pool", "status", "--k"], {"--keys"}),
    (["transferd", "stats", "--format", ""], {"text", "json"}),
    (["transferd", "stats", "--format", "j"], {"json"}),
    (["transferd", "stats", "--timeout", ""], set()),
    (["transferd", "completion", "b"], {"bash"}),
    (["transferd", "serve", "--config", "con"], {"config with a space.toml"}),
    (["transferd", "replay", "con"], {"config with a space.toml"}),
    (["transferd", "tasks", "--running", "--sl"], {"--slow"}),
]


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"{program} is not installed")


def run(directory: Path, *command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False, cwd=directory)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config with a space.toml").touch()
    (tmp_path / "script").write_text(completion.script(Shell.BASH, GRAMMAR))
    return tmp_path


def test_the_grammar_has_every_command_and_its_options() -> None:
    assert {("serve",), ("pool", "master"), ("config", "init"), ("bench", "copy"), ("man",)} <= set(COMMANDS)
    options = {name: option for option in COMMANDS["stats",].options for name in option.names}
    assert (options["--format"].choices, options["--format"].default) == (("text", "json"), "text")
    assert options["--endpoint"].variable == "TRANSFERD_ENDPOINT"
    assert options["--key-file"].takes == "path"
    (trace,) = COMMANDS["replay",].arguments
    assert (trace.names, trace.takes) == (("trace",), "path")
    assert all(command.text for command in GRAMMAR.walk())


@needs("bash")
@pytest.mark.parametrize(
    ("typed", "offered"), TYPED, ids=lambda value: "-".join(sorted(value) if isinstance(value, set) else value)
)
def test_bash_offers_what_may_follow(directory: Path, typed: list[str], offered: set[str]) -> None:
    words = " ".join(f"'{word}'" for word in typed)
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _transferd; printf "%s\\n" "${{COMPREPLY[@]}}"'
    told = run(directory, "bash", "--norc", "-c", f"set -u; source ./script; {ask}")
    assert set(told.splitlines()) - {""} == offered


@needs("bash")
@pytest.mark.parametrize(
    ("typed", "offered"), [(["--format", "="], {"text", "json"}), (["--format", "=", "j"], {"json"})]
)
def test_bash_splits_words_at_an_equals_sign(directory: Path, typed: list[str], offered: set[str]) -> None:
    test_bash_offers_what_may_follow(directory, ["transferd", "stats", "--format", *typed], offered)


@needs("bash")
def test_bash_binds_the_script_to_the_command(directory: Path) -> None:
    assert run(directory, "bash", "--norc", "-c", "source ./script; complete -p transferd") == (
        "complete -F _transferd transferd\n"
    )


@needs("zsh")
@pytest.mark.parametrize(
    ("typed", "offered"), TYPED, ids=lambda value: "-".join(sorted(value) if isinstance(value, set) else value)
)
def test_zsh_offers_the_same(directory: Path, typed: list[str], offered: set[str]) -> None:
    (directory / "_transferd").write_text(completion.script(Shell.ZSH, GRAMMAR))
    words = " ".join(f"'{word}'" for word in typed)
    ask = f'COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _transferd; print -rl -- "${{COMPREPLY[@]}}"'
    start = "autoload -Uz compinit && compinit -D -u; source ./_transferd"
    told = run(directory, "zsh", "-f", "-c", f"{start}; emulate ksh; {ask}")
    assert set(told.splitlines()) - {""} == offered


@needs("fish")
@pytest.mark.parametrize(
    ("typed", "offered"), TYPED, ids=lambda value: "-".join(sorted(value) if isinstance(value, set) else value)
)
def test_fish_offers_the_same(
    directory: Path, typed: list[str], offered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(directory))  # where fish would write its own files
    (directory / "transferd.fish").write_text(completion.script(Shell.FISH, GRAMMAR))
    told = run(directory, "fish", "--no-config", "-c", f"source ./transferd.fish; complete -C '{' '.join(typed)}'")
    values = {line.split("\t")[0].replace("\\ ", " ") for line in told.splitlines()}
    assert values >= offered - {"--help"}  # fish shows options only after a dash
    assert values <= offered or typed[-1] == ""


def test_the_manual_names_every_command_and_option() -> None:
    page = manual.manual(GRAMMAR).replace("\\-", "-")
    for command in COMMANDS.values():
        if not command.commands:
            assert f".SS {' '.join(command.path[1:])}" in page
            for option in command.options:
                assert f".B {option.names[0]}" in page


@needs("groff")
def test_groff_reads_the_manual_without_a_warning(tmp_path: Path) -> None:
    page = run(tmp_path, "groff", "-man", "-Tutf8", "-P-cbou", "-ww", text=manual.manual(GRAMMAR))
    text = " ".join(page.split())
    assert "COMMANDS" in text
    assert "EXIT STATUS" in text
    assert "Print the daemon's report" in text


@needs("man")
def test_man_shows_the_manual(tmp_path: Path) -> None:
    (tmp_path / "transferd.1").write_text(manual.manual(GRAMMAR))
    page = run(tmp_path, "man", "-l", "transferd.1")
    assert page.startswith("TRANSFERD(1)")


def test_text_that_would_be_a_request_to_roff_is_escaped() -> None:
    command = Command(("x",), ".SH no\n'quote\na\\b", (), (), ())
    assert "\\&.SH no\n\\&'quote\na\\eb\n" in manual.manual(command)
