"""What a storage backend does when something fails: one suite over the real backends and the simulated ones.

A backend says how a failure is brought about; what follows from it is the same for all of them. The failures of the
file store are errors of its system calls (test_file_faults.py has every one of them at every moment), those of the
Mooncake pool the codes that the library was seen to answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.storage.harness import Harness, Open, file_config, memory_config, mooncake_config, pool_storage
from tests.storage.test_contract import content, name
from tests.support.blobs import get, put
from tests.support.simulation.pool import SIM_MASTER, SimPool
from tests.support.simulation.storage import SimStorage
from transferd.errors import Closed, StillRunning, StorageError, StorageFull, StorageUnavailable, TransferError
from transferd.runtime import threads
from transferd.runtime.compat import timeout
from transferd.storage import file_io
from transferd.storage.base import FOUND, MISSING, STORED, Blob, Found, Outcome, Storage
from transferd.storage.file import FileStorage
from transferd.storage.memory import MemoryStorage
from transferd.storage.mooncake import MooncakeStorage
from transferd.storage.mooncake import error_codes as codes

GOOD, BAD, LAST = name("aa" * 20), name("bd" * 20), name("cc" * 20)
OBJECTS = [(GOOD, content(1)), (BAD, content(2)), (LAST, content(3))]

Armed = AbstractContextManager[None]


@dataclass
class Kind:
    """A backend, and its failures: each fails while its context is open. None: it has no such failure.

    full, write: of the object BAD in a put. read: of BAD in a get, which can be read again later. spoilt: of BAD in a
    get, for good. unavailable: of whole calls. held: calls that begin, until the context ends.
    """

    storage: Storage
    full: Callable[[], Armed] | None = None
    write: Callable[[], Armed] | None = None
    read: Callable[[], Armed] | None = None
    spoilt: Callable[[], Armed] | None = None
    unavailable: Callable[[], Armed] | None = None
    held: Callable[[], Armed] | None = None


# --- how each backend fails ---------------------------------------------------------------------------


def simulated(_: Path, __: pytest.MonkeyPatch) -> Kind:
    storage = SimStorage()

    @contextlib.contextmanager
    def scripted(operation: str, *faults: str | None) -> Iterator[None]:
        storage.dice.script(operation, *faults)
        yield

    @contextlib.contextmanager
    def unavailable() -> Iterator[None]:
        for operation in ("exists", "put", "get", "quarantine"):
            storage.dice.script(operation, "unavailable")
        yield

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        storage.gate.hold()
        try:
            yield
        finally:
            storage.gate.release()

    return Kind(
        storage,
        lambda: scripted("object put", None, "full"),
        lambda: scripted("object put", None, "error"),
        lambda: scripted("object get", None, "error"),
        lambda: scripted("object get", None, "spoilt"),
        unavailable,
        held,
    )


def file(path: Path, patch: pytest.MonkeyPatch) -> Kind:
    patch.setattr(file_io, "NATIVE", False)  # so that system calls can be replaced
    digest = BAD.split("/")[-2]

    def is_bad(fd: int) -> bool:
        return digest in os.readlink(f"/proc/self/fd/{fd}")

    @contextlib.contextmanager
    def failing(call: str, code: int) -> Iterator[None]:
        real = getattr(os, call)

        def fails(target: Any, *more: Any, **named: Any) -> Any:
            bad = is_bad(target) if isinstance(target, int) else digest in os.fspath(target)
            if bad:
                raise OSError(code, os.strerror(code), None if isinstance(target, int) else target)
            return real(target, *more, **named)

        with patch.context() as patched:
            patched.setattr(os, call, fails)
            yield

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        go, write, read = threading.Event(), os.pwrite, os.preadv

        def waits(call: Callable[..., int]) -> Callable[..., int]:
            def waiting(*arguments: Any) -> int:
                assert go.wait(60)
                return call(*arguments)

            return waiting

        with patch.context() as patched:
            patched.setattr(os, "pwrite", waits(write))
            patched.setattr(os, "preadv", waits(read))
            try:
                yield
            finally:
                go.set()

    return Kind(
        FileStorage(file_config(path / "blocks", 1 << 30)),
        lambda: failing("pwrite", errno.ENOSPC),
        lambda: failing("pwrite", errno.EIO),
        lambda: failing("open", errno.EMFILE),
        lambda: failing("preadv", errno.EIO),
        held=held,
    )


def memory(_: Path, __: pytest.MonkeyPatch) -> Kind:
    return Kind(MemoryStorage(memory_config(1 << 30)))


def mooncake(_: Path, __: pytest.MonkeyPatch) -> Kind:
    pool = SimPool()

    @contextlib.contextmanager
    def answering(code: int, *operations: str, only: str = "") -> Iterator[None]:
        real = pool.call

        def call(operation: str, keys: Collection[str], each: Callable[[str], int]) -> dict[str, int]:
            hit = operation in operations
            return real(operation, keys, lambda key: code if hit and only in key else each(key))

        pool.call = call  # type: ignore[method-assign]
        try:
            yield
        finally:
            pool.call = real  # type: ignore[method-assign]

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        go = threading.Event()
        pool.before = lambda _operation, _keys: None if go.wait(60) else pytest.fail("held for too long")
        try:
            yield
        finally:
            go.set()

    digest = BAD.split("/")[-2]
    return Kind(
        pool_storage(mooncake_config(SIM_MASTER), set_up=pool.set_up),
        lambda: answering(codes.NO_AVAILABLE_HANDLE, "put", "replace", only=digest),
        lambda: answering(codes.TRANSFER_FAIL, "put", "replace", only=digest),
        lambda: answering(codes.TRANSFER_FAIL, "get", only=digest),
        unavailable=lambda: answering(codes.RPC_FAIL, "exists", "put", "replace", "get", "lengths", "remove"),
        held=held,
    )


KINDS = {"simulated": simulated, "file": file, "memory": memory, "mooncake-simulated": mooncake}


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kind:
    return KINDS[request.param](tmp_path, monkeypatch)


@pytest.fixture
async def store(kind: Kind, open_storage: Open) -> Harness:
    return await open_storage(kind.storage)


def brought_about(failure: Callable[[], Armed] | None) -> Armed:
    if failure is None:
        pytest.skip("this backend has no such failure")
    return failure()


async def is_whole(store: Harness, *objects: tuple[str, bytes]) -> bool:
    answers = await store.get(*((each, len(data)) for each, data in objects))
    return answers == [(FOUND, data) for _, data in objects]


# --- one object fails -------------------------------------------------------------------------------


@pytest.mark.parametrize(("failure", "error"), [("full", StorageFull), ("write", StorageError)])
async def test_a_put_that_fails_leaves_nothing_and_its_neighbours_alone(
    kind: Kind, store: Harness, failure: str, error: type[StorageError]
) -> None:
    with brought_about(getattr(kind, failure)):
        outcomes = await store.put(*OBJECTS)
    assert [outcome.found for outcome in outcomes] == [Found.STORED, Found.FAILED, Found.STORED]
    assert isinstance(outcomes[1].error, error)
    assert isinstance(outcomes[1].error, StorageFull) == (failure == "full")
    assert await store.storage.exists([each for each, _ in OBJECTS]) == [True, False, True]
    [(outcome, _)] = await store.get((BAD, 3000))
    assert outcome == MISSING
    assert store.storage.statistics()["errors"] == 1
    again = await store.put(*OBJECTS)
    assert again[1] == STORED
    assert {outcome.found for outcome in again} <= {Found.STORED, Found.EXISTS}
    assert await is_whole(store, *OBJECTS)


async def test_a_get_that_fails_is_an_error_and_no_miss_and_the_object_stays(kind: Kind, store: Harness) -> None:
    await store.put(*OBJECTS)
    with brought_about(kind.read):
        answers = await store.get(*((each, 3000) for each, _ in OBJECTS))
    assert [outcome.found for outcome, _ in answers] == [Found.FOUND, Found.FAILED, Found.FOUND]
    assert [answers[0][1], answers[2][1]] == [content(1), content(3)]
    assert isinstance(answers[1][0].error, StorageError)
    assert store.storage.statistics()["errors"] == 1
    assert await is_whole(store, *OBJECTS)


async def test_an_object_that_can_never_be_read_again_goes_and_can_be_stored_anew(kind: Kind, store: Harness) -> None:
    left: list[str] = []
    await store.put(*OBJECTS)
    failure = brought_about(kind.spoilt)
    assert store.storage.index.tell_departures(left.append)
    with failure:
        [(first, _), (bad, _)] = await store.get((GOOD, 3000), (BAD, 3000))
    assert (first, bad.found) == (FOUND, Found.FAILED)
    assert isinstance(bad.error, StorageError)
    assert left == [BAD]
    assert await store.storage.exists([GOOD, BAD, LAST]) == [True, False, True]
    [(outcome, _)] = await store.get((BAD, 3000))
    assert outcome == MISSING
    assert await store.put((BAD, content(2))) == [STORED]
    assert await is_whole(store, *OBJECTS)


# --- a whole call fails, or hangs -------------------------------------------------------------------


async def test_a_pool_that_does_not_answer_fails_the_whole_call_and_changes_nothing(kind: Kind, store: Harness) -> None:
    await store.put(*OBJECTS[:2])
    with brought_about(kind.unavailable):
        with pytest.raises(StorageError):
            await store.storage.exists([GOOD])
        if not store.storage.shared:  # else nothing is set aside: other nodes may be able to read it
            with pytest.raises(StorageError):
                await store.storage.quarantine(BAD)
        assert {type(error) for error in await errors_of(store.put(OBJECTS[2]))} == {StorageUnavailable}
        assert {type(error) for error in await errors_of(store.get((GOOD, 3000)))} == {StorageUnavailable}
    async with timeout(30):
        while await errors_of(store.get((GOOD, 3000))):  # noqa: ASYNC110 - until a probe finds that it is back
            await asyncio.sleep(0.01)
    assert await store.storage.exists([GOOD, BAD, LAST]) == [True, True, False]
    assert await is_whole(store, *OBJECTS[:2])


async def errors_of(call: Awaitable[list[Any]]) -> list[TransferError | None]:
    """What a call has raised, or what it says of each object that failed."""
    try:
        answers = await call
    except StorageError as error:
        return [error]
    outcomes = [answer if isinstance(answer, Outcome) else answer[0] for answer in answers]
    return [outcome.error for outcome in outcomes if outcome.found is Found.FAILED]


async def test_a_hung_call_keeps_its_buffers_until_it_ends_whoever_gives_up_on_it(kind: Kind, store: Harness) -> None:
    await store.put(OBJECTS[0])
    into, source = store.buffer(3000), store.buffer(3000, content(2))
    with brought_about(kind.held):
        calls = [
            asyncio.ensure_future(get(store.storage, [Blob(GOOD, into)])),
            asyncio.ensure_future(put(store.storage, [Blob(BAD, source)])),
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        for call in calls:
            call.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(call.done() for call in calls)
    await asyncio.wait(calls)
    assert all(call.cancelled() for call in calls)
    into[:] = bytes(3000)
    source[:] = bytes(3000)
    assert await is_whole(store, *OBJECTS[:2])
    assert bytes(into) == bytes(3000), "written to after the call had ended"


async def test_a_close_over_a_hung_call_names_it(
    kind: Kind, open_storage: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "CLOSE_S", 0.05)
    if kind.held is None:
        pytest.skip("its calls do not hang")
    if isinstance(kind.storage, MooncakeStorage):
        pytest.skip("tests/storage/mooncake/test_store.py: its budget is the calls' own")
    store = await open_storage(kind.storage)
    with brought_about(kind.held):
        call = asyncio.ensure_future(put(store.storage, [Blob(BAD, store.buffer(3000, content(2)))]))
        for _ in range(20):
            await asyncio.sleep(0)
        with pytest.raises(StillRunning, match=r"put|write|bdbd"):
            await store.storage.close()
        assert store.storage.abandon()
    await asyncio.wait([call])
    async with timeout(30):
        while store.storage.abandon():  # noqa: ASYNC110 - a thread that goes on past the end of its call
            await asyncio.sleep(0.001)
    with pytest.raises(Closed):
        await store.storage.exists([GOOD])
