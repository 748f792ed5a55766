"""What every test shares: each async test runs on asyncio's own loop and on uvloop; hypothesis watches no clock.

Examples are the same in every run, and may take as long as a busy machine needs: what has not changed does not
fail. `--hypothesis-profile=default` looks for new ones.

Marked `one_loop` are slow tests of daemons in processes of their own, which run on uvloop anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop
from hypothesis import HealthCheck, Phase, settings

settings.register_profile("transferd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# For `make mutate`, which runs the same tests hundreds of times: few examples, and a failing one as it was found.
settings.register_profile(
    "mutate", settings.get_profile("transferd"), max_examples=25, phases=[Phase.explicit, Phase.generate]
)
settings.load_profile("transferd")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.get_closest_marker("one_loop") is None:
        factories["uvloop"] = uvloop.new_event_loop
    return factories
