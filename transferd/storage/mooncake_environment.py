"""Mooncake settings by FastDeploy's names: MOONCAKE_* variables, or a JSON file at MOONCAKE_CONFIG_PATH.

The file replaces the variables entirely, as it does there. What [storage.mooncake] sets to something
else than its default wins over both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from transferd.config import MooncakeStorageSection, Size
from transferd.errors import ConfigError

NAMES = (
    "local_hostname",
    "metadata_server",
    "global_segment_size",
    "local_buffer_size",
    "protocol",
    "rdma_devices",
    "master_server_addr",
)


def section_from_environment(
    section: MooncakeStorageSection, env: Mapping[str, str] | None = None
) -> MooncakeStorageSection:
    """The section, completed from the environment. Raises ConfigError."""
    env = os.environ if env is None else env
    path = env.get("MOONCAKE_CONFIG_PATH", "")
    found = _from_file(path) if path else _from_variables(env)
    default = MooncakeStorageSection()
    changes = {name: value for name, value in found.items() if getattr(section, name) == getattr(default, name)}
    return msgspec.structs.replace(section, **changes)


def _from_variables(env: Mapping[str, str]) -> dict[str, Any]:
    named = {name: f"MOONCAKE_{name.upper()}" for name in NAMES}
    return {name: _value(name, env[variable], variable) for name, variable in named.items() if env.get(variable)}


def _from_file(path: str) -> dict[str, Any]:
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("MOONCAKE_CONFIG_PATH", f"is not a readable JSON file: {error}", path) from error
    if not isinstance(tree, dict):
        raise ConfigError("MOONCAKE_CONFIG_PATH", "does not hold a JSON object", path)
    return {name: _value(name, tree[name], f"{path}: {name}") for name in NAMES if tree.get(name) is not None}


def _value(name: str, value: Any, source: str) -> Any:
    if name.endswith("_size"):
        try:
            return Size.parse(int(value) if str(value).isdigit() else value)
        except ValueError as error:
            raise ConfigError(source, str(error)) from None
    if name == "protocol" and value not in ("tcp", "rdma"):
        raise ConfigError(source, "expected tcp or rdma", value)
    return str(value)
