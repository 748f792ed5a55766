"""The event sockets against subscribers that join late, miss, dawdle, leave and talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.integration.subscriber import WAIT_MS, Batch, BlockStored, Subscriber
from tests.integration.subscriber import BlockRemoved as SubscriberRemoved
from tests.machine.hostile.raw_zmtp import Raw, frame
from tests.support.announced import announced_hashes
from tests.support.waits import until
from transferd.config import Size
from transferd.config.sections import EventsSection, PeerSection
from transferd.daemon.kv_events.announcements import Block
from transferd.daemon.kv_events.snapshot import Announced
from transferd.daemon.kv_events.sockets import END, MAX_PEERS, REPLAY_STEP, SNAPSHOT, EventSockets
from transferd.daemon.kv_events.subscriber import DESCRIPTORS_EACH, OWN_DESCRIPTORS, FollowedNodes
from transferd.errors import ConfigError
from transferd.runtime.clock import Clock
from transferd.runtime.compat import timeout
from transferd.runtime.loop_turns import OneATurn
from transferd.storage.attention_store.open_index import TokenIndex
from transferd.wire.kv_events import BlockRemoved, encode_batch

Open = Callable[..., EventSockets]
Follow = Callable[..., Subscriber]


@pytest.fixture
async def open_sockets(tmp_path: Path) -> AsyncIterator[Open]:
    opened: list[EventSockets] = []

    def open_(*, clock: Clock | None = None, **more: Any) -> EventSockets:
        """Without a clock, batches count from 0, and none greets a subscriber."""
        places = {"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": f"ipc://{tmp_path}/replay"}
        sockets = EventSockets(EventsSection(**(places | more)), clock=clock or Clock(wall=lambda: 0.0))
        if clock is None:
            sockets._greeted = math.inf
        sockets.start()
        opened.append(sockets)
        return sockets

    yield open_
    for sockets in opened:
        sockets.close()


@pytest.fixture
def follow() -> Iterator[Follow]:
    subscribers: list[Subscriber] = []

    def follow_(sockets: EventSockets, **more: Any) -> Subscriber:
        subscribers.append(Subscriber(sockets.endpoint, sockets.replay_endpoint, **more))
        return subscribers[-1]

    yield follow_
    for subscriber in subscribers:
        subscriber.close()


def publish(sockets: EventSockets, number: int, size: int = 1) -> None:
    sockets.publish([BlockRemoved([number] * size, "CPU")], sockets.config.dp_rank)


def numbers(subscriber: Subscriber) -> list[int]:
    return [batch.events[0].block_hashes[0] for batch in subscriber.batches if batch.events]  # type: ignore[union-attr,misc]


async def joined(sockets: EventSockets, subscriber: Subscriber) -> int:
    """Publish until the subscriber hears of it; returns how many batches that took."""
    count = 0
    async with timeout(WAIT_MS / 1000):
        while not subscriber.live():
            publish(sockets, count)
            count += 1
            await asyncio.sleep(0.001)
    return count


async def test_a_subscriber_that_joins_late_asks_for_the_beginning_and_misses_nothing(
    open_sockets: Open, follow: Follow
) -> None:
    sockets = open_sockets(topic="kv@node-1@demo", dp_rank=2)
    for i in range(20):
        publish(sockets, i)
    subscriber = follow(sockets, topic=b"kv@")
    count = 20
    async with timeout(WAIT_MS / 1000):
        while not subscriber.live():
            publish(sockets, count)
            count += 1
            await asyncio.sleep(0.001)
    for i in range(count, count + 10):
        publish(sockets, i)
    await asyncio.to_thread(subscriber.follow, count + 10)
    assert numbers(subscriber) == list(range(count + 10))
    assert subscriber.asked == 1
    assert subscriber.topics == {b"kv@node-1@demo"}
    assert {batch.data_parallel_rank for batch in subscriber.batches} == {2}
    times = [batch.ts for batch in subscriber.batches]
    assert times == sorted(times)


async def test_a_subscriber_that_does_not_read_slows_nobody_and_recovers_by_replay(
    open_sockets: Open, follow: Follow
) -> None:
    sockets = open_sockets()
    subscriber = follow(sockets, hwm=1)
    count = await joined(sockets, subscriber)
    for i in range(count, count + 4000):  # more than sockets and their buffers hold between them
        publish(sockets, i, size=500)
    end = count + 4000
    assert sockets.statistics()["batches"] == end
    following = asyncio.ensure_future(asyncio.to_thread(subscriber.follow, end))
    async with timeout(WAIT_MS / 1000):
        while not following.done():  # what is dropped last is missed by nobody until there is news
            publish(sockets, sockets.statistics()["batches"])
            await asyncio.sleep(0.001)
    await following
    assert numbers(subscriber) == list(range(len(subscriber.batches)))
    assert subscriber.asked >= 1


async def test_numbers_grow_over_a_restart_and_a_subscription_is_greeted_with_a_batch(
    open_sockets: Open, follow: Follow, tmp_path: Path
) -> None:
    now = 1000.0
    places = {"endpoint": f"ipc://{tmp_path}/pub", "clock": Clock(wall=lambda: now)}
    first = open_sockets(**places)
    for i in range(5):
        publish(first, i)
    late = follow(first)
    await asyncio.to_thread(late.step)  # nothing else is published: the greeting shows it what it has missed
    assert (numbers(late), late.asked, late.last) == ([0, 1, 2, 3, 4], 1, 1_000_000_005)
    other = follow(first)
    await asyncio.to_thread(other.step)
    assert numbers(other) == [0, 1, 2, 3, 4]
    first.close()
    now += 0.001
    second = open_sockets(**places)
    publish(second, 7)
    while numbers(late)[-1] != 7:  # it subscribes anew by itself
        await asyncio.to_thread(late.step)
    assert late.last >= 1_000_001_000, "no number comes twice"


async def test_a_subscriber_that_joins_after_batches_were_dropped_gets_all_that_is_announced_with_its_tokens(
    open_sockets: Open, follow: Follow
) -> None:
    sockets = open_sockets(buffer=3, clock=Clock(wall=lambda: 1000.0))
    chain = [Block(i, i - 1 if i else None, True, bytes([i % 256, 0, 0, 0] * 2)) for i in range(3000)]
    sockets.include(lambda: [Announced(0, "STORAGE", chain, 2)])
    for i in range(10):
        publish(sockets, 5000 + i)
    late = follow(sockets)
    await asyncio.to_thread(late.step)
    assert late.index == {"STORAGE": set(range(3000))}
    assert late.tokens == {i: (i - 1 if i else None, [i % 256] * 2) for i in range(3000)}
    assert late.last == 1_000_000_010, "the numbers end where the next batch begins"
    publish(sockets, 7)
    await asyncio.to_thread(late.step)
    assert (late.asked, late.last, late.batches[-1].events) == (1, 1_000_000_011, [SubscriberRemoved([7], "CPU")])


async def test_publishing_without_subscribers_does_not_wait(open_sockets: Open) -> None:
    sockets = open_sockets()
    for i in range(5000):
        publish(sockets, i)
    assert sockets.statistics()["batches"] == 5000


LENGTH = len(encode_batch(1.0, [BlockRemoved([100], "CPU")], 0))  # of every batch in the test below


@pytest.mark.parametrize("bound", [{"buffer": 10}, {"buffer_bytes": Size(10 * LENGTH + 1)}])
async def test_batches_kept_for_replay_are_bounded_in_number_and_bytes(
    open_sockets: Open, follow: Follow, bound: dict[str, Any]
) -> None:
    sockets = open_sockets(**bound)
    for i in range(50, 100):
        publish(sockets, i)
    subscriber = follow(sockets)
    subscriber.last = 0
    came = await asyncio.to_thread(subscriber.catch_up)
    kept = sockets.statistics()
    assert came == kept["kept"] == 10
    assert kept["kept_bytes"] == 10 * LENGTH
    assert numbers(subscriber) == list(range(90, 100))


async def test_asking_beyond_the_end_is_answered_with_the_end(open_sockets: Open, follow: Follow) -> None:
    sockets = open_sockets()
    publish(sockets, 0)
    subscriber = follow(sockets)
    for last in (0, 1000, 2**64 - 2):
        subscriber.last = last
        assert await asyncio.to_thread(subscriber.catch_up) == 0


async def test_batches_published_during_a_replay_are_part_of_it(open_sockets: Open, follow: Follow) -> None:
    sockets = open_sockets()
    for i in range(1000):
        publish(sockets, i)
    subscriber = follow(sockets)
    asking = asyncio.ensure_future(asyncio.to_thread(subscriber.catch_up))
    await until(lambda: bool(sockets._replays), look=0)
    for i in range(1000, 1010):
        publish(sockets, i)
    assert await asking == 1010
    assert numbers(subscriber) == list(range(1010))


async def test_a_req_socket_can_request_a_replay(open_sockets: Open) -> None:
    sockets = open_sockets()
    publish(sockets, 7)
    with zmq.Context() as context, context.socket(zmq.REQ) as ask:
        ask.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        ask.setsockopt(zmq.LINGER, 0)
        ask.connect(sockets.replay_endpoint)
        ask.send((0).to_bytes(8, "big"))
        topic, sequence, payload = await asyncio.to_thread(ask.recv_multipart)
        assert (topic, int.from_bytes(sequence, "big")) == (b"", 0)
        assert payload


async def test_nonsense_is_not_answered_and_does_no_harm(open_sockets: Open) -> None:
    sockets = open_sockets()
    publish(sockets, 7)
    with zmq.Context() as context, context.socket(zmq.DEALER) as ask:
        ask.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        ask.setsockopt(zmq.LINGER, 0)
        ask.connect(sockets.replay_endpoint)
        for frames in ([b""], [b"x" * 8], [b"", b"short"], [b"", b"x" * 200], [b"x", b"y" * 8], [b""] * 500):
            ask.send_multipart(frames)
        ask.send_multipart([b"", (1).to_bytes(8, "big")])
        assert await asyncio.to_thread(ask.recv_multipart) == [b"", b"", END, b""]


async def test_a_replay_to_a_peer_that_does_not_read_is_broken_off(open_sockets: Open, follow: Follow) -> None:
    sockets = open_sockets(buffer=20)
    for i in range(20):
        publish(sockets, i, size=5000)
    with zmq.Context() as context, context.socket(zmq.DEALER) as ask:
        ask.setsockopt(zmq.RCVHWM, 1)
        ask.setsockopt(zmq.LINGER, 0)
        ask.connect(sockets.replay_endpoint)
        for _ in range(100):
            ask.send_multipart([b"", bytes(8)])
        await until(lambda: sockets.statistics()["replays_broken_off"] > 0)
        subscriber = follow(sockets)
        assert await asyncio.to_thread(subscriber.catch_up) == 20


async def test_more_peers_than_are_served_at_once_are_turned_away_and_come_again(open_sockets: Open) -> None:
    sockets = open_sockets()
    for i in range(500):
        publish(sockets, i)
    with zmq.Context() as context:
        peers = [context.socket(zmq.DEALER) for _ in range(MAX_PEERS + 20)]
        for peer in peers:
            peer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
            peer.setsockopt(zmq.LINGER, 0)
            peer.connect(sockets.replay_endpoint)
            peer.send_multipart([b"", bytes(8)])

        def served() -> int:
            return int(sockets.statistics()["replays"])

        await until(lambda: served() + sockets.statistics()["replays_broken_off"] == len(peers))
        assert served() >= MAX_PEERS
        for peer in peers:
            before = served()
            peer.send_multipart([b"", (499).to_bytes(8, "big")])
            await until(lambda before=before: served() == before + 1)  # type: ignore[misc]
        for peer in peers:
            peer.close()


async def test_a_peer_that_leaves_during_its_replay_is_forgotten(open_sockets: Open) -> None:
    sockets = open_sockets()
    for i in range(3000):
        publish(sockets, i)
    with zmq.Context() as context, context.socket(zmq.DEALER) as ask:
        ask.setsockopt(zmq.LINGER, 0)
        ask.connect(sockets.replay_endpoint)
        ask.send_multipart([b"", bytes(8)])
        await until(lambda: bool(sockets._replays), look=0)
    await until(lambda: not sockets._replays)


async def test_a_peer_that_leaves_before_the_turn_after_its_last_batch_counts_once(
    open_sockets: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets, turn = open_sockets(), OneATurn.turn
    turns = 0

    async def leaves_before_the_second(self: OneATurn) -> None:
        nonlocal turns
        turns += 1
        if turns == 2:
            [peer] = sockets._replays
            peer.end()
        await turn(self)

    monkeypatch.setattr(OneATurn, "turn", leaves_before_the_second)
    for i in range(REPLAY_STEP - 1):  # and the end
        publish(sockets, i)
    with zmq.Context() as context, context.socket(zmq.DEALER) as ask:
        ask.setsockopt(zmq.LINGER, 0)
        ask.connect(sockets.replay_endpoint)
        ask.send_multipart([b"", bytes(8)])
        await until(lambda: bool(sockets._serving), look=0)
        [serving] = sockets._serving.running
        await serving
    counts = sockets.statistics()
    assert (turns, counts["replays"], counts["replays_broken_off"]) == (2, 0, 1)


async def test_the_error_about_an_address_in_use_names_its_key_and_nothing_stays_bound(
    open_sockets: Open, tmp_path: Path
) -> None:
    first = open_sockets()
    again = EventSockets(EventsSection(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=first.replay_endpoint))
    with pytest.raises(ConfigError, match=r"events\.replay_endpoint: is in use by another daemon"):
        again.start()
    open_sockets(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint="")
    with pytest.raises(ConfigError, match=r"events\.endpoint: is in use"):
        EventSockets(EventsSection(endpoint=first.endpoint)).start()


async def test_after_close_nothing_is_sent_and_the_addresses_are_free(open_sockets: Open, tmp_path: Path) -> None:
    sockets = open_sockets()
    publish(sockets, 1)
    sockets.close()
    publish(sockets, 2)
    assert sockets.statistics()["batches"] == 1
    assert not (tmp_path / "replay").exists()
    open_sockets()


async def test_connections_are_bounded(open_sockets: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transferd.wire.acceptor.most_connections", lambda _: 16)
    sockets = open_sockets(endpoint=f"ipc://{tmp_path}/pub")
    for number, name in enumerate(("pub", "replay"), start=1):
        with contextlib.ExitStack() as crowd:
            for _ in range(64):
                crowd.enter_context(socket.socket(socket.AF_UNIX)).connect(str(tmp_path / name))
            await until(lambda number=number: sockets.refused()["too_many_connections"] >= 16 * number)  # type: ignore[misc]


async def test_a_replay_waits_for_its_reader_and_ends_with_one_that_reads_nothing(
    open_sockets: Open, follow: Follow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.daemon.kv_events.sockets.REPLAY_PATIENCE_S", 0.3)
    monkeypatch.setattr("transferd.daemon.kv_events.sockets.REPLAY_UNREAD", 10_000)
    sockets = open_sockets()
    for i in range(500):
        publish(sockets, i, size=1000)
    with await asyncio.to_thread(Raw, sockets.replay_endpoint) as deaf:
        deaf.socket.sendall(frame(b"", 1) + frame(bytes(8)))
        await until(lambda: bool(sockets._behind))
        await until(lambda: sockets.refused()["unread_answers"] == 1)
    assert not sockets._replays
    monkeypatch.setattr("transferd.daemon.kv_events.sockets.REPLAY_PATIENCE_S", 60.0)  # one that reads may be slow
    subscriber = follow(sockets)
    assert await asyncio.to_thread(subscriber.catch_up) == 500


def snapshot_of(sockets: EventSockets) -> tuple[int, list[tuple[int | None, str | None, int | bytes]], int]:
    """Request a snapshot: its number, the announcements (rank, medium, hash), and how many batches came after it."""
    announced: list[tuple[int | None, str | None, int | bytes]] = []
    after = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(sockets.replay_endpoint)
        dealer.send_multipart([b"", SNAPSHOT])
        _, _, number, start = dealer.recv_multipart()
        assert number == SNAPSHOT
        while True:
            _, _, number, payload = dealer.recv_multipart()
            if number == END:
                return int.from_bytes(start, "big"), announced, after
            if number != SNAPSHOT:
                after += 1
                continue
            batch = msgspec.msgpack.decode(payload, type=Batch)
            for event in batch.events:
                assert isinstance(event, BlockStored)
                announced += [(batch.data_parallel_rank, event.medium, hash_) for hash_ in event.block_hashes]


async def test_a_snapshot_has_every_announcement_of_every_engine_and_the_number_to_go_on_from(
    open_sockets: Open,
) -> None:
    sockets = open_sockets(buffer=10)
    first = {"GPU": set(range(5)), "STORAGE": set(range(2**64 - 3000, 2**64))}
    sockets.include(lambda: [announced_hashes(0, medium, hashes) for medium, hashes in first.items()])
    second = lambda: publish(sockets, 7) or [announced_hashes(3, "CPU", {9})]  # noqa: E731 - it publishes what is pending first
    sockets.include(second)
    for i in range(30):
        publish(sockets, i)
    start, announced, after = await asyncio.to_thread(snapshot_of, sockets)
    assert start == sockets.statistics()["batches"] == 31
    assert after == 0
    wanted = {(0, medium, hash_) for medium, hashes in first.items() for hash_ in hashes} | {(3, "CPU", 9)}
    assert len(announced) == len(wanted)
    assert set(announced) == wanted
    sockets.exclude(second)
    start, announced, _ = await asyncio.to_thread(snapshot_of, sockets)
    assert start == 31
    assert set(announced) == wanted - {(3, "CPU", 9)}
    assert sockets.statistics()["snapshots"] == 2


async def test_peers_that_ask_for_a_snapshot_at_once_share_one(open_sockets: Open) -> None:
    sockets = open_sockets()
    taken = []

    def announcements() -> list[Announced]:
        taken.append(1)
        return [announced_hashes(0, "STORAGE", range(500_000))]

    sockets.include(announcements)
    answers = await asyncio.gather(*(asyncio.to_thread(snapshot_of, sockets) for _ in range(4)))
    assert all(len(announced) == 500_000 for _, announced, _ in answers)
    assert len(taken) < 4
    assert sockets.statistics()["snapshots"] == 4


FOLLOW_TWO_HUNDRED = """
import asyncio, os, sys

from tests.support.waits import until
from transferd.config.sections import PeerSection
from transferd.daemon.kv_events.subscriber import FollowedNodes
from transferd.storage.attention_store.open_index import TokenIndex


async def follow(endpoint, replay_endpoint):
    section = PeerSection(endpoint=endpoint, replay_endpoint=replay_endpoint)
    nodes = FollowedNodes({f"node-{i}": section for i in range(200)}, TokenIndex(), 10_000)
    before = [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]
    nodes.start()
    await until(lambda: all(peer.snapshots for peer in nodes.statistics().values()), within=60)
    after = [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]
    nodes.close()
    print("opened", after[0] - before[0], after[1] - before[1])


asyncio.run(follow(*sys.argv[1:]))
"""


async def test_two_hundred_followed_nodes_share_one_context(open_sockets: Open, tmp_path: Path) -> None:
    sockets = open_sockets(endpoint=f"ipc://{tmp_path}/pub", buffer=4)
    publish(sockets, 0)
    # A process of its own: nothing else starts threads or opens files in it meanwhile.
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FOLLOW_TWO_HUNDRED, sockets.endpoint, sockets.replay_endpoint, stdout=subprocess.PIPE
    )
    async with timeout(60 + WAIT_MS / 1000):
        told, _ = await child.communicate()
    assert child.returncode == 0
    threads, descriptors = map(int, told.decode().rsplit("opened", 1)[1].split())
    assert threads == 2  # for the sockets, and to free them
    assert 200 * 4 < descriptors <= OWN_DESCRIPTORS + DESCRIPTORS_EACH * 200, "what it asks for before it starts"


async def test_two_hundred_nodes_that_follow_late_know_everything(
    open_sockets: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transferd.daemon.kv_events.subscriber.ASK_AGAIN_S", 0.5)  # more ask at once than are answered
    sockets = open_sockets(endpoint=f"ipc://{tmp_path}/pub", buffer=4)
    held = {"STORAGE": set(range(800))}
    sockets.include(lambda: [announced_hashes(0, medium, hashes) for medium, hashes in held.items()])
    for i in range(20):
        publish(sockets, i)
    section = PeerSection(endpoint=sockets.endpoint, replay_endpoint=sockets.replay_endpoint)
    index = TokenIndex()
    nodes = FollowedNodes({f"node-{i}": section for i in range(200)}, index, 10_000)
    try:
        nodes.start()
        await until(lambda: all(peer.snapshots for peer in nodes.statistics().values()), within=WAIT_MS / 1000)
        await until(lambda: all(index.blocks_of(f"node-{i}") == 800 for i in range(200)), within=WAIT_MS / 1000)
        held["STORAGE"].remove(5)
        sockets.publish([BlockRemoved([5], "STORAGE")], 0)
        await until(lambda: all(index.blocks_of(f"node-{i}") == 799 for i in range(200)), within=WAIT_MS / 1000)
    finally:
        nodes.close()
    assert not any(index.blocks_of(f"node-{i}") for i in range(200))
