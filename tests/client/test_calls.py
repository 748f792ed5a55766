"""One surface: the classes of calls of the clients."""

from __future__ import annotations

import re
from pathlib import Path

from transferd.client import calls
from transferd.client.cache import CacheCalls
from transferd.client.client import Client
from transferd.client.engines import ControlCalls
from transferd.client.group import TOGETHER
from transferd.client.reports import ReportCalls
from transferd.client.store import StoreCalls
from transferd.wire import protocol as wire

CLASSES = (StoreCalls, CacheCalls, ControlCalls, ReportCalls)
# What a client itself has: its life, and its tasks from their push to their result.
ITS_OWN = {
    *("connect", "close", "wait_ready", "connected", "endpoint", "boot_id", "generation", "identity", "on_new_boot"),
    *("submit", "insist", "push", "cancel", "settled", "unsettled", "write_all", "read_all", "pd_address", "ping"),
    *("count_not_stored", "dropped", "unusable", "used", "retried", "withdraw", "lease"),
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def own(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_each_call_is_in_one_class_or_of_the_client_itself() -> None:
    names = [name for kind in CLASSES for name in own(kind)]
    assert len(names) == len(set(names))
    assert public(Client) - ITS_OWN == set(names)


def made_in(*files: Path) -> set[str]:
    """The requests that these files make."""
    return set(re.findall(r"\bwire\.(\w+)\(", "".join(file.read_text() for file in files)))


def test_each_control_request_has_a_call_and_a_group_of_nodes_knows_how_answers_become_one() -> None:
    folder = Path(calls.__file__).parent
    made = made_in(*folder.glob("*.py")) | {"Offer"}  # by wire.offer
    assert {kind.__name__ for kind in wire.CONTROLS} <= made
    together = {kind.__name__ for kind in TOGETHER}
    assert made_in(folder / "store.py") == together | {"Prefetch"}, "or GroupClient._ask handles it"
