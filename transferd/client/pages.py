"""Pages, from the engine's side: what its blocks are. (A handle says where they lie: tiers/page_handles.py.)

layout = Pages(layers=32, page_bytes=65536, blocks=1024, identity="vllm/LBHNC/FlashAttention/bf16/64")
handle = shm_pages("name-in-dev-shm", segments=[(offset, block_stride), …])   # one segment per layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transferd.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PLANE = "page"


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The layout of an engine's own KV cache: opaque bytes.

    A block is one segment per layer. Engines that agree on identity, sizes, tensor-parallel size, model and generation
    read each other's blocks.

    page_bytes: bytes of each segment; a list gives each layer its own size.
    blocks: their number on one rank.
    identity: the engine's description of what the bytes mean: layout name, element type, attention backend, tokens per
        block.
    windows: blocks may share bytes, so the stride may be shorter than `page_bytes`, and other engines of the same user
        may have windows of other sizes in the same memory. Requires one layer, in shared memory. Tasks with a byte in
        common are ordered as tasks on one block are.
    """

    layers: int
    page_bytes: int | Sequence[int]
    blocks: int
    identity: str
    windows: bool = False

    def as_cache(self) -> dict[str, Any]:
        """This layout as keys of [cache], as a registration sends it."""
        more = {"windows": True} if self.windows else {}  # which an older daemon does not know
        return {
            "attention": "pages",
            "layers": self.layers,
            "page_bytes": self.page_bytes if isinstance(self.page_bytes, int) else list(self.page_bytes),
            "device_blocks": self.blocks,
            "identity": self.identity,
            **more,
        }

    def views(self, memory: Any, segments: Sequence[Sequence[int]]) -> dict[str, list[npt.NDArray[np.uint8]]]:
        """Your own view of pages in host memory, for `client.offer(…, caches=…)`.

        Returns {"page": [one array per layer]}; an array's shape is [blocks, page_bytes].
        memory: anything with the buffer protocol (an mmap, a numpy array), whose first byte is offset 0. Zero-copy.
        """
        import numpy as np

        whole = np.frombuffer(memory, dtype=np.uint8)
        sizes = [self.page_bytes] * self.layers if isinstance(self.page_bytes, int) else list(self.page_bytes)
        views = []
        for layer, ((offset, stride, *_), nbytes) in enumerate(zip(segments, sizes, strict=True)):
            end = offset + (self.blocks - 1) * stride + nbytes
            if not (offset >= 0 and (1 if self.windows else nbytes) <= stride and end <= whole.nbytes):
                what = f"the segment of layer {layer} does not fit its memory of {whole.nbytes} bytes"
                raise RequestError(what, code="bad_value")
            shape, strides = (self.blocks, nbytes), (stride, 1)
            views.append(np.lib.stride_tricks.as_strided(whole[offset:end], shape, strides))
        return {PLANE: views}
