"""Checks before anything is opened: what a configuration means, and whether this machine can run it.

`build` derives everything that follows from the configuration alone. `examine` checks this machine. Both allocate
nothing, write nothing, listen nowhere, and never wait. `transferd config check` and the daemon's start call both, so
they accept the same configurations; only the start can notice that another process took a directory or port in
between. Permissions are checked for the current user, so run `config check` as the daemon's user.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import ipaddress
import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transferd.blocks.formats import ObjectFormat, SealedBlocks, object_format
from transferd.blocks.layout import BlockLayout, build_layout
from transferd.config import CacheSection, Config, FileStorageSection, Size
from transferd.config.generation import configured_generation
from transferd.config.ownership import Creator, creator
from transferd.daemon.kv_events.subscriber import DESCRIPTORS_EACH
from transferd.errors import ConfigError
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.descriptors import hard_limit
from transferd.runtime.limits import memory_total
from transferd.storage.base import Storage
from transferd.storage.file_io import NO_DIRECT_IO, direct_io_problem
from transferd.storage.registry import backends_of, create_storages
from transferd.storage.tokens import TokenStorage
from transferd.tiers.registry import check_device
from transferd.tiers.staging import slots_in
from transferd.wire.credentials import may_give, resolve_group, resolve_uids
from transferd.wire.curve import server_side
from transferd.wire.endpoint import check_path

MOST_BLOCK_BYTES = 2**36
FIRST_UNPRIVILEGED = 1024  # lower port numbers need a capability, and only the kernel knows whether we have it
SHARED_MEMORY = "/dev/shm"
# The daemon's own memory for each segment of a rank: offsets, strides, extents, tables of copies. Measured as the
# growth of its anonymous memory, without staging, when an engine of pages offers 1,024 interleaved layers for each of
# its ranks: 684 bytes a segment with 1 rank, 719 with 4, 542 with 16, 439 with 64.
PLACE_BYTES = 768


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes that an engine takes, all ranks together; in a daemon's Plan, including the daemon's own."""

    block: int = 0  # one block of one rank
    shared: int = 0  # the device cache, if the daemon creates it in shared memory
    host: int = 0
    staging: int = 0
    pool: int = 0  # the memory of a Mooncake client
    level: int = 0  # the memory level of a store of several
    places: int = 0  # the daemon's own memory for the places of blocks

    @property
    def memory(self) -> int:
        return self.shared + self.host + self.staging + self.pool + self.level + self.places


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """What follows from the configuration of one engine. None of its parts is open."""

    config: Config  # the daemon's, with this engine's cache and storage
    layout: BlockLayout
    objects: ObjectFormat
    generation: str
    sizes: Sizes
    tokens: TokenStorage | None = None

    @property
    def only_flush(self) -> bool:
        """Whether its writes tell token-indexed storage what the engine has, and move no bytes."""
        return self.tokens is not None and self.config.storage.attention_store.only_flush


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows from a daemon's configuration. None of its parts is open. engine: the plan of [cache]."""

    tokens: TokenStorage | None
    storage: Storage | None
    engine: EnginePlan | None
    sizes: Sizes


def build(config: Config, clock: Clock = SYSTEM_CLOCK, storage: Storage | None = None) -> Plan:
    """Derive everything that the configuration alone decides. storage: replaces the configured one.

    Raises ConfigError. No side effects.
    """
    engine = None if config.cache is None else build_engine(config)
    for key, value in (("pd.mode", config.pd.mode), ("storage.backend", config.storage.backend)):
        if engine is None and value in ("direct", "attention_store"):
            raise ConfigError(key, "requires [cache]: engines that register cannot use it", value)
    tokens, keyed = create_storages(config, clock, storage)
    if engine is not None:
        engine = dataclasses.replace(engine, tokens=tokens)
    kinds = backends_of(config)
    pool = sum(kind.memory_of(config) for kind in kinds if kind.shared) if storage is None else 0
    level = sum(kind.memory_of(config) for kind in kinds if not kind.shared) if len(kinds) > 1 else 0
    sizes = dataclasses.replace(Sizes() if engine is None else engine.sizes, pool=pool, level=level)
    return Plan(tokens, keyed, engine, sizes)


def build_engine(config: Config) -> EnginePlan:
    """Derive everything that the configuration of one engine decides. Raises ConfigError. No side effects."""
    cache = config.geometry
    layout = build_layout(cache)
    if layout.block_bytes > MOST_BLOCK_BYTES:
        problem = f"one block of one rank has {layout.block_bytes} bytes, the limit is {Size(MOST_BLOCK_BYTES)}"
        raise ConfigError("cache.layers", problem, cache.layers)
    check_device(config)
    objects = object_format(config.storage, layout)
    slots_in(config.host.staging, objects.slot_bytes)
    staged = int(config.host.staging)
    if config.pd.mode == "direct":
        slots_in(config.pd.staging, SealedBlocks(config.storage.model, layout).slot_bytes, key="pd.staging")
        staged += config.pd.staging
    shared = device_bytes(layout) if cache.device == "shm" and creator(config) is Creator.DAEMON else 0
    sizes = Sizes(
        block=layout.block_bytes,
        shared=shared * cache.ranks,
        host=layout.host_blocks * layout.block_bytes * cache.ranks,
        staging=staged * cache.ranks,
        places=PLACE_BYTES * len(layout.segments) * cache.ranks,
    )
    return EnginePlan(config, layout, objects, configured_generation(config.storage), sizes)


def device_bytes(layout: BlockLayout) -> int:
    """Device memory of one rank; of windows, which lie in memory of any size, that of one block."""
    if layout.windows:
        return layout.block_bytes
    return sum(layout.device_blocks_of(segment.layer) * segment.nbytes for segment in layout.segments)


def examine(config: Config, plan: Plan) -> None:
    """Raise ConfigError if this machine or this user cannot run the configuration.

    Checks users, groups, keys, descriptors, packages, addresses, paths and memory.
    """
    server = config.server
    resolve_uids("server.allowed_uids", server.allowed_uids)
    resolve_uids("server.observer_uids", server.observer_uids)
    hard_limit()
    for key, group in (("socket_group", server.socket_group), ("observer_group", server.observer_group)):
        if not may_give(resolve_group(f"server.{key}", group)):
            what = "this user may not give the socket to that group: it must be one of the user's own (usermod -aG)"
            raise ConfigError(f"server.{key}", what, group)
    if server.curve is not None:
        server_side(server.curve)
    _examine_packages(config, plan)
    _examine_addresses(config)
    _examine_descriptors(config)
    for kind in backends_of(config):
        for section in kind.directories(config.storage):
            _examine_store(section.paths[0], section, _listens(config))
    _examine_memory(config, plan.sizes)


def _examine_packages(config: Config, plan: Plan) -> None:
    """Check that needed packages are installed: a start would first wait for the pool's master."""
    kinds = backends_of(config)
    needed = [("storage.backend", package, config.storage.title) for kind in kinds for package in kind.packages]
    if config.pd.mode == "direct":
        needed.append(("pd.mode", "mooncake", config.pd.mode))
    if plan.tokens is not None and config.storage.attention_store.driver == "sdk":
        needed.append(("storage.attention_store.driver", "attentionstore_sdk", "sdk"))
    if config.traces.endpoint:
        packages = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
        needed += [("traces.endpoint", package, config.traces.endpoint) for package in packages]
    for key, package, value in needed:
        if not _is_installed(package):
            raise ConfigError(key, f"needs the Python package {package}, which is not installed", value)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _examine_descriptors(config: Config) -> None:
    """Check that the nodes that we follow leave enough descriptors for clients and files."""
    peers, limit = len(config.storage.attention_store.peers), hard_limit()
    if limit != resource.RLIM_INFINITY and peers * DESCRIPTORS_EACH > limit // 4:
        what = f"{peers} nodes take {peers * DESCRIPTORS_EACH} descriptors, more than a quarter of the limit, {limit}"
        problem = f"{what}; raise LimitNOFILE in the unit, or ulimit -n"
        raise ConfigError("storage.attention_store.peers", problem, peers)


def _examine_addresses(config: Config) -> None:
    """Check that we listen on addresses of this machine. Skips host names, because resolving them may take time."""
    for key, endpoint in _listens(config):
        scheme, _, address = endpoint.partition("://")
        if scheme == "tcp":
            _examine_address(key, address, endpoint)
        elif scheme == "ipc":
            _examine_path(key, address, endpoint)
    if config.metrics.listen:
        _examine_address("metrics.listen", config.metrics.listen, config.metrics.listen)
    if config.pd.mode == "direct":
        _examine_address("pd.listen", config.pd.listen, config.pd.listen)


def _listens(config: Config) -> list[tuple[str, str]]:
    """Every endpoint to listen on, with the key that names it."""
    return [
        *(("server.endpoint", endpoint) for endpoint in config.server.endpoints),
        ("server.observer_endpoint", config.server.observer_endpoint),
        ("events.endpoint", config.events.endpoint),
        ("events.replay_endpoint", config.events.replay_endpoint),
    ]


def _examine_address(key: str, address: str, value: str) -> None:
    host, _, port = address.rpartition(":")
    host = "0.0.0.0" if host == "*" else host.strip("[]")
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return
    low = int(port) if port.isdecimal() and int(port) < FIRST_UNPRIVILEGED else 0
    for asked in dict.fromkeys((0, low)):
        try:
            with socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET) as probe:
                probe.bind((host, asked))
        except OSError as error:
            if asked == 0 or error.errno == errno.EACCES:  # a port in use may belong to the running daemon
                raise ConfigError(key, f"cannot bind: {error.strerror}", value) from error


def _examine_path(key: str, path: str, value: str) -> None:
    if path == "*" or path.startswith("@"):
        return
    if os.path.lexists(path) and (os.path.islink(path) or not Path(path).is_socket()):
        raise ConfigError(key, "the path exists and is not a socket; remove it, or name another", value)
    _examine_directory(key, str(Path(path).parent), value, make=1)
    check_path(path, key, value)


def _examine_directory(key: str, path: str, value: str, *, make: int | None = None) -> str:
    """Check that we may write to a directory, or create it. Returns the part of the path that exists.

    make: how many missing levels a start creates; None for any number.
    """
    places = (path, *map(str, Path(path).parents))
    missing, there = next((number, place) for number, place in enumerate(places) if os.path.lexists(place))
    if make is not None and missing > make:
        raise ConfigError(key, f"there is no directory {os.path.dirname(path)}", value)
    if not os.path.isdir(there):
        raise ConfigError(key, f"{there} is not a directory", value)
    if not os.access(there, os.W_OK | os.X_OK):
        what = f"this user may not write in {there}; give the daemon's user the directory, and run this as that user"
        raise ConfigError(key, what, value)
    return there


def _examine_store(path: str, section: FileStorageSection, listens: Sequence[tuple[str, str]]) -> None:
    store = Path(os.path.realpath(path))
    for key, endpoint in listens:
        taken = os.path.realpath(endpoint.removeprefix("ipc://")) if endpoint.startswith("ipc:///") else ""
        for other in (Path(taken), Path(f"{taken}.lock")) if taken else ():
            if other == store or other in store.parents:
                raise ConfigError("storage.file.path", f"{other} is the socket of {key}, or its lock", path)
    there = _examine_directory("storage.file.path", path, path)
    if section.direct_io and direct_io_problem(there) == os.strerror(errno.EINVAL):
        raise ConfigError("storage.file.direct_io", NO_DIRECT_IO.format(there), section.direct_io)


def _examine_memory(config: Config, sizes: Sizes) -> None:
    cache = config.cache or CacheSection()
    if sizes.shared:
        there = os.statvfs(SHARED_MEMORY)
        if sizes.shared > (room := there.f_blocks * there.f_frsize):
            problem = f"the ranks need {sizes.shared} bytes of shared memory, but {SHARED_MEMORY} has only {room}"
            raise ConfigError("cache.device_blocks", problem, cache.device_blocks)
    if sizes.memory > (memory := memory_total()):
        values = {
            "cache.device_blocks": (sizes.shared, cache.device_blocks),
            "cache.host_blocks": (sizes.host, cache.host_blocks),
            "host.staging": (sizes.staging, str(config.host.staging)),
            "storage.memory.capacity": (sizes.level, str(config.storage.memory.capacity)),
            "storage.mooncake.global_segment_size": (sizes.pool, str(config.storage.mooncake.global_segment_size)),
        }
        key = max(values, key=lambda name: values[name][0])
        nbytes, value = values[key]
        problem = f"the daemon needs {sizes.memory} bytes, {nbytes} of them for this, but only {memory} are available"
        raise ConfigError(key, problem, value)


def host_memory(config: Config, sizes: Sizes) -> tuple[int, int]:
    """(bytes for all engines that register, bytes for each). sizes: the daemon's own memory."""
    engines = config.engines
    most = engines.host_memory or max(0, memory_total() - sizes.memory)
    return most, min(engines.host_memory_each or most, most)
