"""FastDeploy's cache messager beside transferd: it creates the cache and sends from it, the daemon swaps in it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.machine.with_fastdeploy.engine import BLOCK_SIZE, chain
from tests.machine.with_fastdeploy.gpu.engine import gpu_engine
from tests.machine.with_fastdeploy.test_tiers import prompts

MESSAGER_BLOCK_SIZE = 64  # FastDeploy does not tell its messagers how large a block is


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_a_prompt_goes_from_prefill_to_decode_directly_and_through_the_host_on_either_side(
    place: Path, tp: int, first: str
) -> None:
    devices = {"prefill": [0, 1][:tp], "decode": [2, 3][:tp]}
    with ExitStack() as stack:
        made = {
            role: stack.enter_context(gpu_engine(tp=tp, role=role, gpu_blocks=24, cpu_blocks=48, devices=devices[role]))
            for role in sorted(devices, key=first.__ne__)
        }
        prefill, decode = made["prefill"], made["decode"]
        for engine in made.values():
            assert engine.report()["registered"]
        asked = prompts(4)
        for tokens in asked:
            prefill.run(tokens)
        prefill.settle()
        for slot, tokens in enumerate(asked):
            request = prefill.begin(tokens)  # those that were pushed off the device come back from the host
            request.idx, request.need_prefill_tokens = slot, len(tokens) // BLOCK_SIZE * MESSAGER_BLOCK_SIZE
            received = decode.begin(tokens, computed=False)
            prefill.send_to(decode, request, received.block_tables)
            blocks = list(zip(received.block_tables, chain(tokens), strict=True))
            half = len(blocks) // 2
            prefill.tell(request, range(half * MESSAGER_BLOCK_SIZE))
            # Release 2.6 hangs if one rank hears of both chunks before it knows of the request, and another does not.
            decode.await_content(blocks[:half])
            prefill.tell(request, range(half * MESSAGER_BLOCK_SIZE, len(blocks) * MESSAGER_BLOCK_SIZE))
            assert prefill.await_sent() == [[request.request_id, "finished"]]
            prefill.finish(request)
            for worker in decode.workers:
                for block, content in blocks:
                    worker.check(block, content)
            decode.manager.update_cache_blocks(received, BLOCK_SIZE, len(tokens))
            decode.finish(received)
        prefill.settle()
        decode.settle()
        assert sum(decode.run(tokens)["cpu_match_token_num"] for tokens in asked) > 0
        decode.settle()
