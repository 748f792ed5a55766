"""The storage contract, over every backend: what storage/base.py says in numbers, as tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest

from tests.storage.harness import Backend, Harness, Open
from tests.support.blobs import get, put
from transferd.errors import StorageFull, TransferError
from transferd.storage.base import EXISTS, FOUND, MISSING, STORED, Blob, Found, Outcome, Storage
from transferd.storage.indexed import IndexedStorage
from transferd.storage.lru import Use


def holds(storage: Storage, name_: str) -> bool:
    return storage.index.find([name_], None) == [True]


def name(text: str, rank: int = 0) -> str:
    return f"demo/0123456789abcdef/RL-1/{text}/{rank}"


def content(seed: int, nbytes: int = 3000) -> bytes:
    return random.Random(seed).randbytes(nbytes)


async def test_an_absent_object_is_missing_and_does_not_exist(open_backend: Open) -> None:
    store = await open_backend()
    assert await store.storage.exists([name("aa")]) == [False]
    [(outcome, _)] = await store.get((name("aa"), 100))
    assert outcome == MISSING


@pytest.mark.parametrize("nbytes", [1, 15, 4096, 4097, 300_001, 2 * 1024**2 + 128])
async def test_a_stored_object_exists_and_comes_back_to_the_last_byte(open_backend: Open, nbytes: int) -> None:
    store = await open_backend()
    data = content(nbytes, nbytes)
    assert await store.put((name("aa"), data)) == [STORED]
    assert await store.storage.exists([name("aa")]) == [True]
    assert await store.get((name("aa"), nbytes)) == [(FOUND, data)]


async def test_a_batch_is_answered_in_its_order_object_by_object(open_backend: Open) -> None:
    store = await open_backend()
    objects = [(name(f"{i:02x}"), content(i)) for i in range(20)]
    assert await store.put(*objects[::2]) == [STORED] * 10
    assert await store.storage.exists([n for n, _ in objects]) == [True, False] * 10
    answers = await store.get(*((n, 3000) for n, _ in objects))
    assert [outcome for outcome, _ in answers] == [FOUND, MISSING] * 10
    assert [data for _, data in answers[::2]] == [data for _, data in objects[::2]]


async def test_an_empty_batch_has_an_empty_answer(open_backend: Open) -> None:
    store = await open_backend()
    assert await store.storage.exists([]) == []
    assert await put(store.storage, []) == []
    assert await get(store.storage, []) == []


async def test_storing_again_says_exists_and_changes_nothing(open_backend: Open) -> None:
    store = await open_backend()
    await store.put((name("aa"), content(1)))
    [outcome] = await store.put((name("aa"), content(1)))
    assert outcome in (EXISTS, STORED)
    assert await store.get((name("aa"), 3000)) == [(FOUND, content(1))]
    assert store.storage.statistics()["objects"] in (1, None)


async def test_a_name_that_is_twice_in_a_batch_is_stored_once(open_backend: Open) -> None:
    store = await open_backend()
    outcomes = await store.put((name("aa"), content(1)), (name("bb"), content(2)), (name("aa"), content(1)))
    assert outcomes[:2] == [STORED, STORED]
    assert outcomes[2] in (STORED, EXISTS)
    assert await store.get((name("aa"), 3000), (name("aa"), 3000)) == [(FOUND, content(1))] * 2


@pytest.mark.parametrize("nbytes", [1, 2999, 3001, 6000])
async def test_an_object_of_another_length_is_missing_and_can_be_stored_anew(open_backend: Open, nbytes: int) -> None:
    store = await open_backend()
    await store.put((name("aa"), content(1)))
    [(outcome, _)] = await store.get((name("aa"), nbytes))
    assert outcome == MISSING
    right = content(2, nbytes)
    [outcome] = await store.put((name("aa"), right))
    assert outcome == STORED
    assert await store.get((name("aa"), nbytes)) == [(FOUND, right)]


async def test_putting_another_length_replaces_what_nobody_could_load(backend: Backend, open_backend: Open) -> None:
    if not backend.sees_lengths:
        pytest.skip("keeps what is there until a get finds that it does not fit")
    store = await open_backend()
    await store.put((name("aa"), content(1, 10)))
    assert await store.put((name("aa"), content(1))) == [STORED]
    assert await store.get((name("aa"), 3000)) == [(FOUND, content(1))]


async def test_puts_of_one_name_at_once_all_succeed(open_backend: Open) -> None:
    store = await open_backend()
    data = content(1, 500_000)
    answers = await asyncio.gather(*(store.put((name("aa"), data)) for _ in range(8)))
    assert {outcome.found for [outcome] in answers} <= {Found.STORED, Found.EXISTS}
    assert await store.get((name("aa"), len(data))) == [(FOUND, data)]


async def test_a_get_during_the_put_of_its_name_finds_the_whole_object_or_nothing(open_backend: Open) -> None:
    store = await open_backend()
    for i in range(10):
        data = content(i, 400_000)
        target = name(f"{i:02x}")
        into = Blob(target, store.buffer(len(data)))
        putting = asyncio.ensure_future(put(store.storage, [Blob(target, store.buffer(len(data), data))]))
        while not putting.done():
            [outcome] = await get(store.storage, [into])
            assert outcome == MISSING or into.data == data
            await asyncio.sleep(0)  # a get may be answered at once
        assert await store.get((target, len(data))) == [(FOUND, data)]
        store.reuse_memory()


NASTY = ["", ".", "..", "../../../etc", "a b", "a/b", "/", "//", "%", "%2F", "@", "~", "a@b~1", "-", "*?", "\0", "\n"]
NASTY += ["\u00e9", "e\u0301", "模型/中文", "\ud800", "A", "a", "a.", ".a", "x" * 60, "con", "\\", "'\"$(x)`", "😀"]


async def test_names_with_any_characters_never_collide(open_backend: Open) -> None:
    store = await open_backend()
    names = [f"{model}/f0/{generation}/{'ab' * 20}/0" for model in NASTY for generation in NASTY]
    names = list(dict.fromkeys(names))  # ("a/b", "") and ("a", "b/…") style pairs may be one text
    assert len(names) > 800
    data = {n: i.to_bytes(8, "little") for i, n in enumerate(names)}
    assert await store.put(*data.items()) == [STORED] * len(names)
    assert await store.get(*((n, 8) for n in names)) == [(FOUND, data[n]) for n in names]


async def test_names_that_differ_in_one_part_are_different_objects(open_backend: Open) -> None:
    store = await open_backend()
    parts = ["demo", "f0", "g", "ab" * 20, "0"]
    names = ["/".join(parts)]
    for i, other in enumerate(["demo2", "f1", "", "cd" * 20, "1"]):
        names.append("/".join([*parts[:i], other, *parts[i + 1 :]]))
    await store.put(*((n, n.encode().ljust(100)) for n in names))
    assert [data for _, data in await store.get(*((n, 100) for n in names))] == [n.encode().ljust(100) for n in names]


async def test_a_quarantined_object_is_gone_and_can_be_stored_anew(open_backend: Open) -> None:
    store = await open_backend()
    await store.put((name("aa"), content(1)), (name("bb"), content(2)))
    for _ in range(store.storage.tries):  # a shared medium's is read once more
        await store.storage.quarantine(name("aa"))
    assert await store.storage.exists([name("aa"), name("bb")]) == [False, True]
    [(outcome, _)] = await store.get((name("aa"), 3000))
    assert outcome == MISSING
    assert await store.put((name("aa"), content(1))) == [STORED]
    assert await store.get((name("aa"), 3000)) == [(FOUND, content(1))]


async def test_quarantine_of_an_absent_object_does_nothing(open_backend: Open) -> None:
    store = await open_backend()
    await store.storage.quarantine(name("aa"))
    assert await store.storage.exists([name("aa")]) == [False]


async def test_quarantine_twice_at_once_does_it_once(open_backend: Open) -> None:
    store = await open_backend()
    await store.put((name("aa"), content(1)))
    await asyncio.gather(*(store.storage.quarantine(name("aa")) for _ in range(4)))
    assert await store.put((name("aa"), content(1))) == [STORED]


@pytest.mark.parametrize("operation", ["put", "get"])
async def test_after_a_cancelled_call_has_ended_its_buffers_are_the_callers_again(
    open_backend: Open, operation: str
) -> None:
    """Cancel at many moments; scribble on the buffers as soon as the call is over; nothing may be torn."""
    store = await open_backend()
    data = content(7, 300_000)
    for passes in range(12):
        target = name(f"{passes:02x}")
        if operation == "get":
            await store.put((target, data))
        buffer = store.buffer(len(data), data if operation == "put" else None)
        call = put if operation == "put" else get
        task = asyncio.ensure_future(call(store.storage, [Blob(target, buffer)]))
        for _ in range(passes):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        buffer[:] = b"\x55" * len(data)
        if operation == "put":
            [(outcome, got)] = await store.get((target, len(data)))
            assert outcome == MISSING or got == data
        else:
            assert await store.get((target, len(data))) == [(FOUND, data)]
            assert bytes(buffer) == b"\x55" * len(data), "written to after the call had ended"
        store.reuse_memory()


async def test_close_is_idempotent_and_the_end(open_backend: Open) -> None:
    store = await open_backend()
    await store.storage.close()
    await store.storage.close()
    with pytest.raises(TransferError):
        await store.get((name("aa"), 10))


async def test_statistics_tell_what_happened(open_backend: Open) -> None:
    store = await open_backend()
    await store.put((name("aa"), content(1)))
    await store.get((name("aa"), 3000), (name("bb"), 3000), (name("aa"), 3000))
    statistics = store.storage.statistics()
    assert (statistics["hits"], statistics["misses"], statistics["errors"]) == (2, 1, 0)
    assert statistics["objects"] in (1, None)
    assert statistics["bytes"] in (3000, None)


# --- capacity -------------------------------------------------------------------------------------


@pytest.fixture
def lru_only(backend: Backend) -> None:
    if not backend.keeps_lru:
        pytest.skip("evicts by a policy of its own")


async def present(store: Harness, count: int) -> list[int]:
    """Which of the objects 0 … count-1 there are, without using them."""
    return [i for i in range(count) if name(f"{i:02x}") in indexed(store)._index]


def indexed(store: Harness) -> IndexedStorage:
    assert isinstance(store.storage, IndexedStorage)
    return store.storage


async def put_each(store: Harness, *numbers: int) -> None:
    for i in numbers:
        assert await store.put((name(f"{i:02x}"), content(i, 1000))) == [STORED]


async def put_chain(store: Harness, use: Use, depths: Iterable[int], first: int = 0) -> list[Outcome]:
    """Blocks of one task's chain, at these depths, as object `first` + depth."""
    blobs = [Blob(name(f"{first + i:02x}"), store.buffer(1000, content(first + i, 1000)), use, i) for i in depths]
    return await put(store.storage, blobs)


@pytest.mark.usefixtures("lru_only")
class TestCapacity:
    async def test_the_least_recently_stored_goes_first_and_the_bound_is_exact(self, open_backend: Open) -> None:
        store = await open_backend(5000)
        await put_each(store, *range(8))
        assert await present(store, 8) == [3, 4, 5, 6, 7]
        assert store.storage.statistics()["bytes"] == 5000
        assert store.storage.statistics()["evictions"] == 3

    async def test_one_byte_less_of_capacity_holds_one_object_less(self, open_backend: Open) -> None:
        store = await open_backend(4999)
        await put_each(store, *range(8))
        assert await present(store, 8) == [4, 5, 6, 7]

    async def test_a_loaded_an_asked_for_and_a_stored_again_object_stay(self, open_backend: Open) -> None:
        store = await open_backend(5000)
        await put_each(store, *range(5))
        await store.get((name("00"), 1000))
        await store.storage.exists([name("01")])
        assert await store.put((name("02"), content(2, 1000))) == [EXISTS]
        await put_each(store, 5, 6)
        assert await present(store, 7) == [0, 1, 2, 5, 6]

    async def test_a_chain_is_eaten_from_its_leaf(self, open_backend: Open) -> None:
        """Blocks of one batch are root to leaf; a leaf without its root is useless, so the root stays longest."""
        store = await open_backend(8000)
        await store.put(*((name(f"{i:02x}"), content(i, 1000)) for i in range(8)))
        await put_each(store, 8, 9, 10)
        assert await present(store, 11) == [0, 1, 2, 3, 4, 8, 9, 10]

    async def test_an_object_that_is_stored_again_is_not_pushed_out_by_its_own_batch(self, open_backend: Open) -> None:
        store = await open_backend(2000)
        await put_each(store, 0, 1)
        assert await store.put((name("00"), content(0, 1000)), (name("02"), content(2, 1000))) == [EXISTS, STORED]
        assert await present(store, 3) == [0, 2]

    async def test_an_object_larger_than_the_capacity_fails_alone(self, open_backend: Open) -> None:
        store = await open_backend(5000)
        await put_each(store, 0)
        outcomes = await store.put((name("aa"), content(1, 5001)), (name("bb"), content(2, 1000)))
        assert [outcome.found for outcome in outcomes] == [Found.FAILED, Found.STORED]
        assert isinstance(outcomes[0].error, StorageFull)
        assert "5001 bytes" in str(outcomes[0].error)
        assert "capacity, 5000 bytes" in str(outcomes[0].error)
        assert await store.storage.exists([name("00")]) == [True], "nothing is evicted for what cannot fit"
        assert store.storage.statistics()["errors"] == 1

    async def test_a_batch_larger_than_the_capacity_keeps_its_root_and_says_what_has_no_room(
        self, open_backend: Open
    ) -> None:
        store = await open_backend(5000)
        await put_each(store, 20, 21)
        outcomes = await store.put(*((name(f"{i:02x}"), content(i, 1000)) for i in range(12)))
        assert outcomes[:5] == [STORED] * 5
        assert [(outcome.found, type(outcome.error)) for outcome in outcomes[5:]] == [(Found.FAILED, StorageFull)] * 7
        assert "capacity, 5000 bytes" in str(outcomes[5].error)
        assert store.storage.statistics()["bytes"] == 5000
        assert await present(store, 22) == [0, 1, 2, 3, 4]
        assert await store.get(*((name(f"{i:02x}"), 1000) for i in range(5))) == [
            (FOUND, content(i, 1000)) for i in range(5)
        ]

    async def test_objects_that_a_task_found_are_not_evicted_for_its_own_tail(self, open_backend: Open) -> None:
        store = await open_backend(5000)
        chain = [name(f"{i:02x}") for i in range(8)]
        await put_each(store, 0, 1, 2, 20, 21)  # the root of the chain is the coldest
        use = Use()
        assert (store.storage.index.find(chain, use) or await store.storage.exists(chain)) == [True] * 3 + [False] * 5
        outcomes = await put_chain(store, use, range(3, 8))
        assert [outcome.found for outcome in outcomes] == [Found.STORED] * 2 + [Found.FAILED] * 3
        assert await present(store, 22) == [0, 1, 2, 3, 4]

    async def test_a_chain_that_is_loaded_in_pieces_is_eaten_from_its_leaf(self, open_backend: Open) -> None:
        store = await open_backend(6000)
        await put_each(store, *range(6))
        use = Use()
        for piece in ([0, 1], [2, 3], [4, 5]):
            blobs = [Blob(name(f"{i:02x}"), store.buffer(1000), use, i) for i in piece]
            assert await get(store.storage, blobs) == [FOUND, FOUND]
        await put_each(store, 10, 11, 12)
        assert await present(store, 13) == [0, 1, 2, 10, 11, 12]

    @pytest.mark.parametrize("seed", range(4))
    async def test_ranks_of_one_task_share_a_store_that_is_too_small_for_its_chain(
        self, open_backend: Open, seed: int
    ) -> None:
        """However their writes meet, each rank keeps the same part: the root."""
        store = await open_backend(10_000)
        rng, use = random.Random(seed), Use()

        async def rank(number: int) -> set[int]:
            stored: set[int] = set()
            at = 0
            while at < 12:
                depths = range(at, min(12, at + rng.randint(1, 12)))
                outcomes = await put_chain(store, use, depths, first=100 * number)
                stored |= {i for i, outcome in zip(depths, outcomes, strict=True) if outcome == STORED}
                at = depths.stop
            return stored

        ranks = await asyncio.gather(rank(0), rank(1))
        kept = [{i for i in range(12) if holds(store.storage, name(f"{100 * r + i:02x}"))} for r in range(2)]
        assert kept == [set(range(5)), set(range(5))]
        assert all(kept[r] <= ranks[r] for r in range(2))

    async def test_many_callers_at_once_get_right_bytes_within_the_bound(self, open_backend: Open) -> None:
        store = await open_backend(20_000)

        async def caller(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(25):
                numbers = rng.sample(range(40), rng.randint(1, 8))
                if rng.random() < 0.5:
                    outcomes = await store.put(*((name(f"{i:02x}"), content(i, 1000)) for i in numbers))
                    for outcome in outcomes:  # with what later callers hold there may be no room for the last
                        assert outcome in (STORED, EXISTS) or isinstance(outcome.error, StorageFull)
                elif rng.random() < 0.9:
                    answers = await store.get(*((name(f"{i:02x}"), 1000) for i in numbers))
                    for i, (outcome, data) in zip(numbers, answers, strict=True):
                        assert outcome == MISSING or data == content(i, 1000)
                else:
                    await store.storage.quarantine(name(f"{numbers[0]:02x}"))
                assert store.storage.statistics()["bytes"] <= 20_000

        await asyncio.gather(*(caller(seed) for seed in range(8)))
        left = await present(store, 40)
        assert store.storage.statistics()["bytes"] == 1000 * len(left)
        assert await store.get(*((name(f"{i:02x}"), 1000) for i in left)) == [(FOUND, content(i, 1000)) for i in left]

    async def test_lower_and_higher_capacities_take_effect_at_once(self, open_backend: Open) -> None:
        store = await open_backend(8000)
        await put_each(store, *range(8))
        indexed(store).set_capacity(3000)
        assert await present(store, 8) == [5, 6, 7]
        await put_each(store, 8)
        assert await present(store, 9) == [6, 7, 8]
        indexed(store).set_capacity(5000)
        await put_each(store, 9, 10)
        assert await present(store, 11) == [6, 7, 8, 9, 10]


async def test_a_departure_is_reported_in_the_step_in_which_the_object_is_gone(
    backend: Backend, open_backend: Open
) -> None:
    if not backend.tells:
        pytest.skip("a pool that evicts on its own cannot say")
    nbytes = 1024**2
    store = await open_backend(16 * nbytes)
    told: list[str] = []

    def left(name_: str) -> None:
        assert not holds(store.storage, name_)
        told.append(name_)

    assert store.storage.index.tell_departures(left)
    stored = [name(f"{i:02x}") for i in range(20)]
    for i, each in enumerate(stored):
        assert not holds(store.storage, each)
        await store.put((each, content(i, nbytes)))
        assert holds(store.storage, each)
    if store.storage.levels is not None:
        await store.storage.levels.flush(30)
    held = {each for each in stored if holds(store.storage, each)}
    assert len(told) >= 4
    assert held == set(stored) - set(told)
    assert await store.storage.exists(stored) == [each in held for each in stored]
    newest = stored[-1]
    await store.storage.quarantine(newest)
    assert told[-1] == newest
    assert not holds(store.storage, newest)
