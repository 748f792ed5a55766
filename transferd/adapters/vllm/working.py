"""A worker's half of TransferdConnector: it offers its KV memory, and reports which step its stream has passed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transferd.adapters.common.entry import EngineFacts, Memory, OfferedMemory, Order, Point
from transferd.adapters.common.gpu import GpuMemory, torch_stream
from transferd.adapters.common.link import Link
from transferd.adapters.common.memory import shared_memory_at
from transferd.adapters.vllm import identity
from transferd.adapters.vllm.by_layer import LayerLoads
from transferd.adapters.vllm.layers import LayerBlocks, blocks_of, check_shared, distinct, joined
from transferd.adapters.vllm.settings import VLLM, AdapterSettings
from transferd.client.client import Client
from transferd.errors import TierError
from transferd.runtime.clock import SYSTEM_CLOCK

Gather = Callable[[str], Sequence[str]]
INSTEAD = "TransferdTier"  # where the connector cannot serve


class Working:
    """One rank. Its link enters the daemon, at first and after each restart."""

    def __init__(self, engine: EngineFacts, chosen: AdapterSettings, layers: Mapping[str, int] | None = None) -> None:
        """layers: see LayerLoads."""
        self.engine = engine
        gpu = not isinstance(engine.memory, OfferedMemory)
        companion = chosen.finder(VLLM, engine if engine.memory.rank == 0 else None, gpu=gpu)
        self._passed = 0
        self._link = Link(companion, engine.name, self._enter, token=engine.token)
        self.loads = LayerLoads(self._link.submit, layers or {})

    async def _enter(self, client: Client) -> None:
        # Kernels may read the null block together with others and mask it; a NaN in it would get past the mask.
        await self.engine.enter(client, canary=not self._passed)

    def launched(self, step: int, after: Point) -> None:
        """Note that this thread has submitted all work of a step to the device. after: the step's point."""
        if step > self._passed:
            self.engine.memory.advance(after)
            self._passed = step

    def passed(self) -> tuple[int, Order]:
        """The ready word: the last step launched, and how copies are ordered behind it."""
        return self._passed, self.engine.memory.order

    @property
    def ready(self) -> bool:
        """Whether a daemon answers, and knows this rank's memory."""
        return self._link.ready

    def close(self, timeout: float) -> None:
        self.engine.memory.close()  # before the daemon frees the timelines
        self._link.close(timeout)


def engine_facts(
    vllm_config: Any,
    kv_cache_config: Any,
    name: str,
    chosen: AdapterSettings,
    kv_caches: Mapping[str, Any],
    gather: Gather,
) -> EngineFacts:
    """vLLM's engine, with the memory of these tensors of this rank. Raises TierError for memory that we cannot serve.

    kv_caches: as vLLM registers them.
    gather: called by every rank with a text; returns those of all ranks in order.
    """
    token = gather(SYSTEM_CLOCK.fresh_id())[0]  # rank 0's; first, because every rank waits here for the others
    rank, blocks = vllm_config.parallel_config.rank, kv_cache_config.num_blocks
    tensors = distinct(kv_caches)
    layers = blocks_of(tensors, blocks)
    check_shared(kv_caches, layers, blocks)
    ranges = joined(tensors, layers)
    page_bytes = [one.nbytes for one in ranges.values() for _ in one.pieces]
    shapes = {layer: tuple(tensor.shape[1:]) for layer, tensor in tensors.items()}
    orders = {name: layer.order for name, layer in layers.items()}
    life = SYSTEM_CLOCK.fresh_id()
    return EngineFacts(
        name=name,
        model=str(vllm_config.model_config.model),
        generation=chosen.generation,
        identity="vllm",
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        blocks=blocks,
        page_bytes=page_bytes,
        memory=_memory(rank, [tensors[name] for name in ranges], list(ranges.values()), gather),
        token=token,
        fingerprint={}  # rank 0 registers the engine
        if rank
        else identity.of_connector(
            vllm_config, shapes, orders, sum(page_bytes), kv_cache_config.kv_cache_groups, chosen, life
        ),
    )


def _memory(rank: int, tensors: list[Any], layers: list[LayerBlocks], gather: Gather) -> Memory:
    kinds = {tensor.device.type for tensor in tensors}
    if kinds == {"cuda"}:
        return GpuMemory(rank, tensors, layers, program=VLLM, instead=INSTEAD, gather=gather, stream=torch_stream)
    if kinds == {"cpu"}:
        return _host_memory(rank, tensors, layers)
    what = f"KV memory is on {', '.join(sorted(kinds))}; TransferdConnector serves NVIDIA GPUs and CPUs"
    raise TierError(f"{what}: use {INSTEAD}")


def _host_memory(rank: int, tensors: list[Any], layers: list[LayerBlocks]) -> OfferedMemory:
    """Move the tensors' memory, in place, to where another process can map it.

    It has no name: vLLM stops its engine with SIGKILL, so no one would remove the name and free the memory.
    """
    import torch

    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    if len(storages) > 1:
        raise TierError(f"vLLM has allocated the KV cache in {len(storages)} pieces; one is supported")
    (storage,) = storages.values()
    if not storage.is_shared():
        storage._share_fd_cpu_()
    mapped = shared_memory_at(storage.data_ptr(), storage.nbytes())
    whole = tensors[0].new_empty(0).view(torch.uint8).set_(storage).numpy()
    segments = [
        (tensor.data_ptr() - storage.data_ptr() + piece, layer.stride)
        for tensor, layer in zip(tensors, layers, strict=True)
        for piece in layer.pieces
    ]
    return OfferedMemory(rank, mapped, segments, whole)
