"""Completion scripts for shells, generated from the command line's own grammar.

A script contains all words, so pressing Tab does not start Python.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterable, Iterator

from transferd.cli.grammar import Command, Parameter


class Shell(enum.StrEnum):
    """The shells that a script can be printed for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def script(shell: Shell, grammar: Command) -> str:
    """The text that the shell reads at its start."""
    return {Shell.BASH: _bash, Shell.ZSH: _zsh, Shell.FISH: _fish}[shell](grammar)


def _bash(grammar: Command) -> str:
    program = grammar.path[0]
    return f"""# bash completion of {program}; made by `{program} completion bash`
{_function(grammar)}
complete -F _{program} {program}
"""


def _zsh(grammar: Command) -> str:
    """The script for zsh, which runs bash's function, so that both use the same list of words."""
    program = grammar.path[0]
    return f"""#compdef {program}
# zsh completion of {program}; made by `{program} completion zsh`
autoload -Uz bashcompinit && bashcompinit
{_function(grammar)}
complete -F _{program} {program}
"""


def _function(grammar: Command) -> str:
    """A function that finds the command before the cursor, then what may follow it.

    bash splits `--format=js` into three words. Its names avoid those that zsh gives a meaning (path,
    words), and it selects words itself: zsh's compgen does not.
    """
    program = grammar.path[0]
    commands = list(grammar.walk())
    inner = _patterns(" ".join(command.path) for command in commands[1:])
    return f"""_{program}() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} at={program} choices= files= word
    if [[ $current == = ]]; then current=
    elif [[ $previous == = ]]; then previous=${{COMP_WORDS[COMP_CWORD-2]}}; fi
    for word in "${{COMP_WORDS[@]:1:$((COMP_CWORD-1))}}"; do
        case "$at $word" in {inner}) at="$at $word" ;; esac
    done
    case "$at $previous" in
{_lines(_values(commands))}
    *) case "$at" in
{_lines(_words(commands))}
    esac ;;
    esac
    COMPREPLY=()
    while IFS= read -r word; do [[ $word != "$current"* ]] || COMPREPLY+=("$word"); done < <(
        [[ -z $choices ]] || compgen -W "$choices" -- "$current"
        [[ -z $files || $current == -* ]] || compgen -f -- "$current"
    )
    [[ -z $files ]] || compopt -o filenames 2>/dev/null
    return 0
}}"""


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _patterns(words: Iterable[str]) -> str:
    return "|".join(f'"{word}"' for word in words)


def _values(commands: list[Command]) -> Iterator[str]:
    """The cases for the value of an option: one branch for all options with the same values."""
    branches: dict[str, list[str]] = {}
    for command in commands:
        for option in command.options:
            if option.takes:
                places = branches.setdefault(_asks(option), [])
                places += [f"{' '.join(command.path)} {name}" for name in option.names]
    for asks, places in branches.items():
        yield f"    {_patterns(places)}) {asks}"


def _asks(parameter: Parameter) -> str:
    if parameter.choices:
        return f'choices="{" ".join(parameter.choices)}" ;;'
    return "files=1 ;;" if parameter.takes == "path" else ";;"


def _words(commands: list[Command]) -> Iterator[str]:
    """The cases for other words: commands, options, and the command's arguments."""
    for command in commands:
        words = [inner.path[-1] for inner in command.commands]
        words += [name for option in command.options for name in option.names] + ["--help"]
        words += [choice for argument in command.arguments for choice in argument.choices]
        files = " files=1" if any(argument.takes == "path" for argument in command.arguments) else ""
        yield f'    "{" ".join(command.path)}") choices="{" ".join(words)}"{files} ;;'


def _fish(grammar: Command) -> str:
    program = grammar.path[0]
    lines = [
        f"# fish completion of {program}; made by `{program} completion fish`",
        f"complete -c {program} -f",
    ]
    for command in grammar.walk():
        when = _fish_condition(command)
        lines += [
            f"complete -c {program} -n '{when}' -a {inner.path[-1]} -d {_quoted(_first(inner.text))}"
            for inner in command.commands
        ]
        for option in command.options:
            names = " ".join(f"-l {name.removeprefix('--')}" for name in option.names)
            value = _fish_value(option)
            lines.append(f"complete -c {program} -n '{when}' {names}{value} -d {_quoted(_first(option.text))}")
        for argument in command.arguments:
            if argument.takes == "path":
                lines.append(f"complete -c {program} -n '{when}' -F")
            elif argument.choices:
                lines.append(f"complete -c {program} -n '{when}' -a {_quoted(' '.join(argument.choices))}")
    return "\n".join(lines) + "\n"


def _fish_condition(command: Command) -> str:
    """A condition that holds where this command's own words may follow: after its path, but no inner command."""
    typed = [f"__fish_seen_subcommand_from {word}" for word in command.path[1:]]
    if command.commands:
        inner = " ".join(one.path[-1] for one in command.commands)
        typed.append(f"not __fish_seen_subcommand_from {inner}")
    return "; and ".join(typed)


def _fish_value(option: Parameter) -> str:
    if option.choices:
        return f" -x -a {_quoted(' '.join(option.choices))}"
    return {"": "", "path": " -r -F"}.get(option.takes, " -x")


def _first(text: str) -> str:
    """The first sentence of a help text."""
    return text.split("\n", 1)[0].split(". ")[0].removesuffix(".")


def _quoted(text: str) -> str:
    return shlex.quote(text)
