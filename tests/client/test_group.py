"""What a group does with its nodes' answers and silences, each node a stub that answers when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.support.bodies import tag_of
from transferd.client.client import Client
from transferd.client.group import GroupClient
from transferd.errors import Closed, DaemonLost, HandoverFailed, RequestError, TransferError
from transferd.tasks import ErrorInfo, LevelChange, RankResult, ReadStorageTask, Status, Task, TaskResult
from transferd.wire import protocol as wire
from transferd.wire.answers import Purged
from transferd.wire.protocol import Identity

TASK = ReadStorageTask(task_id="t", keys=["a", "b"], gpu_block_ids=[4, 5])


class Node:
    """In a Client's place.

    asked: what was asked of it, in order. named: the task ids given with that.
    fails: which requests raise, and what.
    """

    def __init__(self, number: int, engine: dict[str, Any] | None = None) -> None:
        self.endpoint = f"tcp://node-{number}:1"
        self.connected = True
        self.asked: list[str] = []
        self.named: list[str] = []
        self.fails: dict[str, TransferError] = {}
        self.answers: dict[str, Any] = {}
        self.result: asyncio.Future[TaskResult] = asyncio.get_running_loop().create_future()
        alike: dict[str, Any] = {
            "model": "m",
            "fingerprint": "f",
            "ranks": 2,
            "first_rank": 2 * number,
            "group_ranks": 4,
        }
        said = alike | {"generation": "g"} | (engine or {})
        self.answers["stats"] = {"engines": {"default": dict(said)}}
        self.generation = said.pop("generation")
        self.identity: Identity | None = Identity(**said)
        self.used_as: list[Identity] = []
        self.used = self.used_as.append

    async def _ask(self, what: str | wire.ControlRequest, timeout: float = 0.0) -> Any:
        what = what if isinstance(what, str) else tag_of(type(what))
        self.asked.append(what)
        if what in self.fails:
            raise self.fails[what]
        if what == "cancel" and self.answers.get(what) and not self.result.done():
            self.ends(Status.CANCELLED, code="cancelled")
        return self.answers.get(what)

    async def push(self, task: Task) -> asyncio.Future[TaskResult]:
        await self._ask("push")
        return self.result

    def __getattr__(self, name: str) -> Any:
        async def ask(*_: Any, task_id: str = "", **__: Any) -> Any:
            self.named += [task_id] if task_id else []
            return await self._ask(name)

        return ask

    def ends(self, status: Status, blocks: Sequence[int] = (), code: str = "", ranks: int = 0, **more: Any) -> None:
        error = ErrorInfo(code, "why") if code else None
        shares = [RankResult(rank=rank, status=status, blocks=len(blocks)) for rank in range(ranks)]
        result = TaskResult(
            task_id="t", status=status, block_ids=list(blocks), ranks=shares, error=error, generation="g"
        )
        self.result.set_result(msgspec.structs.replace(result, **more))


async def group_of(*nodes: Node) -> GroupClient:
    group = GroupClient([node.endpoint for node in nodes])
    group.clients = list(nodes)  # type: ignore[arg-type]
    await group.connect()
    return group


async def test_a_task_ends_when_every_node_has_answered_and_not_before() -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)
    pushed = await group.push(TASK)
    one.ends(Status.OK, [4, 5], ranks=2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not pushed.done()
    two.ends(Status.PARTIAL, [4], ranks=2)
    result = await pushed
    assert (result.status, result.block_ids) == (Status.PARTIAL, [4])
    assert [rank.rank for rank in result.ranks] == [0, 1, 2, 3]
    assert "cancel" not in one.asked + two.asked, "a read that found less is no reason to stop the others"


@pytest.mark.parametrize(("status", "code"), [(Status.FAILED, "daemon_lost"), (Status.BUSY, "queue_full")])
async def test_if_a_node_takes_no_part_the_others_cancel_the_task(status: Status, code: str) -> None:
    one, two = Node(0), Node(1)
    one.answers["cancel"] = True
    group = await group_of(one, two)
    pushed = await group.push(TASK)
    two.ends(status, code=code)
    result = await pushed
    assert one.asked[-2:] == ["push", "cancel"]
    assert "cancel" not in two.asked
    assert (result.status, result.error and result.error.code) == (status, code)
    assert result.error is not None
    assert two.endpoint in result.error.message


async def test_a_node_that_takes_no_push_takes_no_part_and_the_others_cancel_the_task() -> None:
    """The error of one push used to be raised, while the other nodes went on with the task."""
    one, two = Node(0), Node(1)
    one.answers["cancel"] = True
    two.fails["push"] = Closed("this client was closed")
    group = await group_of(one, two)
    result = await group.submit(TASK)
    assert one.asked[-2:] == ["push", "cancel"]
    assert (result.status, result.error and result.error.code) == (Status.FAILED, Closed.code)
    assert two.endpoint in str(result.error)
    one.fails["push"] = Closed("and this one")
    with pytest.raises(Closed):
        await group.submit(TASK)


async def test_cancelling_a_submit_withdraws_the_task_on_every_node() -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)
    waiting = asyncio.ensure_future(group.submit(TASK))
    for _ in range(20):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [node.asked[-2:] for node in (one, two)] == [["push", "withdraw"]] * 2
    one.ends(Status.CANCELLED, code="cancelled")
    two.ends(Status.CANCELLED, code="cancelled")
    await group.close()


async def test_a_result_is_settled_when_it_is_on_every_node() -> None:
    one, two = Node(0), Node(1)
    one.answers["settled"] = two.answers["settled"] = True
    group = await group_of(one, two)
    one.ends(Status.OK, [4, 5], ranks=2)
    two.ends(Status.FAILED, code="daemon_lost", settled=False)
    assert not (await group.submit(TASK)).settled
    assert (await group.submit(TASK, settled=True)).settled
    assert "settled" in one.asked
    two.answers["settled"] = False
    assert not await group.settled("t")


async def test_a_cancel_counts_if_any_node_took_it_and_fails_only_if_none_could_tell() -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)
    assert not await group.cancel("t")
    one.fails["cancel"] = DaemonLost("gone")
    with pytest.raises(DaemonLost, match="tcp://node-0:1: gone"):
        await group.cancel("t")
    two.answers["cancel"] = True
    assert await group.cancel("t")


async def test_questions_are_about_what_every_node_has() -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)
    one.answers |= {"match": 3, "exists": [True, True, False]}
    two.answers |= {"match": 2, "exists": [True, False, True]}
    assert await group.match(["a"]) == 2
    assert await group.exists(["a", "b", "c"], timeout=1.0) == [True, False, False]
    assert (await group.stats())["ranks"] == [2, 2]
    await group.set_generation("next")
    assert [node.asked[-1] for node in (one, two)] == ["set_generation"] * 2


async def test_a_pause_that_fails_on_one_node_holds_none() -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)
    two.fails["pause"] = DaemonLost("gone")
    with pytest.raises(DaemonLost, match="tcp://node-1:1: gone"):
        await group.pause()
    assert one.asked[-2:] == ["pause", "resume"]
    assert "resume" not in two.asked, "where the group holds nothing, a resume ends the pauses of others"
    two.fails["pause"] = TransferError("late", code="no_answer")
    with pytest.raises(TransferError, match="late"):
        await group.pause()
    assert two.asked[-2:] == ["pause", "resume"], "the daemon is alive, and holds it"


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"first_rank": 0}, "its first rank is 0; in this order of nodes it must be 2"),
        ({"first_rank": 3}, "its first rank is 3"),
        ({"model": "other"}, "its model is 'other', that of tcp://node-0:1 is 'm'"),
        ({"fingerprint": "other"}, "its fingerprint is 'other'"),
        ({"generation": "other"}, "its generation is 'other'"),
    ],
)
async def test_nodes_that_do_not_fit_are_refused_by_name(engine: dict[str, Any], said: str) -> None:
    one, two = Node(0), Node(1, engine)
    with pytest.raises(RequestError, match=said) as refusal:
        await group_of(one, two)
    assert refusal.value.reason == "group_mismatch"
    assert two.endpoint in str(refusal.value)
    assert [node.asked[-1] for node in (one, two)] == ["close"] * 2


async def test_every_node_compares_its_engine_from_the_first_check_on() -> None:
    one, two = Node(0), Node(1)
    await group_of(one, two)
    assert one.used_as == [Identity("m", "f", 0, 2, 4)]
    assert two.used_as == [Identity("m", "f", 2, 2, 4)]


async def test_a_group_that_is_not_ready_takes_no_task() -> None:
    group = GroupClient(["tcp://node-0:1", "tcp://node-1:1"], await_ready=False)
    with pytest.raises(RequestError, match="connect the group first"):
        await group.push(TASK)


@pytest.mark.parametrize("endpoints", [[], ["tcp://a:1", "tcp://a:1"]])
async def test_a_group_needs_its_nodes_each_once(endpoints: list[str]) -> None:
    with pytest.raises(RequestError, match="one endpoint per node, each once"):
        GroupClient(endpoints)


async def test_every_node_has_its_transport() -> None:
    with pytest.raises(RequestError, match="2 endpoints, but 0 transports"):
        GroupClient(["tcp://a:1", "tcp://b:1"], transports=[])


# --- one surface ----------------------------------------------------------------------------------

# What a Client has and a GroupClient has not, and why. `clients` has a Client for each node.
_OF_ONE_NODE = "it is about one node: use `clients`"
_OWN_RANKS = "a node's ranks and their memory are its own: use `clients`"
NOT_OF_GROUPS = {
    **dict.fromkeys(("boot_id", "identity", "pd_address", "ping"), _OF_ONE_NODE),
    **dict.fromkeys(("explain", "why", "tasks", "record", "restart_check", "count_not_stored"), _OF_ONE_NODE),
    **dict.fromkeys(("register", "unregister", "offer", "attach", "detach", "outdated", "lease"), _OWN_RANKS),
    **dict.fromkeys(("device_handle", "timelines", "reattach"), _OWN_RANKS),
    "clients": "here it is the list of the nodes' clients; what they report is about one node",
    **dict.fromkeys(("dropped", "unusable", "used", "retried", "withdraw"), "for the client's own parts"),
}


def test_a_group_has_what_a_client_has_or_says_why_not() -> None:
    def members(kind: object) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert members(Client) - members(GroupClient) == NOT_OF_GROUPS.keys()
    assert all(getattr(GroupClient, name).__doc__ for name in members(GroupClient))


async def test_control_reaches_every_node_and_answers_are_put_together() -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)
    one.answers |= {
        "purge": {"objects": 3, "bytes": 30, "not_reached": ["/a"], "kept_by": [], "complete": False},
        "pin": {"pinned": 2, "durable": 2, "reachable": 0},
        "change_level": {"level": "file", "state": "out", "objects": 1, "bytes": 2},
        "locate": {"host-1": {"file": 3, "any": 3}, "host": {"file": 3, "memory": 1, "any": 3}},
    }
    two.answers |= {
        "purge": {"objects": 4, "bytes": 40, "not_reached": ["/b"], "kept_by": ["/c"], "complete": False},
        "pin": {"pinned": 1, "durable": 0, "reachable": 1},
        "change_level": {"level": "file", "state": "out", "objects": 0, "bytes": 0},
        "locate": {"host-2": {"file": 2, "any": 2}, "host": {"file": 2, "any": 2}},
    }
    assert await group.purge(["a"]) == Purged(7, 70, ["/a", "/b"], ["/c"])
    assert await group.store.drain_level("file") == LevelChange("file", "out", 1, 2)
    where = {"host-1": {"file": 3, "any": 3}, "host-2": {"file": 2, "any": 2}, "host": {"file": 2, "any": 2}}
    assert await group.locate(keys=["a"]) == where
    pinned = await group.pin(["a", "b"], 1.0)
    assert (pinned, pinned.durable, pinned.reachable) == (1, 0, 0)
    two.answers["pin"] = 1  # of a daemon of 0.3.0
    assert await group.pin(["a", "b"], 1.0) == 1
    for name in ("unpin", "drain", "clear_cache", "restore_cache"):
        await getattr(group, name)()
        assert (one.asked[-1], two.asked[-1]) == (name, name)
    assert group.endpoints == [one.endpoint, two.endpoint]
    with pytest.raises(RequestError, match="needs as many peers, not 1"):
        await group.read_all("r", [1, 2], [0], peers=["a:1"])


async def test_a_prefetch_counts_what_every_rank_of_the_group_has() -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)
    for node, ids in ((one, [0, 1]), (two, [1])):
        shares = [{"rank": rank, "status": "ok", "blocks": len(ids)} for rank in range(2)]
        status = "ok" if len(ids) == 2 else "partial"
        node.answers["prefetch"] = {
            "task_id": "p",
            "status": status,
            "block_ids": ids,
            "ranks": shares,
            "generation": "g",
        }
    result = await group.store.prefetch(["a", "b"], to="memory", task_id="p")
    assert (result.task_id, result.status, result.block_ids) == ("p", Status.PARTIAL, [1])
    assert [rank.rank for rank in result.ranks] == [0, 1, 2, 3]
    with pytest.raises(RequestError, match='for to="host"'):
        await group.prefetch(["a"], to="host")
    one.ends(Status.OK, [7], ranks=2)
    two.ends(Status.OK, [7], ranks=2)
    assert (await group.prefetch(["a"], to="host", cpu_block_ids=[7], task_id="t")).block_ids == [7]


async def test_a_sequence_is_whole_if_every_node_has_it() -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)

    def whole() -> TaskResult:
        shares = [RankResult(rank=rank, status=Status.OK, blocks=2) for rank in range(2)]
        return TaskResult(task_id="t", status=Status.OK, block_ids=[4, 5], ranks=shares, generation="g")

    one.answers["read_all"], two.answers["read_all"] = whole(), whole()
    result = await group.read_all("r", [1, 2], [4, 5], peers=["a:1", "b:1"])
    assert (result.status, result.block_ids, [rank.rank for rank in result.ranks]) == (Status.OK, [4, 5], [0, 1, 2, 3])
    two.fails["write_all"] = HandoverFailed("gone")
    with pytest.raises(HandoverFailed, match="tcp://node-1:1: gone"):
        await group.write_all("r", [1, 2], [4, 5])


@pytest.mark.parametrize("kind", [HandoverFailed, RequestError])
async def test_a_handover_that_one_node_has_not_settled_fails_with_that_nodes_error(kind: type[TransferError]) -> None:
    one, two = Node(0), Node(1)
    group = await group_of(one, two)
    settled = TaskResult(task_id="t", status=Status.FAILED)
    one.fails["read_all"] = HandoverFailed("x", result=settled) if kind is HandoverFailed else kind("x")
    two.fails["read_all"] = HandoverFailed("y", result=msgspec.structs.replace(settled, settled=False))
    with pytest.raises(HandoverFailed, match="tcp://node-1:1: y") as raised:
        await group.read_all("r", [1, 2], [4, 5], peers=["a:1", "b:1"])
    assert raised.value.result is not None
    assert not raised.value.result.settled
    assert one.named == two.named != [], "so that `settled` waits for the tasks of both nodes"
    with pytest.raises(HandoverFailed):
        await group.read_all("r", [1, 2], [4, 5], task_id=None)
    assert len(one.named) == 2
    assert one.named == two.named, "also where the default is written out"
