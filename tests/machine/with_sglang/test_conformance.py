"""TransferdHiCache on SGLang's real host pool passes the checks that every adapter must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.machine.with_sglang import pools
from tests.support.tried import TriedHiCache, sglang_settings
from transferd.adapters import conformance
from transferd.adapters.conformance import CHECKS, Bench, Trial

BYTES = 2 * pools.LAYERS * pools.PAGE * pools.HEADS * pools.DIM * 2  # of a page: K and V in bfloat16


class TriedSglang(TriedHiCache):
    def __init__(self, trial: Trial) -> None:
        self._pool: Any = pools.mha("page_first", allocator="default" if trial.private else "shm")
        backend = pools.backend(self._pool, pools.config(model=trial.model, **sglang_settings(trial)))
        super().__init__(backend, pools.indices, pools.TOKENS // pools.PAGE, BYTES)

    def fill(self, block: int, content: bytes) -> None:
        flat = torch.frombuffer(bytearray(content), dtype=torch.bfloat16)
        self._pool.set_from_flat_data_page(block * pools.PAGE, flat)

    def read(self, block: int) -> bytes:
        return pools.read(self._pool, block)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_adapter_is_fit(check: Callable[[Bench], None]) -> None:
    assert conformance.run(TriedSglang, check) == ""
