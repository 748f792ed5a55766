"""A FastDeploy that differs from those that the plugin knows is named in one line, and runs its own queue."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from transferd.adapters.fastdeploy import expected, plugin
from transferd.adapters.fastdeploy.engine_queue import EngineQueue, queue_for

STATUSES = {"NORMAL": 0, "UPDATING": 1, "CLEARING": -1, "CLEARED": -2}


class TheirQueue:
    """FastDeploy's own class."""

    def __init__(
        self, address: Any, authkey: Any, is_server: Any, num_client: Any, client_id: Any,
        local_data_parallel_size: Any, local_data_parallel_id: Any,
    ) -> None:  # fmt: skip
        self.arguments = address, is_server, num_client, local_data_parallel_id


def known(name: str, parameters: tuple[str, ...]) -> Any:
    """A function with these parameters, and more that have defaults."""
    made: dict[str, Any] = {}
    exec(f"def {name}({', '.join((*parameters, 'newer=None'))}): pass", made)
    return made[name]


@pytest.fixture
def fastdeploy(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Modules that have all that the plugin knows, and a line of source that names the attributes."""
    modules: dict[str, ModuleType] = {}
    for path in (*expected.SIGNATURES, *expected.ATTRIBUTES, plugin.PACKAGE, "fastdeploy"):
        name = path.partition(":")[0]
        modules.setdefault(name, ModuleType(name))
        monkeypatch.setitem(sys.modules, name, modules[name])
    for path, parameters in expected.SIGNATURES.items():
        module, _, names = path.partition(":")
        at: Any = modules[module]
        *outer, last = names.split(".")
        for name in outer:
            if not hasattr(at, name):
                setattr(at, name, type(name, (), {}))
            at = getattr(at, name)
        made = known(last, parameters)
        if path in expected.ATTRIBUTES:
            made = type(last, (), {"__init__": known("__init__", ("self", *parameters))})
        setattr(at, last, made)
    for path in expected.ATTRIBUTES:
        module, _, name = path.partition(":")
        if not hasattr(modules[module], name):
            setattr(modules[module], name, type(name, (), {}))
    modules[plugin.PACKAGE].EngineCacheQueue = TheirQueue  # type: ignore[attr-defined]
    modules[plugin.PACKAGE].KVCacheStatus = type("KVCacheStatus", (), STATUSES)  # type: ignore[attr-defined]
    source = " ".join(name for names in expected.ATTRIBUTES.values() for name in names)
    monkeypatch.setattr(inspect, "getsource", lambda _: source)
    expected.as_expected.cache_clear()
    yield modules
    expected.as_expected.cache_clear()


def made_queue() -> Any:
    plugin.register()
    return queue_for(("127.0.0.1", 7111), is_server=True, num_client=2, local_data_parallel_id=3)


def test_a_fastdeploy_with_further_names_is_served(fastdeploy: dict[str, ModuleType]) -> None:
    assert expected.differences() == []
    made = made_queue()
    assert isinstance(made, EngineQueue)
    made.cleanup()


@pytest.mark.parametrize("what", ["gone", "order", "needed", "attribute", "module", "status", "call", "signal"])
def test_differences_are_logged_once_and_the_plugin_does_nothing(
    fastdeploy: dict[str, ModuleType], what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager: Any = fastdeploy[expected.MANAGER]
    if what == "gone":
        del manager.PrefixCacheManager.issue_swap_task
    if what == "order":
        manager.PrefixCacheManager.issue_swap_task = known("f", ("transfer_task_id", "gpu_block_ids", "swap_node_ids"))
    if what == "needed":
        manager.PrefixCacheManager.recycle_cpu_blocks = lambda cpu_block_ids, where: (cpu_block_ids, where)
    if what == "attribute":
        monkeypatch.setattr(inspect, "getsource", lambda _: "node_map")
    if what == "module":
        del fastdeploy[expected.DATA].BlockNode
    if what == "status":
        fastdeploy[plugin.PACKAGE].KVCacheStatus.CLEARED = -3
    source = inspect.getsource(manager)
    if what == "call":
        monkeypatch.setattr(inspect, "getsource", lambda _: f"{source} self.cache_task_queue.newer_call(1)")
    if what == "signal":
        monkeypatch.setattr(inspect, "getsource", lambda _: source.replace("cache_task_inflight", "tasks_in_flight"))
    named = {
        "needed": "recycle_cpu_blocks", "attribute": "has no node_id_pool", "module": "BlockNode",
        "status": "KVCacheStatus.CLEARED is -3, not -2", "call": "calls cache_task_queue.newer_call",
        "signal": '"cache_task_inflight"',
    }  # fmt: skip
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            made = made_queue()
            assert isinstance(made, TheirQueue)
            assert made.arguments == (("127.0.0.1", 7111), True, 2, 3)
    (line,) = [one for one in caplog.messages if "does nothing" in one]
    assert named.get(what, "issue_swap_task") in line
    assert "\n" not in line
