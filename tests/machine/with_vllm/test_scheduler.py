"""Tier and connector under vLLM's own scheduler, over a real daemon: every block is checked at every step (dry.py)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.machine.with_vllm.dry import TOKENS, DryEngine, flip, hashes, object_with, objects, prompts
from tests.machine.with_vllm.test_trace import conversations

pytestmark = pytest.mark.timeout(900)
both = pytest.mark.parametrize("kind", ["tier", "connector"])

ROOMY = 256  # blocks; a quarter of them is more than any test saves at once
ANSWER = 2  # tokens; the last one of them is never computed
SEEDS = int(os.environ.get("TRANSFERD_TEST_SEEDS", "4"))


def whole(asked: Sequence[Sequence[int]]) -> list[int]:
    """Tokens that are computed if nothing is found."""
    return [len(prompt) + ANSWER - 1 for prompt in asked]


def rest(asked: Sequence[Sequence[int]], unit: int = TOKENS) -> list[int]:
    """Tokens that are computed if every full block is found, of prompts that end within a block. unit: its tokens."""
    return [(len(prompt) - 1) % unit + ANSWER for prompt in asked]


def computes_nothing_twice(start: Callable[[], DryEngine]) -> None:
    """Neither after its KV cache was emptied nor after a restart."""
    asked = prompts(1, 200, 300, 170)
    with start() as engine:
        assert engine.run(asked) == whole(asked)
        engine.forget()
        assert engine.run(asked) == rest(asked)
    with start() as engine:
        assert engine.run(asked) == rest(asked)
        others = prompts(2, 200, 300)
        assert engine.run(others) == whole(others)


def preempts_and_aborts(engine: DryEngine, draw: random.Random, asked: Sequence[Sequence[int]]) -> None:
    names = [engine.add(prompt, 120) for prompt in asked]
    while engine.scheduler.has_requests():
        engine.step()
        if draw.random() < 0.02:
            engine.abort(draw.choice(names))
    assert engine.preempted
    engine.forget()


@both
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restarted_engine_computes_nothing_twice(place: Path, kind: str, ranks: int) -> None:
    computes_nothing_twice(lambda: DryEngine(place, kind, blocks=ROOMY, ranks=ranks))


def test_the_check_sees_one_wrong_bit(place: Path) -> None:
    asked = prompts(2, 200)
    with DryEngine(place, "connector") as engine:
        engine.run(asked)
        block = engine.scheduler.kv_cache_manager.block_pool.get_cached_block(hashes(engine, asked[0])[2], [0])[0]
        engine.ranks[0].bytes[1, block.block_id, -1] ^= 1
        with pytest.raises(AssertionError, match="wrong bytes in block 2"):
            engine.run(asked)


@both
def test_a_block_that_is_damaged_or_gone_is_computed_with_what_follows_it(place: Path, kind: str) -> None:
    """The daemon believes that it has the block. vLLM needs a prefix: what is behind a lost block it computes, too."""
    asked = prompts(3, 300, 200)
    with DryEngine(place, kind, blocks=ROOMY) as engine:
        engine.run(asked)
        names = hashes(engine, asked[0])
        for bad, damage in ((0, flip), (3, flip), (8, flip), (0, Path.unlink), (3, Path.unlink), (8, Path.unlink)):
            engine.forget()
            damage(object_with(place, engine.ranks[0].content(names[bad])))
            assert engine.run(asked) == [whole(asked)[0] - bad * TOKENS, rest(asked)[1]], (bad, damage)
            engine.forget()
            assert engine.run(asked) == rest(asked), "it is stored again"
        engine.forget()
        for path in objects(place):
            path.unlink()
        assert engine.run(asked) == whole(asked)


@both
def test_a_full_store_loses_old_blocks_and_no_byte(place: Path, kind: str) -> None:
    sets = [prompts(seed, 300, 300) for seed in (4, 5, 6)]
    with DryEngine(place, kind, blocks=ROOMY, capacity="1MiB") as engine:  # thirty blocks and a bit
        for asked in sets:
            engine.run(asked)
            engine.forget()
        assert engine.run(sets[-1]) == rest(sets[-1])
        engine.forget()
        first = engine.run(sets[0])
        assert any(computed > least for computed, least in zip(first, rest(sets[0]), strict=True))


@both
def test_two_engines_share_a_daemon_and_what_either_has_stored(place: Path, kind: str) -> None:
    ours, theirs, common = prompts(7, 300, 200), prompts(8, 250), prompts(9, 310)
    with DryEngine(place, kind, blocks=ROOMY) as one, DryEngine(place, kind, blocks=ROOMY) as other:
        assert other.links[0]._companion.started.process is None, "the second found the first one's daemon"
        one.run(ours)
        other.run(theirs)
        assert one.run(theirs) == rest(theirs)
        assert other.run(ours) == rest(ours)
        names = [(engine, engine.add(common[0])) for engine in (one, other)]  # at once: both store it
        while one.scheduler.has_requests() or other.scheduler.has_requests():
            one.step()
            other.step()
        assert all(engine.computed[name] in (*whole(common), *rest(common)) for engine, name in names)
        for engine in (one, other):
            engine.forget()
            assert engine.run([*ours, *theirs, *common]) == rest([*ours, *theirs, *common])


@both
def test_a_daemon_killed_at_any_moment_costs_hits_and_no_byte(place: Path, kind: str) -> None:
    asked = prompts(10, 300, 200, 330)
    with DryEngine(place, kind, blocks=ROOMY) as engine:
        engine.run(asked)
        for steps in (1, 3):
            engine.forget()
            boots = engine.boots
            for prompt in [*asked, *prompts(20 + steps, 250)]:
                engine.add(prompt)
            for _ in range(steps):
                engine.step()
            engine.kill_daemon()
            engine.finish()
            engine.served_again(boots)
        engine.forget()
        assert engine.run(asked) == rest(asked)


@both
def test_a_suspended_daemon_delays_those_that_load_from_it_and_nobody_else(place: Path, kind: str) -> None:
    asked, others = prompts(11, 300), prompts(12, 200, 200)
    with DryEngine(place, kind, blocks=ROOMY) as engine:
        engine.run(asked)
        engine.forget()
        os.kill(engine.daemon(), signal.SIGSTOP)
        try:
            delayed = engine.add(asked[0])
            for _ in range(3):
                engine.step()
            names = [engine.add(prompt) for prompt in others]
            engine.until(lambda: all(len(engine.answers[name]) == ANSWER for name in names))
        finally:
            os.kill(engine.daemon(), signal.SIGCONT)
        engine.finish()
        assert len(engine.answers[delayed]) == ANSWER


def test_nothing_moves_before_every_rank_has_passed_its_step(place: Path) -> None:
    asked = prompts(13, 300)
    with DryEngine(place, "connector", blocks=ROOMY, ranks=2) as engine:
        engine.run(asked)
        engine.forget()
        engine.held = {1}
        name = engine.add(asked[0])
        engine.until(lambda: bool(engine.connector._scheduling._waiting))
        for _ in range(50):
            engine.step()
            assert not engine.computed[name]
            assert not engine.connector._scheduling._running
            assert all((rank.bytes == 0xA5).all() for rank in engine.ranks)
        engine.held = set()
        engine.finish()
        assert engine.computed[name] == rest(asked)[0]


def test_the_connector_says_which_blocks_are_stored(place: Path) -> None:
    (asked,) = prompts(15, 100)
    with DryEngine(place, "connector", blocks=ROOMY, events=True) as engine:
        engine.run([asked])
        told = [event for event in engine.published if event.medium == "STORAGE"]
        names = [maybe_convert_block_hash(name) for name in hashes(engine, asked)]
        assert [event.block_hashes for event in told] == [[name] for name in names]
        assert [event.parent_block_hash for event in told] == [None, *names[:-1]]
        assert [event.token_ids for event in told] == [asked[i : i + TOKENS] for i in (0, 32, 64)]


@both
@pytest.mark.parametrize("ahead", [False, True])
def test_preempted_and_aborted_requests_leave_no_wrong_byte(place: Path, kind: str, ahead: bool) -> None:
    draw = random.Random(14)
    asked = prompts(14, *[250] * 8)
    with DryEngine(place, kind, blocks=36, ahead=ahead) as engine:
        for _ in range(3):
            preempts_and_aborts(engine, draw, asked)


@both
def test_conversations_are_right_to_the_byte_while_the_daemon_dies(place: Path, kind: str) -> None:
    """A conversation trace through a small KV cache, one block in a hundred damaged, the daemon killed at a third."""
    asked = conversations()
    together = 50
    pool: dict[str, Any] = {"cpu_bytes_to_use": 100 * 2 * 16384} if kind == "tier" else {}
    with DryEngine(place, kind, blocks=110, together=3, ahead=True, **pool) as engine:
        least = 0
        for start in range(0, len(asked), together):
            batch = asked[start : start + together]
            if start % (3 * together) == together:
                names = [engine.add(prompt) for prompt in batch]
                boots = engine.boots
                for _ in range(20):
                    engine.step()
                engine.kill_daemon()
                engine.finish()
                engine.served_again(boots)
            else:
                names = [engine.add(prompt) for prompt in batch]
                engine.finish()
            assert all(len(engine.answers[name]) == ANSWER for name in names)
            least += sum(engine.computed[name] for name in names)
            for path in objects(place)[::100]:
                flip(path)
        print(f"{kind}: {len(asked)} requests, {sum(whole(asked))} tokens, {least} computed")
        assert least < sum(whole(asked))


@both
@pytest.mark.parametrize("seed", range(SEEDS))
def test_any_order_of_requests_and_faults(place: Path, kind: str, seed: int) -> None:
    draw = random.Random(seed)
    stems = prompts(seed, *[draw.randrange(40, 400) for _ in range(5)])
    shape: dict[str, Any] = {
        "blocks": draw.choice([40, ROOMY]),
        "ranks": draw.choice([1, 2]),
        "ahead": draw.choice([False, True]),
    }
    with DryEngine(place, kind, **shape) as engine:
        names: list[str] = []
        for _ in range(60):
            deed = draw.choice(["ask", "ask", "ask", "step", "step", "abort", "forget", "flip", "unlink", "kill"])
            if deed == "ask":
                stem = draw.choice(stems)
                tail = [draw.randrange(3, 500) for _ in range(draw.choice([0, 20, 100]))]
                names.append(engine.add([*stem[: draw.randrange(33, len(stem) + 1)], *tail], draw.choice([2, 40])))
            elif deed == "step":
                for _ in range(draw.randrange(1, 30)):
                    engine.step()
            elif deed == "abort" and names:
                engine.abort(draw.choice(names))
            elif deed == "forget":
                engine.finish()
                engine.forget()
            elif deed in ("flip", "unlink"):
                for path in draw.sample(found := objects(place), min(3, len(found))):
                    with contextlib.suppress(FileNotFoundError):  # the daemon has just put a damaged one aside
                        flip(path) if deed == "flip" else path.unlink()
            elif deed == "kill" and draw.random() < 0.3 and all(link.ready for link in engine.links):
                engine.kill_daemon()
        engine.finish()
        assert sum(engine.computed.values())
