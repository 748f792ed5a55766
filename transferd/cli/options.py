"""Command-line options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from transferd.runtime.compat import StrEnum

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell


class Format(StrEnum):
    """How a report is printed."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="text or json.")]
