"""The whole configuration as one frozen, typed value, made once at the edge.

Four sources, later ones win: defaults here, the TOML file, `TRANSFERD_SECTION__KEY` in the
environment, `--set section.key=value`. An unknown key, a wrong type or an impossible combination
raises `ConfigError` with one line that names the key and the value; nothing is guessed or clamped.

Struct field = TOML key = name in the docs, so a search for a name finds option, field and use.
Sizes are `Size`: an int of bytes or text such as "64MiB" (powers of 1024 with `i`, of 1000 without).
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from transferd.errors import ConfigError

ENV_PREFIX = "TRANSFERD_"
DEFAULT_ENDPOINT = "ipc:///run/transferd/transferd.sock"

# FastDeploy's names for settings of ours. Mooncake's and AttentionStore's are read where those are configured.
FASTDEPLOY_VARIABLES = {"FILE_BACKEND_STORAGE_DIR": "storage.file.path"}

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


class Size(int):
    """A number of bytes; parsed from an int or from text with a unit."""

    @classmethod
    def parse(cls, value: int | str) -> Size:
        """Raises ValueError with a sentence for anything that is not a non-negative size."""
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"expected a size such as 67108864 or '64MiB', got {value!r}")
        if isinstance(value, str):
            match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
            if match is None or match[2] not in _UNITS:
                raise ValueError(f"expected a size such as '64MiB', got {value!r}")
            value = int(float(match[1]) * _UNITS[match[2]])
        if value < 0:
            raise ValueError(f"expected a size of at least 0, got {value}")
        return cls(value)

    def __str__(self) -> str:
        for unit, scale in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
            if self >= scale and self % scale == 0:
                return f"{self // scale}{unit}"
        return str(int(self))


Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class CurveSection(_Section, frozen=True, kw_only=True):
    """CURVE keys for tcp:// beyond loopback (ZeroMQ's Z85 text, one key a file)."""

    secret_key_file: str
    client_keys_dir: str = ""  # one file a permitted client's public key; "" = any client that knows ours


class ServerSection(_Section, frozen=True, kw_only=True):
    """Where clients find the daemon, and how much of everything it takes."""

    endpoint: str | list[str] = DEFAULT_ENDPOINT
    max_queued_tasks: Positive = 4096  # past it: busy
    max_inflight_bytes: Size = Size(16 * 1024**3)  # per lane, queued and running, all ranks; past it: busy
    max_message: Size = Size(64 * 1024**2)
    result_ttl: Seconds = 60.0  # a task_id pushed again within it gets the same result
    max_results: Positive = 16384  # results kept for that, at most
    lane_depth: Positive = 16  # tasks running at once per lane
    deadline_slack: Seconds = 1.0  # a result comes at most this long after its deadline
    client_timeout: Seconds = 5.0  # a client silent for this long has gone
    shutdown_timeout: Seconds = 20.0  # the whole budget of a shutdown
    socket_mode: str = "0660"  # of ipc:// sockets
    curve: CurveSection | None = None

    @property
    def endpoints(self) -> list[str]:
        return [self.endpoint] if isinstance(self.endpoint, str) else list(self.endpoint)


class CacheSection(_Section, frozen=True, kw_only=True):
    """The KV cache: who holds it, what a block is, how many there are. All counts are per rank."""

    ranks: Positive = 2
    devices: list[Count] | None = None  # device index per rank; default 0 … ranks-1
    device: str = "shm"
    ownership: Literal["create", "attach", "auto"] = "create"  # who allocates device memory; see ownership.py
    role: Literal["mixed", "prefill", "decode"] = "mixed"  # of the engine; FastDeploy's splitwise_role
    attention: str = "gqa"
    layers: Positive = 4
    kv_heads: Positive = 2
    head_dim: Positive = 64
    block_size: Positive = 64
    dtype: Literal["bfloat16", "float16", "uint8", "block_wise_fp8"] = "bfloat16"
    scale_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of block_wise_fp8
    device_blocks: Positive = 64
    host_blocks: Count = 128
    mtp_layers: Count = 0
    mtp_blocks: Positive | None = None  # device blocks of an MTP layer; default device_blocks
    kv_lora_rank: Positive = 512  # mla, dsa
    qk_rope_head_dim: Positive = 64  # mla, dsa
    index_head_dim: Positive = 128  # dsa

    @property
    def device_of_rank(self) -> list[int]:
        return list(range(self.ranks)) if self.devices is None else list(self.devices)


class HostSection(_Section, frozen=True, kw_only=True):
    """Host memory besides the pool. `staging`: per rank, the whole of it; what storage I/O goes through."""

    staging: Size = Size(64 * 1024**2)


class FileStorageSection(_Section, frozen=True, kw_only=True):
    """The file backend: a directory of its own, and how much it may hold."""

    path: str = "/var/lib/transferd/blocks"
    capacity: Size = Size(64 * 1024**3)
    fsync: bool = False  # True: an object is on the medium before it counts as written


class MemoryStorageSection(_Section, frozen=True, kw_only=True):
    """The memory backend: how much it may hold."""

    capacity: Size = Size(1024**3)


class MooncakeStorageSection(_Section, frozen=True, kw_only=True):
    """The Mooncake backend: how to join a pool, and what this node lends it.

    The first seven are FastDeploy's: where one is not given, its MOONCAKE_* settings count before the default.
    """

    master_server_addr: str | None = None  # host:port, or etcd://…
    metadata_server: str | None = None  # default P2PHANDSHAKE; or http://…/metadata, etcd://…, redis://…
    local_hostname: str | None = None  # how other nodes reach this one; default 127.0.0.1
    protocol: Literal["tcp", "rdma"] | None = None  # default tcp
    rdma_devices: str | None = None  # comma separated; default all
    global_segment_size: Size | None = None  # memory lent to the pool; default 1GiB; 0: use only what others lend
    local_buffer_size: Size | None = None  # default 128MiB
    replica_num: Positive = 1
    soft_pin: bool = False
    hard_pin: bool = False
    timeout: Seconds = 5.0  # of one call; past it the breaker opens
    connect_timeout: Seconds = 30.0  # how long a start waits for the master
    probe_interval: Seconds = 1.0  # between two questions to a pool that did not answer
    native_log: Literal["off", "error", "warning", "info"] = "off"  # the library's own lines on stderr


class PeerSection(_Section, frozen=True, kw_only=True):
    """Another node whose KV events the open token index follows: where it publishes, and where it replays."""

    endpoint: str
    replay_endpoint: str = ""  # "" = what was missed stays missed


class AttentionStoreSection(_Section, frozen=True, kw_only=True):
    """Storage found by token ids (docs/attention_store.md). Where a key is not given, FastDeploy's variable counts."""

    driver: Literal["open", "sdk"] = "open"  # our own index, or Baidu's attentionstore_sdk
    data: str = "file"  # open: the keyed backend that holds the bytes, any of storage.backend
    only_flush: bool | None = None  # FD_AS_ONLY_FLUSH; write tasks move no bytes and tell the index
    namespace: str | None = None  # AS_NAMESPACE; default the last part of storage.model
    pod_name: str | None = None  # AS_POD_NAME; this node's name; default default_pod, with role and dp_id
    model_version: str | None = None  # AS_MODEL_VERSION; default v0
    splitwise_role: str = "mixed"
    dp_id: Count = 0
    slice_blocks: Positive | None = None  # AS_WRITE_SLICE_BLOCK_NUM; default 100; blocks of one call
    slice_timeout: Seconds | None = None  # AS_WRITE_SLICE_TIMEOUT; default 10
    total_timeout: Seconds | None = None  # AS_WRITE_TOTAL_TIMEOUT; of a write; default what is left of the task's
    ready_timeout: Seconds = 300.0  # how long a start waits for the SDK
    peers: dict[str, PeerSection] = {}  # open: other nodes by name, and where they publish KV events


class StorageSection(_Section, frozen=True, kw_only=True):
    """Which pool blocks are stored in, and what their names begin with."""

    backend: str = "file"
    key_schema: Literal["transferd", "fastdeploy"] = "transferd"  # what objects are called and hold: objects.py
    model: str = "demo"
    generation: str = ""
    version_file: str = ""  # FastDeploy's version.yaml: where the generation is read instead, at start and on restore
    scrub_rate: Size = Size(0)  # bytes a second that stored objects are checked with in the background; 0 = off
    file: FileStorageSection = FileStorageSection()
    memory: MemoryStorageSection = MemoryStorageSection()
    mooncake: MooncakeStorageSection = MooncakeStorageSection()
    attention_store: AttentionStoreSection = AttentionStoreSection()


class PdSection(_Section, frozen=True, kw_only=True):
    """How sequences go from a prefill to a decode engine: through storage, or straight from daemon to daemon.

    mode: where it is not given, FastDeploy's FD_PD_TRANSFER_VIA_STORAGE counts (1 storage, 0 direct), then "storage".
    The rest is of direct mode only.
    """

    mode: Literal["storage", "direct"] | None = None
    listen: str = "127.0.0.1:0"  # where decode daemons reach this one; port 0: any, see stats
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""  # comma separated; "" = all
    staging: Size = Size(64 * 1024**2)  # per rank; the only memory that peers write to


class MetricsSection(_Section, frozen=True, kw_only=True):
    """Where /metrics, /healthz, /readyz and /status are served."""

    listen: str = "127.0.0.1:9464"  # "" = off


class EventsSection(_Section, frozen=True, kw_only=True):
    """KV events for routers that know caches, in vLLM's wire form (docs/events.md)."""

    endpoint: str = ""  # of the PUB socket, such as tcp://127.0.0.1:5557; "" = off
    replay_endpoint: str = ""  # where batches that were missed can be asked for again; "" = nowhere
    topic: str = ""
    dp_rank: Count = 0  # data-parallel rank, in every batch
    token_ids: bool = True  # False: events carry hashes only, not the tokens of prompts
    buffer: Positive = 10_000  # batches kept to be asked for again
    buffer_bytes: Size = Size(64 * 1024**2)  # and their bytes
    max_blocks: Positive = 1_000_000  # stored blocks announced at once; beyond it the oldest are withdrawn


class LogSection(_Section, frozen=True, kw_only=True):
    """What is logged, and how a line looks."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["json", "console"] = "json"


class RecorderSection(_Section, frozen=True, kw_only=True):
    """The flight recorder: how much it remembers, and where its dumps go (see dumps.py)."""

    notes: Positive = 8192  # of admitted tasks, about two a task; all that is kept is about 4 MiB
    directory: str = "/var/lib/transferd/flight"  # made when the first dump is written; "" = no dumps
    keep: Positive = 8  # dumps that stay in it, the newest


class Config(_Section, frozen=True, kw_only=True):
    """Everything the daemon is told. Sections are documented in docs/operations.md."""

    server: ServerSection = ServerSection()
    cache: CacheSection = CacheSection()
    host: HostSection = HostSection()
    storage: StorageSection = StorageSection()
    pd: PdSection = PdSection()
    metrics: MetricsSection = MetricsSection()
    events: EventsSection = EventsSection()
    log: LogSection = LogSection()
    recorder: RecorderSection = RecorderSection()


# --- loading --------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
) -> Config:
    """Read, merge, convert and check the configuration.

    FastDeploy's variables in FASTDEPLOY_VARIABLES count before the defaults and after everything else.

    overrides: `section.key=value` texts, the value as TOML where it parses as TOML, else as text.
    env: the environment to read TRANSFERD_SECTION__KEY from; default os.environ.

    Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(str(path), f"cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), f"is not TOML: {error}") from error
    environment = os.environ if env is None else env
    for name, key in FASTDEPLOY_VARIABLES.items():
        if environment.get(name):
            _put_default(tree, key.split("."), environment[name])
    for name, text in sorted(environment.items()):
        if name.startswith(ENV_PREFIX) and "__" in name:
            _put(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), _value(text))
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or "." not in key:
            raise ConfigError("--set", "expected section.key=value", item)
        _put(tree, key.strip().split("."), _value(text))
    return from_tree(tree)


def from_tree(tree: Mapping[str, Any]) -> Config:
    """Convert plain data to a checked Config. Raises ConfigError."""
    try:
        config = msgspec.convert(tree, Config, dec_hook=_decode_size)
    except msgspec.ValidationError as error:
        raise _explain(tree, error) from None
    check(config)
    return config


def pd_mode(config: Config, env: Mapping[str, str] | None = None) -> str:
    """The mode of the handover from prefill to decode, "storage" or "direct". Raises ConfigError."""
    if config.pd.mode is not None:
        return config.pd.mode
    via_storage = (os.environ if env is None else env).get("FD_PD_TRANSFER_VIA_STORAGE", "")
    modes = {"": "storage", "1": "storage", "0": "direct"}
    if via_storage not in modes:
        raise ConfigError("FD_PD_TRANSFER_VIA_STORAGE", "expected 0 or 1", via_storage)
    return modes[via_storage]


def to_tree(config: Config) -> dict[str, Any]:
    """The effective configuration as plain data, sizes as text."""
    tree: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str, builtin_types=(int,))
    return tree


def check(config: Config) -> None:
    """The rules that join several keys. Raises ConfigError naming the one to change."""
    cache = config.cache
    if len(cache.device_of_rank) != cache.ranks:
        raise ConfigError("cache.devices", f"needs one device index per rank, {cache.ranks} of them", cache.devices)
    if cache.mtp_blocks is not None and not cache.mtp_layers:
        raise ConfigError("cache.mtp_blocks", "has a meaning only with cache.mtp_layers", cache.mtp_blocks)
    if cache.mtp_blocks is not None and cache.mtp_blocks < cache.device_blocks:
        # A block id names the same block in every layer, so an MTP layer has at least the main layers' blocks.
        raise ConfigError(
            "cache.mtp_blocks", f"must be at least cache.device_blocks, {cache.device_blocks}", cache.mtp_blocks
        )
    if not config.server.endpoints:
        raise ConfigError("server.endpoint", "needs at least one endpoint", config.server.endpoint)
    for endpoint in config.server.endpoints:
        _check_endpoint(endpoint, config.server.curve is not None)
    if not re.fullmatch(r"0?[0-7]{3}", config.server.socket_mode):
        raise ConfigError("server.socket_mode", "expected octal permissions such as '0660'", config.server.socket_mode)
    if not config.storage.model:
        raise ConfigError("storage.model", "must not be empty: it is part of every key", config.storage.model)
    _check_events(config.events)
    for name, peer in config.storage.attention_store.peers.items():
        _check_event_endpoints(f"storage.attention_store.peers.{name}", peer)
    if config.storage.version_file and config.storage.generation:
        raise ConfigError(
            "storage.generation", "is read from storage.version_file, which is set, too", config.storage.generation
        )
    if config.storage.scrub_rate and config.storage.backend in ("memory", "mooncake", "attention_store", "none"):
        what = f"needs a backend that can list its objects, and {config.storage.backend} cannot"
        raise ConfigError("storage.scrub_rate", what, str(config.storage.scrub_rate))
    listen = config.metrics.listen
    if listen and not re.fullmatch(r".+:\d{1,5}", listen):
        raise ConfigError("metrics.listen", "expected host:port or nothing", listen)
    if not re.fullmatch(r".+:\d{1,5}", config.pd.listen):
        raise ConfigError("pd.listen", "expected host:port", config.pd.listen)


def _check_events(events: EventsSection) -> None:
    if events.replay_endpoint and not events.endpoint:
        raise ConfigError("events.replay_endpoint", "needs events.endpoint", events.replay_endpoint)
    _check_event_endpoints("events", events)


def _check_event_endpoints(key: str, section: EventsSection | PeerSection) -> None:
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(section, name)
        # Routers speak plain ZeroMQ and sit on other machines: no CURVE, and not only loopback.
        if endpoint and not re.fullmatch(r"ipc://.+|tcp://.+:(\d{1,5}|\*)", endpoint):
            raise ConfigError(f"{key}.{name}", "expected ipc://PATH or tcp://HOST:PORT", endpoint)


def _check_endpoint(endpoint: str, curve: bool) -> None:
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc" and address:
        # sockaddr_un holds 108 bytes with its terminator; libzmq's own message does not name the path.
        if len(os.fsencode(address)) > 107:
            raise ConfigError("server.endpoint", "is longer than a unix socket path may be (107 bytes)", endpoint)
        return
    if scheme == "tcp" and re.fullmatch(r".+:(\d{1,5}|\*)", address):
        host = address.rpartition(":")[0].strip("[]")
        if host in ("localhost", "::1") or host.startswith("127.") or curve:
            return
        raise ConfigError("server.endpoint", "tcp:// beyond loopback needs [server.curve]", endpoint)
    raise ConfigError("server.endpoint", "expected ipc://PATH or tcp://HOST:PORT", endpoint)


def _decode_size(kind: type, value: Any) -> Any:
    if kind is Size:
        return Size.parse(value)
    raise NotImplementedError(kind)


def _put(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(".".join(keys), f"{key} is a value, not a section")
    tree[keys[-1]] = value


def _put_default(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set what is not there; a section that is none is told of when the tree is converted."""
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return
    tree.setdefault(keys[-1], value)


def _value(text: str) -> Any:
    """TOML where it is TOML (numbers, booleans, lists, quoted text), else the text itself."""
    try:
        return tomllib.loads(f"v = {text.strip()}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _explain(tree: Mapping[str, Any], error: msgspec.ValidationError) -> ConfigError:
    """msgspec's sentence and JSON path, turned into `section.key: what is wrong (value)`."""
    text, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", text)
    if unknown is not None:
        key = f"{path}.{unknown[1]}" if path else unknown[1]
        return ConfigError(key, "unknown key", _at(tree, key))
    return ConfigError(path or "config", text[:1].lower() + text[1:], _at(tree, path))


def _at(tree: Any, path: str) -> Any:
    for key in filter(None, re.split(r"[.\[\]]+", path)):
        try:
            tree = tree[int(key)] if isinstance(tree, list) else tree[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return tree
