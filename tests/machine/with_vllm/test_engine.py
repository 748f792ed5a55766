"""The adapter under vLLM's real engine: a tiny model with made-up weights on the CPU, and a real daemon.

Equal answers prove nothing. Witnesses note the sha256 of every block as it is stored and after it was loaded.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.machine.with_vllm.engine import Engine, witnessed
from tests.machine.with_vllm.held import holding

pytestmark = [pytest.mark.timeout(900), pytest.mark.parametrize("kind", ["tier", "connector"])]


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 500) for _ in range(length)] for length in lengths]


def tokens(answers: list[dict[str, object]]) -> list[object]:
    return [answer["tokens"] for answer in answers]


PLAIN: dict[str, list[list[dict[str, Any]]]] = {}


def plain(place: Path, asked: list[list[list[int]]], **options: Any) -> list[list[dict[str, Any]]]:
    """What vLLM answers without us; asked once for both kinds, since each start takes half a minute."""
    name = repr((asked, options))
    if name not in PLAIN:
        PLAIN[name] = Engine(place, "none", asked, **options).result()
    return PLAIN[name]


def test_a_restarted_engine_loads_what_the_last_one_stored(place: Path, kind: str) -> None:
    asked = prompts(1, 200, 300, 170)
    (cold,) = Engine(place, kind, [asked]).result()
    (warm,) = Engine(place, kind, [asked]).result()
    assert tokens(cold) == tokens(warm) == tokens(plain(place, [asked])[0])
    assert [answer["cached"] for answer in cold] == [0, 0, 0]
    assert [answer["cached"] for answer in warm] == [192, 288, 160]
    stored, loaded = witnessed(place)
    assert stored >= 20
    assert loaded == 20


def test_a_killed_daemon_costs_time_and_no_byte(place: Path, kind: str) -> None:
    asked = prompts(2, 200, 300)
    engine = Engine(place, kind, [asked, asked, asked, asked], wait=True)
    engine.played(1)
    os.kill(engine.daemon(), signal.SIGKILL)
    for number in (2, 3, 4):
        engine.go_on()
        engine.played(number)
    engine.go_on()
    rounds = engine.result()
    assert all(tokens(answers) == tokens(rounds[0]) for answers in rounds)
    witnessed(place)


def test_a_killed_engine_leaves_nothing_wrong_behind(place: Path, kind: str) -> None:
    asked = prompts(3, 200, 300, 250)
    engine = Engine(place, kind, [asked, prompts(4, 600, 600, 600)], wait=True)
    engine.played(1)
    engine.go_on()
    engine.kill()
    (warm,) = Engine(place, kind, [asked]).result()
    assert tokens(warm) == tokens(plain(place, [asked])[0])
    _, loaded = witnessed(place)
    assert loaded


def test_an_engine_killed_in_the_middle_of_a_load_leaves_a_clean_daemon(place: Path, kind: str) -> None:
    """Half of the load's objects are read when the engine dies, and the rest only once the daemon knows of that."""
    asked = prompts(1, 200, 300, 170)
    with holding(place) as daemon:
        there = {"extra": {"endpoint": daemon.endpoint}}
        engine = Engine(place, kind, [asked, asked], wait=True, **there)
        engine.played(1)
        daemon.hold()
        engine.go_on()
        daemon.reached()
        assert daemon.stats()["running"]
        engine.kill()
        daemon.noticed()
        daemon.release()
        daemon.clean()
        (warm,) = Engine(place, kind, [asked], **there).result()
        daemon.clean()
    assert tokens(warm) == tokens(plain(place, [asked])[0])
    assert [answer["cached"] for answer in warm] == [192, 288, 160]
    _, loaded = witnessed(place)
    assert loaded == 20, "every block, each with the bytes that the killed engine had stored"


def test_preempted_requests_are_right(place: Path, kind: str) -> None:
    asked = prompts(5, 250, 250, 250, 250)
    small = {"num_gpu_blocks_override": 36, "max_num_seqs": 4}
    options = {"llm": small, "max_tokens": 120}
    rounds = Engine(place, kind, [asked, asked], **options).result()
    expected = plain(place, [asked, asked], **options)
    assert [tokens(answers) for answers in rounds] == [tokens(answers) for answers in expected]
    _, loaded = witnessed(place)
    assert loaded


def test_two_ranks(place: Path, kind: str) -> None:
    asked = prompts(6, 200, 300)
    options = {"llm": {"tensor_parallel_size": 2}}
    rounds = Engine(place, kind, [asked, asked], **options).result()
    assert tokens(rounds[0]) == tokens(rounds[1])
    assert [answer["cached"] for answer in rounds[1]] == [192, 288]
    _, loaded = witnessed(place)
    assert loaded
