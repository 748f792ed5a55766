"""The weight version of stored blocks, read from a file beside the model.

FastDeploy's reinforcement-learning loop writes `version.yaml` into the model's directory and names its
stored blocks after the first two dash-separated parts of the field `version`:

    version: RL-STEP03-20260801-5d1f…    →    generation RL-STEP03

Only this one field is read, a plain or quoted scalar on a line of its own at the top level; whatever else
the file holds does not matter. So no YAML library is needed, and no tag in such a file can do anything.
"""

from __future__ import annotations

import re
from pathlib import Path

from transferd.config import StorageSection
from transferd.config.environment import LONGEST_FILE, read_file
from transferd.errors import ConfigError

VERSION_PARTS = 2
_FIELD = re.compile(
    r"""^["']?version["']?\s*:\s*(?:"([^"]*)"|'([^']*)'|([^\s#"'][^#\n]*?))\s*(?:#.*)?$""", re.MULTILINE
)


def generation_of(path: str | Path) -> str:
    """The generation that a version.yaml stands for. Raises ConfigError naming storage.version_file."""
    try:
        text = read_file(path, LONGEST_FILE).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError("storage.version_file", f"cannot be read: {what}", str(path)) from error
    match = _FIELD.search(text.replace("\r\n", "\n"))
    version = next((group for group in match.groups() if group), "").strip() if match else ""
    if not version or not version.isprintable():
        raise ConfigError("storage.version_file", "the file has no line 'version: …'", str(path))
    return generation_named(version)


def generation_named(version: str) -> str:
    """The generation of a version as FastDeploy writes it."""
    return "-".join(version.split("-")[:VERSION_PARTS])


def configured_generation(storage: StorageSection) -> str:
    """storage.generation, or what storage.version_file says now. Raises ConfigError."""
    return generation_of(storage.version_file) if storage.version_file else storage.generation
