"""What FastDeploy will do with transferd when it starts in this environment: found out before it does it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from msgspec.structs import replace

from transferd.adapters.common.companion import ENDPOINT_VARIABLE
from transferd.adapters.common.directories import started_daemons
from transferd.adapters.common.packaged import nobody_listens
from transferd.adapters.fastdeploy.companion import load_sections
from transferd.adapters.fastdeploy.words import storage_in_words, storage_settings
from transferd.cli.doctor.checks import PLUGINS, Diagnosis, fail, mooncake_problem, ok, warn
from transferd.cli.doctor.machine import Machine
from transferd.config import Config
from transferd.config.sections import DEFAULT_ENDPOINT
from transferd.errors import ConfigError
from transferd.runtime.address import host_and_port
from transferd.storage.mooncake.join import Dialled, check_section, reachable
from transferd.storage.registry import backends_of

PACKAGES = ("fastdeploy-gpu", "fastdeploy-xpu", "fastdeploy")
RUN_WITH = ("2.5", "2.6")  # and develop
V1_VARIABLE = "ENABLE_V1_KVCACHE_MANAGER"
NAME = "FastDeploy"


def plans(machine: Machine, backend: str) -> Iterator[Diagnosis]:
    """One finding for each thing. backend: as in `--kvcache-storage-backend`; "none" for a CPU cache alone."""
    yield _version(machine)
    yield _daemon(machine)
    try:
        asked = {"storage": {"backend": backend, **storage_settings(backend, os.environ)}}
        if backend == "attention_store":
            asked["cache"] = {}
        config = load_sections(asked, os.environ)
    except ConfigError as error:
        yield fail(f"{NAME}'s storage", str(error), "correct that variable")
        return
    shared = any(kind.shared for kind in backends_of(config))
    if shared:
        yield _pool(machine, config)
    else:
        yield ok(f"{NAME}'s storage", storage_in_words(config) or "none: blocks are kept in the CPU cache only")


def _version(machine: Machine) -> Diagnosis:
    found = next((f"{name} {version}" for name in PACKAGES if (version := machine.package(name))), "")
    if "transferd" not in machine.variable(PLUGINS).split(","):
        return warn(
            NAME, f"{PLUGINS} does not name transferd: FastDeploy does not load it", f"export {PLUGINS}=transferd"
        )
    if not found:
        return warn(NAME, "is not installed in this environment", "install transferd where FastDeploy is")
    manager = "its V1 manager's storage" if machine.variable(V1_VARIABLE) not in ("", "0") else "its transfer processes"
    if not found.rpartition(" ")[2].startswith(RUN_WITH):
        remedy = "the plugin compares its names at the start, and stays out with one error if one is missing"
        return warn(NAME, f"{found}: transferd was run with {', '.join(RUN_WITH)} and develop", remedy)
    return ok(NAME, f"{found}: transferd takes the place of {manager}")


def _daemon(machine: Machine) -> Diagnosis:
    name, named = f"{NAME}'s daemon", machine.variable(ENDPOINT_VARIABLE)
    if named:
        there = "{" in named or not nobody_listens(named)
        return ok(
            name, f"{named}, as {ENDPOINT_VARIABLE} says; {'it listens' if there else 'it will be started there'}"
        )
    if not nobody_listens(DEFAULT_ENDPOINT):
        return ok(name, f"{DEFAULT_ENDPOINT}, if it runs as FastDeploy's user or as root")
    running = started_daemons()
    if running:
        return ok(name, f"one of these if its settings are the same, else one is started: {', '.join(running)}")
    return ok(name, "none runs: the first engine starts one, and it ends with the last engine")


def _pool(machine: Machine, config: Config) -> Diagnosis:
    """Whether the master answers, and by which address other nodes will reach this one."""
    name, pool = f"{NAME}'s storage", config.storage.mooncake
    if problem := mooncake_problem(machine):
        return fail(name, problem, "pip install 'transferd[mooncake]'")
    try:
        check_section(pool)
        target = host_and_port(pool.master_server_addr)
        if problem := "" if target is None else machine.connects(*target):
            return fail(name, f"no master at {pool.master_server_addr}: {problem}", "start it, or open the firewall")
        pool = reachable(pool, None if target is None else _ends(*target))
    except (ConfigError, OSError) as error:
        return fail(name, str(error), "correct MOONCAKE_… or the configuration")
    reached = replace(config, storage=replace(config.storage, mooncake=pool))
    return ok(name, f"{storage_in_words(reached)}; the master answers")


def _ends(host: str, port: int) -> Dialled:
    with socket.create_connection((host, port), 2.0) as connection:
        return Dialled(connection.getsockname()[0], connection.getpeername()[0])
