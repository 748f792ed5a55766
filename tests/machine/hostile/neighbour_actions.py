"""What hostile peers do to the other daemons of the campaign (neighbours.py): at `pd.listen`, and with memory."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from tests.integration.caches import attach, fill, snapshot, wipe
from tests.integration.test_token_storage import path_of, read, write
from tests.machine.hostile import transfer_peers
from tests.machine.hostile.accounts import be_visible
from tests.machine.hostile.memory_actions import PAGE
from tests.machine.hostile.neighbours import LONG_KEYS
from tests.machine.hostile.place import SHARED, Place, Report, fresh_name
from transferd import Client, Engine, Pages, ReadStorageTask, Status, TransferError
from transferd.runtime.compat import wait_for
from transferd.storage.peer.messages import Done, Landed, PeerMessage, Post, PostedSlot, Want, Withdraw, encode
from transferd.tasks import ErrorInfo
from transferd.tiers.base import DeviceHandle
from transferd.tiers.owner import as_data, this_process

Action = Callable[[Place, random.Random, Report], Coroutine[Any, Any, None]]
Attack = Callable[[transfer_peers.Address, contextlib.ExitStack], None]
BACK_S = 20.0  # until lost memory is made anew
BLOCKS = [1, 2, 3, 4]
SPARSE = 512 * 1024**2  # more than the control group of the daemon on files has
LONG_TASKS = 256


def at_transfers(attack: Attack) -> Action:
    """An attack on `pd.listen`, as an action."""

    @functools.wraps(attack)
    async def action(place: Place, chance: random.Random, report: Report) -> None:
        with contextlib.ExitStack() as stack:
            await asyncio.to_thread(attack, transfer_address(place), stack)
            report.told.append("sent")

    action.__name__ = f"{attack.__name__}_at_transfers"
    return action


def transfer_address(place: Place) -> transfer_peers.Address:
    host, _, port = place.transfers.rpartition(":")
    return host, int(port)


async def lie_about_transfers(place: Place, chance: random.Random, report: Report) -> None:
    """Messages of transfers that are nobody's, out of order, spoilt, and such as only a sender may send."""
    text = "".join(chance.choices("abc\0\u00e9\U0001f600", k=20))
    share = (chance.choice(["t", "", text, "x" * 1024]), chance.choice([0, 1, -1, 2**63 - 1]), chance.randrange(-1, 5))
    slots = [PostedSlot(text, 2**64 - 1, 2**40)] * 20
    messages: list[PeerMessage] = [
        *(Want(*share, [text] * 50, text), Want(*share, [], "x", version=9), Done(*share), Post(*share, slots)),
        *(Withdraw(*share, ErrorInfo("device_lost", text)), Landed(*share, [text], ErrorInfo("device_lost", text))),
    ]
    with contextlib.ExitStack() as stack:
        for peer in transfer_peers.peers(transfer_address(place), 20, stack):
            said = b"".join(encode(chance.choice(messages)) for _ in range(30))
            if chance.random() < 0.5:
                spoilt = bytearray(said)
                for _ in range(8):
                    spoilt[chance.randrange(len(spoilt))] = chance.randrange(256)
                said = bytes(spoilt)
            with contextlib.suppress(OSError):
                peer.sendall(said[: chance.randrange(1, len(said))])
        await asyncio.sleep(0.3)


async def truncate_below_the_sdk(place: Place, chance: random.Random, report: Report) -> None:
    """Truncate the memory that a daemon made, while AttentionStore's SDK moves blocks of it: those tasks fail alone."""
    async with Client(place.tokens, connect_timeout=BACK_S) as client:
        anew = asyncio.Event()
        client.on_new_boot = anew.set
        caches, path = await attach(client), path_of(chance.randrange(4), len(BLOCKS))
        fill(caches, BLOCKS, seed=chance.getrandbits(32))
        before, mark = snapshot(caches, BLOCKS), os.urandom(4).hex()
        if (done := await client.submit(write(f"{mark} w", path, BLOCKS))).status is not Status.OK:
            report.wrong.append(f"a write was {done.status} {done.error}")
        moving = [
            asyncio.ensure_future(client.submit((read if number % 2 else write)(f"{mark} {number}", path, BLOCKS)))
            for number in range(8)
        ]
        await asyncio.sleep(chance.random() / 20)
        names = _truncated(chance)
        results = [await task for task in moving]
        results += [await client.submit(kind(f"{mark} last {kind.__name__}", path, BLOCKS)) for kind in (read, write)]
        codes = {result.error.code if result.error else str(result.status) for result in results}
        report.told.append(f"{len(names)} truncated: {sorted(codes)}")
        if codes - {"ok", "device_lost", "not_attached"} or results[-1].status is Status.OK:
            report.wrong.append(f"over memory that was truncated, tasks were {sorted(codes)}")
        await wait_for(anew.wait(), BACK_S)
        made = await client.reattach(BACK_S)
        caches = [made[rank] for rank in range(2)]
        wipe(caches, BLOCKS)
        found = await client.submit(read(f"{mark} again", path, BLOCKS))
        if found.status is not Status.OK or snapshot(caches, BLOCKS) != before:
            report.wrong.append(f"after memory was made anew, a read was {found.status} {found.error}")


def _truncated(chance: random.Random) -> list[str]:
    """Truncate what this user may of the memory that daemons made. Its names."""
    names = []
    for entry in os.scandir(SHARED):
        with contextlib.suppress(PermissionError, FileNotFoundError):
            if entry.name.startswith("transferd.rank"):
                os.truncate(entry.path, chance.choice([0, 1, 4096]))
                names.append(entry.name)
    if not names:
        raise TransferError("there is no memory that this user may truncate")
    return names


async def offer_more_than_the_group_has(place: Place, chance: random.Random, report: Report) -> None:
    """Sparse memories, whose pages would count as the daemon's: one alone, and several together, are too much."""
    be_visible()
    told: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        for nbytes in chance.sample([SPARSE, *[SPARSE // 8] * 10], 11):
            fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            stack.callback(os.close, fd)
            os.ftruncate(fd, nbytes)
            data = {"fd": fd, "nbytes": nbytes, "segments": [[0, PAGE]], "owner": as_data(this_process())}
            layout = Pages(layers=1, page_bytes=PAGE, blocks=nbytes // PAGE, identity="sparse")
            client = await stack.enter_async_context(Client(place.members, engine=fresh_name(), await_ready=False))
            try:
                await client.register(Engine(ranks=1, model="sparse", layout=layout))
                stack.push_async_callback(client.unregister)
                await client.offer(0, DeviceHandle("shm", data))
                told["taken"] += 1
            except TransferError as error:
                told[error.reason] += 1
    report.told.append(f"{dict(told)}")


async def trace_long_tasks(place: Place, chance: random.Random, report: Report) -> None:
    """Tasks of many blocks, each of which ends at once, and has a span that waits for a collector."""
    keys, blocks = [f"{chance.getrandbits(64):016x}" for _ in range(LONG_KEYS)], list(range(LONG_KEYS))
    told: Counter[str] = Counter()
    async with Client(place.members, await_ready=False) as client:
        await client.device_handle(0)  # its memory may have been truncated, and nobody has noticed yet
        for _ in range(LONG_TASKS):
            task = ReadStorageTask(task_id=fresh_name(), keys=keys, gpu_block_ids=blocks, timeout=5)
            result = await client.submit(task)
            told[result.error.message if result.error else str(result.status)] += 1
    report.told.append(f"{dict(told)}")
