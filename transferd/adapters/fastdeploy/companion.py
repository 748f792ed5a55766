"""The daemon behind one FastDeploy group: a running one, or one that we start here and that ends with the engine.

    where           TRANSFERD_ENDPOINT ({port}, {dp} filled in), else the packaged socket if a daemon of this user or
                    of root answers there, else a socket in this user's directory, named after the engine's port
    runs already    its configuration must match what FastDeploy's arguments require; a difference is an error
    does not run    we start one with the configuration that those arguments require

A daemon started here holds one end of a pipe and stops when the engine's end closes, so it ends with its engine, in
whatever way the engine ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from transferd.adapters.directories import own_directory
from transferd.adapters.packaged import packaged_endpoint
from transferd.blocks.fingerprint import Facts
from transferd.blocks.fingerprint import differences as differences_in_words
from transferd.blocks.layout import build_layout
from transferd.client.sync_client import SyncClient
from transferd.config import Config
from transferd.config.loading import load, to_tree
from transferd.config.toml import to_toml
from transferd.errors import ConfigError, ConnectTimeout, TransferError

log = logging.getLogger(__name__)

ENDPOINT_VARIABLE = "TRANSFERD_ENDPOINT"
ANSWER_TIMEOUT_S = 2.0  # a running daemon answers in milliseconds
START_TIMEOUT_S = 120.0  # enough for CUDA, pinned host memory, a pool's master
ELSEWHERE = f"set {ENDPOINT_VARIABLE} to another address, where a daemon is then started for this engine"
STAGED_BLOCKS = 4  # the least that staging holds, so that storage I/O and copies overlap


@dataclass(slots=True)
class Companion:
    """A daemon and how to reach it. process: set only for a daemon that was started here."""

    endpoint: str
    process: subprocess.Popen[bytes] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that it gets in addition to the engine's
    config_file: Path | None = None
    log_file: Path | None = None

    def start(self) -> None:
        """Start or restart the daemon, which appends to its log. It does not answer yet."""
        assert self.config_file is not None
        assert self.log_file is not None
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "transferd.adapters.embedded", str(self.config_file)],
                stdin=subprocess.PIPE,  # never written to: its end tells the daemon that the engine is gone
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,  # FastDeploy ends its transfer processes by their group
            )

    def alive(self) -> bool:
        return self.process is None or self.process.poll() is None

    def died(self) -> bool:
        """Whether the daemon was started here and ended although FastDeploy did not ask it to."""
        return self.process is not None and self.process.poll() not in (None, 0)

    def log(self, characters: int = 3000) -> str:
        """The end of the daemon's log, for an error that says why it did not start."""
        if self.log_file is None:
            return ""
        return self.log_file.read_text(encoding="utf-8", errors="replace")[-characters:]


def named_endpoint(port: int, data_parallel_id: int, groups: int) -> str | None:
    """The endpoint that the operator named for the group's daemon, or None.

    groups: data-parallel groups on this node. Raises ConfigError if several would share one daemon.
    """
    template = os.environ.get(ENDPOINT_VARIABLE)
    if not template:
        return None
    if groups > 1 and "{port}" not in template and "{dp}" not in template:
        what = f"names one daemon for {groups} data-parallel groups; each needs its own: put {{port}} or {{dp}} into it"
        raise ConfigError(ENDPOINT_VARIABLE, what, template)
    return filled_in(template, port, data_parallel_id)


def filled_in(template: str, port: int | None, data_parallel_id: int) -> str:
    """Fill in {dp} and {port}. Raises ConfigError for other braces, or for {port} if no port is known."""
    known: dict[str, Any] = {"dp": data_parallel_id} | ({} if port is None else {"port": port})
    try:
        return template.format(**known)
    except (KeyError, IndexError, ValueError) as error:
        what = f"only {{dp}} and {{port}} can be filled in: {error}"
        raise ConfigError(ENDPOINT_VARIABLE, what, template) from None


def find_or_start(
    wanted: Mapping[str, Any],
    *,
    port: int,
    data_parallel_id: int,
    groups: int,
    environment: Mapping[str, str] | None = None,
    fingerprint: Facts | None = None,
) -> Companion:
    """A daemon with this configuration for the group; it may not be ready yet if memory must still be offered.

    wanted: sections from `arguments.configuration`; TRANSFERD_SECTION__KEY variables override them.
    environment: variables that a started daemon gets in addition to this process's. fingerprint: of the model; a
    started daemon gets it as cache.fingerprint, in which a running one must not differ.
    Raises ConfigError for a daemon that is configured differently, TransferError if one does not start.
    """
    named = named_endpoint(port, data_parallel_id, groups)
    running_at = named or (packaged_endpoint("FastDeploy", log) if groups == 1 else "")
    if running_at and (running := _ask(running_at)) is not None:
        _check_same(running_at, wanted, running)
        _check_fingerprint(running_at, fingerprint or {}, running["configured"]["cache"].get("fingerprint", {}))
        return Companion(running_at)
    directory = own_directory("fastdeploy", str(port))
    if fingerprint:
        wanted = {**wanted, "cache": {**wanted["cache"], "fingerprint": fingerprint}}
    return _start(wanted, named or f"ipc://{directory / 'transferd.sock'}", directory, environment or {})


def differences(wanted: Config, asked: Mapping[str, Any], running: Mapping[str, Any]) -> list[str]:
    """Where a running daemon differs from what FastDeploy requires, one `section.key: …` each.

    wanted: the whole configuration; asked: the sections and keys that FastDeploy's arguments decide. running: a
    daemon's `stats()["configured"]`.
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


def _ask(endpoint: str) -> dict[str, Any] | None:
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
    """Raise ConfigError if the configurations differ, in one line that says what differs and what to do."""
    if "configured" not in running:
        what = f"is version {running.get('version')}, which does not say how it is configured: update it"
    elif not running["configured"]:
        what = f"has no [cache] section, so it serves only engines that register: give it one, or {ELSEWHERE}"
    elif found := differences(whole(asked), asked, running["configured"]):
        what = f"is configured differently: {'; '.join(found)}. Change its configuration, or {ELSEWHERE}"
    else:
        return
    raise ConfigError(ENDPOINT_VARIABLE, f"the daemon there {what}", endpoint)


def _check_fingerprint(endpoint: str, ours: Facts, running: Facts) -> None:
    """Compare the facts that a running daemon's configuration names with ours. Raises ConfigError if one differs.

    Without any, the daemon takes this model for every other one of its name; one log line says so.
    """
    if ours and not running:
        told = tomli_w.dumps({"cache": {"fingerprint": ours}}).strip().replace("\n", " | ")
        what = "the daemon at %s has no cache.fingerprint: it cannot tell other weights, or settings of the model, from"
        log.warning(what + " these. Its configuration should have (lines are separated by |): %s", endpoint, told)
    named = {name: one for name, one in ours.items() if name in running}
    found = differences_in_words(named, {name: running[name] for name in named})
    if found:
        what = f"the daemon there serves another model (FastDeploy's / cache.fingerprint): {'; '.join(found)}"
        raise ConfigError(ENDPOINT_VARIABLE, f"{what}. Change its configuration, or {ELSEWHERE}", endpoint)


def whole(sections: Mapping[str, Any]) -> Config:
    """The whole configuration: the environment overrides these sections, which override the defaults."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(to_toml(sections))
        file.flush()
        return load(file.name)


def _start(asked: Mapping[str, Any], endpoint: str, directory: Path, environment: Mapping[str, str]) -> Companion:
    block = build_layout(whole(asked).geometry).block_bytes
    sections: dict[str, Any] = {name: dict(values) for name, values in asked.items()}
    sections["server"] = {"endpoint": endpoint}
    sections["metrics"] = {"listen": ""}
    sections["recorder"] = {"directory": str(directory / "flight")}
    sections["host"] = {"staging": max(64 * 1024**2, STAGED_BLOCKS * block)}
    if not os.environ.get("FILE_BACKEND_STORAGE_DIR"):
        sections["storage"]["file"] = {"path": str(directory / "blocks")}
    config_file, log_file = directory / "transferd.toml", directory / "transferd.log"
    config_file.write_text(to_toml(sections), encoding="utf-8")
    log_file.write_bytes(b"")
    companion = Companion(endpoint, environment=environment, config_file=config_file, log_file=log_file)
    companion.start()
    _await_answer(companion)
    return companion


def _await_answer(companion: Companion) -> None:
    give_up = time.monotonic() + START_TIMEOUT_S
    while companion.alive() and time.monotonic() < give_up:
        with contextlib.suppress(TransferError):
            if _ask(companion.endpoint) is not None:
                return
    code = None if companion.process is None else companion.process.poll()
    raise TransferError(f"the transferd daemon did not start (exit code {code}); its log ends:\n{companion.log()}")
