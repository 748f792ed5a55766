"""A node that is killed and back two seconds later, as systemd brings it: what it writes then is found at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from tests.machine.rack.engine import engine
from tests.machine.rack.lab import WHOLE, laboratory
from tests.machine.rack.test_partition import ANSWER_S
from transferd import Status
from transferd.cli.pool.master import master_executable
from transferd.runtime.compat import timeout

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
DOWN_S = 2.0
# Of a handover, and between two of them: so few that the pool does not fill up meanwhile, however fast the machine is.
BLOCKS, PACE_S = 2, 0.2
POOL: dict[str, Any] = {"global_segment_size": "256MiB"}


@pytest.mark.parametrize("copies", [1, 2] if WHOLE else [1])
async def test_handovers_through_the_pool_go_on_after_a_kill_and_a_quick_restart(tmp_path: Path, copies: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        lab = stack.enter_context(laboratory(tmp_path, nodes=2))
        prefill, decode = [lab.daemon(number, replica_num=copies, **POOL) for number in (1, 2)]
        reader = await stack.enter_async_context(engine(decode))
        async with engine(prefill) as writer:
            await writer.until_stored(range(BLOCKS))
            await reader.until_stored(range(50, 50 + BLOCKS))
            assert (await reader.read(range(BLOCKS))).status is Status.OK
        prefill.kill()
        killed = time.monotonic()
        while time.monotonic() - killed < DOWN_S:
            result = await reader.write(range(60, 60 + BLOCKS))
            assert reader.took < ANSWER_S, result
        async with engine(lab.daemon(1, replica_num=copies, **POOL)) as writer:
            begun, last_failure, handed_over, content = time.monotonic(), 0.0, 0, 1000
            async with timeout(60):
                while time.monotonic() - begun < 12.0:  # longer than the master takes to miss the dead segment
                    at = time.monotonic() - begun
                    written = await writer.write(range(content, content + BLOCKS))
                    read = await reader.read(range(content, content + BLOCKS))
                    ok = written.status is Status.OK and read.status is Status.OK
                    back = await reader.write(range(content + 50, content + 50 + BLOCKS), first=BLOCKS)
                    ok = ok and back.status is Status.OK
                    ok = ok and (await writer.read(range(content + 50, content + 50 + BLOCKS))).status is Status.OK
                    if ok:
                        handed_over += 1
                    else:
                        last_failure = at  # when it began: on a busy machine it may end late
                        print("failed", last_failure, written.error, read.error, back.error)
                    content += 100
                    await asyncio.sleep(PACE_S)
            print(f"{copies} copies: {handed_over} handed over, the last failure after {last_failure:.2f} s")
            assert handed_over > 2
            assert last_failure < 1.0
