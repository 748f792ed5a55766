"""What the command line accepts, as plain data from its parser, for completion and the manual."""

from __future__ import annotations

import enum
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command


@dataclass(frozen=True, slots=True)
class Parameter:
    """An option, or an argument.

    names: an option's spellings ("--config"); an argument's one name ("trace"). takes: "" for a flag, "path", "text",
    or "number". choices: the only permitted values, if there are any. default: "" for none. variable: the environment
    variable that applies if the option is not given.
    """

    names: tuple[str, ...]
    text: str
    takes: str
    choices: tuple[str, ...] = ()
    default: str = ""
    variable: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command or a group of commands. path: the words that call it, the program first."""

    path: tuple[str, ...]
    text: str
    arguments: tuple[Parameter, ...]
    options: tuple[Parameter, ...]
    commands: tuple[Command, ...]

    def walk(self) -> Iterator[Command]:
        """This command, then all those below it, in the order of the help."""
        yield self
        for command in self.commands:
            yield from command.walk()


def grammar(app: typer.Typer, program: str) -> Command:
    """Read the parser of a typer application."""
    return _command(get_command(app), (program,))


def _command(parsed: Any, path: tuple[str, ...]) -> Command:
    below = getattr(parsed, "commands", {})
    function = inspect.unwrap(parsed.callback) if parsed.callback is not None else None
    hints = typing.get_type_hints(function) if function is not None else {}
    defaults = {name: one.default for name, one in inspect.signature(function).parameters.items()} if function else {}
    parameters = [
        (one.param_type_name, _parameter(one, hints[one.name], defaults[one.name]))
        for one in parsed.params
        if not one.hidden and one.name in hints
    ]
    return Command(
        path,
        inspect.cleandoc(parsed.help or ""),
        tuple(parameter for kind, parameter in parameters if kind == "argument"),
        tuple(parameter for kind, parameter in parameters if kind == "option"),
        tuple(_command(command, (*path, name)) for name, command in below.items() if not command.hidden),
    )


def _parameter(parsed: Any, hint: Any, default: Any) -> Parameter:
    kind = _plain(hint)
    choices = tuple(str(one.value) for one in kind) if issubclass(kind, enum.Enum) else ()
    takes = "" if kind is bool else "path" if issubclass(kind, Path) else "number" if kind in (int, float) else "text"
    absent = default is inspect.Parameter.empty or default is None or kind is bool
    value = default.value if isinstance(default, enum.Enum) else default
    return Parameter(
        tuple(parsed.opts),
        parsed.help or "",
        takes,
        choices,
        "" if absent else str(value),
        getattr(parsed, "envvar", None) or "",
    )


def _plain(hint: Any) -> type:
    """The type of one value: `list[str] | None` is str."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    if typing.get_origin(hint) is list:
        (hint,) = typing.get_args(hint)
    assert isinstance(hint, type), hint
    return hint
