"""Environment variables of FastDeploy, Mooncake and AttentionStore: read once, when the configuration is loaded.

They set keys that the configuration leaves open; transferd's own keys take precedence. Variables of Mooncake and
AttentionStore are read only if that storage is configured, so that unrelated variables cause no error. For each of
Mooncake's settings the first of these applies:

1. the key in [storage.mooncake] (file, TRANSFERD_STORAGE__MOONCAKE__…, --set);
2. the JSON file at MOONCAKE_CONFIG_PATH; if that variable is set, the variables below are ignored;
3. the variable MOONCAKE_<NAME>, then the name that Mooncake's own tools have for it;
4. the default.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from transferd.config.rules import namespace_of, pod_name_of
from transferd.config.sections import AttentionStoreSection
from transferd.config.size import Size
from transferd.errors import ConfigError
from transferd.runtime.compat import convert

LONGEST_FILE = 64 * 1024  # bytes of other programs' files, such as MOONCAKE_CONFIG_PATH
# Setting: its other name in Mooncake's own JSON file, and the variable that Mooncake's own tools read.
_MOONCAKE = {
    "master_server_addr": ("master_server_address", "MOONCAKE_MASTER"),
    "metadata_server": ("", "MOONCAKE_TE_META_DATA_SERVER"),
    "local_hostname": ("", ""),
    "protocol": ("", ""),
    "rdma_devices": ("device_name", "MOONCAKE_DEVICE"),
    "global_segment_size": ("", ""),
    "local_buffer_size": ("", ""),
}
_ATTENTION_STORE = {
    "namespace": "AS_NAMESPACE",
    "model_version": "AS_MODEL_VERSION",
    "slice_blocks": "AS_WRITE_SLICE_BLOCK_NUM",
    "slice_timeout": "AS_WRITE_SLICE_TIMEOUT",
    "total_timeout": "AS_WRITE_TOTAL_TIMEOUT",
    "only_flush": "FD_AS_ONLY_FLUSH",
}


def fold(tree: dict[str, Any], env: Mapping[str, str]) -> None:
    """Set keys that are absent from `tree` and set by these variables. Raises ConfigError naming the variable.

    `from_tree` reports a section that is not a table.
    """
    if directory := env.get("FILE_BACKEND_STORAGE_DIR"):  # FastDeploy's
        _fill(tree, "storage.file", {"path": directory})
    storage = tree.get("storage")
    if not isinstance(storage, dict):
        return
    used = [storage.get("backend")]
    if used[0] == "attention_store" and isinstance(tokens := storage.setdefault("attention_store", {}), dict):
        for name in ("namespace", "pod_name"):  # "" is the default, which is found here
            if tokens.get(name) == "":
                del tokens[name]
        used.append(tokens.get("data"))
        _fill(tree, "storage.attention_store", _attention_store(env, storage, tokens))
    if "mooncake" in used:
        _fill(tree, "storage.mooncake", _mooncake(env))


def _fill(tree: dict[str, Any], section: str, values: Mapping[str, Any]) -> None:
    for key in section.split(".") if values else ():
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return
    for name, value in values.items():
        tree.setdefault(name, value)


def _attention_store(env: Mapping[str, str], storage: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    open_ones = {name: variable for name, variable in _ATTENTION_STORE.items() if name not in section}
    types = {field.name: field.type for field in msgspec.structs.fields(AttentionStoreSection)}
    read = {name: _parsed(env, variable, types[name]) for name, variable in open_ones.items()}
    found = {name: value for name, value in read.items() if value is not None}
    role, dp_id = section.get("splitwise_role", "mixed"), section.get("dp_id", 0)
    shared = _parsed(env, "ENABLE_EP_DP_IN_FD", bool)
    found["pod_name"] = pod_name_of(env.get("AS_POD_NAME"), role, dp_id, shared=shared is not False)
    if isinstance(model := storage.get("model", "demo"), str):
        found.setdefault("namespace", namespace_of(model))
    return found


def _parsed(env: Mapping[str, str], variable: str, kind: Any) -> Any:
    """The value of a variable as a setting of this type; None if it is not set."""
    text = env.get(variable, "")
    try:
        return convert(text, kind, strict=False) if text else None
    except msgspec.ValidationError as error:
        raise ConfigError(variable, f"{error}".replace("Expected", "expected", 1), text) from None


def _mooncake(env: Mapping[str, str]) -> dict[str, Any]:
    path = env.get("MOONCAKE_CONFIG_PATH", "")
    given: Mapping[str, Any] = _json_object(path) if path else env
    found: dict[str, Any] = {}
    for name, (in_file, variable) in _MOONCAKE.items():
        for key in (name, in_file) if path else (f"MOONCAKE_{name.upper()}", variable):
            if name not in found and given.get(key) not in (None, ""):
                found[name] = _mooncake_value(name, given[key], f"MOONCAKE_CONFIG_PATH, {key}" if path else key)
    return found


def _json_object(path: str) -> dict[str, Any]:
    try:
        tree = json.loads(read_file(path, LONGEST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("MOONCAKE_CONFIG_PATH", f"is not a readable JSON file: {error}", path) from error
    if not isinstance(tree, dict):
        raise ConfigError("MOONCAKE_CONFIG_PATH", "does not hold a JSON object", path)
    return tree


def _mooncake_value(name: str, value: Any, source: str) -> Any:
    if name.endswith("_size"):
        try:
            return Size.parse(value)
        except ValueError as error:
            raise ConfigError(source, str(error), value) from None
    if not isinstance(value, str):
        raise ConfigError(source, "expected text", value)
    if name == "protocol" and value.lower() not in ("tcp", "rdma"):
        raise ConfigError(source, "expected tcp or rdma", value)
    return value.lower() if name == "protocol" else value


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Read a regular file of at most `most` bytes. Raises OSError, or ValueError for anything else; never blocks."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"larger than {most} bytes")
    return data


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK) -> BinaryIO:
    """Open a regular file to read it. Raises OSError, or ValueError for anything else, such as a FIFO; never blocks."""
    descriptor = os.open(path, flags)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
