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
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from transferd.config.rules import namespace_of, pod_name_of
from transferd.config.size import Size
from transferd.errors import ConfigError

# FastDeploy's names for settings of ours that are text.
FASTDEPLOY_VARIABLES = {"FILE_BACKEND_STORAGE_DIR": "storage.file.path"}

LONGEST_FILE = 64 * 1024  # bytes of MOONCAKE_CONFIG_PATH
_MOONCAKE = (
    "master_server_addr",
    "metadata_server",
    "local_hostname",
    "protocol",
    "rdma_devices",
    "global_segment_size",
    "local_buffer_size",
)
# Setting: its name in Mooncake's own JSON file, and the variable that Mooncake's own tools read.
_OTHER_NAMES = {
    "master_server_addr": ("master_server_address", "MOONCAKE_MASTER"),
    "metadata_server": ("", "MOONCAKE_TE_META_DATA_SERVER"),
    "rdma_devices": ("device_name", "MOONCAKE_DEVICE"),
}


def fold(tree: dict[str, Any], env: Mapping[str, str]) -> None:
    """Set keys that are absent from `tree` and set by these variables. Raises ConfigError naming the variable.

    `from_tree` reports a section that is not a table.
    """
    for name, key in FASTDEPLOY_VARIABLES.items():
        if env.get(name):
            section, _, setting = key.rpartition(".")
            _fill(tree, section, {setting: env[name]})
    storage = tree.get("storage")
    if not isinstance(storage, dict):
        return
    tokens = storage.get("attention_store")
    used = [storage.get("backend")]
    if used[0] == "attention_store":
        if tokens is None:
            tokens = storage["attention_store"] = {}
        if isinstance(tokens, dict):
            used.append(tokens.get("data"))
            _fill(tree, "storage.attention_store", _attention_store(env, storage, tokens))
    for name, read in _VARIABLES.items():
        if name in used:
            _fill(tree, f"storage.{name}", read(env))


def _fill(tree: dict[str, Any], section: str, values: Mapping[str, Any]) -> None:
    for key in section.split(".") if values else ():
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return
    for name, value in values.items():
        tree.setdefault(name, value)


def _from_variables(
    env: Mapping[str, str], variables: Mapping[str, tuple[str, Callable[[str], Any]]], given: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """The parsed values of set variables, for settings that are not in `given`."""
    found: dict[str, Any] = {}
    for name, (variable, parse) in variables.items():
        text = env.get(variable, "")
        if text and name not in given:
            try:
                found[name] = parse(text)
            except ValueError as error:
                raise ConfigError(variable, str(error), text) from None
    return found


# --- AttentionStore -------------------------------------------------------------------------------


def _attention_store(env: Mapping[str, str], storage: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    variables: dict[str, tuple[str, Callable[[str], Any]]] = {
        "namespace": ("AS_NAMESPACE", str),
        "model_version": ("AS_MODEL_VERSION", str),
        "slice_blocks": ("AS_WRITE_SLICE_BLOCK_NUM", _count),
        "slice_timeout": ("AS_WRITE_SLICE_TIMEOUT", _seconds),
        "total_timeout": ("AS_WRITE_TOTAL_TIMEOUT", _seconds),
        "only_flush": ("FD_AS_ONLY_FLUSH", _flag),
    }
    found = _from_variables(env, variables, section)
    pod = _from_variables(env, {"name": ("AS_POD_NAME", str), "shared": ("ENABLE_EP_DP_IN_FD", _flag)})
    role, dp_id = section.get("splitwise_role", "mixed"), section.get("dp_id", 0)
    found["pod_name"] = pod_name_of(pod.get("name"), role, dp_id, shared=pod.get("shared", True))
    if isinstance(model := storage.get("model", "demo"), str):
        found.setdefault("namespace", namespace_of(model))
    return found


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return text == "1"


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError("expected a number of seconds above 0")
    return seconds


# --- Mooncake -------------------------------------------------------------------------------------


def _mooncake_variables(env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _MOONCAKE:
        for variable in (f"MOONCAKE_{name.upper()}", _OTHER_NAMES.get(name, ("", ""))[1]):
            if env.get(variable) and name not in found:
                found[name] = _mooncake_value(name, env[variable], variable)
    return found


def _mooncake_file(path: str) -> dict[str, Any]:
    try:
        tree = json.loads(read_text(path, LONGEST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("MOONCAKE_CONFIG_PATH", f"is not a readable JSON file: {error}", path) from error
    if not isinstance(tree, dict):
        raise ConfigError("MOONCAKE_CONFIG_PATH", "does not hold a JSON object", path)
    found: dict[str, Any] = {}
    for name in _MOONCAKE:
        for key in (name, _OTHER_NAMES.get(name, ("", ""))[0]):
            if tree.get(key) is not None and name not in found:
                found[name] = _mooncake_value(name, tree[key], f"MOONCAKE_CONFIG_PATH, {key}")
    return found


def _mooncake_value(name: str, value: Any, source: str) -> Any:
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


def read_text(path: str | os.PathLike[str], most: int) -> str:
    """Read a regular file of at most `most` bytes. Raises OSError, or ValueError for anything else; never blocks."""
    return read_file(path, most).decode("utf-8")


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Like `read_text`, but returns bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"larger than {most} bytes")
    return data


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read it. Raises OSError, or ValueError for anything else, such as a FIFO; never blocks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("not a regular file")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _mooncake(env: Mapping[str, str]) -> dict[str, Any]:
    path = env.get("MOONCAKE_CONFIG_PATH", "")
    return _mooncake_file(path) if path else _mooncake_variables(env)


_VARIABLES: dict[str, Callable[[Mapping[str, str]], dict[str, Any]]] = {"mooncake": _mooncake}  # by section
