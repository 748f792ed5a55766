"""A daemon in a user namespace: whom it can tell apart owns engines, whom it cannot owns nothing, and it says so.

The namespaces are real, as those of PrivateUsers= and of rootless containers are; so are the other users.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.test_engines import running
from tests.integration.as_user import ITS_OWN
from tests.integration.test_access import as_user
from tests.support.waits import wait_until
from transferd import Client
from transferd.client import launch
from transferd.errors import ConfigError, TransferError
from transferd.wire import credentials

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can map other users into a namespace, and become them"),
    pytest.mark.one_loop,
]

MAPPED, ALSO_MAPPED, HIDDEN, ALSO_HIDDEN = 61001, 61002, 61003, 61004
ROOT = Path(__file__).parents[3]
IN_NAMESPACE = (sys.executable, "-m", "tests.machine.hostile.namespace")


@pytest.fixture
def directory() -> Iterator[Path]:
    """One that every user can enter."""
    with tempfile.TemporaryDirectory(prefix="transferd-hidden-") as path:
        os.chmod(path, 0o755)
        yield Path(path)


def config(**server: Any) -> dict[str, Any]:
    return {
        "server": {"socket_mode": "0666"} | server,
        "storage": {"backend": "memory"},
        "host": {"staging": "64KiB"},
        "engines": {"max_engines": 8},
    }


@pytest.fixture
def half_blind(directory: Path) -> Iterator[launch.DaemonProcess]:
    """A daemon whose namespace has root and two users."""
    prefix = (*IN_NAMESPACE, f"0,{MAPPED},{ALSO_MAPPED}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with launch.running(config(), directory, prefix=prefix) as daemon:
            yield daemon


def asked(daemon: launch.DaemonProcess, uid: int, *actions: str, engine: str) -> dict[str, str]:
    return asyncio.run(as_user(uid, daemon.endpoint, *actions, engine=engine))


def test_only_users_that_are_told_apart_own_engines(half_blind: launch.DaemonProcess) -> None:
    assert asked(half_blind, MAPPED, "register", engine="mine") == {"register": "ok"}
    for uid in (HIDDEN, ALSO_HIDDEN):
        told = asked(half_blind, uid, "register", "stats", engine="hidden")
        assert told == {"register": "user_hidden", "stats": "ok"}, "it may look, and own nothing"


async def _with_a_living_engine(daemon: launch.DaemonProcess, others: tuple[int, ...]) -> list[dict[str, str]]:
    """What each of the others may do with an engine that a mapped user has registered and holds."""
    command = ["-m", "tests.machine.hostile.holder", MAPPED, daemon.endpoint, "held"]
    holder = await asyncio.create_subprocess_exec(
        sys.executable, *map(str, command), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"registered\n"
    use = ("write", "exists", "pause", "unregister")
    told = [await as_user(uid, daemon.endpoint, *use, engine="held") for uid in others]
    await holder.communicate(b"")
    return told


def test_an_engine_of_a_mapped_user_is_safe_from_every_other_mapped_or_hidden(
    half_blind: launch.DaemonProcess,
) -> None:
    for told in asyncio.run(_with_a_living_engine(half_blind, (ALSO_MAPPED, HIDDEN))):
        assert set(told.values()) == {"not_yours"}


def test_the_daemon_says_at_start_and_in_its_report_whom_it_cannot_tell_apart(
    half_blind: launch.DaemonProcess,
) -> None:
    told = '"event": "cannot tell all users apart"'
    wait_until(lambda: told in half_blind.log.rpartition("\n")[0], "it is logged")
    lines = [json.loads(line) for line in half_blind.log.splitlines() if line.startswith("{")]
    (said,) = [line for line in lines if line["event"] == "cannot tell all users apart"]
    assert "all appear as uid 65534" in said["problem"]
    assert transferd("stats", "--format", "json", endpoint=half_blind.endpoint)["users"] == {
        "told_apart": False,
        "hidden_as": 65534,
        "why": said["problem"],
    }
    findings = transferd("doctor", "--format", "json", endpoint=half_blind.endpoint, check=False)
    (found,) = [one for one in findings if one["name"] == "daemon's users"]
    assert (found["level"], found["found"]) == ("warn", said["problem"])


def transferd(*arguments: str, endpoint: str, check: bool = True) -> Any:
    command = [sys.executable, "-m", "transferd", *arguments, "--endpoint", endpoint]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=check)
    return json.loads(done.stdout)


def test_a_container_with_one_user_works_as_before(directory: Path) -> None:
    """As in a rootless container: the daemon and its engine are one user there, and some 65,000 uids are mapped."""
    prefix = (*IN_NAMESPACE, "0+61002")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with launch.running(config(), directory, prefix=prefix) as daemon:
            for uid in (0, MAPPED):
                told = asked(daemon, uid, "register", "unregister", engine="mine")
                assert told == {"register": "ok", "unregister": "ok"}
            assert asked(daemon, HIDDEN, "register", engine="mine") == {"register": "user_hidden"}


def test_the_initial_namespace_hides_nobody_not_even_nobody(directory: Path) -> None:
    with launch.running(config(), directory) as daemon:
        told = asked(daemon, 65534, "register", "unregister", engine="of-nobody")
        assert told == {"register": "ok", "unregister": "ok"}
        assert "cannot tell all users apart" not in daemon.log


@pytest.mark.parametrize("key", ["allowed_uids", "observer_uids"])
def test_a_list_cannot_name_the_uid_that_stands_for_everybody(directory: Path, key: str) -> None:
    """Where 65534 itself is mapped, it is in the map, and yet every hidden user would pass as it."""
    prefix = (*IN_NAMESPACE, "0+65536")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with pytest.raises(TransferError, match=rf"server\.{key}: these uids are not mapped .*\[65534\]"):
            launch.start(config(**{key: [0, 65534]}), directory, prefix=prefix)


async def test_an_engine_of_one_kind_of_socket_is_out_of_reach_of_the_other(directory: Path) -> None:
    """By tcp nobody has a user: nobody there is the user of an engine that has one, nor the reverse."""
    both = [f"ipc://{directory}/s", "tcp://127.0.0.1:*"]
    server = {"endpoint": both, "socket_mode": "0666"}
    use = ("write", "exists", "pause", "unregister")
    async with running("", server=server) as daemon:
        for held_by, asked_by in (daemon.transport.endpoints, reversed(daemon.transport.endpoints)):
            async with Client(held_by, engine="held", await_ready=False) as holder:
                await holder.register(ITS_OWN)
                assert await as_user(MAPPED, asked_by, *use, engine="held") == dict.fromkeys(use, "not_yours")
                assert "held" in (await holder.stats())["engines"]
                await holder.unregister()


# --- the parts --------------------------------------------------------------------------------------


def test_check_config_says_so_too(directory: Path) -> None:
    file = directory / "t.toml"
    file.write_text("[server]\nendpoint = ['ipc:///tmp/t.sock', 'tcp://127.0.0.1:7800']\n[storage]\nbackend='memory'\n")
    check = [sys.executable, "-m", "transferd", "check-config", "--config", str(file)]
    blind = [*IN_NAMESPACE, "0", *check]
    for command, said in ((check, ["tcp://127.0.0.1:7800 names no user"]), (blind, ["all appear as uid 65534", "tcp"])):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=ROOT)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("# Not all users can be told apart")]
        assert all(part in line for part in said)


@pytest.mark.parametrize(
    ("lines", "hidden"),
    [
        ("0 0 4294967295\n", None),
        ("0 0 1000\n1000 1000 4294966295\n", None),  # all of them, in two ranges
        ("0 0 1\n998 998 1\n", 65534),
        ("0 100000 65536\n", 65534),
        ("", 65534),  # a namespace whose map is not written yet
    ],
)
def test_the_map_decides_who_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, hidden: int | None
) -> None:
    uid_map = tmp_path / "uid_map"
    uid_map.write_text(lines)
    monkeypatch.setattr(credentials, "UID_MAP", uid_map)
    assert credentials.hidden_uid() == hidden
    assert credentials.hidden(65534) is (hidden is not None)
    assert not credentials.hidden(0)
    assert not credentials.hidden(None)
    if hidden is not None:
        with pytest.raises(ConfigError):
            credentials.resolve_uids("server.allowed_uids", [65534])
