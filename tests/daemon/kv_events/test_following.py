"""Following a publisher: gaps, restarts, replays that lose, and batches that nobody can read."""

from __future__ import annotations

import os
import random

import msgspec
import pytest

from tests.support.announced import announced_hashes
from transferd.daemon.kv_events import following
from transferd.daemon.kv_events.following import END, SNAPSHOT, Follower
from transferd.daemon.kv_events.snapshot import Snapshot
from transferd.storage.attention_store.open_index import TokenIndex
from transferd.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, encode_batch


def stored(*hashes: int) -> BlockStored:
    return BlockStored(list(hashes), None, [], 0, None, "GPU", None)


class Publisher:
    """The other end: numbers its batches, keeps some, and answers what it is asked when the test says so."""

    def __init__(
        self,
        index: TokenIndex,
        *,
        keep: int = 1000,
        replay: bool = True,
        max_blocks: int = 1000,
        snapshots: bool = True,
        outrun: int = 0,
    ) -> None:
        """outrun: how many snapshots are followed by so many batches that those after the snapshot are gone."""
        self.index = index
        self.keep = keep
        self.batches: list[bytes] = []
        self.asked: list[int] = []
        self.truth: set[int] = set()
        self.snapshots = snapshots
        self.outrun = outrun
        self.follower = Follower(index, "node", max_blocks, self.asked.append if replay else None)

    def publish(self, *events: KvEvent, heard: bool = True) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.truth |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self.truth -= set(event.block_hashes)
            else:
                self.truth.clear()
        self.batches.append(encode_batch(1.0, events, 0))
        if heard:
            self.follower.live(len(self.batches) - 1, self.batches[-1])

    def answer(self) -> None:
        """Everything that was asked for, in order, each with its end."""
        while self.asked:
            wanted = self.asked.pop(0)
            if wanted == SNAPSHOT and self.snapshots:
                wanted = self.send_snapshot()
            first = len(self.batches) if wanted == SNAPSHOT else max(wanted, len(self.batches) - self.keep)
            for sequence in range(first, len(self.batches)):
                self.follower.replayed(sequence, self.batches[sequence])
            self.follower.replayed(END, b"")

    def send_snapshot(self) -> int:
        """Send what is announced now; the number of the first batch after it."""
        snapshot = Snapshot(len(self.batches), [announced_hashes(0, "GPU", self.truth)], 1.0)
        self.follower.replayed(SNAPSHOT, snapshot.sequence.to_bytes(8, "big"))
        for payload in snapshot.hashes():
            self.follower.replayed(SNAPSHOT, payload)
        if self.outrun:
            self.outrun -= 1
            for i in range(self.keep + 1):
                self.publish(stored(1000 + i))
        return snapshot.sequence

    @property
    def believed(self) -> set[int]:
        return set(self.index._held.get(("node", 0, "GPU"), set()))


@pytest.fixture
def publisher() -> Publisher:
    return Publisher(TokenIndex())


def test_a_follower_that_joins_late_has_everything_after_its_replay(publisher: Publisher) -> None:
    for i in range(5):
        publisher.publish(stored(i), heard=False)
    publisher.follower.connected()
    assert publisher.asked == [SNAPSHOT]
    publisher.publish(BlockRemoved([1], "GPU"))  # live, while the replay is under way: put aside
    assert publisher.believed == set()
    publisher.answer()
    assert publisher.believed == {0, 2, 3, 4}
    publisher.publish(stored(9))
    assert publisher.believed == {0, 2, 3, 4, 9}
    assert publisher.asked == []


def test_a_gap_is_asked_for_and_filled_in_order(publisher: Publisher) -> None:
    publisher.follower.connected()
    publisher.answer()
    publisher.publish(stored(1))
    publisher.publish(stored(2), heard=False)
    publisher.publish(BlockRemoved([2], "GPU"), heard=False)
    publisher.publish(stored(3))
    assert publisher.asked == [1]
    assert publisher.believed == {1}
    assert publisher.follower.counts.snapshots == 1
    publisher.answer()
    assert publisher.believed == {1, 3}
    assert publisher.follower.counts.lost == 0


def test_live_batches_that_a_replay_contained_are_skipped(publisher: Publisher) -> None:
    publisher.publish(stored(1), heard=False)
    publisher.publish(stored(2), heard=False)
    publisher.follower.connected()
    publisher.answer()
    for sequence in (0, 1):  # the live stream had them in its queue
        publisher.follower.live(sequence, publisher.batches[sequence])
    assert publisher.believed == {1, 2}
    assert publisher.follower.counts.replays == 0


def test_a_sequence_that_goes_back_is_another_daemon(publisher: Publisher) -> None:
    publisher.follower.connected()
    publisher.answer()
    publisher.publish(stored(1))
    publisher.publish(stored(2))
    publisher.batches.clear()
    publisher.truth.clear()
    publisher.publish(stored(7))
    assert publisher.believed == set()
    publisher.answer()
    assert publisher.believed == {7}


def test_a_broken_connection_drops_the_nodes_blocks(publisher: Publisher) -> None:
    publisher.follower.connected()
    publisher.answer()
    publisher.publish(stored(1))
    publisher.follower.disconnected()
    assert publisher.believed == set()
    publisher.publish(stored(2), heard=False)
    publisher.follower.connected()
    publisher.answer()
    assert publisher.believed == {1, 2}


def test_a_late_follower_learns_what_no_kept_batch_contains() -> None:
    publisher = Publisher(TokenIndex(), keep=2, max_blocks=10_000)
    for i in range(3000):  # in several batches of the snapshot
        publisher.publish(stored(i), heard=False)
    publisher.follower.connected()
    publisher.publish(BlockRemoved([1], "GPU"))
    publisher.answer()
    publisher.publish(stored(5000))
    assert publisher.believed == publisher.truth
    assert len(publisher.believed) == 3000
    assert publisher.follower.counts.lost == 0


def test_a_gap_that_replays_cannot_fill_is_filled_by_a_snapshot() -> None:
    publisher = Publisher(TokenIndex(), keep=2)
    publisher.follower.connected()
    publisher.answer()
    publisher.publish(stored(1))
    publisher.publish(BlockRemoved([1], "GPU"), heard=False)
    for i in range(2, 7):
        publisher.publish(stored(i), heard=False)
    publisher.publish(stored(7))
    publisher.answer()
    assert publisher.believed == publisher.truth == {2, 3, 4, 5, 6, 7}
    assert publisher.follower.counts.lost == 1
    assert publisher.asked == []


@pytest.mark.parametrize("outrun", [1, 2, 3, 10])
def test_batches_that_outrun_a_snapshot_are_asked_for_again_but_not_for_ever(outrun: int) -> None:
    publisher = Publisher(TokenIndex(), keep=2, outrun=outrun)
    publisher.publish(stored(1), stored(2), heard=False)
    publisher.follower.connected()
    publisher.answer()
    assert publisher.asked == []
    assert publisher.follower.counts.snapshots == min(outrun + 1, following.SNAPSHOTS_IN_A_ROW)
    assert publisher.believed <= publisher.truth
    if outrun < following.SNAPSHOTS_IN_A_ROW:
        assert publisher.believed == publisher.truth
    else:  # the next gap begins anew
        publisher.outrun = 0
        for _ in range(5):
            publisher.publish(stored(3), heard=False)
        publisher.publish(stored(4))
        publisher.answer()
        assert publisher.believed == publisher.truth


def test_answers_to_a_request_that_was_given_up_are_not_taken_for_those_of_the_next(publisher: Publisher) -> None:
    publisher.publish(stored(1), heard=False)
    publisher.follower.connected()
    publisher.answer()
    publisher.publish(stored(2), heard=False)
    publisher.publish(stored(3))  # asks for batch 1
    publisher.follower.disconnected()
    publisher.publish(BlockRemoved([2], "GPU"), heard=False)
    publisher.follower.connected()
    assert publisher.asked == [1, SNAPSHOT]
    publisher.answer()
    assert publisher.believed == publisher.truth == {1, 3}


def test_a_snapshot_that_begins_with_something_else_is_unreadable(publisher: Publisher) -> None:
    publisher.follower.connected()
    publisher.follower.replayed(SNAPSHOT, b"not a number")
    assert publisher.follower.counts.unreadable == 1
    publisher.answer()
    publisher.publish(stored(1))
    assert publisher.believed == {1}


def test_a_publisher_without_snapshots_is_asked_for_its_batches() -> None:
    publisher = Publisher(TokenIndex(), snapshots=False)
    publisher.publish(stored(1), heard=False)
    publisher.follower.connected()
    publisher.answer()
    assert publisher.believed == {1}
    assert publisher.follower.counts.replays == 1


def test_batches_too_old_for_a_replay_are_lost_and_older_blocks_are_dropped() -> None:
    publisher = Publisher(TokenIndex(), keep=2, snapshots=False)
    publisher.follower.connected()
    publisher.answer()
    publisher.publish(stored(1))
    for i in range(2, 7):
        publisher.publish(stored(i), heard=False)
    publisher.publish(stored(7))
    publisher.answer()
    assert publisher.believed == {6, 7}  # 1 may have been withdrawn meanwhile
    assert publisher.follower.counts.lost == 1


def test_without_a_replay_endpoint_a_gap_begins_anew() -> None:
    publisher = Publisher(TokenIndex(), replay=False)
    publisher.follower.connected()
    publisher.publish(stored(1))
    publisher.publish(stored(2), heard=False)
    publisher.publish(stored(3))
    assert publisher.believed == {3}
    assert publisher.asked == []


def test_a_replay_that_does_not_come_is_asked_for_again(publisher: Publisher) -> None:
    publisher.publish(stored(1), heard=False)
    publisher.follower.connected()
    publisher.asked.clear()  # it got lost
    publisher.follower.unanswered()
    assert publisher.asked == [SNAPSHOT]
    publisher.answer()
    assert publisher.believed == {1}
    publisher.follower.unanswered()
    assert publisher.asked == []


def test_live_batches_that_wait_for_a_replay_are_bounded(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "MAX_ASIDE_BYTES", 500)
    publisher.follower.connected()
    for i in range(100):
        publisher.publish(stored(i))
    assert publisher.follower._aside_bytes <= 500
    publisher.answer()
    assert publisher.believed == publisher.truth


def test_a_node_that_announces_without_end_is_forgotten_and_begins_anew() -> None:
    publisher = Publisher(TokenIndex(), max_blocks=10)
    publisher.follower.connected()
    publisher.answer()
    publisher.publish(stored(*range(10)))
    assert len(publisher.believed) == 10
    publisher.publish(stored(11))
    assert publisher.believed == set()
    publisher.publish(stored(12))
    assert publisher.believed == {12}


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockStored", "block_hashes": "x"}]]),
    ],
)
def test_an_unreadable_batch_is_counted_and_skipped(publisher: Publisher, payload: bytes) -> None:
    publisher.follower.connected()
    publisher.answer()
    publisher.publish(stored(1))
    publisher.batches.append(payload)
    publisher.follower.live(1, payload)
    assert publisher.follower.counts.unreadable == 1
    publisher.publish(stored(2))
    assert publisher.believed == {1, 2}


def test_events_of_other_publishers_are_understood(publisher: Publisher) -> None:
    publisher.follower.connected()
    publisher.answer()
    events = [
        {"type": "BlockStored", "block_hashes": [b"\0" * 24 + (5).to_bytes(8, "big"), -1], "group_idx": 0},
        {"type": "BlockStored", "block_hashes": [6], "medium": "CPU", "extra_keys": [None]},
        {"type": "SomethingNew", "block_hashes": [7]},
        {"type": "BlockRemoved", "block_hashes": [2**64 - 1], "medium": None},
    ]
    publisher.batches.append(msgspec.msgpack.encode([1.0, events, 0, "more"]))
    publisher.follower.live(0, publisher.batches[0])
    assert publisher.index.locate([5]) == {"node": {"GPU": 1, "any": 1}}
    assert publisher.index.locate([6]) == {"node": {"CPU": 1, "any": 1}}
    assert publisher.index.locate([7]) == publisher.index.locate([2**64 - 1]) == {}


def test_after_any_losses_the_index_is_right_once_traffic_stops() -> None:
    seed = int(os.environ.get("SEED", "7"))
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(200):
        snapshots = rng.random() < 0.5
        publisher = Publisher(TokenIndex(), keep=rng.choice([3, 1000]), snapshots=snapshots)
        up = False
        for _ in range(rng.randint(1, 60)):
            what = rng.random()
            if what < 0.08:
                up = not up
                if up:
                    publisher.follower.connected()
                else:
                    publisher.asked.clear()  # of a connection that is gone
                    publisher.follower.disconnected()
            elif what < 0.3 and up:
                publisher.answer()
            else:
                some = [rng.randrange(20) for _ in range(rng.randint(1, 3))]
                events: list[KvEvent] = [stored(*some), BlockRemoved(some, "GPU"), AllBlocksCleared()]
                publisher.publish(rng.choices(events, [6, 4, 1])[0], heard=up and rng.random() < 0.7)
        if not up:
            assert publisher.believed == set()
            publisher.follower.connected()
        publisher.publish(BlockRemoved([99], "GPU"))  # news show the last gap
        publisher.answer()
        publisher.follower.unanswered()  # time passes: answers that were lost with a connection are asked for again
        publisher.answer()
        if publisher.keep == 1000 or snapshots:
            assert publisher.believed == publisher.truth
        else:
            assert publisher.believed <= publisher.truth


def test_a_clear_of_one_engine_leaves_the_blocks_of_the_node_s_others() -> None:
    index = TokenIndex()
    follower = Follower(index, "node", 1000, None)
    for number, (event, engine) in enumerate([(stored(1), 0), (stored(2), 1), (AllBlocksCleared(), 0)]):
        follower.live(number, encode_batch(1.0, [event], engine))
    assert index.locate([1]) == {}
    assert index.locate([2]) == {"node": {"GPU": 1, "any": 1}}


def test_a_batch_that_comes_before_the_connection_is_known_is_no_loss() -> None:
    """The greeting of a new subscription: its number is far from nought, and nothing was known that could be lost."""
    index = TokenIndex()
    publisher = Publisher(index, keep=2)
    publisher.publish(stored(1), heard=False)
    for number in range(2, 6):
        publisher.publish(stored(number), heard=False)
    publisher.publish()
    assert publisher.asked == [SNAPSHOT]
    publisher.follower.connected()
    publisher.answer()
    assert (publisher.follower.counts.lost, publisher.follower.counts.snapshots) == (0, 1)
