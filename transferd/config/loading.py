"""Merges the four sources into one checked value. Every mistake becomes one line that names key and value."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from transferd.config import personal
from transferd.config.environment import fold, read_file
from transferd.config.rules import check
from transferd.config.sections import Config
from transferd.config.size import Capacities
from transferd.errors import ConfigError
from transferd.runtime.compat import convert, tomllib

# The source of settings that are not configured, for a user who may not write in the packaged daemon's directories.
PERSONAL = "this user's own directories"
ENV_PREFIX = "TRANSFERD_"

LONGEST_FILE = 256 * 1024  # bytes
MOST_DOTS = 64  # in a line: the parser's time for a key grows with the square of its dots
BY_GPU = "the kind of GPU decides (transferd/tiers/cuda/tuning.py)"
A_QUARTER = "each engine that registers may take a quarter of the bound in [server]"
# Retired keys, and what decides in their place. They are accepted without effect until release 0.5.
RETIRED = {
    **{f"cuda.{key}": BY_GPU for key in ("copies", "straight_from", "loads_straight_from", "grid", "slots")},
    **{f"cuda.{key}": BY_GPU for key in ("slot_bytes", "largest_dma")},
    **{f"engines.max_{key}": A_QUARTER for key in ("queued_tasks", "queued_bytes", "inflight_bytes")},
}
# Settings that nobody sets: they stand in [tuning], each below the name of its section, which may still have it.
TUNING = {
    *("server.max_queued_bytes", "server.max_inflight_bytes", "server.max_message", "server.result_ttl"),
    *("server.max_results", "server.max_result_bytes", "server.lane_depth", "server.deadline_slack"),
    *("server.observer_rate", "storage.admit_window", "storage.level.NAME.write_back_max_age"),
    *("storage.level.NAME.recheck", "storage.mooncake.timeout", "storage.mooncake.connect_timeout"),
    *("storage.mooncake.probe_interval", "storage.mooncake.native_log", "storage.mooncake.mend_interval"),
    *("storage.attention_store.slice_blocks", "storage.attention_store.slice_timeout"),
    *("storage.attention_store.total_timeout", "storage.attention_store.ready_timeout"),
    *("events.buffer", "events.buffer_bytes", "events.max_blocks"),
}


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> Config:
    """Read, merge, convert and check the configuration.

    Variables of FastDeploy, Mooncake and AttentionStore override only the defaults.

    overrides: `section.key=value` texts, the value as TOML where it parses as TOML, else as text.
    env: the environment to read TRANSFERD_SECTION__KEY from; default os.environ.

    Raises ConfigError.
    """
    return from_tree(_merge(path, overrides, os.environ if env is None else env)[0])


def origins(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """{"section.key": which source set it}, for every setting that some source names. Raises like `load`."""
    return _merge(path, overrides, os.environ if env is None else env)[1]


def outdated(origins: Mapping[str, str]) -> list[str]:
    """A sentence for each setting that has no effect any more, or another place. origins: what `origins` returned."""
    gone = [f"{key} ({why}) has no effect any more: {RETIRED[key]}" for key, why in origins.items() if key in RETIRED]
    return gone + [f"{key} ({why}) is tuning.{key} now" for key, why in origins.items() if of_tuning(key)]


def of_tuning(key: str) -> bool:
    """Whether a setting, named without `tuning.`, stands in [tuning]."""
    return re.sub(r"^storage\.level\..+\.", "storage.level.NAME.", key) in TUNING


def _merge(
    path: str | os.PathLike[str] | None, overrides: Iterable[str], environment: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings that the sources name, merged, and the source of each."""
    given = {} if path is None else _read(path)
    sources = {key: str(path) for key, _ in leaves(given)}
    tree = _settled(given)
    for name, text in sorted(environment.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            keys = name.removeprefix(ENV_PREFIX).lower().split("__")
            _put(tree, keys, _value(text))
            _sourced(sources, ".".join(keys), name)
    tree = _settled(tree)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or "." not in key:
            raise ConfigError("--set", "expected section.key=value", item)
        _put(tree, key.strip().split("."), _value(text))
        _sourced(sources, key.strip(), "--set")
    tree = _settled(tree)
    before = dict(leaves(tree))
    fold(tree, environment)
    others = "the environment of FastDeploy, Mooncake or AttentionStore"
    for key, _ in leaves(tree):
        if key not in before:
            _sourced(sources, f"tuning.{key}" if of_tuning(key) else key, others)
    for key, value in personal.settings(environment).items():
        if key not in sources:
            _put(tree, key.split("."), value)
            sources[key] = PERSONAL
    return tree, sources


def _sourced(sources: dict[str, str], key: str, source: str) -> None:
    """Note the source of a setting, whichever of its two names an earlier source has used."""
    plain = key.removeprefix("tuning.")
    for name in (plain, f"tuning.{plain}"):
        sources.pop(name, None)
    sources[key] = source


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A TOML file as plain data. Raises ConfigError."""
    try:
        data = read_file(path, LONGEST_FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read: {getattr(error, 'strerror', error)}") from error
    try:
        text = data.decode()
        for line in text.splitlines():
            if line.count(".") > MOST_DOTS and not line.lstrip().startswith("#"):
                raise ConfigError(str(path), f"has a line with more than {MOST_DOTS} dots", f"{line[:40]}…")
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting of a tree of sections: (`section.key`, its value)."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


TAKES_EFFECT = {
    "log.level",
    "storage.file.capacity",
    "storage.file.reserve",
    "storage.memory.capacity",
    "storage.scrub_rate",
}


def takes_effect(key: str) -> bool:
    """Whether a setting can change while the daemon runs (daemon/reload.py)."""
    key = key.removeprefix("tuning.")
    return key in TAKES_EFFECT or key.startswith("storage.level.")


def from_tree(tree: Mapping[str, Any]) -> Config:
    """Convert plain data to a checked Config. Raises ConfigError."""
    tree = _settled(tree)
    try:
        config = convert(tree, Config, dec_hook=_parsed)
    except msgspec.ValidationError as error:
        raise _as_config_error(tree, error) from None
    check(config)
    return config


def _settled(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A tree without retired settings, and with those of [tuning] in their sections. Raises ConfigError."""
    settled = {name: value for name, value in tree.items() if name != "tuning"}
    for name, _, key in (one.partition(".") for one in RETIRED):
        if isinstance(section := settled.get(name), Mapping) and key in section:
            settled[name] = {other: value for other, value in section.items() if other != key}
    return _tuned(settled, tree.get("tuning", {}), "")


def _tuned(section: Any, given: Any, above: str) -> dict[str, Any]:
    """A section with what [tuning] has for it. above: its name and a dot."""
    if not (isinstance(section, Mapping) and isinstance(given, Mapping)):
        raise ConfigError(f"tuning.{above}".rstrip("."), "expected a section", section if given else given)
    tuned = dict(section)
    for key, value in given.items():
        if of_tuning(name := f"{above}{key}"):
            tuned[key] = value
        elif isinstance(value, Mapping):
            tuned |= {key: _tuned(tuned.get(key, {}), value, f"{name}.")} if value else {}
        else:
            meant = difflib.get_close_matches(name, TUNING, 1, 0.85)
            hint = f"; did you mean {meant[0]}?" if meant else ": it stands in its own section"
            raise ConfigError(f"tuning.{name}", f"is no key of [tuning]{hint}", value)
    return tuned


def to_tree(config: Config) -> dict[str, Any]:
    """The effective configuration as plain data, sizes as text."""
    tree: dict[str, Any] = msgspec.to_builtins(config, enc_hook=_plain, builtin_types=(int,))
    return tree | {"tuning": _taken(tree, "")}


def _taken(section: dict[str, Any], above: str) -> dict[str, Any]:
    """Take what stands in [tuning] out of a section. above: its name and a dot."""
    taken = {}
    for key, value in list(section.items()):
        if of_tuning(f"{above}{key}"):
            taken[key] = section.pop(key)
        elif isinstance(value, dict) and (inner := _taken(value, f"{above}{key}.")):
            taken[key] = inner
    return taken


def _plain(value: Any) -> Any:
    return value.as_plain() if isinstance(value, Capacities) else str(value)


def _parsed(kind: Any, value: Any) -> Any:
    """A Size, a Reserve or Capacities."""
    return kind.parse(value)


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(".".join(keys), f"{key} is a value, not a section")
    tree[keys[-1]] = value


def _value(text: str) -> Any:
    """TOML where it is TOML (numbers, booleans, lists, quoted text), else the text itself."""
    try:
        return tomllib.loads(f"v = {text.strip()}")["v"]
    except (ValueError, KeyError, RecursionError):
        return text


def _as_config_error(tree: Mapping[str, Any], error: msgspec.ValidationError) -> ConfigError:
    """msgspec's sentence and JSON path, turned into `section.key: what is wrong (value)`."""
    text, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", text)
    if unknown is not None:
        key = f"{path}.{unknown[1]}" if path else unknown[1]
        meant = difflib.get_close_matches(unknown[1], _type_at(path).__struct_fields__, 1)
        return ConfigError(key, f"unknown key; did you mean {meant[0]}?" if meant else "unknown key", _at(tree, key))
    if text.startswith("Invalid enum value"):
        text = f"expected one of {', '.join(_choices(path))}"
    name = f"tuning.{path}" if of_tuning(path) else path
    return ConfigError(name or "config", text[:1].lower() + text[1:], _at(tree, path))


def _choices(path: str) -> list[str]:
    """The possible values of a setting that has only a few."""
    kind = _type_at(path)
    literals = [one for one in (kind, *typing.get_args(kind)) if typing.get_origin(one) is typing.Literal]
    return sorted(str(value) for one in literals for value in typing.get_args(one))


def _type_at(path: str) -> Any:
    """The type of a section or a setting."""
    kind: Any = Config
    for name in re.findall(r"(\w+)(?:\[\S*\])?", path):  # `peers[...]`: sections that have names of their own
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
        kind = section_in(kind) or kind
    return kind


def section_in(kind: Any) -> Any:
    """The section that a field of this type holds, optional or not; None if the field is a setting."""
    options = typing.get_args(kind) or (kind,)
    return next((one for one in options if isinstance(one, type) and issubclass(one, msgspec.Struct)), None)


def load_class(key: str, name: str, target: str, base: type) -> Any:
    """The class `package.module:Class`, derived from `base`, that a setting means by a name. Raises ConfigError."""
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            problem = f"this installation has no module {module_name}"
        else:
            problem = f"needs the Python package {error.name}, which is not installed"
        raise ConfigError(key, problem, name) from error
    except (ImportError, ValueError) as error:  # a missing shared library; an empty module name
        raise ConfigError(key, f"fails to load: {error}", name) from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(key, f"{module_name} has no {base.__name__} class {class_name!r}", name)
    return found


def _at(tree: Any, path: str) -> Any:
    for key in filter(None, re.split(r"[.\[\]]+", path)):
        try:
            tree = tree[int(key)] if isinstance(tree, list) else tree[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return tree
