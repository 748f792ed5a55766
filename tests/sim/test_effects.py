"""Effects that raise, one kind after the other: every task is answered once, honestly, and the daemon works on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import structlog

from tests.support.simulation.engine import Act, SimEngine
from tests.support.simulation.loop import SimLoop, simulate
from tests.support.simulation.oracle import Oracle
from tests.support.simulation.world import SimWorld, small_config
from transferd.control import instructions as do
from transferd.tasks import Status, SwapOutTask, TaskResult

Program = Callable[[SimWorld, SimEngine], Coroutine[Any, Any, None]]


def play(program: Program, seed: int = 0) -> None:
    """A daemon of two ranks and one engine; afterwards everything works, and everything given out has come back."""

    async def main(loop: SimLoop) -> None:
        world = SimWorld(loop, small_config())
        with world.log.installed():
            oracle = Oracle(world)
            await world.open()
            engine = SimEngine(world, "engine", range(48))
            await engine.connect()
            await program(world, engine)
            for what in ("write", "read", "read_sparse", "swap_out", "swap_in", "chain"):
                await engine.act(what, Act(f"after-{what}", loop.stream(what), patient=True))
            await engine.leave()
            await world.close()
            oracle.stop()
            oracle.at_end()

    simulate(main, seed)


def swap(task_id: str, block: int = 0, timeout: float = 5.0) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, timeout=timeout, gpu_block_ids=[block], cpu_block_ids=[block])


def stick(world: SimWorld) -> None:
    """The next copy stands still."""
    world.devices[0].dice.script("copy_out", "stuck")


def let_go(world: SimWorld) -> None:
    world.devices[0].unstick()


@pytest.mark.parametrize("ranks", [("start", None), (None, "start"), ("start", "start")])
def test_a_rank_arrives_with_the_error_of_its_start(ranks: tuple[str | None, ...]) -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        world.effects.dice.script("Start", None, *ranks)  # the first is the opening of the round
        result = await engine.client.submit(swap("a"))
        assert result.status is Status.FAILED
        assert result.error is not None
        assert result.error.code == "internal"
        assert "Start raised EffectRaised" in result.error.message
        assert [rank.error is not None for rank in result.ranks] == [rank is not None for rank in ranks]
        assert world.daemon.default.coordinator.effects_failed == {"Start": sum(rank is not None for rank in ranks)}

    play(program)


def test_a_task_whose_round_cannot_open_fails_and_the_one_behind_it_runs() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        world.effects.dice.script("Start", "start")
        first, second = await engine.client.push(swap("a")), await engine.client.push(swap("b"))
        assert ((await first).status, (await second).status) == (Status.FAILED, Status.OK)

    play(program)


def test_hundreds_of_starts_that_raise_in_a_row_do_not_nest() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        world.effects.dice.script("Start", *["start"] * 500)
        pushed = [await engine.client.push(swap(f"t{number}", block=0)) for number in range(500)]
        assert Counter([(await future).status for future in pushed]) == {Status.FAILED: 500}

    play(program)


def test_a_task_behind_one_with_raising_effects_is_started() -> None:
    """The old coordinator stopped at the first effect that raised: what followed was never started, nor answered."""

    async def program(world: SimWorld, engine: SimEngine) -> None:
        dice = world.effects.dice
        dice.script("Reply", "reply")
        dice.script("Publish", "publish")
        first, second = await engine.client.push(swap("a")), await engine.client.push(swap("b"))
        assert ((await first).status, (await second).status) == (Status.OK, Status.OK)
        assert world.daemon.default.coordinator.effects_failed == {"Reply": 1, "Publish": 1}
        note = next(note for note in world.daemon.recorder.notes() if note.what == "failure")
        assert "raised EffectRaised" in note.detail["problem"]

    for seed in range(4):
        play(program, seed)


@pytest.mark.parametrize("instruction", ["StopTask", "ExpireRound", "WakeAt"])
def test_a_deadline_is_kept_though_telling_of_it_raises_again_and_again(instruction: str) -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        kind = {"StopTask": "stop_task", "ExpireRound": "expire_round", "WakeAt": "wake_at"}[instruction]
        stick(world)
        world.effects.dice.script(instruction, kind, kind, kind)
        pushed_at = world.loop.time()
        result = await engine.client.submit(swap("a", timeout=0.5))
        took = world.loop.time() - pushed_at
        slack = world.daemon.config.server.deadline_slack
        assert result.status is Status.EXPIRED
        assert took <= 0.5 + slack + 0.1
        world.effects.dice._scripted.clear()
        let_go(world)

    for seed in range(4):  # effects raise before or after they had any effect, as the seed says
        play(program, seed)


def test_a_raised_effect_is_logged_once_with_its_tasks_story() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        world.effects.dice.script("Publish", "publish")
        told: list[dict[str, Any]] = []
        before = structlog.get_config()

        def keep(_: object, __: str, event: structlog.typing.EventDict) -> str:
            told.append(dict(event))
            raise structlog.DropEvent

        structlog.configure(processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET))
        await engine.client.submit(swap("a"))
        structlog.configure(**before)
        (event,) = told
        assert (event["event"], event["effect"], event["task_id"]) == ("an effect raised", "Publish", "a")
        for step in ("admitted", "started", "arrived", "done"):
            assert step in event["problem"]
        assert (await engine.client.stats())["effects_failed"] == {"Publish": 1}

    play(program)


def test_decisions_are_carried_out_in_their_order() -> None:
    """What one effect leads to comes after what was decided before it."""

    async def program(world: SimWorld, engine: SimEngine) -> None:
        coordinator = world.daemon.default.coordinator
        seen: list[str] = []

        def reply(instruction: do.Reply) -> None:
            seen.append(instruction.result.task_id)
            if instruction.result.task_id == "one":
                coordinator._carry_out([do.Reply(b"", 3, TaskResult(task_id="three", status=Status.OK))])
                assert seen == ["one"]

        before, coordinator._apply[do.Reply] = coordinator._apply[do.Reply], reply
        results = [TaskResult(task_id=task_id, status=Status.OK) for task_id in ("one", "two")]
        coordinator._carry_out([do.Reply(b"", seq, result) for seq, result in enumerate(results)])
        coordinator._apply[do.Reply] = before
        assert seen == ["one", "two", "three"]

    play(program)


def test_a_log_that_refuses_every_line_changes_nothing() -> None:
    async def program(world: SimWorld, engine: SimEngine) -> None:
        world.log.dice.script("put", *["refuse"] * 1000)
        stick(world)
        first = await engine.client.push(swap("a", timeout=0.5))
        second = await engine.client.push(swap("b", timeout=1.0))
        assert ((await first).status, (await second).status) == (Status.EXPIRED, Status.EXPIRED)
        let_go(world)
        assert world.log.dropped >= 3
        assert world.daemon.default.coordinator.effects_failed == {}

    play(program)
