"""Shares, pins and second use behind a running daemon, with engines in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.storing_engine import OBJECT, RANKS, Refused, Storing
from tests.integration.test_purge import backend, files, place, transferd  # noqa: F401
from tests.support.waits import wait_until
from transferd.client.launch import DaemonProcess, running

pytestmark = pytest.mark.one_loop


@contextlib.contextmanager
def daemon(place: Path, backend: str, blocks: int, **sections: Any) -> Iterator[DaemonProcess]:  # noqa: F811
    """Its store has room for so many blocks."""
    capacity = blocks * RANKS * OBJECT
    storage = {"backend": backend, backend: {"capacity": capacity}} | sections.pop("storage", {})
    with running({"storage": storage} | sections, place) as process:
        yield process


def some(name: str, count: int, first: int = 0) -> list[str]:
    return [f"{name}{i}" for i in range(first, first + count)]


def test_one_engines_writes_evict_another_ones_blocks_only_above_its_share(place: Path, backend: str) -> None:  # noqa: F811
    engines = {"storage_share": 0.5}
    with daemon(place, backend, 64, engines=engines) as node, contextlib.ExitStack() as stack:
        a = stack.enter_context(Storing(node.endpoint, "a", storage_share=0.25))
        b = stack.enter_context(Storing(node.endpoint, "b"))
        mine = some("a", 16)
        assert a.write(mine)["status"] == "ok"
        for i in range(0, 192, 32):
            assert b.write(some("b", 32, i))["status"] == "ok"
        assert a.read(mine) == mine, "a is within its share"
        rows = {row["engine"]: row for row in a.stats()["storage"]["holdings"]}
        assert rows["a"]["objects"] == 16 * RANKS
        assert rows["a"]["share"] == 64 * RANKS * OBJECT // 4
        for i in range(0, 64, 16):
            a.write(some("more", 16, i))
        assert len(a.read(mine)) + sum(a.exists(some("more", 64))) >= 16
        assert len(b.read(some("b", 32, 160))) == 32, "what b keeps of its half"
        with pytest.raises(Refused) as refused:
            Storing(node.endpoint, "c", storage_share=0.6)
        assert refused.value.code == "share_exceeded"
        assert "one engine may have 0.5 (engines.storage_share)" in str(refused.value)
        with pytest.raises(Refused) as refused:
            Storing(node.endpoint, "c", storage_share=0.4)
        assert "0.25 are left" in str(refused.value)


def test_blocks_of_weights_that_no_engine_serves_go_first(place: Path) -> None:  # noqa: F811
    with daemon(place, "file", 64) as node, contextlib.ExitStack() as stack:
        other = stack.enter_context(Storing(node.endpoint, "other"))
        a, b = (stack.enter_context(Storing(node.endpoint, name, model="m")) for name in "ab")
        oldest, before = some("o", 16), some("k", 16)
        for engine, keys in ((other, oldest), (a, before)):
            assert engine.write(keys)["status"] == "ok"
        a.generation("2")
        assert a.exists(before) == [False] * 16
        assert a.write(some("n", 40))["status"] == "ok"
        assert b.exists(before) == [True] * 16, "b still serves their weights"
        assert other.exists(oldest) == [True] * 8 + [False] * 8, "so the oldest chain went, from its leaf"
        b.generation("2")
        assert b.exists(some("n", 40)) == [True] * 40
        for first in (0, 6):
            assert a.write(some("more", 6, first))["status"] == "ok"
        assert other.exists(oldest) == [True] * 8 + [False] * 8
        b.generation("")
        assert b.read(before) == before[:4], "they went from the leaf, and may be found again until they go"
        a.generation("3")
        assert a.write(some("new", 24))["status"] == "ok"
        assert b.read(before) == before[:4], "they are in use again"
        assert other.exists(oldest) == [True] * 8 + [False] * 8


def test_a_share_survives_a_restart_of_daemon_and_engine(place: Path) -> None:  # noqa: F811
    engines, mine = {"storage_share": 0.5}, some("a", 16)
    with daemon(place, "file", 64, engines=engines) as node, Storing(node.endpoint, "a") as a:
        assert a.write(mine)["status"] == "ok"
    with daemon(place, "file", 64, engines=engines) as node:
        with Storing(node.endpoint, "a"):
            pass  # it takes over what is its own by model and layout, and leaves again
        with Storing(node.endpoint, "b", storage_share=0.0) as b:
            for i in range(0, 192, 32):
                b.write(some("b", 32, i))
        with Storing(node.endpoint, "a") as a:
            assert a.read(mine) == mine


def test_pins_keep_blocks_until_their_time_is_over(place: Path, backend: str) -> None:  # noqa: F811
    with daemon(place, backend, 64) as node, contextlib.ExitStack() as stack:
        a, b = stack.enter_context(Storing(node.endpoint, "a")), stack.enter_context(Storing(node.endpoint, "b"))
        prompt = some("prompt", 4)
        a.write([*prompt, "tail"])
        assert a.pin([*prompt, "absent"], 3600) == 4
        for i in range(0, 128, 32):
            b.write(some("b", 32, i))
        assert a.read([*prompt, "tail"]) == prompt
        storage = a.stats()["storage"]
        assert (storage["pinned"], storage["pins_expired"]) == (4 * RANKS, 0)
        a.write(some("other", 4))
        with pytest.raises(Refused) as refused:
            a.pin(some("other", 4), 3600)
        assert refused.value.code == "share_exceeded"
        assert "engines.pin_share" in str(refused.value)
        assert b.pin(some("b", 1, 127), 3600) == 1, "another engine has a bound of its own"
        assert transferd(node.endpoint, "pin", "prompt0", "--engine", "a", "--ttl", "1s")["pinned"] == 1
        wait_until(lambda: a.stats()["storage"]["pins_expired"] == RANKS)
        a.unpin(["prompt1"])
        assert a.stats()["storage"]["pinned"] == (2 + 1) * RANKS
        for i in range(128, 256, 32):
            b.write(some("b", 32, i))
        assert a.read(prompt) == prompt[2:]
        assert transferd(node.endpoint, "pin", "absent", "--engine", "a", expect=1)["pinned"] == 0
        transferd(node.endpoint, "pin", "--unpin", "--all", "--engine", "a")
        assert a.stats()["storage"]["pinned"] == RANKS


def test_second_use_stores_what_two_tasks_asked_for(place: Path, backend: str) -> None:  # noqa: F811
    with daemon(place, backend, 64, storage={"admit": "second use"}) as node, Storing(node.endpoint, "a") as a:
        once = a.write(some("k", 4))
        assert once == {"status": "partial", "stored": [], "code": "not_admitted", "not_admitted": 4}
        assert a.read(some("k", 4)) == []
        assert a.write([*some("k", 2), "new"]) == {
            "status": "partial", "stored": some("k", 2), "code": "not_admitted", "not_admitted": 1,
        }  # fmt: skip
        assert a.read([*some("k", 4), "new"]) == some("k", 2)
        assert a.write(some("k", 4))["status"] == "ok"
        stats = a.stats()
        assert stats["storage"]["not_admitted"] == 5 * RANKS
        assert stats["errors"] == {}, "nothing failed"
        busy = {"event_loop_late", "storage_slow"}  # what a busy machine may add
        assert {concern["name"] for concern in stats["concerns"]} <= busy
        assert backend != "file" or len(files(place)) == 4 * RANKS
