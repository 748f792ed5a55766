"""FastDeploy's control requests to its transfer processes, carried out by the daemon.

They travel through the cache queue as (CacheStatus.CTRL, request); a request has method, request_id and
args. FastDeploy's transfer processes answer on a queue of their own. Here a callback tells the engine how
each request ended (`EngineCacheQueue.on_control`).

    pause           no task starts; when the request ends, none is running
    resume          tasks start again
    update_weights  blocks are stored under the new weight version: args["version"], else version.yaml
    sleep           frees the cache's memory (tags without kv_cache: we have nothing to free)
    wakeup          creates it again, under a weight version that was not served before

The version comes from args["version"], or else from the file in TRANSFERD_STORAGE__VERSION_FILE, if the engine has
that variable, too. Without either, a wakeup uses the version in the daemon's own storage.version_file, or the one
that an update_weights has set since.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from transferd.client.sync_client import SyncClient
from transferd.config.generation import generation_named, generation_of
from transferd.errors import ConfigError, RequestError

KEEP_VARIABLE = "TRANSFERD_KEEP_BLOCKS_ON_UPDATE"
UNNAMED = "unnamed"  # weights without a version
VERSION_FILE_VARIABLE = "TRANSFERD_STORAGE__VERSION_FILE"  # the daemon's own setting, if the engine has it too


@dataclass(frozen=True, slots=True)
class ControlItem:
    """A request to do something other than a transfer."""

    request: Any
    method: str
    args: Mapping[str, Any]


def obey(item: ControlItem, client: SyncClient) -> None:
    """Carry out a request; return when it is done.

    Raises RequestError for an unknown method, and the daemon's errors.
    """
    command = _COMMANDS.get(item.method)
    if command is None:
        raise RequestError(
            f"no control method {item.method!r}; there are {', '.join(_COMMANDS)}", code="unknown_method"
        )
    command(client, item.args)


def _update_weights(client: SyncClient, args: Mapping[str, Any]) -> None:
    generation = _new_generation(args)
    if generation is None:
        what = "neither the request nor the environment names the new weight version"
        raise ConfigError(VERSION_FILE_VARIABLE, what)
    client.set_generation(new_generation(generation, client.generation))


def new_generation(named: str, served: str) -> str:
    """A generation for new weights that are called `named`, if an engine has served `served` until now.

    A name that is served already does not tell the weights apart. It gets a unique ending, so that no block of the
    earlier weights is found, unless the environment says that such an update keeps the weights.
    """
    keep = os.environ.get(KEEP_VARIABLE, "").strip().lower() in ("1", "true")
    return named if keep or named not in (served, UNNAMED) else f"{named}-{uuid.uuid4().hex[:16]}"


def _sleep(client: SyncClient, args: Mapping[str, Any]) -> None:
    if is_about_the_cache(args):
        client.clear_cache()


def _wakeup(client: SyncClient, args: Mapping[str, Any]) -> None:
    if is_about_the_cache(args):
        client.restore_cache(_new_generation(args))


def is_about_the_cache(args: Mapping[str, Any]) -> bool:
    """Whether the request's tags include the cache. tags: "weight,kv_cache", or a list; none means everything."""
    tags = args.get("tags")
    if not tags:
        return True
    return "kv_cache" in (tags.split(",") if isinstance(tags, str) else tags)


def _new_generation(args: Mapping[str, Any]) -> str | None:
    version = args.get("version")
    if isinstance(version, str) and version:
        return generation_named(version)
    file = os.environ.get(VERSION_FILE_VARIABLE)
    return generation_of(file) if file else None


_COMMANDS: dict[str, Callable[[SyncClient, Mapping[str, Any]], None]] = {
    "pause": lambda client, _: client.pause(),
    "resume": lambda client, _: client.resume(),
    "update_weights": _update_weights,
    "sleep": _sleep,
    "wakeup": _wakeup,
}
