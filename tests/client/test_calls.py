"""One surface: the groups of calls of the three clients."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.wire_daemon import serving
from transferd.client import calls
from transferd.client.calls import CallGroup, Calls
from transferd.client.client import Client
from transferd.client.group import TOGETHER, GroupClient
from transferd.client.sync_client import SyncClient
from transferd.wire import protocol as wire

GROUPS = ("store", "cache", "control", "reports")
# What a client itself has: its life, and its tasks from their push to their result.
ITS_OWN = {
    *("connect", "close", "wait_ready", "connected", "endpoint", "boot_id", "generation", "identity", "on_new_boot"),
    *("submit", "insist", "push", "cancel", "settled", "unsettled", "write_all", "read_all", "pd_address", "ping"),
    *("count_not_stored", "dropped", "unusable", "used", "retried", "withdraw", "lease"),
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_each_call_is_in_one_group_or_of_the_client_itself() -> None:
    names = [name for group in GROUPS for name in getattr(Client, group).names]
    assert len(names) == len(set(names))
    assert public(Client) - {*GROUPS} - ITS_OWN == set(names)


def made_in(*files: Path) -> set[str]:
    """The requests that these files make."""
    return set(re.findall(r"\bwire\.(\w+)\(", "".join(file.read_text() for file in files)))


def test_each_control_request_has_a_call_and_a_group_of_nodes_knows_how_answers_become_one() -> None:
    folder = Path(calls.__file__).parent
    made = made_in(*folder.glob("*.py")) | {"Offer"}  # by wire.offer
    assert {kind.__name__ for kind in wire.CONTROLS} <= made
    together = {kind.__name__ for kind in TOGETHER}
    assert made_in(folder / "store.py") == together | {"Prefetch"}, "or GroupClient._ask handles it"


@pytest.mark.parametrize("kind", [Client, SyncClient, GroupClient])
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_its_calls_under_their_names_and_no_others(kind: Any, group: str) -> None:
    where = ["ipc:///a", "ipc:///b"] if kind is GroupClient else "ipc:///a"
    client = kind(where)
    there = getattr(client, group)
    assert isinstance(getattr(kind, group), CallGroup)
    assert getattr(kind, group).__doc__
    assert set(dir(there)) <= set(getattr(Client, group).names)
    for name in dir(there):
        mine = getattr(there, name)
        assert mine == getattr(client, name), "the older name is the same call"
        assert not callable(mine) or getattr(mine, "__func__", mine) is not getattr(Calls, name, None)
    with pytest.raises(AttributeError, match=rf"{kind.__name__}\.{group} has no 'submit'; it has .*{dir(there)[0]}"):
        there.submit  # noqa: B018
    with pytest.raises(AttributeError):
        there.match = 1


async def test_groups_ask_a_daemon_as_the_older_names_do(tmp_path: Path) -> None:
    where = f"ipc://{tmp_path}/d.sock"
    with serving(where):
        async with Client(where) as client:
            assert await client.store.match(["a", "missing"]) == await client.match(["a", "missing"])
            assert (await client.reports.stats())["boot_id"] == client.boot_id
        with SyncClient(where) as blocking:
            assert blocking.store.exists(["a", "missing"]) == [True, False]
            assert blocking.control.token == ""
