"""What must hold of a dispatcher between any two events, for tests and the simulation."""

from __future__ import annotations

from transferd.control.admission import footprint_of
from transferd.control.dispatcher import Dispatcher
from transferd.control.task_state import AT_WORK, State


def check_dispatcher(dispatcher: Dispatcher) -> None:
    """Assert that its books agree with each other and with the tasks. Linear in all that is held."""
    records, lanes, limits = dispatcher._records.values(), dispatcher._lanes, dispatcher.limits
    assert sum(record.state is State.QUEUED for record in records) == lanes.queued <= limits.max_queued
    for name, load in lanes.loads.items():
        mine = [record for record in records if record.task.lane is name]
        assert load.tasks == len(mine)
        assert load.nbytes == sum(record.nbytes for record in mine)
        assert load.running == sum(record.state in AT_WORK for record in mine)
        assert load.running <= limits.lane_depth
        assert load.tasks <= 1 or load.nbytes <= limits.max_bytes  # one alone may be larger than the bound
        assert all(r.claim is not None and r.claim.ready for r in load.ready if r.state is State.QUEUED)
    assert len(dispatcher._results) <= limits.max_results
    assert dispatcher.empty is (not records and not dispatcher._stragglers)
    assert not dispatcher.empty or dispatcher._hazards.idle
    _check_blocks(dispatcher)


def blocks_to_write(dispatcher: Dispatcher, tier: str) -> set[int]:
    """The blocks of a tier ("device" or "host") that tasks at work may change now."""
    working = (record.task for record in dispatcher._records.values() if record.state in AT_WORK)
    return {block for task in working for block in getattr(footprint_of(task, dispatcher.limits), f"{tier}_writes")}


def _check_blocks(dispatcher: Dispatcher) -> None:
    """No block that one task at work changes is touched by another: asked of the tasks, not of the hazard table."""
    working = [record for record in dispatcher._records.values() if record.state in AT_WORK]
    users: dict[tuple[str, int], str] = {}
    for writes in (True, False):
        for record in (*working, *dispatcher._stragglers.values()):
            footprint, task_id = footprint_of(record.task, dispatcher.limits), record.task.task_id
            for tier in ("device", "host"):
                for block in getattr(footprint, f"{tier}_{'writes' if writes else 'reads'}"):
                    use = tier, block
                    other = users.setdefault(use, task_id) if writes else users.get(use, task_id)
                    assert other == task_id, f"{task_id!r} and {other!r} are at work on {tier} block {block}"
