"""The connector under vLLM's own scheduler, with sliding windows and several KV groups: every block is checked.

Before its layers' windows reach back to a block, a request has it; then it has vLLM's null block instead.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.machine.with_vllm.dry import (
    NULL,
    STALE,
    TOKENS,
    DryEngine,
    Group,
    flip,
    hashes,
    object_with,
    objects,
    prompts,
)
from tests.machine.with_vllm.test_scheduler import ROOMY, SEEDS, rest, whole
from tests.support.waits import wait_until

pytestmark = pytest.mark.timeout(900)

Groups = Sequence[Group | int | None]

SHAPES: dict[str, Groups] = {
    "sliding": (100,),
    "hybrid": (None, 100),
    "three groups": (None, 100, 40),
    "blocks of two sizes": (Group(2 * TOKENS), 100),
    "chunks": (None, Group(chunk=4 * TOKENS)),
    "states": (None, Group(state=True), Group(state=True)),
    "states alone": (Group(state=True),),
}
shapes = pytest.mark.parametrize("groups", SHAPES.values(), ids=SHAPES)


def untouched(engine: DryEngine) -> bool:
    """Whether nobody has written to the null block since it was spoiled."""
    return all(np.all(rank.bytes[:, NULL] == STALE) for rank in engine.ranks)


@shapes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restarted_engine_computes_nothing_twice(place: Path, groups: Groups, ranks: int) -> None:
    asked = prompts(1, 500, 300, 170)
    with DryEngine(place, "connector", blocks=4 * ROOMY, ranks=ranks, groups=groups) as engine:
        assert engine.run(asked) == whole(asked)
        engine.forget()
        assert engine.run(asked) == rest(asked, engine.unit)
        assert untouched(engine)
    with DryEngine(place, "connector", blocks=4 * ROOMY, ranks=ranks, groups=groups) as engine:
        assert engine.run(asked) == rest(asked, engine.unit)
        assert not engine.counts["blocks_not_loaded"]


@shapes
def test_a_lost_block_is_computed_anew_and_stored_again(place: Path, groups: Groups) -> None:
    """vLLM may have no block before the lost one, so such a request begins anew, and loads what is before the loss."""
    (asked,) = prompts(2, 500)
    with DryEngine(place, "connector", blocks=4 * ROOMY, groups=groups) as engine:
        engine.run([asked])
        names = hashes(engine, asked)[: (len(asked) - 1) // engine.unit * engine.unit // engine.hashed]
        for number in range(len(engine.groups)):
            engine.forget()
            flip(object_with(place, engine.ranks[0].content(names[-1], number)))
            before = rest([asked], engine.unit)[0] + engine.unit
            again = whole([asked])[0] if any(one.state for one in engine.groups) else before
            assert engine.run([asked]) == [again], "vLLM has a state only where a step has ended"
            assert untouched(engine)
            engine.forget()
            assert engine.run([asked]) == rest([asked], engine.unit)


def test_a_window_needs_only_the_blocks_that_it_reaches(place: Path) -> None:
    (asked,) = prompts(3, 500)
    with DryEngine(place, "connector", blocks=ROOMY, groups=(100,)) as engine:
        engine.run([asked])
        names = hashes(engine, asked)
        for name in names[:10]:
            object_with(place, engine.ranks[0].content(name)).unlink()
        engine.forget()
        assert engine.run([asked]) == rest([asked])


GEMMA = (None, *[100] * 5)


def counted(engine: DryEngine) -> dict[str, int]:
    """How many blocks were saved, and not saved by reason, since the start."""
    engine.ours.get_kv_connector_stats()
    return {name: n for name, n in engine.counts.items() if name.startswith(("blocks_saved", "blocks_not_saved"))}


def play(engine: DryEngine, asked: Sequence[Sequence[int]], answer: int) -> None:
    """Play requests whose saves end within the step that begins them."""
    scheduling = engine.ours._scheduling
    for prompt in asked:
        engine.add(prompt, answer)
    while engine.scheduler.has_requests():
        engine.step()
        wait_until(lambda: (scheduling.collect(), not scheduling._running)[1], within=60.0)


def test_of_windows_only_what_a_later_request_can_load_is_saved(place: Path) -> None:
    asked = prompts(5, 500, 400, 300, 350)
    full, reached = sum(len(one) // TOKENS for one in asked), 4 * 4  # blocks of a group; a window reaches back to four
    with DryEngine(place, "connector", blocks=400, groups=GEMMA, every=0) as engine:
        play(engine, asked, 20)
        counts = counted(engine)
        more = sum((len(one) + 19) // TOKENS for one in asked) - full  # blocks of the answers
        assert counts["blocks_saved"] == full + more + 5 * (reached + more)
        assert counts["blocks_not_saved/unreachable"] == 5 * (full - reached)
        assert sum(counts.values()) == len(GEMMA) * (full + more)
        engine.forget()
        assert engine.run(asked) == rest(asked)
    with DryEngine(place, "connector", blocks=400, groups=GEMMA, every=0) as engine:
        assert engine.run(asked) == rest(asked)


@pytest.mark.parametrize("every", [None, 0])
def test_a_small_pool_gives_what_prompts_need_and_counts_what_it_skips(place: Path, every: int | None) -> None:
    """The ends of the windows first, what sees all tokens as room comes, and what a retention adds last."""
    asked = prompts(6, 500, 400, 300, 350)
    with DryEngine(place, "connector", blocks=330, groups=GEMMA, every=every) as engine:
        play(engine, asked, 40)
        counts = counted(engine)
        assert every == 0 or counts["blocks_not_saved/no_room"]
        assert sum(counts.values()) == len(GEMMA) * sum((len(one) + 39) // TOKENS for one in asked)
        engine.forget()
        assert engine.run(asked) == rest(asked)


def test_prompts_that_part_share_what_is_before_from_the_third_one_on(place: Path) -> None:
    """The first one's windows are kept at its end only; the second one shows where they part."""
    stem, *tails = prompts(7, 330, 170, 170, 170)
    computed = []
    for tail in tails:  # new engines: vLLM's own cache knows of none
        with DryEngine(place, "connector", blocks=ROOMY, groups=(None, 100), every=0) as engine:
            computed += engine.run([stem + tail])
    assert computed == [501, 501, 501 - 320]


def test_a_next_turn_goes_on_where_the_last_answer_ended(place: Path) -> None:
    (turn,) = prompts(8, 300)
    with DryEngine(place, "connector", blocks=ROOMY, groups=(None, 100), every=0) as engine:
        name = engine.add(turn, 200)
        engine.finish()
        turn += engine.answers[name]
    with DryEngine(place, "connector", blocks=ROOMY, groups=(None, 100), every=0) as engine:
        assert engine.run([[*turn, *range(3, 53)]]) == [550 - 480 + 1]


@shapes
@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_and_aborted_requests_leave_no_wrong_byte(place: Path, groups: Groups, ahead: bool) -> None:
    draw = random.Random(14)
    asked = prompts(14, *[250] * 8)
    with DryEngine(place, "connector", blocks=36 * len(groups), ahead=ahead, groups=groups) as engine:
        for _ in range(3):
            names = [engine.add(prompt, 120) for prompt in asked]
            while engine.scheduler.has_requests():
                engine.step()
                if draw.random() < 0.02:
                    engine.abort(draw.choice(names))
            engine.forget()


@shapes
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_of_requests_and_damage(place: Path, groups: Groups, seed: int) -> None:
    draw = random.Random(seed)
    stems = prompts(seed, *[draw.randrange(40, 400) for _ in range(5)])
    blocks = draw.choice([40, ROOMY]) * len(groups)
    with DryEngine(place, "connector", blocks=blocks, ahead=draw.choice([False, True]), groups=groups) as engine:
        for _ in range(60):
            deed = draw.choice(["ask", "ask", "ask", "step", "step", "forget", "flip", "unlink"])
            if deed == "ask":
                stem = draw.choice(stems)
                tail = [draw.randrange(3, 500) for _ in range(draw.choice([0, 20, 100]))]
                engine.add([*stem[: draw.randrange(33, len(stem) + 1)], *tail], draw.choice([2, 40]))
            elif deed == "step":
                for _ in range(draw.randrange(1, 30)):
                    engine.step()
            elif deed == "forget":
                engine.finish()
                engine.forget()
            else:
                for path in draw.sample(found := objects(place), min(3, len(found))):
                    with contextlib.suppress(FileNotFoundError):  # the daemon has just put a damaged one aside
                        flip(path) if deed == "flip" else os.unlink(path)
        engine.finish()
        assert sum(engine.computed.values())
