"""What `transferd config check` prints below the configuration, as comments: memory, and where settings come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transferd.cli.doctor.machine import Machine
from transferd.config import CacheSection, Config, outdated, to_tree
from transferd.config.loading import leaves, takes_effect
from transferd.config.toml import inline
from transferd.daemon.preflight import Sizes, host_memory
from transferd.errors import one_line
from transferd.observability.units import size
from transferd.storage.registry import BACKENDS, backends_of
from transferd.storage.room import disk_of, misfit, reserved
from transferd.wire.credentials import users_problem


def comments(config: Config, sizes: Sizes, origins: Mapping[str, str]) -> str:
    """Lines that begin with #, so that all of the output is still TOML. origins: `loading.origins`."""
    lines = (*_memory(config, sizes), *_disk(config), *_users(config), *_on_reload(config), *_chosen(config, origins))
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _memory(config: Config, sizes: Sizes) -> Iterator[str]:
    yield ""
    if config.cache is None:
        yield "There is no [cache]: the daemon waits for engines to register, and allocates host memory for each."
        yield _budget(config, sizes)
        return
    ranks = config.cache.ranks
    yield f"A block of one rank has {sizes.block} bytes. Memory at the start:"
    yield f"{'':28}{'a rank':>12}{'in all':>12}"
    tiers = (
        ("device cache, in /dev/shm", sizes.shared),
        ("host tier", sizes.host),
        ("staging", sizes.staging),
    )
    for name, nbytes in tiers:
        yield f"{name:28}{size(nbytes / ranks):>12}{size(nbytes):>12}"
    yield f"{'lent to a Mooncake pool':28}{'':12}{size(sizes.pool):>12}"
    yield f"{'in all':28}{'':12}{size(sizes.memory):>12}   ({sizes.memory} bytes)"
    yield _budget(config, sizes)


def _budget(config: Config, sizes: Sizes) -> str:
    most, each = host_memory(config, sizes)
    return f"Engines that register: {size(most)} of host memory for all of them, at most {size(each)} for each."


def _disk(config: Config) -> Iterator[str]:
    sections = [section for kind in backends_of(config) for section in kind.directories(config.storage)]
    yield from [""] * bool(sections)
    for section in sections:
        try:
            disk = disk_of(Machine().existing(section.paths[0]))
        except OSError as error:
            yield f"The file system of storage.file.path cannot be read: {error.strerror}."
            continue
        keep, free = size(reserved(section.reserve, disk.total, section.capacity)), size(disk.free)
        yield f"The store's file system has {size(disk.total)}, {free} of them free; {keep} stay free (reserve)."
        if problem := misfit(section.capacity, section.reserve, disk):
            yield f"storage.file.capacity does not fit: {problem}."


def _users(config: Config) -> Iterator[str]:
    if problem := users_problem([*config.server.endpoints, config.server.observer_endpoint]):
        yield ""
        yield f"Not all users can be told apart: {problem}."


def _on_reload(config: Config) -> Iterator[str]:
    unused = {f"storage.{name}." for name in BACKENDS if name not in config.storage.backends}
    keys = [key for key, _ in leaves(to_tree(config)) if takes_effect(key) and not key.startswith(tuple(unused))]
    yield ""
    yield f"Settings that a reload (SIGHUP) changes: {', '.join(keys)}. The others need a restart."


def _chosen(config: Config, origins: Mapping[str, str]) -> Iterator[str]:
    """Every setting that is not the default, and its source."""
    chosen = dict(leaves(changed(config)))
    if gone := outdated(origins):
        yield ""
        yield from map(one_line, gone)
    yield ""
    yield "Settings that differ from the default, and their sources:" if chosen else "Every setting has its default."
    for key, value in chosen.items():
        yield f"{key} = {one_line(inline(value))}   {one_line(_origin(key, origins))}"


def changed(config: Config) -> dict[str, Any]:
    """The part of the configuration that differs from the defaults, as a tree."""
    default = Config() if config.cache is None else Config(cache=CacheSection())
    return _differing(to_tree(config), to_tree(default))


def _differing(ours: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in ours.items():
        default = defaults.get(key)
        one = _differing(value, default or {}) if isinstance(value, dict) else value
        if one not in (default, None, {}):
            found[key] = one
    return found


def _origin(key: str, origins: Mapping[str, str]) -> str:
    """The source of a setting, or of the table that set it as a whole (`--set cache={…}`)."""
    while key not in origins and "." in key:
        key = key.rpartition(".")[0]
    return origins.get(key, "another setting")
