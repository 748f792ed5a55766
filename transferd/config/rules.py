"""Rules that involve several settings, and values that follow from several settings."""

from __future__ import annotations

import os
import re

from transferd.config import names
from transferd.config.sections import (
    CacheSection,
    Config,
    EventsSection,
    FileStorageSection,
    ObjectStorageSection,
    PeerSection,
    ServerSection,
    StorageSection,
)
from transferd.errors import ConfigError
from transferd.runtime.address import LONGEST_SOCKET_PATH, host_and_port, is_loopback

# Clients send Hello once a second (client/heartbeat.py): one late or lost Hello must not end a client.
LEAST_CLIENT_TIMEOUT_S = 2.5
MOST_MESSAGE = 1024**3  # the transport takes twice as much before it cuts a connection, and counts in 31 bits
_UUID = re.compile(r"((GPU|MIG)-)?[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}")


def check(config: Config) -> None:
    """Check the rules that involve several keys. Raises ConfigError naming the key to change."""
    storage, events, traces = config.storage, config.events, config.traces
    if config.cache is not None:
        check_cache(config.cache)
    if not config.engines.devices:
        raise ConfigError("engines.devices", "must name at least one device", config.engines.devices)
    _check_server(config.server)
    if not storage.model:
        raise ConfigError("storage.model", "must not be empty: it is part of every key", storage.model)
    names.MODEL.check("storage.model", storage.model)
    names.GENERATION.check("storage.generation", storage.generation)
    if events.replay_endpoint and not events.endpoint:
        raise ConfigError("events.replay_endpoint", "requires events.endpoint", events.replay_endpoint)
    _check_event_endpoints("events", events)
    for name, peer in storage.attention_store.peers.items():
        _check_event_endpoints(f"storage.attention_store.peers.{name}", peer)
    if storage.version_file and storage.generation:
        what = "conflicts with storage.version_file; set only one of them"
        raise ConfigError("storage.generation", what, storage.generation)
    _check_levels(storage)
    _check_disks(storage.file)
    if storage.admit != "all" and storage.backends[0] in ("attention_store", "none"):
        what = f"requires storage by keys; {storage.title} cannot choose what it stores"
        raise ConfigError("storage.admit", what, storage.admit)
    if storage.object != ObjectStorageSection():
        check_object(storage.object)
    listen = config.metrics.listen
    if listen and not _has_port(listen):
        raise ConfigError("metrics.listen", 'expected host:port, or "" to turn it off', listen)
    if traces.endpoint and not re.match(r"https?://[^/]", traces.endpoint):
        raise ConfigError("traces.endpoint", 'expected http://… or https://…, or "" to turn it off', traces.endpoint)
    if not _has_port(config.pd.listen):
        raise ConfigError("pd.listen", "expected host:port", config.pd.listen)


def _check_levels(storage: StorageSection) -> None:
    levels = storage.levels
    if levels and storage.backend != StorageSection().backend:
        raise ConfigError("storage.backend", "conflicts with storage.levels; set only one of them", storage.backend)
    if twice := [name for name in levels if levels.count(name) > 1]:
        raise ConfigError("storage.levels", "names a level twice", twice[0])
    for name in levels:
        if name in ("attention_store", "none"):
            raise ConfigError("storage.levels", "expected backends that store blocks by keys", name)
    for name, section in storage.level.items():
        key = f"storage.level.{name}"
        if name not in levels:
            raise ConfigError(key, f"is no level of storage.levels, {levels}", name)
        if name == levels[0] and section.write == "back":
            raise ConfigError(f"{key}.write", "the first level is always written before the answer", section.write)
        if name == levels[0] and section.promote is not None:
            raise ConfigError(f"{key}.promote", "there is no level above the first one", section.promote)


def check_object(section: ObjectStorageSection) -> None:
    """Check the rules within [storage.object]. Raises ConfigError."""
    if not re.match(r"(s3|gs|az)://[^/?#@]+(/[^?#]*)?$", section.url):
        what = "expected s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX, without credentials"
        raise ConfigError("storage.object.url", what, _without_secrets(section.url))
    if section.endpoint and not re.match(r"https?://[^/?#@]+/?$", section.endpoint):
        what = "expected http://HOST:PORT or https://HOST:PORT, without credentials"
        raise ConfigError("storage.object.endpoint", what, _without_secrets(section.endpoint))


def _without_secrets(url: str) -> str:
    """The URL for an error text, which ends up in logs."""
    return re.sub(r"//[^/]*@", "//…@", url).partition("?")[0]


def check_cache(cache: CacheSection) -> None:
    """Check the rules within [cache], or for an engine that registers. Raises ConfigError naming the key to change."""
    if len(cache.device_of_rank) != cache.ranks:
        raise ConfigError("cache.devices", f"must have one device index per rank ({cache.ranks} ranks)", cache.devices)
    for uuid in (device for device in cache.device_of_rank if isinstance(device, str)):
        if cache.device in ("shm", "paddle"):
            raise ConfigError("cache.devices", f"the {cache.device} device takes indices, not UUIDs", cache.devices)
        if not _UUID.fullmatch(uuid):
            raise ConfigError("cache.devices", "expected an index, or a UUID as nvidia-smi -L prints it", uuid)
    if cache.mtp_blocks is not None and not cache.mtp_layers:
        raise ConfigError("cache.mtp_blocks", "requires cache.mtp_layers", cache.mtp_blocks)
    if cache.mtp_blocks is not None and cache.mtp_blocks < cache.device_blocks:
        # A block id names the same block in every layer, so an MTP layer has at least the main layers' blocks.
        what = f"must be at least cache.device_blocks, {cache.device_blocks}"
        raise ConfigError("cache.mtp_blocks", what, cache.mtp_blocks)
    if cache.windows:
        _check_windows(cache)
    if cache.first_rank + cache.ranks > cache.tensor_parallel_size:
        what = f"ranks {cache.first_rank} to {cache.first_rank + cache.ranks - 1} do not fit into the group"
        raise ConfigError("cache.group_ranks", what, cache.tensor_parallel_size)


def _check_windows(cache: CacheSection) -> None:
    if cache.attention != "pages":
        raise ConfigError("cache.windows", 'requires cache.attention = "pages"', cache.attention)
    if cache.layers != 1:
        raise ConfigError("cache.windows", "requires one layer: a window is one range of bytes", cache.layers)
    if cache.ownership != "attach":
        what = 'requires cache.ownership = "attach": only an engine knows where its windows lie'
        raise ConfigError("cache.windows", what, cache.ownership)


def _check_disks(file: FileStorageSection) -> None:
    paths, sizes = file.paths, file.capacity.each
    if not paths or any(not path for path in paths):
        raise ConfigError("storage.file.path", "expected a directory, or a list of directories", file.path)
    real = [os.path.realpath(path) for path in paths]
    if twice := [path for path in paths if real.count(os.path.realpath(path)) > 1]:
        raise ConfigError("storage.file.path", "names a directory twice", twice[0])
    for path, one in zip(paths, real, strict=True):
        if any(other != one and one.startswith(f"{other.rstrip('/')}/") for other in real):
            raise ConfigError("storage.file.path", "one directory is inside another one", path)
    if len(sizes) not in (1, len(paths)):
        what = f"expected one size, or one for each of the {len(paths)} paths"
        raise ConfigError("storage.file.capacity", what, file.capacity.as_plain())


def _has_port(address: str) -> bool:
    return host_and_port(address, least=0) is not None


def _check_event_endpoints(key: str, section: EventsSection | PeerSection) -> None:
    for name in ("endpoint", "replay_endpoint"):
        if endpoint := getattr(section, name):
            # Routers speak plain ZeroMQ and sit on other machines: no CURVE, and not only loopback.
            _check_endpoint(f"{key}.{name}", endpoint, anywhere=True)


def _check_server(server: ServerSection) -> None:
    if not server.endpoints:
        raise ConfigError("server.endpoint", "needs at least one endpoint", server.endpoint)
    if server.client_timeout < LEAST_CLIENT_TIMEOUT_S:
        what = f"must be at least {LEAST_CLIENT_TIMEOUT_S:g}: clients send a heartbeat once a second"
        raise ConfigError("server.client_timeout", what, server.client_timeout)
    if server.max_message > MOST_MESSAGE:
        what = f"must be at most {MOST_MESSAGE} (1GiB)"
        raise ConfigError("tuning.server.max_message", what, str(server.max_message))
    observers = [server.observer_endpoint] if server.observer_endpoint else []
    for key, endpoints in (("endpoint", server.endpoints), ("observer_endpoint", observers)):
        for endpoint in endpoints:
            _check_endpoint(f"server.{key}", endpoint, anywhere=server.curve is not None)
            if endpoint.startswith("tcp://") and (server.allowed_uids or server.observer_uids):
                uids = "server.allowed_uids" if server.allowed_uids else "server.observer_uids"
                what = f"peer uids are not available on tcp://; remove {uids} or use ipc://"
                raise ConfigError(f"server.{key}", what, endpoint)
    for key in ("socket_mode", "observer_mode"):
        mode = getattr(server, key)
        if not re.fullmatch(r"0?[0-7]{3}", mode):
            raise ConfigError(f"server.{key}", "expected octal permissions such as '0660'", mode)


def _check_endpoint(key: str, endpoint: str, *, anywhere: bool) -> None:
    """anywhere: tcp:// not only on loopback."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and address:
        # The kernel's own message does not name the path.
        if len(os.fsencode(address)) > LONGEST_SOCKET_PATH:
            what = f"the path is too long for a unix socket (limit {LONGEST_SOCKET_PATH} bytes)"
            raise ConfigError(key, what, endpoint)
        return
    if scheme == "tcp" and (_has_port(address) or re.fullmatch(r".+:\*", address)):
        host = address.rpartition(":")[0].strip("[]")
        if anywhere or is_loopback(host):
            return
        raise ConfigError(key, "tcp:// beyond loopback requires [server.curve]", endpoint)
    raise ConfigError(key, "expected ipc://PATH or tcp://HOST:PORT", endpoint)


def namespace_of(model: str) -> str:
    """AttentionStore's default namespace: the last part of the model's name."""
    return os.path.basename(model.rstrip("/")) or model


def pod_name_of(name: str | None, role: str, dp_id: int, *, shared: bool = True) -> str:
    """This node's name for AttentionStore. shared: add role and dp_id, because several engines may share a pod."""
    name = name or "default_pod"
    return f"{name}_{role}_{dp_id}" if shared else name
