"""Command-line options that several commands share."""

from __future__ import annotations

import enum
from typing import Annotated

import typer

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell


class Format(enum.StrEnum):
    """How a report is printed."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="text or json.")]
