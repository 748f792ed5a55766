"""The daemon behind FastDeploy's groups on a node: a running one, or one that a group starts.

    where           TRANSFERD_ENDPOINT ({port}, {dp} filled in), else the packaged socket if a daemon of this user or
                    of root answers there, else a socket in this user's directory, named after the daemon's settings
    runs already    without [cache], the group registers its engine there; a [cache] must match FastDeploy's
                    arguments, and no other engine may use it
    does not run    we start one with the configuration that those arguments require

A started daemon serves every group of this user that needs the same settings: data-parallel groups, prefill and decode,
other engines. It ends when the last of them has left, whoever started it, and however they end. If it ends before, one
of them starts it again. Some groups need their own daemon, with [cache] (`shares`), which ends with its engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import tomli_w

from transferd.adapters.common.companion import ENDPOINT_VARIABLE, LEAST_STAGING, STAGED_BLOCKS, StartedDaemon
from transferd.adapters.common.directories import own_directory, own_socket, sees_all_gpus
from transferd.adapters.common.packaged import nobody_listens, packaged_endpoint
from transferd.adapters.fastdeploy import words
from transferd.blocks.fingerprint import Facts
from transferd.blocks.fingerprint import differences as differences_in_words
from transferd.blocks.layout import build_layout
from transferd.client.sync_client import SyncClient
from transferd.config import CacheSection, Config
from transferd.config.generation import configured_generation
from transferd.config.loading import from_tree, leaves, load, to_tree
from transferd.config.toml import to_toml
from transferd.errors import ConfigError, ConnectTimeout, TransferError
from transferd.runtime.compat import tomllib

log = logging.getLogger(__name__)

STORE_VARIABLES = ("FILE_BACKEND_STORAGE_DIR", "TRANSFERD_STORAGE__FILE__PATH")
ANSWER_TIMEOUT_S = 2.0  # a running daemon answers in milliseconds
START_TIMEOUT_S = 120.0  # enough for CUDA, pinned host memory, a pool's master
FREE_TIMEOUT_S = 10.0  # for a daemon to notice that the engine before us has ended
STOP_TIMEOUT_S = 30.0
ELSEWHERE = f"set {ENDPOINT_VARIABLE} to another address, where a daemon is then started for this engine"
LARGEST_OBJECT = 32 * 1024**2  # bytes, of V1's: all layers of a block of 64 tokens


_pause = threading.Event().wait


@dataclass(eq=False, kw_only=True)
class Companion(StartedDaemon):
    """A daemon and how to reach it. Not thread-safe."""

    registers: bool  # whether engines register there; else it serves the one of its [cache]
    sections: Mapping[str, Any] | None = None  # how we start it; None for the operator's daemon, which we never start
    place: BinaryIO | None = None  # locked while the directory is ours; None if it is shared, or not in use

    def configuration(self) -> Mapping[str, Any]:
        assert self.sections is not None
        return self.sections

    def lives(self) -> bool:
        """Whether the daemon may hold memory. Always true of a daemon that somebody else has started."""
        return self.sections is None or not self.ended

    def look(self) -> str:
        """What to log, or "": see StartedDaemon. Does nothing for the operator's daemon."""
        why = "" if self.sections is None else super().look()
        return why and f"{why}; starting it again"

    def await_answer(self) -> None:
        """Wait until a daemon answers; start it if nobody has, or if another engine's ends.

        Raises OSError, and TransferError with the daemon's last line once ours has ended.
        """
        give_up = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < give_up:
            ended = self.ended
            if ended and self.process is None:
                self.start()
                continue
            with contextlib.suppress(TransferError):
                if not nobody_listens(self.endpoint) and ask(self.endpoint) is not None:
                    return
            if ended:
                break
            _pause(0.01)
        raise TransferError(self.why())

    def why(self) -> str:
        """Why no daemon serves at the endpoint."""
        if self.process is None:
            return f"no transferd daemon answers at {self.endpoint}"
        return self.process.ended() or f"the transferd daemon does not serve; it logged last: {self.process.last_line}"

    def close(self, timeout: float = STOP_TIMEOUT_S) -> None:
        """Leave a daemon that engines start; wait for its end, within its shutdown_timeout, if no other one uses it."""
        if self.sections is not None:
            super().close(timeout)
        if self.place is not None:
            self.place.close()


def named_endpoint(port: int, data_parallel_id: int) -> str | None:
    """The endpoint that the operator named for the group's daemon, or None. Raises ConfigError."""
    template = os.environ.get(ENDPOINT_VARIABLE)
    return filled_in(template, port, data_parallel_id, ENDPOINT_VARIABLE) if template else None


def filled_in(template: str, port: int | None, data_parallel_id: int, variable: str = ENDPOINT_VARIABLE) -> str:
    """Fill in {dp} and {port}. Raises ConfigError for other braces, or for {port} if no port is known."""
    known: dict[str, Any] = {"dp": data_parallel_id} | ({} if port is None else {"port": port})
    try:
        return template.format(**known)
    except (KeyError, IndexError, ValueError) as error:
        what = f"only {{dp}} and {{port}} can be filled in: {error}"
        raise ConfigError(variable, what, template) from None


def find_or_start(
    wanted: Mapping[str, Any],
    *,
    port: int,
    data_parallel_id: int,
    environment: Mapping[str, str] | None = None,
    fingerprint: Facts | None = None,
    objects: bool = False,
) -> Companion:
    """A daemon for the group; it may not be ready yet if memory must still be offered.

    wanted: sections from `arguments.configuration`; TRANSFERD_SECTION__KEY variables override them.
    environment: variables that a daemon of this group alone gets in addition to this process's.
    objects: whether the group also stores objects of its own (objects.py).
    fingerprint: of the model; such a daemon gets it as cache.fingerprint, in which a running one must not differ.
    Raises ConfigError for a daemon that is configured differently, TransferError if one does not start.
    """
    named = named_endpoint(port, data_parallel_id)
    running_at, running = _running(named)
    if running is not None:
        registers = running.get("configured") == {} and shares(whole(wanted))
        if registers:
            _check_storage(running_at, whole(wanted).storage.backend, running["storage"]["backend"])
        else:
            _check_same(running_at, wanted, running)
            _await_free(running_at)
            _check_fingerprint(running_at, fingerprint or {}, running["configured"]["cache"].get("fingerprint", {}))
        return Companion(endpoint=running_at, registers=registers)
    paths = _store_paths(port, data_parallel_id)
    made = _to_start(wanted, named, paths, environment or {}, fingerprint or {}, objects=objects)
    try:
        if made.ended:
            made.start()
        made.await_answer()
    except BaseException:
        made.close()
        raise
    return made


def for_objects(backend: str) -> Companion:
    """The daemon for a process that stores objects of its own (v1.py); one of ours may be yet to be started.

    AttentionStore finds blocks by tokens, and such a process has keys only: what its index would keep is stored here.
    Raises ConfigError.
    """
    if backend == "attention_store":
        backend = whole({"storage": {"backend": backend}}).storage.attention_store.data
        log.warning(
            "V1's blocks have no tokens, so AttentionStore hears nothing of them: they are stored in %s", backend
        )
    named = named_endpoint(0, 0)
    running_at, running = _running(named)
    if running is not None:
        _check_storage(running_at, backend, running["storage"]["backend"])
        return Companion(endpoint=running_at, registers=True)
    return _to_start({"storage": {"backend": backend}}, named, _store_paths(None, 0), {}, {})


def _running(named: str | None) -> tuple[str, dict[str, Any] | None]:
    """Where a daemon that we do not start may be, and what it reports; None if none answers there."""
    endpoint = named or packaged_endpoint("FastDeploy", log, gpu=True)
    return endpoint, ask(endpoint) if endpoint and not nobody_listens(endpoint) else None


def _store_paths(port: int | None, data_parallel_id: int) -> dict[str, str]:
    """The variables that name a file store's directory, filled in. Raises ConfigError."""
    set_ones = (name for name in STORE_VARIABLES if os.environ.get(name))
    return {name: filled_in(os.environ[name], port, data_parallel_id, name) for name in set_ones}


def shares(config: Config) -> bool:
    """Whether a daemon serves this group beside others. config: the whole configuration that the group needs."""
    return (
        config.geometry.ownership == "attach"
        and config.geometry.device != "paddle"
        and config.storage.key_schema == "transferd"
        and config.storage.backend.partition(":")[0] != "attention_store"
        and config.pd.mode == "storage"
    )


def _to_start(
    asked: Mapping[str, Any],
    named: str | None,
    paths: Mapping[str, str],
    environment: Mapping[str, str],
    fingerprint: Facts,
    *,
    objects: bool = False,
) -> Companion:
    """The daemon to start for this group: shared, or its own. named: the endpoint that the operator wants for it."""
    config = whole(asked) if "cache" in asked else load_sections(asked, _without_cache(os.environ))
    sections: dict[str, Any] = {name: dict(values) for name, values in asked.items()}
    for backend, settings in words.storage_settings(config.storage.backend, os.environ).items():
        sections["storage"][backend] = {**sections["storage"].get(backend, {}), **settings}
    sections["metrics"] = {"listen": "127.0.0.1:0"}  # the daemon's log names the port
    block = LARGEST_OBJECT if config.cache is None else build_layout(config.cache).block_bytes
    sections["host"] = {"staging": max(LEAST_STAGING, STAGED_BLOCKS * block)}
    if shared := config.cache is None or shares(config):
        sections.pop("cache", None)
        devices = ["shm"] if config.cache is None else [config.cache.device]
        sections["engines"] = {"devices": [*devices, *(["shm"] if objects and "shm" not in devices else [])]}
        for of_one_engine in ("model", "version_file"):
            sections["storage"].pop(of_one_engine, None)
        # The registration carries these settings of the cache; as variables they would give the daemon a [cache].
        environment = _without_cache(sees_all_gpus())
    else:
        sections["cache"]["fingerprint"] = fingerprint
        # Leave out the file: a restarted daemon would read the name of weights that the engine does not have yet.
        sections["storage"].pop("version_file", None)
        environment = {**os.environ, **environment}
    environment = {**environment, **paths}
    _remove_old(own_directory("fastdeploy"))
    name = _name(sections, load_sections(sections, environment), named)
    directory, place = (own_directory("fastdeploy", name), None) if shared else _place_of_its_own(name)
    sections["server"] = {"endpoint": named or own_socket(directory)}
    if not shared:
        sections["storage"]["generation"] = configured_generation(config.storage)
    sections["recorder"] = {"directory": str(directory / "flight")}
    if not paths:
        sections["storage"]["file"] = {"path": str(directory / "blocks")}
    return Companion(
        endpoint=sections["server"]["endpoint"], directory=directory, environment=environment, registers=shared,
        sections=sections, place=place,
    )  # fmt: skip


def _name(sections: Mapping[str, Any], config: Config, named: str | None) -> str:
    """The name of the daemon's directory, of what its configuration sets: a release with new settings changes no name.

    sections: what FastDeploy's arguments decide. config: the whole of it.
    """
    defaults = dict(leaves(to_tree(Config(cache=config.cache and CacheSection()))))
    chosen = {key: value for key, value in leaves(to_tree(config)) if value != defaults.get(key)} | {"named": named}
    digest = hashlib.sha256(msgspec.json.encode(chosen, order="deterministic")).hexdigest()[:16]
    backend = config.storage.backend.rpartition(":")[2]
    name = f"{backend}-{digest}"
    parent = own_directory("fastdeploy")
    if any(parent.glob(f"{name}*/blocks")):
        return name
    taken = (old for old in _of_0_3_0(parent, backend) if _takes(old, name, sections, named))
    return next((old.name.partition(".")[0] for old in taken), name)


def _of_0_3_0(parent: Path, backend: str) -> list[Path]:
    """The directories of daemons of 0.3.0 with a store, the last one started first.

    0.3.0 named them by all settings that it knew, so no other version makes the same names.
    """
    names = re.compile(rf"{re.escape(backend)}-[0-9a-f]{{12}}(\.\d+)?")
    found = [one for one in parent.iterdir() if names.fullmatch(one.name) and (one / "blocks").is_dir()]
    return sorted(found, key=lambda one: one.stat().st_mtime, reverse=True)


def _takes(old: Path, name: str, sections: Mapping[str, Any], named: str | None) -> bool:
    """Whether a directory of 0.3.0 is ours, or becomes ours, because its daemon was started for the same cache.

    The link OLD.for names whose it is: two daemons never share one. It stays in its place for a way back to 0.3.0.
    """
    mark = old.with_name(f"{old.name.partition('.')[0]}.for")
    if not mark.is_symlink():
        if not (nobody_listens(own_socket(old)) and _of_the_same(old, sections, named)):
            return False
        with contextlib.suppress(FileExistsError):
            mark.symlink_to(name)
    return os.readlink(mark) == name


def _of_the_same(old: Path, sections: Mapping[str, Any], named: str | None) -> bool:
    """Whether what a daemon was last started with, as its directory says, is what we start ours with."""
    try:
        last = max(old.glob("*.toml"), key=lambda file: file.stat().st_mtime)
        theirs = tomllib.loads(last.read_text(encoding="utf-8"))
        return theirs["server"]["endpoint"] == (named or own_socket(old)) and _store(theirs) == _store(sections)
    except (OSError, ValueError, KeyError, ConfigError):  # it is damaged, or this version does not know a value
        return False


def _store(sections: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a store of these sections from those of other caches."""
    cache, storage = sections.get("cache"), sections["storage"]
    devices = sections.get("engines", {}).get("devices", [])[:1]  # the second is for objects, which 0.3.0 had not
    config = from_tree({} if cache is None else {"cache": cache})
    return config.cache, storage["backend"], storage.get("model"), sections["host"]["staging"], devices


def _without_cache(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith("TRANSFERD_CACHE__")}


def _remove_old(directory: Path) -> None:
    """Remove what daemons of earlier versions left: their directories had the name of a port, another one each time."""
    for old in directory.iterdir():
        if old.name.isdecimal() and nobody_listens(f"ipc://{old / 'transferd.sock'}"):
            shutil.rmtree(old, ignore_errors=True)


def _place_of_its_own(name: str) -> tuple[Path, BinaryIO]:
    """A directory that no other engine uses: the first free one of NAME.0, NAME.1 …, so that a store is found again."""
    for number in range(1024):
        directory = own_directory("fastdeploy", f"{name}.{number}")
        lock = (directory / "lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
        else:
            return directory, lock
    raise TransferError(f"1024 engines of these settings run here, as their directories say: {directory.parent}")


def differences(wanted: Config, asked: Mapping[str, Any], running: Mapping[str, Any]) -> list[str]:
    """Where a running daemon differs from what FastDeploy requires, one `section.key: …` each.

    wanted: the whole configuration.
    asked: the sections and keys that FastDeploy's arguments decide.
    running: a daemon's `stats()["configured"]`.
    """
    effective = to_tree(wanted)
    found: list[str] = []

    def compare(path: str, keys: Mapping[str, Any], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        for key, value in keys.items():
            if isinstance(value, Mapping):
                compare(f"{path}{key}.", value, ours[key], theirs.get(key, {}))
            elif theirs.get(key) != ours[key]:
                found.append(f"{path}{key} is {theirs.get(key)!r}, FastDeploy needs {ours[key]!r}")

    compare("", asked, effective, running)
    return found


def ask(endpoint: str) -> dict[str, Any] | None:
    """What the daemon at this endpoint reports about itself, or None if none answers."""
    client = SyncClient(endpoint, connect_timeout=ANSWER_TIMEOUT_S, await_ready=False)
    try:
        client.connect()
        return client.stats()
    except ConnectTimeout:
        return None
    finally:
        client.close()


def _check_same(endpoint: str, asked: Mapping[str, Any], running: Mapping[str, Any]) -> None:
    """Raise ConfigError if the configurations differ: one line that names the difference and the remedy."""
    if "configured" not in running:
        what = f"is version {running.get('version')}, which does not say how it is configured: update it"
    elif not running["configured"]:
        what = f"has no [cache] section, so it serves only engines that register: give it one, or {ELSEWHERE}"
    elif found := differences(whole(asked), asked, running["configured"]):
        what = f"is configured differently: {'; '.join(found)}. Change its configuration, or {ELSEWHERE}"
    else:
        return
    raise ConfigError(ENDPOINT_VARIABLE, f"the daemon there {what}", endpoint)


def _check_storage(endpoint: str, wanted: str, running: str) -> None:
    if wanted not in ("none", running):
        what = f"the daemon there stores blocks in {running}, FastDeploy needs {wanted}: change storage.backend"
        raise ConfigError(ENDPOINT_VARIABLE, f"{what}, or {ELSEWHERE}", endpoint)


def _await_free(endpoint: str) -> None:
    """Return once no engine uses the daemon's [cache]; the one before us may just have ended. Raises ConfigError."""
    give_up = time.monotonic() + FREE_TIMEOUT_S
    while True:
        cache = None if (report := ask(endpoint)) is None else report.get("cache", {})
        if cache is not None and not any(cache.get("mapped", ())) and not any(cache.get("owners", ())):
            return
        if time.monotonic() > give_up:
            what = "another engine uses its cache; run a daemon without [cache], where both register"
            if cache is None:
                what = "the daemon there does not answer whether another engine uses its cache: start again"
            raise ConfigError(ENDPOINT_VARIABLE, f"{what}, or {ELSEWHERE}", endpoint)
        _pause(0.1)


def _check_fingerprint(endpoint: str, ours: Facts, running: Facts) -> None:
    """Compare the facts that a running daemon's configuration names with ours. Raises ConfigError if one differs.

    A daemon without facts cannot tell this model from others of its name; that logs one line.
    """
    if ours and not running:
        lines = tomli_w.dumps({"cache": {"fingerprint": ours}}).strip().replace("\n", " | ")
        what = "the daemon at %s has no cache.fingerprint: it cannot tell other weights, or settings of the model, from"
        log.warning(what + " these. Its configuration should have (lines are separated by |): %s", endpoint, lines)
    named = {name: one for name, one in ours.items() if name in running}
    found = differences_in_words(named, {name: running[name] for name in named})
    if found:
        what = f"the daemon there serves another model (FastDeploy's / cache.fingerprint): {'; '.join(found)}"
        raise ConfigError(ENDPOINT_VARIABLE, f"{what}. Change its configuration, or {ELSEWHERE}", endpoint)


def whole(sections: Mapping[str, Any]) -> Config:
    """The whole configuration: the environment overrides these sections, which override the defaults."""
    return load_sections(sections, os.environ)


def load_sections(sections: Mapping[str, Any], environment: Mapping[str, str]) -> Config:
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(to_toml(sections))
        file.flush()
        return load(file.name, env=environment)
