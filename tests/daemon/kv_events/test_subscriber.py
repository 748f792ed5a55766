"""Following other nodes over real sockets: late, through a restart, and what libzmq rejects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.support.announced import announced_hashes
from tests.support.waits import until
from transferd.config.sections import EventsSection, PeerSection
from transferd.daemon.kv_events.sockets import EventSockets
from transferd.daemon.kv_events.subscriber import FollowedNodes
from transferd.errors import ConfigError
from transferd.storage.attention_store.open_index import TokenIndex
from transferd.wire.kv_events import BlockRemoved, BlockStored


class Node:
    """A node that publishes what it stores and removes, and answers snapshots with what it holds."""

    def __init__(self, section: EventsSection) -> None:
        self.held: set[int] = set()
        self.sockets = EventSockets(section)
        self.sockets.start()
        self.sockets.include(lambda: [announced_hashes(0, "GPU", self.held)])

    def store(self, *hashes: int) -> None:
        self.held.update(hashes)
        self.sockets.publish([BlockStored(list(hashes), None, [], 0, None, "GPU", None)], 0)

    def remove(self, *hashes: int) -> None:
        self.held.difference_update(hashes)
        self.sockets.publish([BlockRemoved(list(hashes), "GPU")], 0)


Publish = Callable[[str], Node]


@pytest.fixture
async def publish(tmp_path: Path) -> AsyncIterator[Publish]:
    opened: list[Node] = []

    def start(node: str) -> Node:
        section = EventsSection(endpoint=f"ipc://{tmp_path}/{node}", replay_endpoint=f"ipc://{tmp_path}/{node}.replay")
        opened.append(Node(section))
        return opened[-1]

    yield start
    for node in opened:
        node.sockets.close()


def peer(directory: Path, node: str, *, replay: bool = True) -> PeerSection:
    where = f"ipc://{directory}/{node}.replay" if replay else ""
    return PeerSection(endpoint=f"ipc://{directory}/{node}", replay_endpoint=where)


def believed(index: TokenIndex, node: str) -> dict[str, set[int]]:
    return {place[2]: set(hashes) for place, hashes in index._held.items() if place[:2] == (node, 0) and hashes}


async def test_a_node_that_is_followed_late_is_known_from_its_beginning_and_kept_up_with(
    tmp_path: Path, publish: Publish
) -> None:
    index, node = TokenIndex(), publish("a")
    node.store(1, 2, 3)
    node.remove(2)
    nodes = FollowedNodes({"a": peer(tmp_path, "a"), "b": peer(tmp_path, "b")}, index, 1000)
    nodes.start()
    try:
        await until(lambda: believed(index, "a") == {"GPU": {1, 3}})
        node.store(4)
        await until(lambda: believed(index, "a") == {"GPU": {1, 3, 4}})
        publish("b").store(9)
        await until(lambda: believed(index, "b") == {"GPU": {9}}, "a node that starts later")
        assert believed(index, "a") == {"GPU": {1, 3, 4}}
        told = nodes.statistics()
        assert told.keys() == {"a", "b"}
        assert (told["a"].lost, told["a"].unreadable) == (0, 0)
    finally:
        nodes.close()
    assert believed(index, "a") == believed(index, "b") == {}, "nobody follows them any more"
    nodes.close()


async def test_a_nodes_announcements_go_with_its_connection_and_its_successor_begins_anew(
    tmp_path: Path, publish: Publish
) -> None:
    index, node = TokenIndex(), publish("a")
    nodes = FollowedNodes({"a": peer(tmp_path, "a")}, index, 1000)
    nodes.start()
    try:
        node.store(1)
        await until(lambda: believed(index, "a") == {"GPU": {1}})
        node.sockets.close()
        await until(lambda: believed(index, "a") == {})
        publish("a").store(2)
        await until(lambda: believed(index, "a") == {"GPU": {2}})
    finally:
        nodes.close()


async def test_an_endpoint_that_cannot_be_is_named_and_leaves_no_socket_behind(tmp_path: Path) -> None:
    sections = {"a": peer(tmp_path, "a"), "b": PeerSection(endpoint="tcp://no port")}
    nodes = FollowedNodes(sections, TokenIndex(), 1000)
    with pytest.raises(
        ConfigError, match=r"^storage\.attention_store\.peers\.b: cannot connect: .*\('tcp://no port'\)"
    ):
        nodes.start()
    assert nodes._context is None
    assert all(not node._channels for node in nodes._nodes)
