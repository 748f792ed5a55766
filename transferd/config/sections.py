"""Every setting with its default. The struct field, the TOML key and the name in the docs are the same word."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from transferd.config.size import Capacities, Reserve, Size

DEFAULT_ENDPOINT = "ipc:///run/transferd/transferd.sock"

# Bounds far beyond any use. A larger value is a typo, and noticing it later would cost minutes or terabytes.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=365 * 24 * 3600)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=256)]
Layers = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Extent = Annotated[int, msgspec.Meta(ge=1, le=2**20)]  # of a block in one direction
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
Fact = str | bool | int | float | list[str | bool | int | float]

DEFAULT_ENGINE = "default"  # the engine of [cache], and of clients that name none


class _ConfigSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class CurveSection(_ConfigSection, frozen=True, kw_only=True):
    """CURVE keys for tcp:// beyond loopback (ZeroMQ's Z85 text, one key a file)."""

    secret_key_file: str
    client_keys_dir: str = ""  # one file per permitted client's public key; "" = any client that knows our public key


class ServerSection(_ConfigSection, frozen=True, kw_only=True):
    """Where clients find the daemon, who may connect, and the limits on what it accepts."""

    endpoint: str | list[str] = DEFAULT_ENDPOINT
    max_queued_tasks: Positive = 4096  # beyond it the daemon answers busy
    max_queued_bytes: Size = Size(512 * 1024**2)  # memory of admitted tasks (keys, ids, token_ids); beyond it: busy
    max_inflight_bytes: Size = Size(16 * 1024**3)  # per lane, queued and running, all ranks; beyond it: busy
    max_message: Size = Size(64 * 1024**2)
    result_ttl: Seconds = 60.0  # a task_id that is pushed again within this time gets the same result
    max_results: Positive = 16384  # the most results kept for repeated pushes
    max_result_bytes: Size = Size(12 * 1024**2)  # the most memory that these results take
    lane_depth: Positive = 16  # tasks running at once per lane
    deadline_slack: Seconds = 1.0  # a result arrives at most this long after its deadline
    client_timeout: Seconds = 5.0  # a client that is silent for this long counts as gone
    shutdown_timeout: Seconds = 20.0  # the budget for the whole shutdown
    max_connections: Positive = 4096  # further connections are closed at once; lower if descriptors are scarce
    socket_mode: str = "0660"  # of ipc:// sockets
    socket_group: str = ""  # name or number; "" = the daemon's own group
    allowed_uids: list[int | str] = []  # users (numbers or names) who may connect over ipc://; [] = all who can open it
    observer_uids: list[int | str] = []  # users who may connect, but only read
    observer_endpoint: str = ""  # clients that connect here may only read; "" = no such endpoint
    observer_mode: str = "0660"  # of its ipc:// socket
    observer_group: str = ""  # of its ipc:// socket
    observer_rate: Positive = 100  # requests per second, for all observers together
    curve: CurveSection | None = None

    @property
    def endpoints(self) -> list[str]:
        return [self.endpoint] if isinstance(self.endpoint, str) else list(self.endpoint)

    @property
    def open_to_all(self) -> bool:
        """Whether each user of this machine may connect over ipc://, so that nobody has said whom to trust."""
        return not self.allowed_uids and int(self.socket_mode, 8) & 0o002 != 0


class CacheSection(_ConfigSection, frozen=True, kw_only=True):
    """The KV cache: who allocates it, what a block contains, how many blocks there are. All counts are per rank."""

    ranks: Ranks = 2
    devices: list[Count | str] | None = None  # of each rank: an index, or a GPU's UUID; default 0 … ranks-1
    device: str = "shm"
    ownership: Literal["create", "attach", "auto"] = "create"  # who allocates device memory; auto: by role
    role: Literal["mixed", "prefill", "decode"] = "mixed"  # of the engine
    attention: str = "gqa"
    layers: Layers = 4
    kv_heads: Extent = 2
    head_dim: Extent = 64
    block_size: Extent = 64
    dtype: Literal["bfloat16", "float16", "uint8", "block_wise_fp8"] = "bfloat16"
    scale_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"  # of block_wise_fp8
    device_blocks: Positive = 64
    host_blocks: Count = 128
    mtp_layers: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    mtp_blocks: Positive | None = None  # device blocks of an MTP layer; default device_blocks
    group_ranks: Ranks | None = None  # ranks of the tensor-parallel group, if it spans nodes; default ranks
    first_rank: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0  # this node's first rank in that group
    kv_lora_rank: Extent = 512  # mla, dsa
    qk_rope_head_dim: Extent = 64  # mla, dsa
    index_head_dim: Extent = 128  # dsa
    page_bytes: Positive | list[Positive] | None = None  # pages: bytes of a block in one layer, or in each
    identity: Annotated[str, msgspec.Meta(max_length=1024)] = ""  # pages: caches of the same text are alike
    windows: bool = False  # pages: blocks may share bytes, with each other and with other engines' windows
    fingerprint: dict[str, Fact] = {}  # facts about the model and its weights; only caches with the same ones share

    @property
    def device_of_rank(self) -> list[int | str]:
        return list(range(self.ranks)) if self.devices is None else list(self.devices)

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that hold parts of one block, on all nodes together."""
        return self.ranks if self.group_ranks is None else self.group_ranks


class EnginesSection(_ConfigSection, frozen=True, kw_only=True):
    """Engines that register themselves: what each of them may take, and all of them together.

    The bounds of [server] are for all engines together. Each engine that registers may have a quarter of them admitted.
    """

    max_engines: Positive = 64  # at once, besides the one of [cache]
    devices: tuple[str, ...] = ("shm", "cuda")  # what their cache.device may be; the first is the default
    host_memory: Size = Size(0)  # host blocks and staging of all of them; 0 = as much as this machine has
    host_memory_each: Size = Size(0)  # and of one; 0 = host_memory
    storage_share: Fraction = 0.0  # of the store: kept for each engine, and the most that one may register with
    pin_share: Fraction = 0.1  # of the store: the most that one engine may pin; all together: half


class HostSection(_ConfigSection, frozen=True, kw_only=True):
    """Host memory besides the pool. `staging`: bytes per rank that storage I/O passes through."""

    staging: Size = Size(64 * 1024**2)


class CudaSection(_ConfigSection, frozen=True, kw_only=True):
    """What the copies on a GPU may take of it (cache.device = "cuda")."""

    batches: bool = True  # False: never cudaMemcpyBatchAsync, with which some drivers hang
    store_rate: Size = Size(0)  # bytes per second of each rank's copies out of the GPU; 0 = as fast as they can
    store_rate_beside_loads: Size = Size(0)  # the same while copies into the GPU are running; 0 = store_rate


class FileStorageSection(_ConfigSection, frozen=True, kw_only=True):
    """The file backend: its directories, one a disk, which nothing else may use, and how much each may hold."""

    path: str | list[str] = "/var/lib/transferd/blocks"
    capacity: Capacities = Capacities(64 * 1024**3)  # of each path, or a list
    reserve: Reserve = Reserve.parse("5%")  # of the file system, left free; or a size
    fsync: bool = False  # True: flush each object to the medium before reporting it as written
    direct_io: bool = False  # True: past the page cache, for stores larger than memory

    @property
    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else list(self.path)

    @property
    def disks(self) -> list[FileStorageSection]:
        """A section for each path alone."""
        paths, sizes = self.paths, self.capacity.each
        each = sizes if len(sizes) == len(paths) else sizes * len(paths)
        return [
            msgspec.structs.replace(self, path=path, capacity=Capacities(size))
            for path, size in zip(paths, each, strict=True)
        ]


class MemoryStorageSection(_ConfigSection, frozen=True, kw_only=True):
    """The memory backend: how much it may hold."""

    capacity: Size = Size(1024**3)


class MooncakeStorageSection(_ConfigSection, frozen=True, kw_only=True):
    """The Mooncake backend: how to join a pool, and what this node lends it.

    If one of the first seven is not set, FastDeploy's MOONCAKE_* variable applies.
    """

    master_server_addr: str = ""  # host:port, or etcd://…
    metadata_server: str = "P2PHANDSHAKE"  # or http://…/metadata, etcd://…, redis://…
    local_hostname: str = ""  # how other nodes reach this one; "" = the address by which it reaches the master
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""  # comma separated; "" = all
    global_segment_size: Size = Size(1024**3)  # memory lent to the pool; 0 = lend nothing
    lender: str = ""  # host:port of `transferd pool lend` on this node, which lends that memory in the daemon's place
    segment_per_rank: bool = False  # lend that much for each rank that has ever been served at once, as FastDeploy does
    local_buffer_size: Size = Size(128 * 1024**2)
    replica_num: Positive = 1
    soft_pin: bool = False
    hard_pin: bool = False
    timeout: Seconds = 5.0  # of one call; beyond it the breaker opens
    connect_timeout: Seconds = 30.0  # how long a start waits for the master
    probe_interval: Seconds = 1.0  # between two probes of a pool that did not answer
    native_log: Literal["off", "error", "warning", "info"] = "off"  # the library's own lines on stderr
    master_pages: str = ""  # host:port of the master's HTTP pages; "" = port 9003 of master_server_addr
    drain_at_stop: Annotated[float, msgspec.Meta(ge=0, le=24 * 3600)] = 0  # for how long a stop copies to other nodes
    mend: bool = False  # in the background, make the copies again that were lost with another node
    mend_interval: Seconds = 60.0  # between two looks for such objects, with replica_num above 1


class ObjectStorageSection(_ConfigSection, frozen=True, kw_only=True):
    """The object backend: a bucket, and how hard to use it. Credentials come from the environment or the platform."""

    url: str = ""  # s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX; nodes with one URL share
    endpoint: str = ""  # of a server that speaks S3's protocol, such as http://10.0.0.7:9000; "" = the provider's own
    region: str = ""  # "" = from the environment
    concurrency: Annotated[int, msgspec.Meta(ge=1, le=256)] = 32  # calls at a time, for each direction
    timeout: Seconds = 10.0  # how long a connection may move no byte, and for how long a failed call is repeated


class PeerSection(_ConfigSection, frozen=True, kw_only=True):
    """Another node whose KV events the open token index follows: its event endpoint and its replay endpoint."""

    endpoint: str
    replay_endpoint: str = ""  # "" = never ask for missed events


class AttentionStoreSection(_ConfigSection, frozen=True, kw_only=True):
    """Storage found by token ids (docs/attention_store.md). If a key is not set, FastDeploy's variable applies."""

    driver: Literal["open", "sdk"] = "open"  # our own index, or Baidu's attentionstore_sdk
    data: str = "file"  # open: the keyed backend that holds the bytes, any of storage.backend
    only_flush: bool = False  # FD_AS_ONLY_FLUSH; write tasks move no bytes and only update the index
    namespace: str | None = None  # AS_NAMESPACE; default the last part of storage.model
    pod_name: str | None = None  # AS_POD_NAME; this node's name; default default_pod, with role and dp_id
    model_version: str = "v0"  # AS_MODEL_VERSION
    splitwise_role: str = "mixed"
    dp_id: Count = 0
    slice_blocks: Positive = 100  # AS_WRITE_SLICE_BLOCK_NUM; blocks per call
    slice_timeout: Seconds = 10.0  # AS_WRITE_SLICE_TIMEOUT
    total_timeout: Seconds | None = None  # AS_WRITE_TOTAL_TIMEOUT; of a write; default: the task's remaining time
    ready_timeout: Seconds = 300.0  # how long a start waits for the SDK
    peers: dict[str, PeerSection] = {}  # open: other nodes by name, with the endpoints of their KV events


class LevelSection(_ConfigSection, frozen=True, kw_only=True):
    """One level of storage.levels."""

    write: Literal["through", "back"] | None = None  # before or after the answer; default: first through, others back
    promote: Count | None = None  # uses before a block is copied up from here; 0 = never; default: file 2, others 1
    write_back: Literal["wait", "postpone"] = "wait"  # when no more may wait to be copied here: for room, or not at all
    write_back_bytes: Size = Size(1024**3)  # the most that waits to be copied here; at most half of the first level
    write_back_max_age: Seconds = 600.0  # how long a copy waits for a level that does not answer
    recheck: Seconds = 3600.0  # a used object seen there so long ago is looked up again, in a bucket or pool; 0 = never


class StorageSection(_ConfigSection, frozen=True, kw_only=True):
    """The pool that blocks are stored in, and what the names of their objects begin with."""

    backend: str = "file"
    levels: list[str] = []  # instead of backend: several backends, the fastest first
    key_schema: Literal["transferd", "fastdeploy"] = "transferd"  # the names and contents of objects
    model: str = "demo"
    generation: str = ""
    admit: Literal["all", "second use"] = "all"  # second use: store only what two tasks within admit_window would store
    admit_window: Seconds = 3600.0
    version_file: str = ""  # FastDeploy's version.yaml; if set, the generation is read from it at start and on restore
    scrub_rate: Size = Size(0)  # bytes per second at which stored objects are checked in the background; 0 = off
    file: FileStorageSection = FileStorageSection()
    memory: MemoryStorageSection = MemoryStorageSection()
    mooncake: MooncakeStorageSection = MooncakeStorageSection()
    object: ObjectStorageSection = ObjectStorageSection()
    attention_store: AttentionStoreSection = AttentionStoreSection()
    level: dict[str, LevelSection] = {}  # settings of each level, by its name in levels

    @property
    def backends(self) -> list[str]:
        """The backends that hold blocks, the fastest first."""
        return list(self.levels) if self.levels else [self.backend]

    @property
    def drain_at_stop(self) -> float:
        """For how many seconds a stop may copy to other nodes, besides the shutdown budget."""
        return self.mooncake.drain_at_stop if "mooncake" in self.backends else 0.0

    @property
    def title(self) -> str:
        """What reports call the store: its backends."""
        return ">".join(self.backends)


class PdSection(_ConfigSection, frozen=True, kw_only=True):
    """How sequences move from a prefill to a decode engine: through storage, or directly from daemon to daemon.

    All keys but `mode` apply to direct mode only.
    """

    mode: Literal["storage", "direct"] = "storage"
    listen: str = "127.0.0.1:0"  # where decode daemons reach this one; port 0 = any free port, which stats reports
    protocol: Literal["tcp", "rdma"] = "tcp"
    rdma_devices: str = ""  # comma separated; "" = all
    staging: Size = Size(64 * 1024**2)  # bytes per rank; peers write to this memory only


class MetricsSection(_ConfigSection, frozen=True, kw_only=True):
    """Where /metrics, /healthz, /readyz and /status are served."""

    listen: str = "127.0.0.1:9464"  # "" = off
    hosts: tuple[str, ...] = ()  # names besides localhost and this machine's by which it is asked; "*" = any


class TracesSection(_ConfigSection, frozen=True, kw_only=True):
    """OpenTelemetry spans of tasks (needs the extra `otel`). Set headers and certificates with OTEL_* variables."""

    endpoint: str = ""  # the collector's URL, such as http://127.0.0.1:4318/v1/traces; "" = off
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # share of tasks to trace, of those without a traceparent


class EventsSection(_ConfigSection, frozen=True, kw_only=True):
    """KV events for cache-aware routers, in vLLM's wire format (docs/events.md)."""

    endpoint: str = ""  # of the PUB socket, such as tcp://127.0.0.1:5557; "" = off
    replay_endpoint: str = ""  # where subscribers can request missed batches; "" = no replay
    topic: str = ""
    dp_rank: Count = 0  # data-parallel rank, in every batch
    token_ids: bool = True  # False: events carry hashes only, not the tokens of prompts
    levels: bool = False  # also announce in which level of storage.levels each stored block is
    buffer: Positive = 10_000  # batches kept for replay
    buffer_bytes: Size = Size(64 * 1024**2)  # the most bytes that these batches take
    max_blocks: Positive = 1_000_000  # the most stored blocks announced at a time; beyond it the oldest are retracted


class LogSection(_ConfigSection, frozen=True, kw_only=True):
    """The lowest level that is logged, and the format of a line."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, else json


class RecorderSection(_ConfigSection, frozen=True, kw_only=True):
    """The flight recorder: how much it remembers, and where its dumps go."""

    tasks: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = (
        8192  # roughly how many tasks are remembered, with eight steps each; about 4 MiB in total
    )
    directory: str = "/var/lib/transferd/flight"  # created for the first dump; "" = no dumps
    keep: Positive = 8  # how many of the newest dumps to keep


class Config(_ConfigSection, frozen=True, kw_only=True):
    """The daemon's whole configuration. docs/configuration.md documents the sections."""

    server: ServerSection = ServerSection()
    cache: CacheSection | None = None  # the engine "default"; without it, engines register
    engines: EnginesSection = EnginesSection()
    host: HostSection = HostSection()
    cuda: CudaSection = CudaSection()
    storage: StorageSection = StorageSection()
    pd: PdSection = PdSection()
    metrics: MetricsSection = MetricsSection()
    traces: TracesSection = TracesSection()
    events: EventsSection = EventsSection()
    log: LogSection = LogSection()
    recorder: RecorderSection = RecorderSection()

    @property
    def geometry(self) -> CacheSection:
        """[cache], where this is the configuration of an engine."""
        assert self.cache is not None, "there is no engine in this configuration"
        return self.cache
