"""Which generation an engine serves when its weights change in place: a version only if nothing older can be stored."""

from __future__ import annotations

import random

import pytest

from transferd.adapters.vllm.versions import FIRST, Versions, version_of_the_engine


class Engine:
    """vLLM's core, as far as a version goes."""

    def __init__(self) -> None:
        self._weight_version = FIRST
        self.found = version_of_the_engine()

    def get_weight_version(self) -> str:
        return self._weight_version


class World:
    def __init__(self, base: str = "") -> None:
        self.now = FIRST
        self.versions = Versions(base, lambda: self.now)


def test_engines_that_sync_to_one_version_serve_one_generation() -> None:
    """As vLLM's pause, update and finish do: the caches are emptied, then the weights change, then the version."""
    one, other = World("run 7"), World("run 7")
    for world in (one, other):
        world.versions.computed()
        assert world.versions.reset() == "", "until the version is known"
        world.now = "step 1"
    assert one.versions.changed() == other.versions.changed() == "run 7-step 1"
    assert one.versions.changed() is None


def test_the_version_may_come_before_the_reset() -> None:
    world = World()
    world.versions.computed()
    world.now = "2"
    assert world.versions.reset() == "2"
    assert world.versions.changed() is None


def test_a_reset_without_a_version_is_for_this_engine_alone() -> None:
    world = World()
    assert world.versions.reset() == ""
    world.now = "1"
    assert world.versions.changed() == "1"
    assert world.versions.reset() == "", "the weights may have changed again"


@pytest.mark.parametrize("resets", [True, False])
def test_a_version_over_older_kv_is_for_this_engine_alone(resets: bool) -> None:
    world = World("run")
    if resets:
        world.versions.reset()
    world.versions.computed()
    world.now = "1"
    assert world.versions.changed() == ""


@pytest.mark.parametrize("seed", range(200))
def test_no_order_of_events_stores_older_kv_under_a_version(seed: int) -> None:
    """Weights change with their version. KV that vLLM holds is of the weights that computed it."""
    draw, world = random.Random(seed), World("run")
    weights, serves, held = FIRST, FIRST, set[str]()
    for _ in range(60):
        deed = draw.choice(["compute", "compute", "reset", "update"])
        if deed == "update":
            weights = world.now = str(draw.randrange(4))
        elif deed == "reset":
            held.clear()
            serves = world.versions.reset() or "unique"
        else:
            changed = world.versions.changed()
            serves = serves if changed is None else changed or "unique"
            world.versions.computed()
            held.add(weights)
            assert serves in (FIRST, "unique") or held == {serves.removeprefix("run-")}


def test_the_version_is_found_in_the_calls_that_create_a_connector() -> None:
    engine = Engine()
    engine._weight_version = "9"
    assert engine.found() == "9"
    assert version_of_the_engine()() == FIRST
