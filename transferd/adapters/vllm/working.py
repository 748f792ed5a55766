"""A worker's half of TransferdConnector: it offers its KV memory, and reports which step its stream has passed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transferd.adapters.vllm import identity
from transferd.adapters.vllm.companion import DaemonFinder
from transferd.adapters.vllm.entry import EngineFacts, OfferedMemory
from transferd.adapters.vllm.link import Link
from transferd.adapters.vllm.memory import shared_memory_at
from transferd.adapters.vllm.settings import AdapterSettings
from transferd.errors import TierError


class Working:
    """One rank, on the CPU."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, name: str, chosen: AdapterSettings) -> None:
        self._config, self._cache_config, self._name, self._settings = vllm_config, kv_cache_config, name, chosen
        self._link: Link | None = None
        self._passed = 0

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Offer the memory of these tensors, one a layer. Raises TierError."""
        rank, blocks = self._config.parallel_config.rank, self._cache_config.num_blocks
        layers = _distinct(kv_caches)
        for name, tensor in layers.items():
            _check(name, tensor, blocks)
        page_bytes = [tensor[0].numel() * tensor.element_size() for tensor in layers.values()]
        facts = identity.of_connector(
            self._config, {name: tuple(t.shape[1:]) for name, t in layers.items()}, sum(page_bytes)
        )
        self._engine = engine = EngineFacts(
            name=self._name,
            model=str(self._config.model_config.model),
            generation=self._settings.generation,
            identity=f"vllm/{identity.digest(facts)}",
            ranks=self._config.parallel_config.tensor_parallel_size,
            blocks=blocks,
            page_bytes=page_bytes,
            memory=_memory(rank, list(layers.values())),
        )
        companion = DaemonFinder(
            endpoint=self._settings.endpoint,
            path=self._settings.path,
            capacity=self._settings.capacity_bytes,
            engine=engine if rank == 0 else None,
        )
        self._link = Link(companion, engine.name, engine.enter)

    def launched(self, step: int) -> None:
        """All work of this step has been submitted to the device."""
        self._passed = max(self._passed, step)  # a CPU has computed it by now; a GPU would need an event here

    def passed(self) -> int:
        """The ready word: the last step that the device has finished."""
        return self._passed

    def close(self, timeout: float) -> None:
        if self._link is not None:
            self._link.close(timeout)


def _distinct(kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors without those that alias another one's memory (layers that share their KV)."""
    seen: dict[int, str] = {}
    return {name: t for name, t in kv_caches.items() if seen.setdefault(t.data_ptr(), name) == name}


def _check(name: str, tensor: Any, blocks: int) -> None:
    """Check that a block of a layer is one range of bytes. Raises TierError."""
    page = tensor[0]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(page.shape, page.stride(), strict=True))
    if tensor.shape[0] != blocks or extent != page.numel() or tensor.stride(0) < extent:
        what = f"shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}, {blocks} blocks"
        raise TierError(f"{name}: its blocks are not one range of bytes each ({what})")


def _memory(rank: int, tensors: list[Any]) -> OfferedMemory:
    """The memory of these tensors, in a form that another process can map; on the CPU moved there in place."""
    import torch

    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    if len(storages) > 1:
        raise TierError(f"vLLM has allocated the KV cache in {len(storages)} pieces; one is supported")
    (storage,) = storages.values()
    if storage.device.type != "cpu":
        raise TierError(
            f"KV memory is on {storage.device}; TransferdConnector serves CPUs only so far: use TransferdTier"
        )
    if not storage.is_shared():
        # Without a name: vLLM stops its engine with SIGKILL, and nobody would remove a name, and the memory with it.
        storage._share_fd_cpu_()
    size = tensors[0].element_size()
    mapped = shared_memory_at(storage.data_ptr(), storage.nbytes())
    whole = tensors[0].new_empty(0).view(torch.uint8).set_(storage).numpy()
    segments = [(t.data_ptr() - storage.data_ptr(), t.stride(0) * size) for t in tensors]
    return OfferedMemory(rank, mapped, segments, whole)
