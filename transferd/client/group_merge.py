"""Merges the results of several nodes for one task into the result of their group. Pure.

Each node's daemon has already merged its own ranks, so a node's `block_ids` are the blocks that all of its ranks moved.
The task's own merge rule, which the barrier uses for ranks (tasks.py), merges the nodes' results: the shortest prefix,
the blocks that all nodes stored, or all or nothing. Ranks get their global numbers, and errors name the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from transferd.tasks import ErrorInfo, RankOutcome, RankResult, Status, Stop, Task, TaskResult

GENERATIONS = "generation_mismatch"
MISMATCH = "group_mismatch"
_STOPS = frozenset(map(str, Stop))


class NodeResult(NamedTuple):
    """What one node answered.

    ranks: the global numbers of its ranks. taken_back: whether the group cancelled the task here because another node
    could not take part.
    """

    endpoint: str
    ranks: range
    result: TaskResult
    taken_back: bool = False


def merge_nodes(task: Task, nodes: Sequence[NodeResult], duration: float) -> TaskResult:
    """One result for the task. duration: seconds from the push to the last answer."""
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
    return TaskResult(
        task_id=task.task_id,
        status=merged.status,
        block_ids=merged.block_ids,
        ranks=[shares.get(rank.rank, rank) for rank in merged.ranks],
        error=merged.error,
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
    error = first.result.error
    return TaskResult(
        task_id=task.task_id,
        status=first.result.status,
        error=None if error is None else _named(first, error),
        retry_after=max((node.result.retry_after or 0.0 for node in refusals), default=0.0) or None,
        duration=duration,
        generation=first.result.generation,
        boot_id=nodes[0].result.boot_id,
    )


def _outcomes(task: Task, node: NodeResult, *, claims: bool) -> list[RankOutcome]:
    """The node's share, as one outcome per rank. claims: whether its blocks count."""
    result = node.result
    error = None if result.error is None else _named(node, result.error)
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
        msgspec.structs.replace(
            share,
            rank=node.ranks.start + position,
            error=None if share.error is None else _named(node, share.error),
        )
        for position, share in enumerate(node.result.ranks)
    ]


def _named(node: NodeResult, error: ErrorInfo) -> ErrorInfo:
    return error if node.endpoint in error.message else ErrorInfo(error.code, f"{node.endpoint}: {error.message}")
