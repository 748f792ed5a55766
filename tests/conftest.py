"""What every test shares: event loops, the order, how processes are started; hypothesis watches no clock.

What may run in an engine's process (client, wire, adapters, and what these share with the daemon) is tested on
asyncio's own loop and on uvloop. What only the daemon runs is tested on uvloop, on which the daemon always runs.

Examples are the same in every run, and may take as long as a busy machine needs: what has not changed does not
fail. `--hypothesis-profile=default` looks for new ones.

Marked `one_loop` are slow tests of daemons in processes of their own: the test is the engine, on asyncio.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, settings

from tests.support import apart, forks, looking, rewritten
from transferd.runtime.compat import count_cancellations

apart.own_ports()
forks.install()
looking.costs_nothing()

HERE = Path(__file__).parent
DAEMON_ONLY = {"daemon", "integration", "observability", "soak", "storage", "tiers", "workers"}

# Files that take longest, slowest first: with several processes none may be left for the end (see Makefile).
LONGEST = (
    "machine/hostile/test_lost_memory.py",
    "integration/test_settled.py",
    "sim/test_storms.py",
    "machine/hostile/test_campaign.py",
    "cli/test_terminals.py",
    "tiers/test_cuda_bindings.py",
    "integration/test_store_left_alone.py",
    "adapters/test_fastdeploy_trace.py",
    "integration/test_cli.py",
    "machine/hostile/test_lives.py",
    "cli/test_replay_engine.py",
    "machine/hostile/test_memory.py",
    "integration/test_handover.py",
    "daemon/test_daemon.py",
    "machine/systemd/test_unit.py",
    "machine/faults/test_resources.py",
    "machine/fuzz/test_targets.py",
    "integration/test_purge.py",
    "integration/test_totals.py",
    "machine/hostile/test_generations.py",
    "integration/test_replay_predicted.py",
    "daemon/test_process.py",
    "machine/faults/test_matrix.py",
    "test_wheel.py",
)

settings.register_profile("transferd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# For `make mutate`, which runs the same tests hundreds of times: few examples, and a failing one as it was found.
settings.register_profile(
    "mutate", settings.get_profile("transferd"), max_examples=25, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("transferd")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    if not config.option.file_or_dir:  # all tests
        rewritten.rewrite(HERE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {HERE / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))  # stable: the others keep their order


def pytest_collection_finish() -> None:
    """A collection passes over what the tests make, and not over all tests, which takes 0.17 s each time."""
    gc.collect()
    gc.freeze()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {}
    one_loop = item.get_closest_marker("one_loop") is not None
    if one_loop or DAEMON_ONLY.isdisjoint(item.path.relative_to(HERE).parts):
        factories["asyncio"] = lambda: count_cancellations(asyncio.new_event_loop())
    if not one_loop:
        factories["uvloop"] = lambda: count_cancellations(uvloop.new_event_loop())
    return factories
