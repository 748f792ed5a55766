"""A transfer that failed leaves FastDeploy's books right: no node in transit, no block lost, nothing wrong claimed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sabotage import FILE_VARIABLE, Saboteur
from tests.with_fastdeploy.engine import Engine, engine
from tests.with_fastdeploy.test_tiers import prompts


@pytest.fixture
def saboteur(place: Path, monkeypatch: pytest.MonkeyPatch) -> Saboteur:
    """The daemon's device and storage, which fail when they are told to."""
    made = Saboteur(place / "order")
    monkeypatch.setenv(FILE_VARIABLE, str(made.file))
    monkeypatch.setenv("TRANSFERD_CACHE__DEVICE", "tests.support.sabotage:SabotagedDevice")
    return made


def fill(made: Engine, asked: list[list[int]]) -> None:
    for tokens in asked:
        made.run(tokens)
    made.settle()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_failed_swap_out_gives_its_blocks_up(saboteur: Saboteur, tp: int) -> None:
    with engine(tp=tp, gpu_blocks=24, cpu_blocks=48) as made:
        asked = prompts(4)
        fill(made, asked[:2])
        with saboteur.order("copy_out", tp - 1):
            fill(made, asked[2:])  # needs room that an eviction cannot make by moving
        assert all(node.has_in_gpu for node in made.manager.node_map.values()), "a failed swap claims host blocks"
        fill(made, asked)
        assert sum(made.run(tokens)["cpu_match_token_num"] for tokens in asked) > 0
        made.settle()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_failed_swap_in_is_computed_anew(saboteur: Saboteur, tp: int) -> None:
    with engine(tp=tp, gpu_blocks=24, cpu_blocks=48) as made:
        asked = prompts(4)
        fill(made, asked)
        with saboteur.order("copy_in", tp - 1):
            metrics = made.run(asked[0])
        assert metrics["cpu_match_token_num"] == 0
        made.settle()
        assert made.run(asked[1])["cpu_match_token_num"] > 0
        made.settle()


@pytest.mark.parametrize("operation", ["get", "copy_in"])
def test_a_failed_read_is_computed_anew(saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setenv("TRANSFERD_STORAGE__BACKEND", "tests.support.sabotage:SabotagedStorage")
    with engine(tp=2, gpu_blocks=16, cpu_blocks=0, backend="file") as made:
        asked = prompts(3)
        fill(made, asked)
        with saboteur.order(operation, 1):
            assert made.run(asked[0])["storage_match_token_num"] == 0
        made.settle()
        assert made.run(asked[1])["storage_match_token_num"] == 40
        made.settle()


@pytest.mark.parametrize("operation", ["put", "copy_out"])
def test_a_failed_write_says_so_at_once(saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    monkeypatch.setenv("TRANSFERD_STORAGE__BACKEND", "tests.support.sabotage:SabotagedStorage")
    with engine(tp=2, gpu_blocks=16, cpu_blocks=0, backend="file") as made:
        asked = prompts(3)
        with saboteur.order(operation, 0):
            made.run(asked[0])
        made.settle()
        made.run(asked[1])
        made.run(asked[2])
        assert made.run(asked[0])["storage_match_token_num"] == 0
        made.settle()


@pytest.mark.parametrize("tp", [1, 2])
def test_a_daemon_that_is_killed_costs_hits_and_nothing_else(place: Path, tp: int) -> None:
    with engine(tp=tp, gpu_blocks=24, cpu_blocks=48) as made:
        asked = prompts(6)
        fill(made, asked[:4])
        made.kill_daemon()
        for tokens in asked:
            made.run(tokens)  # bytes of what is on the device are checked all the while
        made.settle()
        assert all(made.run(tokens)["cpu_match_token_num"] == 0 for tokens in asked)
        made.settle()
