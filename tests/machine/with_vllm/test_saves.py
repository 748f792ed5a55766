"""What the connector saves again, gives up and counts, under vLLM's own scheduler: every block is checked (dry.py)."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.machine.with_vllm.dry import TOKENS, DryEngine, hashes, object_with, prompts
from tests.machine.with_vllm.held import holding
from tests.machine.with_vllm.test_scheduler import ROOMY, both, rest, whole
from tests.support.waits import wait_until

pytestmark = pytest.mark.timeout(900)


def nothing_twice(place: Path, asked: list[list[int]], **settings: Any) -> None:
    """An engine that starts now computes no full block of these."""
    with DryEngine(place, "connector", blocks=ROOMY, **settings) as engine:
        engine.until(lambda: all(link.ready for link in engine.links))  # else it does not wait, and computes
        assert engine.run(asked) == rest(asked)


def test_a_turn_while_the_daemon_is_down_is_repaired_by_the_next_one(place: Path) -> None:
    (turn,) = prompts(1, 330)
    first = contextlib.ExitStack()
    endpoint = first.enter_context(holding(place)).endpoint
    with first, DryEngine(place, "connector", blocks=ROOMY, endpoint=endpoint) as engine:
        engine.run([turn[:100]])
        first.close()
        engine.until(lambda: not engine.ours._link.ready)
        engine.run([turn[:230]])
        with holding(place) as again:
            assert again.endpoint == endpoint
            engine.until(lambda: all(link.ready for link in engine.links))
            engine.run([turn])
            nothing_twice(place, [turn], endpoint=endpoint)


def test_a_hole_in_the_store_is_filled_from_what_the_gpu_has(place: Path) -> None:
    (asked,) = prompts(2, 330)
    with DryEngine(place, "connector", blocks=ROOMY) as engine:
        engine.run([asked])
        for name in hashes(engine, asked)[2:4]:
            object_with(place, engine.ranks[0].content(name)).unlink()
        lost = engine.ours._link.exists([name.hex() for name in hashes(engine, asked)])
        assert lost.count(False) in (0, 2), "the store may notice at the next load only"
        engine.forget()
        assert engine.run([asked]) == [len(asked) + 1 - 2 * TOKENS]
        engine.run([asked], answer=40)
    nothing_twice(place, [asked])


def test_a_preempted_request_loads_what_it_had_saved(place: Path) -> None:
    """It asked when it came, and the daemon had nothing of it then."""
    asked = prompts(5, *[250] * 4)
    with DryEngine(place, "connector", blocks=36) as engine:
        scheduling = engine.ours._scheduling
        names = [engine.add(prompt, 120) for prompt in asked]
        while engine.scheduler.has_requests():
            engine.step()
            wait_until(lambda: (scheduling.collect(), not scheduling._running)[1], within=60.0)
        assert engine.preempted
        again = sum(engine.computed[name] for name in names) - sum(len(prompt) + 119 for prompt in asked)
        assert again < engine.preempted * 2 * TOKENS, "more than the block that was not full"


@both
@pytest.mark.parametrize("running", [False, True])
def test_a_reset_right_after_an_answer_succeeds(place: Path, kind: str, running: bool) -> None:
    if kind == "tier" and running:
        pytest.skip("vLLM's own offloading holds blocks of running stores")
    asked = prompts(3, 300, 200)
    with DryEngine(place, kind, blocks=ROOMY) as engine:
        names = [engine.add(prompt, 40) for prompt in asked]
        engine.until(lambda: all(len(engine.answers[name]) >= (3 if running else 40) for name in names))
        if kind == "connector":
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=running)
        engine.finish()
        engine.forget()
        engine.run(asked)


def test_a_reset_while_the_daemon_is_suspended_is_refused_in_time_and_then_succeeds(place: Path) -> None:
    (asked,) = prompts(4, 300)
    with DryEngine(place, "connector", blocks=ROOMY) as engine:
        name, scheduling = engine.add(asked, 40), engine.ours._scheduling
        engine.until(lambda: any(known.answered for known in scheduling._requests.values()))
        os.kill(engine.daemon(), signal.SIGSTOP)
        try:
            engine.until(lambda: len(engine.answers[name]) == 40)
            assert scheduling._saving.pinned
            assert not engine.scheduler.reset_prefix_cache()
        finally:
            os.kill(engine.daemon(), signal.SIGCONT)
        engine.finish()
        assert engine.scheduler.reset_prefix_cache()


def test_a_reset_with_the_daemon_down_succeeds_and_the_old_blocks_are_never_found(place: Path) -> None:
    """vLLM's pause and sleep reset the connector, and fail if that fails."""
    (asked,) = prompts(7, 300)
    changed = {"kv_connector_extra_config": {"keep_blocks_on_reset": False}}
    with DryEngine(place, "connector", blocks=ROOMY, transfer=changed) as engine:
        engine.run([asked])
        boots = engine.boots
        engine.kill_daemon()
        engine.until(lambda: not engine.ours._link.ready)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        engine.served_again(boots)
        assert engine.run([asked]) == whole([asked]), "stored before the reset"
        assert engine.scheduler.reset_prefix_cache()
        assert engine.run([asked]) == rest([asked]), "stored since"


def test_engines_that_sync_to_one_version_of_the_weights_share_from_then_on(place: Path) -> None:
    asked = prompts(8, 300, 200)
    changed = {"kv_connector_extra_config": {"keep_blocks_on_reset": False, "generation": "run"}}
    for turn, computed in enumerate((whole(asked), rest(asked))):
        with DryEngine(place, "connector", blocks=ROOMY, transfer=changed) as engine:
            assert engine.run(asked) == (rest(asked) if turn else whole(asked)), "of the weights on disk"
            engine.sync("step 1")
            assert engine.run(asked) == computed
            engine.sync("step 2")
            assert engine.run(asked) == computed
            engine.forget()
            assert engine.run(asked) == whole(asked), "weights that have no version"


def test_roles_and_limits_count(place: Path) -> None:
    asked = prompts(6, 300, 200)
    with DryEngine(place, "connector", blocks=ROOMY, transfer={"kv_role": "kv_consumer"}) as engine:
        engine.run(asked)
        assert not engine.ours._scheduling.counts
    with DryEngine(place, "connector", blocks=ROOMY, transfer={"kv_role": "kv_producer"}) as engine:
        assert engine.run(asked) == whole(asked), "a consumer had stored nothing"
        engine.forget()
        assert engine.run(asked) == whole(asked), "a producer loads nothing"
    nothing_twice(place, asked)
