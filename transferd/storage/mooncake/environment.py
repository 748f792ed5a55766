"""How this node joins a pool: [storage.mooncake], completed by FastDeploy's names.

For each of the settings that FastDeploy knows, the first of these that is given counts:

1. the key in [storage.mooncake] (file, TRANSFERD_STORAGE__MOONCAKE__…, --set);
2. the JSON file at MOONCAKE_CONFIG_PATH; when it is named, the variables below are not looked at;
3. the variable MOONCAKE_<NAME>;
4. the default.

Where Mooncake's own tools call a setting by another name, that name is taken too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from transferd.config import MooncakeStorageSection, Size
from transferd.errors import ConfigError

LEAST_SEGMENT = 16 * 1024**2  # the library refuses to set up with less, with a code that says nothing

# Setting: the same in Mooncake's own JSON file, and in its own environment.
OTHER_NAMES = {
    "master_server_addr": ("master_server_address", "MOONCAKE_MASTER"),
    "metadata_server": ("", "MOONCAKE_TE_META_DATA_SERVER"),
    "rdma_devices": ("device_name", "MOONCAKE_DEVICE"),
}


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The arguments of the client's `setup`, complete."""

    master_server_addr: str
    metadata_server: str = "P2PHANDSHAKE"
    local_hostname: str = "127.0.0.1"
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""
    global_segment_size: int = 1024**3
    local_buffer_size: int = 128 * 1024**2


NAMES = tuple(field.name for field in fields(Membership))


def membership(section: MooncakeStorageSection, env: Mapping[str, str] | None = None) -> Membership:
    """Raises ConfigError naming the key, the variable or the file that is wrong."""
    env = os.environ if env is None else env
    path = env.get("MOONCAKE_CONFIG_PATH", "")
    outside = _from_file(path) if path else _from_variables(env)
    given = {name: value for name in NAMES if (value := getattr(section, name)) is not None}
    settings = outside | given
    if not settings.get("master_server_addr"):
        raise ConfigError("storage.mooncake.master_server_addr", "is needed, such as 127.0.0.1:50051")
    complete = Membership(**settings)
    if 0 < complete.global_segment_size < LEAST_SEGMENT:
        what = f"must be 0 or at least {Size(LEAST_SEGMENT)}: Mooncake lends no smaller segment"
        raise ConfigError("storage.mooncake.global_segment_size", what, str(complete.global_segment_size))
    return complete


def _from_variables(env: Mapping[str, str]) -> dict[str, Any]:
    found = {}
    for name in NAMES:
        for variable in (f"MOONCAKE_{name.upper()}", OTHER_NAMES.get(name, ("", ""))[1]):
            if env.get(variable) and name not in found:
                found[name] = _value(name, env[variable], variable)
    return found


def _from_file(path: str) -> dict[str, Any]:
    try:
        tree = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("MOONCAKE_CONFIG_PATH", f"is not a readable JSON file: {error}", path) from error
    if not isinstance(tree, dict):
        raise ConfigError("MOONCAKE_CONFIG_PATH", "does not hold a JSON object", path)
    found = {}
    for name in NAMES:
        for key in (name, OTHER_NAMES.get(name, ("", ""))[0]):
            if tree.get(key) is not None and name not in found:
                found[name] = _value(name, tree[key], f"MOONCAKE_CONFIG_PATH, {key}")
    return found


def _value(name: str, value: Any, source: str) -> Any:
    if name.endswith("_size"):
        try:
            return Size.parse(int(value) if isinstance(value, str) and value.strip().isdigit() else value)
        except ValueError as error:
            raise ConfigError(source, str(error), value) from None
    if not isinstance(value, str):
        raise ConfigError(source, "expected text", value)
    if name == "protocol" and value.lower() not in ("tcp", "rdma"):
        raise ConfigError(source, "expected tcp or rdma", value)
    return value.lower() if name == "protocol" else value
