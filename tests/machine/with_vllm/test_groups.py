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

from tests.machine.with_vllm.dry import NULL, STALE, TOKENS, DryEngine, flip, hashes, object_with, objects, prompts
from tests.machine.with_vllm.test_scheduler import ROOMY, SEEDS, rest, whole

pytestmark = pytest.mark.timeout(900)

WINDOWS = {"sliding": (100,), "hybrid": (None, 100), "three groups": (None, 100, 40)}
shapes = pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)


def untouched(engine: DryEngine) -> bool:
    """Whether nobody has written to the null block since it was spoiled."""
    return all(np.all(rank.bytes[:, NULL] == STALE) for rank in engine.ranks)


@shapes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restarted_engine_computes_nothing_twice(place: Path, windows: Sequence[int | None], ranks: int) -> None:
    asked = prompts(1, 500, 300, 170)
    with DryEngine(place, "connector", blocks=4 * ROOMY, ranks=ranks, windows=windows) as engine:
        assert engine.run(asked) == whole(asked)
        engine.forget()
        assert engine.run(asked) == rest(asked)
        assert untouched(engine)
    with DryEngine(place, "connector", blocks=4 * ROOMY, ranks=ranks, windows=windows) as engine:
        assert engine.run(asked) == rest(asked)
        assert not engine.connector._scheduling.counts["blocks_not_loaded"]


@shapes
def test_a_lost_block_is_computed_anew_and_stored_again(place: Path, windows: Sequence[int | None]) -> None:
    """vLLM may have no block before the lost one, so such a request begins anew, and loads what is before the loss."""
    (asked,) = prompts(2, 500)
    with DryEngine(place, "connector", blocks=4 * ROOMY, windows=windows) as engine:
        engine.run([asked])
        names = hashes(engine, asked)
        for group in range(len(windows)):
            engine.forget()
            flip(object_with(place, engine.ranks[0].content(names[-1], group)))
            assert engine.run([asked]) == [rest([asked])[0] + TOKENS]
            assert untouched(engine)
            engine.forget()
            assert engine.run([asked]) == rest([asked])


def test_a_window_needs_only_the_blocks_that_it_reaches(place: Path) -> None:
    (asked,) = prompts(3, 500)
    with DryEngine(place, "connector", blocks=ROOMY, windows=(100,)) as engine:
        engine.run([asked])
        names = hashes(engine, asked)
        for name in names[:10]:
            object_with(place, engine.ranks[0].content(name)).unlink()
        engine.forget()
        assert engine.run([asked]) == rest([asked])


@shapes
@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_and_aborted_requests_leave_no_wrong_byte(
    place: Path, windows: Sequence[int | None], ahead: bool
) -> None:
    draw = random.Random(14)
    asked = prompts(14, *[250] * 8)
    with DryEngine(place, "connector", blocks=36 * len(windows), ahead=ahead, windows=windows) as engine:
        for _ in range(3):
            names = [engine.add(prompt, 120) for prompt in asked]
            while engine.scheduler.has_requests():
                engine.step()
                if draw.random() < 0.02:
                    engine.abort(draw.choice(names))
            engine.forget()


@shapes
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_of_requests_and_damage(place: Path, windows: Sequence[int | None], seed: int) -> None:
    draw = random.Random(seed)
    stems = prompts(seed, *[draw.randrange(40, 400) for _ in range(5)])
    blocks = draw.choice([40, ROOMY]) * len(windows)
    with DryEngine(place, "connector", blocks=blocks, ahead=draw.choice([False, True]), windows=windows) as engine:
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
