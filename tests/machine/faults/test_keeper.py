"""The keeper of the gates leaves nothing open, whatever the processes at its gates did last."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path

import pytest

from tests.machine.faults.keeper import Keeper


async def at_gate(path: Path, phase: str, pid: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(json.dumps({"phase": phase, "pid": pid}).encode() + b"\n")
    return reader, writer


@pytest.mark.filterwarnings("error")
async def test_it_closes_the_gates_of_those_that_nobody_waits_for_any_more(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "gates.sock")
    await keeper.open()
    gates = [await at_gate(keeper.path, "idle", 1)]  # an engine that has been replaced
    gates.append(await at_gate(keeper.path, "idle", 2))
    kept = await keeper.idle_engine(2, 30)
    keeper.arm("read", lambda _: True)
    gates.append(await at_gate(keeper.path, "read", 3))
    await keeper.reached(30)
    gates.append(await at_gate(keeper.path, "round", 4))
    gates.append(await asyncio.open_unix_connection(keeper.path))  # it dies before it says where it is
    keeper.rounds.put_nowait(await keeper.rounds.get())
    keeper.let_go()
    keeper.let_go()
    gates.append(await at_gate(keeper.path, "idle", 5))
    assert [await reader.read() for reader, _ in gates[2:4]] == [b"go\n", b"end\n"]
    assert await gates[5][0].read() == b"end\n", "who comes late is not kept"
    await keeper.close()
    assert [await gates[i][0].read() for i in (0, 1, 4)] == [b"", b"", b""]
    for _, writer in gates:
        writer.close()
        await writer.wait_closed()
    del gates, kept
    gc.collect()
