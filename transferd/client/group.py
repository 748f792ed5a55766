"""One client for a tensor-parallel group on several nodes: a daemon on each node, one result per task.

The nodes hold the group's ranks in order. Each daemon knows its own ranks from `first_rank` and `group_ranks` ([cache]
or `Engine`), so object names contain the rank within the group. A task goes to every node under the same id, and the
results are merged as a daemon merges its ranks.

A group answers once every node has answered or is lost, because only then are the task's blocks free on every node. If
a node is lost or refuses, the task cannot succeed, so the group cancels it on the other nodes to shorten the wait.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from transferd.client.calls import CONTROL_TIMEOUT_S, CallGroup, Calls
from transferd.client.client import Client
from transferd.client.pending import after_waiting, seconds_to_wait
from transferd.client.store import StoreCalls
from transferd.errors import HandoverFailed, RequestError, TransferError
from transferd.runtime.aio import Background, answered
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self, convert
from transferd.tasks import (
    ErrorInfo,
    RankOutcome,
    RankResult,
    ReadStorageTask,
    Status,
    Stop,
    Task,
    TaskResult,
)
from transferd.wire import protocol as wire
from transferd.wire.transport import ClientTransport

T = TypeVar("T")


def _added(answers: Sequence[Any]) -> Any:
    """Figures added, lists joined, and of texts the first one that says something."""
    return {name: _one([answer[name] for answer in answers if name in answer]) for name in answers[0]}


def _one(values: Sequence[Any]) -> Any:
    if isinstance(values[0], bool):
        return all(values)
    if isinstance(values[0], list):
        return list(dict.fromkeys(one for value in values for one in value))
    return sum(values) if isinstance(values[0], int) else next(filter(None, values), "")


def _fewest(answers: Sequence[Any]) -> Any:
    """The least of each figure. A daemon of 0.3.0 answers a pin with one figure alone."""
    if not all(isinstance(answer, dict) for answer in answers):
        return min(answer["pinned"] if isinstance(answer, dict) else answer for answer in answers)
    return {name: min(answer.get(name, 0) for answer in answers) for name in answers[0]}


def _places(answers: Sequence[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """The places of all; of two daemons on one machine, what is in the places of both."""
    found: dict[str, dict[str, int]] = {}
    for name, media in (pair for answer in answers for pair in answer.items()):
        known = found.get(name, media)
        found[name] = {medium: min(media[medium], known[medium]) for medium in media if medium in known}
    return found


# How the nodes' answers to a request become the group's.
TOGETHER: dict[type[wire.ControlRequest], Callable[[list[Any]], Any]] = {
    wire.Match: min,
    wire.Exists: lambda answers: [all(there) for there in zip(*answers, strict=True)],
    wire.Locate: _places,
    wire.Pin: _fewest,
    wire.Unpin: lambda _: None,
    **dict.fromkeys((wire.Purge, wire.Warm, wire.ChangeLevel, wire.MakeCopies), _added),
}

# What must be the same on all nodes.
ALIKE = ("model", "fingerprint")


class _Nodes(Calls):
    """The clients of a group's nodes, in the order of their ranks."""

    clients: list[Client]

    async def _on_all(self, ask: Callable[[Client], Coroutine[Any, Any, T]]) -> list[T]:
        """Ask every node at once; wait for all answers. Raises the first node's error, which then names the node."""
        return self._good(await asyncio.gather(*(ask(client) for client in self.clients), return_exceptions=True))

    def _good(self, answers: Sequence[T | BaseException]) -> list[T]:
        """The answers of all nodes. Raises the first node's error, which then names the node."""
        good: list[T] = []
        for client, answer in zip(self.clients, answers, strict=True):
            if isinstance(answer, BaseException):
                raise _named(client, answer)
            good.append(answer)
        return good


class GroupCacheCalls(_Nodes):
    """The memory of the group's ranks: to clear it and to restore it. `clients` map and offer it."""

    async def clear_cache(self, *, keep_host: bool = False) -> None:
        """Free the memory of the cache on every node. See Client.clear_cache."""
        await self._on_all(lambda client: client.clear_cache(keep_host=keep_host))

    async def restore_cache(self, generation: str | None = None, *, same_weights: bool = False) -> None:
        """Create the memory of a cleared cache anew on every node. See Client.restore_cache."""
        await self._on_all(lambda client: client.restore_cache(generation, same_weights=same_weights))


class GroupControlCalls(_Nodes):
    """The group's pauses, and the generation of its weights."""

    @property
    def token(self) -> str:
        """The engine's token, the same on every node; "" for none."""
        return self.clients[0].token

    async def pause(self) -> None:
        """Pause every node; return once no task touches a block on any. If one fails, the pause ends on all nodes."""
        answers = await asyncio.gather(*(client.pause() for client in self.clients), return_exceptions=True)
        try:
            self._good(answers)
        except TransferError:
            # A node that refused it, or is lost, holds none: there, a resume would end the pauses of others.
            each = zip(self.clients, answers, strict=True)
            held = [one for one, said in each if not isinstance(said, TransferError) or said.reason == "no_answer"]
            await asyncio.gather(*(client.resume() for client in held), return_exceptions=True)
            raise

    async def resume(self) -> None:
        """End this group's pause on every node."""
        await self._on_all(lambda client: client.resume())

    async def set_generation(self, generation: str) -> None:
        """Use this weight version on every node from now on.

        Raises if a node could not be reached: retry. Until all agree, tasks fail (`generation_mismatch`), because
        their ranks would move blocks of different weights.
        """
        await self._on_all(lambda client: client.set_generation(generation))

    async def drain(self) -> None:
        """Stop admitting tasks on every node; return once every admitted one is answered. Ends like a pause."""
        await self._on_all(lambda client: client.drain())


class GroupReportCalls(_Nodes):
    """What the nodes report."""

    _ranks: list[range]

    async def stats(self) -> dict[str, Any]:
        """Return {"ready", "ranks": [how many each node has], "nodes": {endpoint: that daemon's report}}."""
        reports = await self._on_all(lambda client: client.stats())
        return {
            "ready": all(client.connected for client in self.clients),
            "ranks": [len(ranks) for ranks in self._ranks],
            "nodes": {client.endpoint: report for client, report in zip(self.clients, reports, strict=True)},
        }


class GroupClient(StoreCalls, GroupCacheCalls, GroupControlCalls, GroupReportCalls):
    """One client of all nodes of a group, in the order of their ranks.

    endpoints: one per node.
    engine, token: the engine's name and token (Client), the same on every node; "" is the engine of [cache].
    transports: replace the default sockets, one per node, for example to use CURVE keys.
    connect_timeout, await_ready, name: see Client.

    Use `clients`, one per node, for what a group has not: a node's ranks and their memory are its own (register,
    attach, offer, lease, …), and reports of one task, block or daemon are about one node (explain, why, tasks, ping,
    boot_id, …). Errors of control requests name the node. Like a Client, a GroupClient belongs to one event loop.
    """

    store, cache = CallGroup(StoreCalls), CallGroup(GroupCacheCalls)
    control, reports = CallGroup(GroupControlCalls), CallGroup(GroupReportCalls)

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        engine: str = "",
        token: str = "",
        connect_timeout: float = 10.0,
        await_ready: bool = True,
        clock: Clock = SYSTEM_CLOCK,
        transports: Sequence[ClientTransport] | None = None,
        name: str = "",
    ) -> None:
        if not endpoints or len(set(endpoints)) != len(endpoints):
            raise RequestError(f"a group needs one endpoint per node, each once, not {list(endpoints)}")
        if transports is not None and len(transports) != len(endpoints):
            raise RequestError(f"{len(endpoints)} endpoints, but {len(transports)} transports")
        self.engine = engine
        self._clock = clock
        self.clients = [
            Client(
                endpoint,
                connect_timeout=connect_timeout,
                await_ready=await_ready,
                clock=clock,
                transport=None if transports is None else transports[number],
                name=name,
                engine=engine,
                token=token,
            )
            for number, endpoint in enumerate(endpoints)
        ]
        self._ranks: list[range] = []  # one range per node
        self._running = Background()

    # --- life ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Connect to every node, and check that together they are one group.

        Without `await_ready`, call `wait_ready` after the memory was offered; that makes the check. Raises
        ConnectTimeout, ConfigError; RequestError with code `group_mismatch`, which names the node that does not match.
        """
        try:
            await self._on_all(lambda client: client.connect())
            if all(client.connected for client in self.clients):
                await self._check()
        except BaseException:
            await self.close()
            raise

    async def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every node is ready. Raises the same errors as `connect`."""
        await self._on_all(lambda client: client.wait_ready(timeout))
        await self._check()

    async def close(self) -> None:
        """Disconnect from every node. Pending results end with code `closed`. Idempotent."""
        await asyncio.gather(*(client.close() for client in self.clients))
        await self._running.settled()

    async def _check(self) -> None:
        """Learn each node's ranks; check that they are consecutive and that all nodes match.

        From then on each client compares its node at every new life (client/identity.py).
        """
        first, ranks = self.clients[0].identity, list[range]()
        for client in self.clients:
            one = client.identity
            if one is None:
                raise RequestError(f"{client.endpoint}: it serves no such engine now", code=MISMATCH)
            start = ranks[-1].stop if ranks else 0
            if one.first_rank != start:
                what = f"its first rank is {one.first_rank}; in this order of nodes it must be {start}"
                raise RequestError(f"{client.endpoint}: {what}", code=MISMATCH)
            pairs = [(what, getattr(one, what), getattr(first, what)) for what in ALIKE]
            for what, said, wanted in [*pairs, ("generation", client.generation, self.clients[0].generation)]:
                if said != wanted:
                    there = f"{client.endpoint}: its {what} is {said!r}, that of {self.clients[0].endpoint} "
                    raise RequestError(f"{there}is {wanted!r}", code=MISMATCH)
            ranks.append(range(start, start + one.ranks))
        for client in self.clients:
            client.used(client.identity)
        self._ranks = ranks

    # --- tasks --------------------------------------------------------------------------------------

    async def submit(self, task: Task, *, settled: bool = False, settle_timeout: float | None = None) -> TaskResult:
        """Push a task to every node and wait for its one result.

        settled, settle_timeout: return only once the result is settled on every node (see Client.submit). Cancelling
        this call cancels the task on every node and waits until it is settled; for a lost node at most as long as
        Client.submit does. There is no `progressed`: nodes load their layers at paces of their own.
        """
        limit = None if settle_timeout is None else seconds_to_wait("settle_timeout", settle_timeout)
        try:
            result = await (await self.push(task))
            if settled and not result.settled:
                result = after_waiting(
                    result, ", ".join(self.endpoints), limit, await self.settled(task.task_id, limit)
                )
        except asyncio.CancelledError:
            await asyncio.gather(*(client.withdraw(task.task_id) for client in self.clients), return_exceptions=True)
            raise
        return result

    async def insist(self, task: Task, *, settled: bool = False, settle_timeout: float | None = None) -> TaskResult:
        """Like `submit`, but retry while a node is busy, for as long as the task's timeout allows."""
        submit = functools.partial(self.submit, settled=settled, settle_timeout=settle_timeout)
        return await self.clients[0].retried(submit, task)

    @property
    def endpoints(self) -> list[str]:
        """Those of the nodes, in the order of their ranks."""
        return [client.endpoint for client in self.clients]

    @property
    def unsettled(self) -> list[str]:
        """Ids of ended tasks that may still use their blocks on some node. See `settled`."""
        return list(dict.fromkeys(task_id for client in self.clients for task_id in client.unsettled))

    async def settled(self, task_id: str, timeout: float | None = None) -> bool:
        """Wait until no node touches the task's blocks any more. See Client.settled."""
        return all(await self._on_all(lambda client: client.settled(task_id, timeout)))

    async def push(self, task: Task) -> asyncio.Future[TaskResult]:
        """Push a task to every node; return once each has admitted or answered it, or is lost.

        In the result, `ranks` has every rank of the group under its number in the group. `busy` and `rejected` mean
        that no node has touched anything. A lost node is `failed`, code `daemon_lost`; the message names its endpoint.
        So is one to which nothing can be pushed, as its client was closed (`closed`). Raises TransferError if all are.
        """
        self._check_connected()
        began = self._clock.monotonic()
        each = await asyncio.gather(*(client.push(task) for client in self.clients), return_exceptions=True)
        errors = [one for one in each if isinstance(one, BaseException)]
        if len(errors) == len(each) or not all(isinstance(error, TransferError) for error in errors):
            raise errors[0]
        pushed = [one if isinstance(one, asyncio.Future) else answered(_failed(task, one)) for one in each]
        return asyncio.shield(self._running.begin(self._joined(task, pushed, began)))

    async def _joined(self, task: Task, pushed: Sequence[asyncio.Future[TaskResult]], began: float) -> TaskResult:
        waiting, taken_back = set(pushed), False
        late: set[asyncio.Future[TaskResult]] = set()
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            # A node that refused the task, or is lost, moves no block: no block can move on every rank.
            refused = any(not r.ranks and r.status is not Status.OK for r in (future.result() for future in done))
            if waiting and not taken_back and refused:
                taken_back, late = True, set(waiting)
                again = wire.Cancel(task.task_id, anew=True)  # where it waits, it is pushed again under its id
                asked = [client for client, future in zip(self.clients, pushed, strict=True) if future in waiting]
                # Not `cancel`, which would end an `insist` as well. A node that cannot be asked is lost.
                cancels = (client._ask(again) for client in asked)  # noqa: SLF001
                await asyncio.gather(*cancels, return_exceptions=True)
        results = [future.result() for future in pushed]
        return self._merged(task, began, results, [future in late for future in pushed])

    async def cancel(self, task_id: str) -> bool:
        """Cancel a task on every node. Returns False if no node had such a task. Raises only if no node answers."""
        answers = await asyncio.gather(*(client.cancel(task_id) for client in self.clients), return_exceptions=True)
        return any(answer is True for answer in answers) or any(self._good(answers))

    # --- prefill → decode ---------------------------------------------------------------------------

    async def write_all(self, request_id: str, *sequence: Any, **more: Any) -> TaskResult:
        """Hand over the KV of a whole sequence from every rank of the group; the parameters are Client.write_all's.

        Returns once every node's ranks have handed all blocks over; raises the first node's error, or one whose result
        is not settled.
        """
        more = self._one_task(request_id, more)
        return await self._whole(lambda client, _: client.write_all(request_id, *sequence, **more))

    async def read_all(
        self, request_id: str, *sequence: Any, peers: Sequence[str] | None = None, **more: Any
    ) -> TaskResult:
        """Load the KV of a whole sequence into the blocks of every rank; the parameters are Client.read_all's.

        peers: in direct mode, the `pd_address` of each node of the prefill group, in order. Raises the first node's
        error, or one whose result is not settled; the contents of the blocks are then undefined on all nodes.
        """
        if peers is not None and len(peers) != len(self.clients):
            what = f"a group of {len(self.clients)} nodes needs as many peers, not {len(peers)}"
            raise RequestError(what, code="length_mismatch")
        more = self._one_task(request_id, more)

        def read(client: Client, node: int) -> Coroutine[Any, Any, TaskResult]:
            return client.read_all(request_id, *sequence, peer=None if peers is None else peers[node], **more)

        return await self._whole(read)

    def _one_task(self, request_id: str, more: dict[str, Any]) -> dict[str, Any]:
        """The parameters with one task id for all nodes, so that `settled` of it waits for each of them."""
        return more | {"task_id": more.get("task_id") or f"{request_id}/{self._clock.fresh_id()}"}

    async def _whole(self, hand_over: Callable[[Client, int], Coroutine[Any, Any, TaskResult]]) -> TaskResult:
        self._check_connected()
        began = self._clock.monotonic()
        each = (hand_over(client, node) for node, client in enumerate(self.clients))
        answers = await asyncio.gather(*each, return_exceptions=True)
        for client, answer in zip(self.clients, answers, strict=True):
            if isinstance(answer, HandoverFailed) and answer.result is not None and not answer.result.settled:
                raise _named(client, answer)  # whatever the others say, the blocks are not the caller's yet
        results = self._good(answers)
        ids, task_id = results[0].block_ids, results[0].task_id
        keys = [str(position) for position in range(len(ids))]
        task = ReadStorageTask(task_id=task_id, keys=keys, gpu_block_ids=ids)
        return self._merged(task, began, results)

    def _check_connected(self) -> None:
        if not self._ranks:
            raise RequestError("connect the group first; with await_ready=False, call wait_ready", code="not_ready")

    def _merged(
        self, task: Task, began: float, results: Sequence[TaskResult], taken_back: Sequence[bool] = ()
    ) -> TaskResult:
        each = zip(self.endpoints, self._ranks, results, taken_back or [False] * len(results), strict=True)
        return merge_nodes(task, [NodeResult(*one) for one in each], self._clock.monotonic() - began)

    # --- control ------------------------------------------------------------------------------------

    async def _ask(self, body: wire.ControlRequest, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        began = self._clock.monotonic()
        each = await self._on_all(lambda client: client._ask(body, timeout))  # noqa: SLF001 - as this client's own
        if not isinstance(body, wire.Prefetch):
            return TOGETHER[type(body)](each)
        self._check_connected()
        ids, results = list(range(len(body.keys))), [convert(one, TaskResult) for one in each]
        read = ReadStorageTask(task_id=body.task_id, keys=body.keys, gpu_block_ids=ids, prefix=False)
        return self._merged(read, began, results)

    @property
    def connected(self) -> bool:
        """Whether a ready daemon answers on every node."""
        return all(client.connected for client in self.clients)

    @property
    def generation(self) -> str:
        """The generation that the first node reported last."""
        return self.clients[0].generation

    @property
    def on_new_boot(self) -> Callable[[], object] | None:
        """Called when the contents of all blocks are lost on some node. See Client.on_new_boot."""
        return self.clients[0].on_new_boot

    @on_new_boot.setter
    def on_new_boot(self, hear: Callable[[], object] | None) -> None:
        for client in self.clients:
            client.on_new_boot = hear


def _named(client: Client, error: BaseException) -> BaseException:
    """The same error, with the node's endpoint at the beginning of its text."""
    if isinstance(error, TransferError) and client.endpoint not in str(error):
        error.args = (f"{client.endpoint}: {error}", *error.args[1:])
    return error


GENERATIONS = "generation_mismatch"
MISMATCH = "group_mismatch"
_STOPS = frozenset(map(str, Stop))


def _failed(task: Task, error: BaseException) -> TaskResult:
    """The result of a task that could not be pushed to a node."""
    code = error.reason if isinstance(error, TransferError) else TransferError.code
    return TaskResult(task_id=task.task_id, status=Status.FAILED, error=ErrorInfo(code, str(error)))


class NodeResult(NamedTuple):
    """What one node answered. ranks: the global numbers of its ranks.

    taken_back: whether the group cancelled the task here because another node could not take part.
    """

    endpoint: str
    ranks: range
    result: TaskResult
    taken_back: bool = False


def merge_nodes(task: Task, nodes: Sequence[NodeResult], duration: float) -> TaskResult:
    """One result for the task. duration: seconds from the push to the last answer.

    A node's `block_ids` are those that all of its ranks moved; the task's own merge rule merges the nodes' results.
    """
    refused = _refused(task, nodes, duration)
    if refused is not None:
        return refused
    generations = sorted({node.result.generation for node in nodes if node.result.block_ids})
    alike = len(generations) < 2
    outcomes = [outcome for node in nodes for outcome in _outcomes(task, node, claims=alike)]
    if not alike:  # ranks moved blocks of different weights, so no block is the same on all
        what = f"nodes ran the task under different generations: {', '.join(map(repr, generations))}"
        outcomes[0] = msgspec.structs.replace(outcomes[0], error=ErrorInfo(GENERATIONS, what))
    merged = task.merge(outcomes)
    shares = {share.rank: share for node in nodes for share in _shares(node)}
    return msgspec.structs.replace(
        merged,
        ranks=[shares.get(rank.rank, rank) for rank in merged.ranks],
        bytes=sum(node.result.bytes for node in nodes),
        duration=duration,
        generation=generations[0] if len(generations) == 1 else nodes[0].result.generation,
        boot_id=nodes[0].result.boot_id,
        settled=all(node.result.settled for node in nodes),
        not_admitted=max(node.result.not_admitted for node in nodes),
    )


def _refused(task: Task, nodes: Sequence[NodeResult], duration: float) -> TaskResult | None:
    """The group's refusal, if the task was refused and no node began it, so that nothing was touched anywhere."""
    refusals = [node for node in nodes if node.result.status in (Status.REJECTED, Status.BUSY)]
    settled = all(node.result.settled for node in nodes)
    idle = settled and all(not node.result.ranks and (node in refusals or node.taken_back) for node in nodes)
    if not refusals or not idle:
        return None
    first = next((node for node in refusals if node.result.status is Status.REJECTED), refusals[0])
    return TaskResult(
        task_id=task.task_id,
        status=first.result.status,
        error=_of_node(first, first.result.error),
        retry_after=max((node.result.retry_after or 0.0 for node in refusals), default=0.0) or None,
        duration=duration,
        generation=first.result.generation,
        boot_id=nodes[0].result.boot_id,
    )


def _outcomes(task: Task, node: NodeResult, *, claims: bool) -> list[RankOutcome]:
    """The node's share, as one outcome per rank. claims: whether its blocks count."""
    result = node.result
    error = _of_node(node, result.error)
    if len(result.ranks) != len(node.ranks):
        if result.ranks:
            what = f"{node.endpoint}: answered for {len(result.ranks)} ranks, and had {len(node.ranks)} before"
            error = ErrorInfo(MISMATCH, what)
        # If the group cancelled the task here because of another node, that node has the cause.
        error, stop = (None, None) if node.taken_back else (error, _stop(result))
        return [RankOutcome(rank, error=error, stop=stop) for rank in node.ranks]
    moved = [position for position, there in enumerate(result.mask(task)) if there] if claims else ()
    done = node.taken_back or result.status is Status.OK
    stop = None if done else _stop(result)
    outcomes = [
        RankOutcome(rank=share.rank, moved=moved, bytes=share.bytes, error=None if done else share.error, stop=stop)
        for share in _shares(node)
    ]
    if not done and error is not None and stop is None and all(one.error is None for one in outcomes):
        outcomes[0] = msgspec.structs.replace(outcomes[0], error=error)
    return outcomes


def _stop(result: TaskResult) -> Stop | None:
    """Why the node's ranks were stopped early, if they were."""
    if result.status in _STOPS:
        return Stop(result.status)
    code = "" if result.error is None else result.error.code
    return Stop(code) if code in _STOPS else None


def _shares(node: NodeResult) -> list[RankResult]:
    """The node's rank results under their global numbers; errors name the node."""
    return [
        msgspec.structs.replace(share, rank=rank, error=_of_node(node, share.error))
        for rank, share in enumerate(node.result.ranks, node.ranks.start)
    ]


def _of_node(node: NodeResult, error: ErrorInfo | None) -> ErrorInfo | None:
    """The same error, if there is one, with the node's endpoint at the beginning of its text."""
    if error is None or node.endpoint in error.message:
        return error
    return ErrorInfo(error.code, f"{node.endpoint}: {error.message}")
