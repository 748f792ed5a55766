"""The man page, generated from the command line's own grammar: `transferd man | man -l -`."""

from __future__ import annotations

from collections.abc import Iterator

from transferd.cli.grammar import Command, Parameter
from transferd.runtime.version import VERSION

EXIT_STATUS = (
    ("0", "It was done; the daemon has stopped as asked."),
    ("1", "It failed: no daemon answers, the daemon is not ready, or what was checked is damaged."),
    ("2", "The command or the configuration is wrong; one line on stderr names the key and the value."),
    ("130", "Ctrl-C ended it; what was done by then is reported."),
    ("3", "The daemon has stopped, but a storage call or a copy never ended."),
)
FILES = (
    ("/etc/transferd/transferd.toml", "The configuration that the systemd unit uses."),
    ("/run/transferd/transferd.sock", "The socket that the daemon listens on by default."),
    ("/var/lib/transferd/blocks", "Stored blocks."),
    ("/var/lib/transferd/flight", "Dumps of the flight recorder."),
)


def manual(grammar: Command) -> str:
    """A man page of section 1 (roff, man macros)."""
    program = grammar.path[0]
    return "\n".join([f'.TH {program.upper()} 1 "" "{program} {VERSION}" "User Commands"', *_sections(grammar)]) + "\n"


def _sections(grammar: Command) -> Iterator[str]:
    program = grammar.path[0]
    yield ".SH NAME"
    yield f"{program} \\- {_escaped(_summary(grammar))}"
    yield ".SH SYNOPSIS"
    yield f".B {program}"
    yield ".I command\n.RI [ option \\ ...]"
    yield ".SH DESCRIPTION"
    yield from _text(grammar.text)
    yield from _options(grammar)
    yield ".SH COMMANDS"
    for command in grammar.walk():
        if command is not grammar and not command.commands:
            yield from _command(command)
    yield ".SH ENVIRONMENT"
    variables = {one.variable: one.text for command in grammar.walk() for one in command.options if one.variable}
    for name, text in variables.items():
        yield from _item(name, text)
    yield from _item("TRANSFERD_SECTION__KEY", "The setting section.key, over the configuration file.")
    yield ".SH EXIT STATUS"
    for code, text in EXIT_STATUS:
        yield from _item(code, text)
    yield ".SH FILES"
    for path, text in FILES:
        yield from _item(path, text)


def _summary(grammar: Command) -> str:
    return grammar.text.split("\n", 1)[0].removesuffix(".")


def _command(command: Command) -> Iterator[str]:
    words = [*command.path[1:], *(f"<{argument.names[0]}>" for argument in command.arguments)]
    yield f".SS {_escaped(' '.join(words))}"
    yield from _text(command.text)
    yield from _options(command)


def _options(command: Command) -> Iterator[str]:
    for parameter in (*command.arguments, *command.options):
        yield from _item(_usage(parameter), _meaning(parameter))


def _usage(parameter: Parameter) -> str:
    value = "|".join(parameter.choices) or parameter.takes
    if not parameter.names[0].startswith("-"):
        return parameter.names[0]
    return ", ".join(parameter.names) + (f" {value}" if value else "")


def _meaning(parameter: Parameter) -> str:
    meaning = parameter.text
    if parameter.default:
        meaning += f" Default: {parameter.default}."
    if parameter.variable:
        meaning += f" Environment: {parameter.variable}."
    return meaning.strip()


def _item(term: str, text: str) -> Iterator[str]:
    yield ".TP"
    yield f".B {_escaped(term)}"
    yield from _text(text)


def _text(text: str) -> Iterator[str]:
    """Paragraphs with safe lines: roff would take a dot or an apostrophe at a line's start for a request."""
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield ".PP"
        for line in paragraph.splitlines():
            yield _escaped(line.strip())


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text
