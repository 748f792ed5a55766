"""The version of this package."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def _version() -> str:
    try:
        return metadata.version("transferd")
    except metadata.PackageNotFoundError:  # run from source, not installed, as `make gpu-check` does
        project = Path(__file__).parent.parent.parent / "pyproject.toml"
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])


VERSION = _version()
