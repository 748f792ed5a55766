"""The plugin reaches FastDeploy's modules in whatever order they are imported, and leaves the rest alone."""

from __future__ import annotations

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from transferd.adapters.fastdeploy import plugin
from transferd.adapters.fastdeploy.engine_queue import queue_for
from transferd.errors import ConfigError, TransferError
from transferd.runtime.compat import tomllib

ENGINE, MANAGER = "fastdeploy.engine.common_engine", plugin.MANAGER


class TheirQueue:
    """FastDeploy's own class."""


class Modules:
    """FastDeploy's modules, imported as far as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def add(self, name: str, **values: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(values)
        self._monkeypatch.setitem(sys.modules, name, made)
        return made


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    for name in (plugin.PACKAGE, MANAGER, ENGINE, "fastdeploy.envs"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return Modules(monkeypatch)


def test_the_entry_points_are_those_that_every_process_executes() -> None:
    declared = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    for group in ("fastdeploy.tool_parser_plugins", "fastdeploy.reasoning_parser_plugins"):
        value = declared["project"]["entry-points"][group]["transferd"]
        assert EntryPoint("transferd", value, group).load() is plugin.register


def test_modules_that_are_there_are_switched_over_and_those_to_come_find_it_in_the_package(modules: Modules) -> None:
    package = modules.add(plugin.PACKAGE, EngineCacheQueue=TheirQueue)
    early = modules.add(MANAGER, EngineCacheQueue=TheirQueue, subprocess=subprocess)  # its class is still to come
    plugin.register()
    plugin.register()
    late = modules.add(ENGINE, EngineCacheQueue=package.EngineCacheQueue)
    assert early.EngineCacheQueue is late.EngineCacheQueue is queue_for
    assert early.subprocess is subprocess

    class PrefixCacheManager:
        def issue_swap_task(self) -> str:
            return "theirs"

    vars(early)["PrefixCacheManager"] = PrefixCacheManager
    plugin.switch_manager()
    assert PrefixCacheManager().issue_swap_task() == "theirs"  # a manager with another queue is left alone
    with early.subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        assert process.wait() == 0
    assert early.subprocess.PIPE is subprocess.PIPE


def test_a_name_that_somebody_else_has_replaced_stays(modules: Modules) -> None:
    modules.add(plugin.PACKAGE, EngineCacheQueue=TheirQueue)
    another = modules.add(ENGINE, EngineCacheQueue=int)
    plugin.register()
    assert another.EngineCacheQueue is int


@pytest.mark.parametrize("case", ["unknown V1 storage", "unknown version"])
def test_an_unsupported_fastdeploy_is_logged_once_and_left_alone(
    modules: Modules, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    v1 = case == "unknown V1 storage"
    package = modules.add(plugin.PACKAGE, **({"EngineCacheQueue": TheirQueue} if v1 else {}))
    if v1:
        modules.add("fastdeploy.envs", ENABLE_V1_KVCACHE_MANAGER=1)
        modules.add(plugin.V1_STORAGE, create_storage_scheduler=int)
    plugin._say_once.cache_clear()
    with caplog.at_level(logging.ERROR):
        for _ in range(2):  # as FastDeploy does, once for each of its two entry-point groups
            plugin.register()
    assert caplog.text.count("does not know this version of FastDeploy") == 1
    assert getattr(package, "EngineCacheQueue", TheirQueue) is TheirQueue


def test_a_version_without_the_v1_cache_manager_is_switched_over_whatever_the_variable_says(
    modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """release/2.6 does not know ENABLE_V1_KVCACHE_MANAGER and starts transfer processes all the same."""
    monkeypatch.setenv("ENABLE_V1_KVCACHE_MANAGER", "1")
    package = modules.add(plugin.PACKAGE, EngineCacheQueue=TheirQueue)
    modules.add("fastdeploy.envs", FD_PLUGINS=["transferd"])
    plugin.register()
    assert package.EngineCacheQueue is queue_for


def test_both_ends_of_a_port_are_one_queue_and_each_port_has_its_own() -> None:
    address = "/dev/shm/fd_task_queue_{}.sock"
    server = queue_for(address.format(7001), is_server=True, num_client=2)
    other = queue_for(address.format(7002), is_server=True, num_client=2)
    try:
        assert queue_for(address.format(7001), num_client=2, client_id=0) is server is not other
        with pytest.raises(ConfigError, match="client_id"):
            queue_for(address.format(7001), num_client=2, client_id=2)
        with pytest.raises(TransferError, match="asked for no cache transfer processes at port 7001"):
            server.put_transfer_task((1, "swap", [], [], []))
        assert server.get_transfer_done_signal() is None
    finally:
        server.cleanup()
        other.cleanup()
    again = queue_for(address.format(7001), num_client=1, client_id=0)
    assert again is not server
    again.cleanup()
