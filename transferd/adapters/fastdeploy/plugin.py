"""FastDeploy's plugin: with `FD_PLUGINS=transferd` a daemon replaces its cache transfer processes.

FastDeploy loads `register` in every process, while `import fastdeploy` runs. It changes names in the modules of the
engine's process, nothing on disk:

    fastdeploy.inter_communicator.EngineCacheQueue     becomes the queue to the daemon
    prefix_cache_manager.subprocess                    passes the command of a transfer process to the group
    prefix_cache_manager.PrefixCacheManager            handles failed swaps (books.py)

With FastDeploy's V1 cache manager there is no queue and no transfer process: the plugin replaces the factories of its
storage instead (v1.py).

At that time modules are only half imported, in an order that differs between versions. So the plugin replaces a name
in modules that have it already, and in its package, for later imports. It replaces the manager's
class when the queue is created, at the latest. The rest of FastDeploy is unchanged: workers and the cache messager
need no change.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import Any

from transferd.adapters.fastdeploy.arguments import is_transfer_process, read_command
from transferd.adapters.fastdeploy.books import keep_right
from transferd.adapters.fastdeploy.engine_queue import at_each_queue, queue_at, queue_for
from transferd.adapters.fastdeploy.engine_queue import original as originals

log = logging.getLogger(__name__)

PACKAGE = "fastdeploy.inter_communicator"
MANAGER = "fastdeploy.cache_manager.prefix_cache_manager"
USERS = (MANAGER, "fastdeploy.engine.common_engine")
QUEUE = "EngineCacheQueue"
LOG_FILE = "transferd.log"
V1_MANAGER = "ENABLE_V1_KVCACHE_MANAGER"
V1_STORAGE = "fastdeploy.cache_manager.v1.storage"
V1_NAMES = ("create_storage_scheduler", "create_storage_connector", "StorageScheduler", "StorageConnector")


def register() -> None:
    """The entry point, called once for each entry-point group. Logs one line if it cannot switch FastDeploy over."""
    package = sys.modules.get(PACKAGE)
    original = getattr(package, QUEUE, None)
    # A version that does not know the variable has no such cache manager, whatever the environment says.
    if getattr(sys.modules.get("fastdeploy.envs"), V1_MANAGER, 0):
        _once_imported(V1_STORAGE, _serve_v1)
        return
    if package is None or original is None:
        _say_once(f"{PACKAGE} has no {QUEUE}: transferd does not know this version of FastDeploy, and does nothing")
        return
    if original is queue_for:
        return
    at_each_queue[:], originals[:] = [be_heard, switch_manager], [original]
    setattr(package, QUEUE, queue_for)
    for name in USERS:
        user = sys.modules.get(name)
        if getattr(user, QUEUE, None) is original:
            setattr(user, QUEUE, queue_for)
    switch_manager()


def _serve_v1(storage: Any) -> None:
    from transferd.adapters.fastdeploy.v1 import serve

    missing = [name for name in V1_NAMES if not hasattr(storage, name)]
    if missing:
        _say_once(f"{V1_STORAGE} has no {', '.join(missing)}: transferd does not know this version of FastDeploy")
        return
    serve(storage, be_heard)


def _once_imported(name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with this module, now or when its import ends: importing it here would run FastDeploy's half."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    elif not any(isinstance(one, _Awaited) and one.name == name for one in sys.meta_path):
        sys.meta_path.insert(0, _Awaited(name, then))


class _Awaited:
    """A finder that finds one module where others do, and calls `then` when the module has been executed."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name) if path is None else PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: Any) -> None:
                execute(module)
                self._then(module)

            spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec


@functools.cache
def _say_once(what: str) -> None:
    log.error("%s", what)


def switch_manager() -> None:
    """Switch the module of the PrefixCacheManager over, once it is imported. Idempotent."""
    module = sys.modules.get(MANAGER)
    manager = getattr(module, "PrefixCacheManager", None)
    if module is None or manager is None:
        return
    keep_right(manager)
    if getattr(module, "subprocess", None) is subprocess:
        module.subprocess = _Subprocess()  # type: ignore[attr-defined]


def be_heard() -> None:
    """Send the plugin's INFO log to standard error, and to transferd.log beside FastDeploy's own logs.

    Python's root logger has no handler in FastDeploy. Idempotent. Do not call it during the import of FastDeploy, which
    adds and removes handlers.
    """
    logger = logging.getLogger(__package__)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
        logger.setLevel(logging.INFO)
    if any(one.name == LOG_FILE for one in logger.handlers):
        return
    try:
        logger.addHandler(_log_file())
    except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
        log.info("the lines of transferd are on standard error only: %s", error)
    else:
        logger.setLevel(logging.INFO)


def _log_file() -> logging.Handler:
    """A file in FD_LOG_DIR that is kept as long as FastDeploy's, by FastDeploy's own class: several processes write."""
    from fastdeploy import envs
    from fastdeploy.logger.handlers import DailyRotatingFileHandler

    place = os.path.join(envs.FD_LOG_DIR, LOG_FILE)
    os.makedirs(envs.FD_LOG_DIR, exist_ok=True)
    file: logging.Handler = DailyRotatingFileHandler(place, backupCount=int(envs.FD_LOG_BACKUP_COUNT))
    file.name = LOG_FILE
    file.setFormatter(logging.Formatter("%(levelname)-8s %(asctime)s %(process)d %(message)s"))
    return file


class _Subprocess:
    """The module `subprocess`, except for the command of a cache transfer process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Any, *args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:  # noqa: N802
        if is_transfer_process(command):
            queue = queue_at(read_command(command).cache_queue_port)
            if queue is not None:
                return queue.group.launch(command)
        return subprocess.Popen(command, *args, **kwargs)
