"""Timelines between processes, waits that nobody ends, and a launch queue that is full."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np

from tests.machine.gpu.machine import LAYOUTS, Failed, Found, Machine, Rig, open_rig, within
from tests.machine.gpu.probe import LET_GO_S, HeldStreams, probing
from tests.machine.gpu.processes import Peer, peer
from tests.machine.gpu.speeds import NEIGHBOUR_BYTES
from transferd.client.timeline import Timeline
from transferd.tiers.cuda.tuning import Tuning, mps_runs, tuning_for

BEHIND_S = 0.005
LATE_S = 300e-6  # from a step's end to the result of a task that waits for it
SOONER = 5.0  # times; then tasks wait for words in host memory
LEAST_SHARE = 0.95  # of its steps that an engine keeps beside a wait
LATE = LAYOUTS["mla"]


async def _attached(rig: Rig, engine: Peer) -> bool:
    data = rig.tier.handle().data
    await engine.ask("attach", data=data)
    return data["timelines"] is not None


async def _task(rig: Rig, after: tuple[int, int] | None, value: int | None) -> float:
    """A swap-out as a worker does it; its blocks must have this in every byte. Returns when the copy was done."""
    stride, nbytes = int(rig.layout.host.strides[0]), rig.layout.block_bytes
    rig.host[stride : 3 * stride] = 0
    if after is not None:
        await rig.tier.reached(after)
    await rig.tier.copy_out(rig.out([0, 3], [1, 2]), rig.pool.memory)
    done = time.monotonic()
    found = {int(byte) for slot in (1, 2) for byte in np.unique(rig.host[slot * stride : slot * stride + nbytes])}
    if value is not None and found != {value}:
        raise Failed(f"the copy has {sorted(found)} where the engine's kernels left {value}")
    return done


def _words(machine: Machine, *, host: bool) -> Tuning:
    """The figures of this GPU, with tasks that wait for words in host memory, or in device memory."""
    return replace(tuning_for(machine.info, mps=mps_runs()), host_words=host)


async def _late(machine: Machine, *, host: bool, steps: int, wait_s: float) -> list[float]:
    """Seconds from an engine's steps, which it advances a timeline behind, to the ends of tasks that wait for them."""
    late: list[float] = []
    async with open_rig(machine, LATE, tuning=_words(machine, host=host)) as rig, peer(machine) as engine:
        if not await _attached(rig, engine):
            raise Failed("this device shares no timelines")
        timelines = rig.tier.resources.timelines
        if timelines is None or timelines.in_host != (host and machine.info.same_address):
            raise Failed("the engine has not mapped its words in host memory")
        line = Timeline(0)
        for value in range(1, steps + 1):
            after = line.next()
            task = asyncio.ensure_future(_task(rig, after, value))
            await asyncio.sleep(0)
            await engine.ask("compute", value=value, after=after, wait_s=wait_s)
            before = time.monotonic()
            late.append(max(0.0, await within(task, "a task behind a step") - before))
    return late


async def a_rank_that_is_behind_is_waited_for(machine: Machine) -> Found:
    """The engine launches its kernels and advances its timeline 5 ms after the task was pushed."""
    steps = 3 if machine.fake else 20
    worst = max([max(await _late(machine, host=host, steps=steps, wait_s=BEHIND_S)) for host in (False, True)])
    return Found(f"right, the result at most {worst * 1e3:.1f} ms after the engine's end", figures={"worst_s": worst})


async def tasks_behind_a_step_of_10_ms(machine: Machine) -> Found:
    """An engine whose steps take 10 ms advances its timeline behind each: how long after it is a block out.

    By words in device memory and in host memory: what is found decides `host_words` in tuning.py.
    """
    figures: dict[str, Any] = {}
    for name, host in (("device", False), ("host", True)):
        late = await _late(machine, host=host, steps=2 if machine.fake else 60, wait_s=0.010)
        figures |= {
            f"{name}_{part}_s": float(np.percentile(late, percent)) for part, percent in (("p50", 50), ("p99", 99))
        }
    told = "; ".join(
        f"words in {name} memory: p50 {figures[f'{name}_p50_s'] * 1e6:.0f}, p99 {figures[f'{name}_p99_s'] * 1e6:.0f} us"
        for name in ("device", "host")
    )
    sooner = figures["device_p50_s"] / max(figures["host_p50_s"], 1e-9)
    key = machine.info.capability, mps_runs()
    figures["measured"] = [f"    {key}: host_words={sooner >= SOONER} (seen {sooner:.1f} times sooner in host memory)"]
    chosen = "host" if tuning_for(machine.info, mps=mps_runs()).host_words else "device"
    good = figures[f"{chosen}_p50_s"] <= LATE_S
    return Found(f"{told} after the step", "right" if machine.fake else "fast" if good else "slow", figures)


async def two_streams_do_not_wait_for_each_other(machine: Machine) -> str:
    """A task of a stream that got there is served while another stream's task waits."""
    async with open_rig(machine, LATE) as rig, peer(machine) as engine:
        if not await _attached(rig, engine):
            raise Failed("this device shares no timelines")
        slow, quick = Timeline(0).next(), Timeline(1).next()
        waiting = asyncio.ensure_future(_task(rig, slow, None))
        await engine.ask("compute", value=7, after=quick)
        await within(_task(rig, quick, 7), "a task of the stream that got there")
        if waiting.done():
            raise Failed("a task did not wait for its stream")
        await engine.ask("compute", value=9, after=slow)
        await within(waiting, "a task of the slow stream")
    return "each by its own timeline"


async def a_wait_that_nobody_ends_holds_up_nothing(machine: Machine) -> Found:
    """kill -9 of the engine before it advances: other copies go on, and closing lets go of the wait."""
    closed = [await _closed_after(machine, host=host) for host in (False, True)]
    told = " and ".join(f"{seconds * 1e3:.0f}" for seconds in closed)
    return Found(f"other copies went on; closed after {told} ms", figures={"close_s": max(closed)})


async def _closed_after(machine: Machine, *, host: bool) -> float:
    async with open_rig(machine, LATE, tuning=_words(machine, host=host)) as rig:
        async with peer(machine) as engine:
            if not await _attached(rig, engine):
                raise Failed("this device shares no timelines")
            waiting = asyncio.ensure_future(_task(rig, Timeline(2).next(), None))
            await asyncio.sleep(0.01)
            await engine.kill()
            with contextlib.suppress(BrokenPipeError):
                pass
        await within(_task(rig, None, None), "a copy beside a wait that never ends")
        waiting.cancel()
        await asyncio.wait({waiting})
        before = time.monotonic()
        await within(rig.tier.close(), "closing while something waits on the device", 30)
        closed = time.monotonic() - before
        await rig.tier.open()
    return closed


async def a_pending_wait_costs_the_engine_nothing(machine: Machine) -> Found:
    """An engine's short kernels, alone and while a task of ours waits on the device for its timeline, without MPS.

    Kernels of two processes take turns; a context that only waits should take none.
    """
    step = 4096 if machine.fake else NEIGHBOUR_BYTES
    async with open_rig(machine, LATE) as rig, peer(machine) as engine:
        if not await _attached(rig, engine):
            return Found("this device shares no timelines", "wrong")

        async def steps() -> float:
            await engine.ask("busy", step=step)
            await asyncio.sleep(0.02 if machine.fake else 1.0)
            found: dict[str, float] = await engine.ask("rest")
            return found["steps_per_s"]

        alone, after = await steps(), Timeline(3).next()
        waiting = asyncio.ensure_future(_task(rig, after, None))
        await asyncio.sleep(0.05)
        beside = await steps()
        if waiting.done():
            raise Failed("the task did not wait")
        await engine.ask("compute", value=1, after=after)
        await within(waiting, "a task behind a timeline")
        again = await steps()
    share = beside / max((alone + again) / 2, 1e-9)
    figures = {"alone": alone, "beside": beside, "again": again, "share": share}
    note = f"{share:.2f} of the engine's steps beside a pending wait ({alone:.0f} and {again:.0f} a second alone)"
    return Found(note, "right" if machine.fake else "fast" if share >= LEAST_SHARE else "slow", figures)


async def a_full_launch_queue(machine: Machine) -> Found:
    """A stream is held and 2000 fills are submitted: which call blocks, and do others' calls block with it."""
    blocked_at, others_s = await asyncio.to_thread(_fill_a_queue, machine)
    first = "none" if blocked_at is None else str(blocked_at)
    took = f"did not end within {LET_GO_S:.0f} s" if others_s is None else f"took {others_s * 1e3:.1f} ms"
    note = f"first call to block: {first} of {_fills(machine)}; other streams' calls {took}"
    good = others_s is not None and others_s < 0.1
    return Found(note, "right" if good else "slow", {"blocked_at": blocked_at, "others_s": others_s})


def _fills(machine: Machine) -> int:
    return 8 if machine.fake else 2000


def _fill_a_queue(machine: Machine) -> tuple[int | None, float | None]:
    """The first of many fills that takes longer than 10 ms, and the seconds of another stream's calls beside them."""
    driver, context = machine.driver, machine.driver.retain(machine.index)
    slow: list[int] = []
    took: list[float] = []
    with probing(machine) as probe:
        held, free, room, word = probe.stream(), probe.stream(urgent=True), probe.allocate(1 << 21), HeldStreams(probe)
        word.hold(held)

        def submit() -> None:
            with driver.current(context):
                for number in range(_fills(machine)):
                    before = time.monotonic()
                    driver.fill(room, 1, 4096, held)
                    if time.monotonic() - before > 0.01:
                        slow.append(number)

        def other() -> None:
            before = time.monotonic()
            with driver.current(context):
                event = driver.create_event()
                driver.record(event, free)
                driver.synchronize(event)
                driver.destroy_event(event)
            took.append(time.monotonic() - before)

        threads = [threading.Thread(target=submit), threading.Thread(target=other)]
        threads[0].start()
        time.sleep(0.0 if machine.fake else 0.5)  # until the queue is full
        threads[1].start()
        threads[1].join(LET_GO_S)
        beside = took[0] if took else None
        word.let_go()
        for thread in threads:
            thread.join()
        driver.synchronize_stream(held)
    driver.release(machine.index)
    return slow[0] if slow else None, beside


CHECKS = (
    a_rank_that_is_behind_is_waited_for,
    tasks_behind_a_step_of_10_ms,
    two_streams_do_not_wait_for_each_other,
    a_wait_that_nobody_ends_holds_up_nothing,
    a_pending_wait_costs_the_engine_nothing,
)
LAST = (a_full_launch_queue,)  # where the driver holds a lock meanwhile, it takes the process down
