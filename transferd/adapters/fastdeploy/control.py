"""FastDeploy's control requests to its transfer processes, carried out by the daemon.

They travel through the cache queue as (CacheStatus.CTRL, request), a request having method, request_id and
args. FastDeploy's transfer processes answer on a queue of their own; here a function that the engine gives
hears how each request ended (`EngineCacheQueue.on_control`).

    pause           no task starts, and none is at work any more when it ends
    resume          tasks start again
    update_weights  blocks are stored under the new weight version: args["version"], else version.yaml
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transferd.errors import ConfigError, RequestError
from transferd.generation import generation_named, generation_of
from transferd.sync_client import SyncClient

VERSION_FILE_VARIABLE = "TRANSFERD_STORAGE__VERSION_FILE"  # the daemon's own setting, where the engine has it too


@dataclass(frozen=True, slots=True)
class ControlItem:
    """A request to do something other than a transfer."""

    request: Any
    method: str
    args: Mapping[str, Any]


def obey(item: ControlItem, client: SyncClient) -> None:
    """Do what is asked; returns when it is done.

    Raises RequestError for an unknown method, and what the daemon raises.
    """
    command = _COMMANDS.get(item.method)
    if command is None:
        raise RequestError(
            f"no control method {item.method!r}; there are {', '.join(_COMMANDS)}", code="unknown_method"
        )
    command(client, item.args)


def _update_weights(client: SyncClient, args: Mapping[str, Any]) -> None:
    client.set_generation(_new_generation(args))


def _new_generation(args: Mapping[str, Any]) -> str:
    version = args.get("version")
    if isinstance(version, str) and version:
        return generation_named(version)
    file = os.environ.get(VERSION_FILE_VARIABLE)
    if not file:
        what = "neither the request nor the environment says where the new weight version is"
        raise ConfigError(VERSION_FILE_VARIABLE, what)
    return generation_of(file)


_COMMANDS: dict[str, Callable[[SyncClient, Mapping[str, Any]], None]] = {
    "pause": lambda client, _: client.pause(),
    "resume": lambda client, _: client.resume(),
    "update_weights": _update_weights,
}
