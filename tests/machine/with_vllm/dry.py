"""vLLM's scheduler, block pool and connectors, with no model between them: many runs in the time of one engine start.

To "compute" a block is to write bytes that follow from vLLM's hash of it. So at every step of every request, each
block that it stands on can be checked byte by byte, whoever stored, loaded or computed it. What differs from vLLM's
own loop (EngineCore.step, KVConnectorModelRunnerMixin) is the model alone; results of ranks are joined by vLLM's own
KVOutputAggregator.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import os
import random
import signal
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.machine.with_vllm import play

TOKENS = 32  # of a block
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
SHAPE = (2, TOKENS, 64)  # of a block of a layer: heads, tokens, key and value
PAGE = 4 * 2 * TOKENS * 64
GIVE_UP_S = 240.0  # for one `run`, on a busy machine
IDLE_STEPS = 20_000  # without a token computed: a livelock
PAUSE_S = 0.002  # a step of the model
NULL = 0  # the number of vLLM's null block
STALE = 0xA5  # what is in a block that nobody computed


class DryRank:
    """A worker: its KV memory, and the connector's half that lives there."""

    def __init__(self, config: Any, cache: Any, rank: int) -> None:
        self.rank = rank
        mine = copy.copy(config)
        mine.parallel_config = copy.copy(config.parallel_config)
        mine.parallel_config.rank = rank
        self._groups = len(cache.kv_cache_groups)
        self.connector = KVConnectorFactory.create_connector(mine, KVConnectorRole.WORKER, cache)
        self.register(cache.num_blocks)

    def register(self, blocks: int) -> None:
        """Allocate the KV memory and register it. bytes: all of it, by layer and block."""
        whole = torch.full((len(LAYERS) * blocks * PAGE,), STALE, dtype=torch.uint8)
        tensors = whole.view(torch.float32).view(len(LAYERS), blocks, *SHAPE)
        names = (layers_of(group) for group in range(self._groups))  # all groups' layers share the memory
        self.connector.register_kv_caches({n: t for some in names for n, t in zip(some, tensors, strict=True)})
        self.bytes = whole.numpy().reshape(len(LAYERS), blocks, PAGE)
        self._whole = whole  # numpy shows its storage, wherever the connector has moved it
        assert self.bytes.ctypes.data == whole.data_ptr()

    def settle(self) -> None:
        """Wait until every step that was launched has been computed: what comes next stands on those."""

    def holds(self, block: int, content: Any) -> bool:
        """Whether a step that comes next finds this in the block."""
        return np.array_equal(self.bytes[:, block], content)

    def put(self, block: int, content: Any) -> None:
        """Compute a block."""
        self.bytes[:, block] = content

    def content(self, block_hash: bytes, group: int = 0) -> np.ndarray:
        """What a block with this hash has to hold on this rank, in a KV group."""
        return _content(block_hash, self.rank, group)

    def step(self, output: Any, compute: Callable[[DryRank], None]) -> KVConnectorOutput:
        """One step, in the order of KVConnectorModelRunnerMixin."""
        it, told = self.connector, KVConnectorOutput()
        it.handle_preemptions(output.kv_connector_metadata)  # blocks are also taken from requests that have ended
        it.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            it.start_load_kv(None)
        compute(self)
        if not output.has_sync_kv_loads:
            it.start_load_kv(None)
        it.wait_for_save()
        results = it.get_transfer_results(output.finished_req_ids)
        told.finished_sending, told.finished_recving = results.finished_sending, results.finished_recving
        told.failed_recving = results.failed_recving
        told.invalid_block_ids = it.get_block_ids_with_load_errors()
        told.kv_connector_worker_meta = it.build_connector_worker_meta()
        it.clear_connector_metadata()
        return told


class DryEngine:
    """An engine of `ranks` ranks over TransferdTier or TransferdConnector ("tier", "connector"). `with` ends it.

    ahead: vLLM's asynchronous scheduling. The scheduler is always one step ahead of the model, which is the worst case.
    model: a directory other than that of the tiny model. options: other arguments of vLLM's.
    events: vLLM publishes KV events, into `published`; and at events_at, its own PUB socket.
    groups: the model's KV groups; a number is a group with a window of so many tokens, None one without.
    every: vLLM's --prefix-cache-retention-interval.
    """

    def __init__(
        self,
        place: Path,
        kind: str,
        *,
        blocks: int = 64,
        ranks: int = 1,
        together: int = 4,
        ahead: bool = False,
        events: bool = False,
        events_at: str = "",
        rank_class: type[DryRank] = DryRank,
        model: Path | None = None,
        options: dict[str, Any] | None = None,
        groups: Sequence[Group | int | None] = (None,),
        every: int | None = None,
        transfer: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        made = play.transfer(kind, {"keep_blocks_on_reset": True} | extra, witness=False)
        assert made is not None
        chosen = made | (transfer or {}) | {"engine_id": uuid.uuid4().hex[:12]}
        config = EngineArgs(
            **{"model": str(model or play.tiny_model(place / "tiny")), "load_format": "dummy"} | (options or {}),
            skip_tokenizer_init=True, enforce_eager=True,
            dtype="float32", block_size=TOKENS, max_model_len=2048, max_num_seqs=together,
            max_num_batched_tokens=2048, kv_transfer_config=chosen,
            kv_events_config=KVEventsConfig(
                enable_kv_cache_events=True, publisher="zmq" if events_at else "null", endpoint=events_at or "-"
            ) if events else None,
        ).create_engine_config()  # fmt: skip
        self._weight_version = "default"
        config.scheduler_config.async_scheduling = ahead  # the platform of the CPU turns it off; a GPU's has it on
        config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = ranks
        config.cache_config.num_gpu_blocks = blocks
        placed = KVCacheTensor(len(LAYERS) * blocks * PAGE, list(LAYERS), blocks * PAGE, PAGE)
        self.groups = [one if isinstance(one, Group) else Group(window=one) for one in groups]
        specs = [KVCacheGroupSpec(layers_of(number), one.spec()) for number, one in enumerate(self.groups)]
        cache = KVCacheConfig(blocks, [placed], specs, every, kv_cache_layout="LBHNC")
        self.unit = math.lcm(*(one.tokens for one in self.groups))
        self.hashed = math.gcd(*(one.tokens for one in self.groups))
        config.cache_config.block_size = max((one.tokens for one in self.groups if one.state), default=TOKENS)
        config.cache_config.mamba_cache_mode = "align" if any(one.state for one in self.groups) else "none"
        hashing = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashing)
        self._hasher = get_request_block_hasher(self.hashed, hashing)
        with set_current_vllm_config(config):
            workers_first = kind == "connector"  # one of them starts the daemon that the scheduler's half waits for
            token = uuid.uuid4().hex
            with mock.patch("transferd.adapters.vllm.connector._of_all_ranks", return_value=[token] * ranks):
                workers = [rank_class(config, cache, rank) for rank in range(ranks)] if workers_first else []
            made_by: Any = config.scheduler_config.get_scheduler_cls()
            self.scheduler = made_by(config, cache, StructuredOutputManager(config), self.unit, self.hashed)
            assert config.max_concurrent_batches == 1 + ahead
            self.ranks = workers or [rank_class(config, cache, rank) for rank in range(ranks)]
        self.counts: Counter[str] = Counter()  # of the connector, since the start
        self.published: list[Any] = []
        publish = self.scheduler.kv_event_publisher.publish

        def note(batch: Any) -> None:
            self.published.extend(batch.events)
            publish(batch)

        self.scheduler.kv_event_publisher.publish = note
        self.connector = self.scheduler.connector
        self.ours = ours(self.connector)  # the same, or within a MultiConnector
        if workers_first:
            report = self.ours.get_kv_connector_stats  # vLLM asks at each step, and each count is given once

            def reported() -> Any:
                stats = report()
                self.counts.update({name: n for name, n in stats.data.items() if name != "ready"})
                return stats

            self.ours.get_kv_connector_stats = reported
            # as EngineCore does
            told = {(0, rank.rank): rank.connector.get_handshake_metadata() for rank in self.ranks}
            self.connector.set_xfer_handshake_metadata_pp_aware(told)
        self._aggregator = KVOutputAggregator.from_connector(self.connector, ranks)
        self._most_in_flight = config.max_concurrent_batches
        self._in_flight: deque[tuple[Any, list[Share]]] = deque()
        self._numbers = 0
        self.computed: dict[str, int] = {}  # tokens, for each request
        self.answers: dict[str, list[int]] = {}
        self.preempted = 0
        self.held: set[int] = set()  # ranks whose ready word stays behind

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        self.scheduler.shutdown()

    def get_weight_version(self) -> str:
        """As EngineCore has it."""
        return self._weight_version

    def sync(self, version: str) -> None:
        """Change the weights to a version, as vLLM's pause, update and finish do."""
        self.forget()
        self._weight_version = version

    # --- the daemon ---------------------------------------------------------------------------------

    @property
    def links(self) -> list[Any]:
        """To the daemon; the first one's process may have started it."""
        if hasattr(self.ours, "_link"):
            return [*(ours(rank.connector)._working._link for rank in self.ranks), self.ours._link]
        return [self.connector.connector_scheduler.manager.secondary_tiers[0]._link]

    def daemon(self) -> int:
        """The pid of the daemon that this engine has started."""
        return int(self.links[0]._companion.started.process.pid)

    def kill_daemon(self) -> None:
        os.kill(self.daemon(), signal.SIGKILL)

    def served_again(self, boots: Sequence[str]) -> None:
        """Step until another daemon than these serves every link. boots: what `boots` said before."""
        self.until(lambda: all(link.ready and link._entered not in boots for link in self.links))

    @property
    def boots(self) -> list[str]:
        return [link._entered for link in self.links]

    # --- requests -----------------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], answer: int = 2, lora: Any = None) -> str:
        """Submit a request; its name. lora: vLLM's LoRARequest."""
        self._numbers += 1
        name = f"r{self._numbers}"
        ask = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        request = Request(name, list(prompt), ask, None, lora_request=lora, block_hasher=self._hasher)
        self.computed[name], self.answers[name] = 0, []
        self.scheduler.add_request(request)
        return name

    def run(self, prompts: Iterable[Sequence[int]], answer: int = 2, lora: Any = None) -> list[int]:
        """Play these requests to their end; how many tokens of each were computed."""
        names = [self.add(prompt, answer, lora) for prompt in prompts]
        self.finish()
        return [self.computed[name] for name in names]

    def finish(self) -> None:
        """Step until nothing is left to do, saves and loads included."""
        give_up, idle = time.monotonic() + GIVE_UP_S, 0
        while self.scheduler.has_requests() or self._in_flight:
            idle = 0 if self.step() else idle + 1
            assert time.monotonic() < give_up, "requests hang"
            assert idle < IDLE_STEPS, "a livelock"

    def until(self, true: Callable[[], bool]) -> None:
        give_up = time.monotonic() + GIVE_UP_S
        while not true():
            self.step()
            assert time.monotonic() < give_up

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def forget(self) -> None:
        """Empty the prefix cache and vLLM's host pool, and spoil every byte, so that only a load brings it back."""
        give_up = time.monotonic() + GIVE_UP_S
        while not self.scheduler.reset_prefix_cache(reset_connector=True):
            self.step()
            assert time.monotonic() < give_up, "blocks stay in use"
        for rank in self.ranks:
            rank.settle()
            rank.bytes[:] = STALE

    # --- a step -------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One step, as EngineCore.step_with_batch_queue has it. Whether anything was scheduled or computed."""
        scheduled = False
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            scheduled = bool(output.num_scheduled_tokens)
            self.preempted += len(output.preempted_req_ids or ())
            self._in_flight.append((output, [self._share(*one) for one in output.num_scheduled_tokens.items()]))
            if len(self._in_flight) < self._most_in_flight and scheduled:
                return True
        if not self._in_flight:
            return False
        computed = self._model(*self._in_flight.popleft())
        if not scheduled and not computed:
            time.sleep(PAUSE_S)
        return scheduled or computed

    def _share(self, name: str, count: int) -> Share:
        request = self.scheduler.requests[name]
        begin = request.num_computed_tokens - count  # `schedule` has counted them already
        ids = self.scheduler.kv_cache_manager.get_block_ids(name)
        return Share(name, request, begin, count, [list(some) for some in ids])

    def _model(self, output: Any, shares: list[Share]) -> bool:
        """Run the model and tell the scheduler. Whether anything was computed."""
        told = [rank.step(output, lambda rank: self._compute(rank, shares)) for rank in self.ranks]
        for number in self.held:
            told[number].kv_connector_worker_meta.step = 0
        names = [share.name for share in shares]
        places = {name: i for i, name in enumerate(names)}
        sampled = [share.sampled() for share in shares]
        results = [ModelRunnerOutput(names, places, sampled, kv_connector_output=one) for one in told]
        for share in shares:
            self.computed[share.name] += share.count
        answered = self.scheduler.update_from_output(output, self._aggregator.aggregate(results))
        for outputs in answered.values():
            for one in outputs.outputs:
                self.answers[one.request_id] += one.new_token_ids
        return bool(shares)

    def _compute(self, rank: DryRank, shares: list[Share]) -> None:
        """Check what these requests stand on, and write the blocks that they fill."""
        rank.settle()
        for share in shares:
            if share.request.is_finished():
                continue  # aborted since: what it would write, nobody may read
            for group in range(len(share.block_ids)):
                self._compute_group(rank, share, group)

    def _compute_group(self, rank: DryRank, share: Share, number: int) -> None:
        group, ids = self.groups[number], share.block_ids[number]
        hashes = share.request.block_hashes[group.tokens // self.hashed - 1 :: group.tokens // self.hashed]
        for i, block_hash in enumerate(hashes[: share.begin // group.tokens]):
            if ids[i] == NULL:  # no window reaches back to it
                continue
            good = rank.holds(ids[i], rank.content(block_hash, number))
            assert good, f"{share.name}: wrong bytes in block {i} (number {ids[i]}) on rank {rank.rank}"
        if group.state and share.begin and share.begin % group.tokens == 0:
            assert ids[share.begin // group.tokens - 1] != NULL, f"{share.name}: no state to go on from"
        end = share.end // group.tokens
        for i in range(share.begin // group.tokens, end):
            passed = group.state and (i + 1) * group.tokens != share.end  # on the way to another state
            if ids[i] != NULL:
                rank.put(ids[i], STALE if passed else rank.content(hashes[i], number))
        if share.end % group.tokens:
            rank.put(ids[end], STALE)  # begun, and not to be stored yet


def ours(connector: Any) -> Any:
    """Transferd's connector, which may be one of several."""
    found = [one for one in getattr(connector, "_connectors", ()) if hasattr(one, "_link")]
    return found[0] if found else connector


def layers_of(group: int) -> list[str]:
    return [f"{name}.{group}" if group else name for name in LAYERS]


@dataclass(frozen=True)
class Group:
    """A KV group. tokens: of a block; those of all groups have equally many bytes. state: of linear attention."""

    tokens: int = TOKENS
    window: int | None = None
    chunk: int | None = None
    state: bool = False

    def spec(self) -> Any:
        """As vLLM has it."""
        shape = {"block_size": self.tokens, "num_kv_heads": 2, "head_size": 32 * TOKENS // self.tokens}
        if self.state:
            return MambaSpec(self.tokens, ((PAGE // 4,),), (torch.float32,), mamba_cache_mode="align")
        if self.chunk is not None:
            return ChunkedLocalAttentionSpec(**shape, dtype=torch.float32, attention_chunk_size=self.chunk)
        if self.window is not None:
            return SlidingWindowSpec(**shape, dtype=torch.float32, sliding_window=self.window)
        return FullAttentionSpec(**shape, dtype=torch.float32)


@dataclass
class Share:
    """What a step computes of one request: `count` tokens behind `begin`."""

    name: str
    request: Request
    begin: int
    count: int
    block_ids: list[list[int]]  # for each KV group

    @property
    def end(self) -> int:
        return self.begin + self.count

    def sampled(self) -> list[int]:
        """A token that follows from all tokens before it, once they are computed."""
        if self.end < self.request.num_tokens:
            return []
        digest = hashlib.sha256(repr(list(self.request.all_token_ids)[: self.end]).encode()).digest()
        return [3 + int.from_bytes(digest[:4], "big") % 490]


@functools.lru_cache(maxsize=1000)  # 32 MiB
def _content(block_hash: bytes, rank: int, group: int) -> np.ndarray:
    seed = hashlib.sha256(block_hash + bytes([rank, group])).digest()[:8]
    return np.random.default_rng(int.from_bytes(seed, "big")).integers(0, 256, (len(LAYERS), PAGE), dtype=np.uint8)


def hashes(engine: DryEngine, prompt: Sequence[int]) -> list[bytes]:
    """vLLM's names of the prompt's full blocks."""
    ask = SamplingParams(max_tokens=1)
    return [bytes(one) for one in Request("", list(prompt), ask, None, block_hasher=engine._hasher).block_hashes]


def objects(place: Path) -> list[Path]:
    """The stored blocks, one file for each block and rank."""
    files = [path for path in (place / "cache/transferd/blocks").rglob("*") if "quarantine" not in path.parts]
    return sorted(path for path in files if path.is_file() and path.stat().st_size > PAGE)


def object_with(place: Path, content: np.ndarray) -> Path:
    """The stored block with these bytes."""
    (found,) = [path for path in objects(place) if content[0, :64].tobytes() in path.read_bytes()]
    return found


def flip(path: Path, at: int = 1000) -> None:
    """Damage a file by one bit."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(length)] for length in lengths]
