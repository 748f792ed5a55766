"""Shares and pins in the index: what an owner keeps, whatever the others do."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from transferd.storage import lru
from transferd.storage.lru import Adopted, LruIndex, NoRoom, Use
from transferd.storage.queues import HELD_S, MOST_LINES, PINNED, UNSAVED, EngineOwner, space_of

A, B, C = EngineOwner("a", 1), EngineOwner("b", 1), EngineOwner("c", 2)


def stored(index: LruIndex, owner: EngineOwner, names: list[str], nbytes: int = 10) -> list[str]:
    """Store a chain; return the names that found room."""
    use, there = Use(owner=owner), []
    for depth, name in enumerate(names):
        if not isinstance(index.reserve(name, nbytes, use, depth), NoRoom):
            index.commit(name)
            there.append(name)
    return there


def chain(space: str, count: int, first: int = 0) -> list[str]:
    return [f"{space}/f/g/{i}/0" for i in range(first, first + count)]


def held(index: LruIndex, owner: EngineOwner) -> int:
    return next((one.used for one in index.queues() if one.owner == owner), 0)


def calls_of(act: Callable[[], object]) -> int:
    """How many functions it calls, those in C included."""
    count = 0

    def called(_: object, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def test_who_takes_over_the_objects_of_others_walks_none_of_them() -> None:
    """With a million objects, the loop stood still for 0.4 s whenever an engine came back under another name."""
    each = set()
    for chains in (4, 400):
        index = LruIndex(10**6)
        for owner in (A, B):
            index.claim(owner, "m/f", 0.25)
        for i in range(chains):
            stored(index, (A, B)[i % 2], chain("m", 4, 4 * i))
        last = index.get(chain("m", 1, 4 * chains - 1)[0])
        assert last is not None
        index.pin(last)
        for owner in (A, B):
            index.disown(owner)
        each.add(calls_of(lambda index=index: index.claim(C, "m/f", 0.5)))  # type: ignore[misc]
        (queue,) = index.queues()
        assert (queue.owner, queue.used, queue.objects, queue.pinned) == (C, 40 * chains, 4 * chains, 10)
        check(index, chains, {last.name})
        going = [name for i in range(chains) for name in reversed(chain("m", 4, 4 * i))]
        assert [victim.name for victim in index.evict(40 * chains)] == [name for name in going if name != last.name]
        assert index.forget(last.name)
        assert queue.lines == [queue.own]
    assert len(each) == 1, each


def test_without_shares_the_oldest_object_goes_of_any_owner() -> None:
    index = LruIndex(320)
    stored(index, A, chain("a", 32))
    for i in range(0, 192, 32):
        stored(index, B, chain("b", 32, i))
    assert held(index, A) == 0, "this is what a share is for"


def test_an_owner_below_its_share_loses_nothing_to_one_above_it() -> None:
    index = LruIndex(640)
    index.claim(A, "a/f", 0.5)
    index.claim(B, "b/f", 0.5)
    stored(index, A, chain("a", 32))
    for i in range(0, 192, 32):
        assert stored(index, B, chain("b", 32, i)), "B still writes: it takes its own oldest"
    assert [name in index for name in chain("a", 32)] == [True] * 32
    assert held(index, B) == 320


def test_an_owners_objects_above_its_share_are_evicted_for_others() -> None:
    index = LruIndex(640)
    index.claim(A, "a/f", 0.25)
    for i in range(0, 64, 16):
        stored(index, A, chain("a", 16, i))
    assert held(index, A) == 640, "what nobody else uses is everybody's"
    for i in range(0, 192, 16):
        stored(index, B, chain("b", 16, i))
    assert held(index, A) == 160
    assert [name in index for name in chain("a", 16, 48)] == [True] * 16, "its newest chain is what it keeps"


def test_an_owner_below_its_share_takes_from_others_before_its_own_oldest() -> None:
    index = LruIndex(200)
    index.claim(A, "a/f", 0.5)
    stored(index, A, chain("a", 5))  # the oldest objects of all
    stored(index, B, chain("b", 15))
    stored(index, A, chain("a", 5, 5))
    assert [name in index for name in chain("a", 10)] == [True] * 10


def test_a_store_filled_by_others_shares_is_full_at_once() -> None:
    index = LruIndex(100)
    index.claim(A, "a/f", 1.0)
    stored(index, A, chain("a", 10))
    assert index.reserve("b/f/g/0/0", 10, Use(owner=B), 0) is NoRoom.FULL


def test_an_engine_takes_over_its_spaces_ownerless_objects_alone() -> None:
    index = LruIndex(1000)
    index.adopt([Adopted(1, depth, name, 10) for depth, name in enumerate(chain("m", 10))])
    index.claim(A, "m/f", 0.1)
    assert held(index, A) == 100
    index.claim(B, "m/f", 0.1)
    assert (held(index, A), held(index, B)) == (100, 0)
    index.find(chain("m", 4), Use(owner=B))
    assert (held(index, A), held(index, B)) == (60, 40), "the first use shows whose they are"
    index.find(chain("m", 10), Use(owner=A))
    index.find(chain("m", 10), Use(owner=B))
    assert (held(index, A), held(index, B)) == (60, 40), "a later look-up of another engine takes nothing away"
    index.disown(A)
    index.claim(C, "m/f", 0.0)
    assert (held(index, A), held(index, B), held(index, C)) == (0, 40, 60)
    index.adopt([])
    assert sum(one.used for one in index.queues()) == index.used


def test_what_was_found_and_is_held_for_a_copy_belongs_to_the_first_engine_that_uses_it() -> None:
    index = LruIndex(1000)
    index.adopt([Adopted(1, depth, name, 10) for depth, name in enumerate(chain("m", 4))])
    index.claim(A, "m/f", 0.1)
    index.claim(B, "m/f", 0.1)
    used, copied, pinned, _ = entries = [index._present[name] for name in chain("m", 4)]
    for entry in entries:
        index.pin(entry, UNSAVED)
    index.pin(pinned, PINNED)
    index.touch_one(used, Use(owner=B), 0)
    assert (held(index, A), held(index, B)) == (30, 10), "while it is held"
    index.unpin(copied, Use(owner=A), UNSAVED)
    index.find([copied.name], Use(owner=B))
    assert (held(index, A), held(index, B)) == (20, 20), "its copy was no use of it"
    index.touch_one(pinned, Use(owner=B), 0)
    assert (held(index, A), held(index, B)) == (20, 20), "what A has pinned is A's"
    assert sum(one.used for one in index.queues()) == index.used


def test_the_share_of_an_engine_that_left_is_kept_until_it_has_been_gone_for_long() -> None:
    now = 0.0
    index = LruIndex(100, now=lambda: now)
    index.claim(A, "a/f", 0.5)
    stored(index, A, chain("a", 5))
    now = 1000.0
    index.disown(A)
    now += HELD_S - 1.0
    stored(index, B, chain("b", 30))
    assert held(index, A) == 50
    now += 1.0
    stored(index, B, chain("b", 30, 30))
    assert held(index, A) == 0
    assert A not in [one.owner for one in index.queues()], "nothing is left of it"


def test_pins_stay_whatever_is_written_and_are_the_first_to_be_remembered() -> None:
    index = LruIndex(100)
    stored(index, A, chain("a", 3))
    for name in chain("a", 3):
        entry = index.get(name)
        assert entry is not None
        index.pin(entry)
    for i in range(0, 40, 10):
        stored(index, B, chain("b", 10, i))
    assert [entry.name for entry in index.hottest_first()][:3] == chain("a", 3)
    use = Use(owner=A)
    for name in chain("a", 3):
        index.unpin(index.get(name), use)  # type: ignore[arg-type]
    assert [entry.name for entry in index.hottest_first()][:3] == chain("a", 3), "as if just used, root first"
    stored(index, B, chain("b", 10, 50))
    assert held(index, A) == 0


def test_a_smaller_capacity_ends_pins_that_do_not_fit() -> None:
    index = LruIndex(100)
    stored(index, A, chain("a", 8))
    for name in chain("a", 8):
        index.pin(index.get(name))  # type: ignore[arg-type]
    gone = index.set_bounds(50)
    assert [victim.name for victim in gone] == chain("a", 8)[:4:-1], "from the leaf"
    assert not any(one.pinned for one in index.queues())


def test_engines_that_come_and_go_leave_few_lines_and_the_order() -> None:
    """Each look at the order of an owner's objects walks all of its lines. Two engines live beside each other."""
    index, pinned, going = LruIndex(10**6), set[str](), list[str]()
    for life in range(100):
        owners = [EngineOwner(f"{which}{life}", 1) for which in "ab"]
        each = [chain("m", count, 10 * life + first) for first, count in ((0, 4), (5, 1 + life % 5))]
        for owner, names in zip(owners, each, strict=True):
            index.claim(owner, "m/f", 0.25)
            for name in names[::-1]:  # a use for each
                stored(index, owner, [name])
        index.find([names[0] for names in each], Use(owner=owners[0]))  # one that has objects of both
        if life % 10 == 7:
            entry = index.get(each[0][-1])
            assert entry is not None
            index.pin(entry)
            pinned.add(entry.name)
        going += [name for names in each for name in names[:0:-1]] + [each[1][0], each[0][0]]
        for owner in owners:
            index.disown(owner)
    index.claim(A, "m/f", 0.25)
    (queue,) = index.queues()
    assert len(queue.lines) <= MOST_LINES
    assert all(line.queue is queue for line in queue.lines)
    check(index, 0, pinned)
    evicted = [victim.name for victim in index.evict(10**6, Use(owner=A))]
    assert evicted == [name for name in going if name not in pinned]
    assert not index.chains.of


@pytest.mark.parametrize("lines", [2, MOST_LINES])
def test_after_any_history_accounts_are_right_and_shares_hold(monkeypatch: pytest.MonkeyPatch, lines: int) -> None:
    monkeypatch.setattr(lru, "MOST_LINES", lines)
    for seed in range(250):
        story(seed)


def story(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(50, 400)
    index = LruIndex(capacity)
    owners, pinned = [A, B, C], set[str]()
    shares = dict(zip(owners, [draw.choice([0.0, 0.2, 0.33]) for _ in owners], strict=True))
    for owner in owners:
        index.claim(owner, f"{'m' if draw.random() < 0.3 else owner.engine}/f", shares[owner])
    flying: list[str] = []
    uses = [Use(owner=one) for one in owners for _ in range(3)]
    for _ in range(draw.randint(20, 120)):
        before = {owner: held(index, owner) for owner in owners}
        step = draw.random()
        use = draw.choice(uses)
        assert isinstance(use.owner, EngineOwner)
        owner = use.owner
        name = f"{owner.engine}/f/g/{draw.randint(0, 30)}/0"
        writer: EngineOwner | None = None
        if step < 0.5:
            if name not in index and name not in flying:
                writer, size = owner, draw.randint(1, 30)
                answer = index.reserve(name, size, use, draw.randint(0, 9))
                if not isinstance(answer, NoRoom):
                    flying.append(name)
                elif answer is NoRoom.LATER:
                    assert flying, f"seed {seed}: somebody to wait for"
        elif step < 0.75 and flying:
            name = flying.pop(draw.randrange(len(flying)))
            if draw.random() < 0.8:
                index.commit(name)
            else:
                index.release(name)
            before = {}
        elif step < 0.85:
            index.find([name, *draw.sample(index.names(), min(3, len(index)))], use)
        elif step < 0.92 and len(index):
            entry = index.get(draw.choice(index.names()))
            assert entry is not None
            if entry.pinned:
                index.unpin(entry, use)
                pinned.discard(entry.name)
            elif sum(one.pinned for one in index.queues()) + entry.nbytes <= capacity // 3:
                index.pin(entry)
                pinned.add(entry.name)
        elif step < 0.95 and len(index):
            name = draw.choice(index.names())
            index.forget(name)
            pinned.discard(name)
            before = {}
        elif step < 0.97:
            index.disown(owner)
            if draw.random() < 0.5:  # another one takes its objects over for a while
                index.claim(brief := EngineOwner(f"{seed}", 3), f"{owner.engine}/f", 0.0)
                index.find(draw.sample(index.names(), min(3, len(index))), Use(owner=brief))
                index.disown(brief)
            index.claim(owner, f"{owner.engine}/f", shares[owner])
            before = {}
        for other, had_bytes in before.items():
            if other != writer:
                kept = min(had_bytes, int(shares[other] * capacity))
                assert held(index, other) >= kept, f"seed {seed}: {other} fell below its share"
        check(index, seed, pinned)


def check(index: LruIndex, seed: int, pinned: set[str]) -> None:
    accounts = index.queues()
    assert sum(one.used for one in accounts) == index.used, f"seed {seed}"
    assert sum(one.objects for one in accounts) == len(index), f"seed {seed}"
    assert index.used <= index.capacity, f"seed {seed}"
    entries = list(index.hottest_first())
    assert sorted(entry.name for entry in entries) == sorted(index.names()), f"seed {seed}"
    assert {entry.name for entry in entries if entry.pinned} == pinned, f"seed {seed}: a pin was lost"
    order = [(entry.group.number, -entry.depth) for entry in entries if entry.group and not entry.pinned]
    assert order == sorted(order, reverse=True), f"seed {seed}: across owners, too"
    for account in accounts:
        own = [entry for entry in entries if entry.group is not None and entry.group.line.queue is account]
        assert account.pinned == sum(entry.nbytes for entry in own if entry.pinned), f"seed {seed}"
        assert account.objects == len(own), f"seed {seed}"


@pytest.mark.parametrize(
    ("name", "space"), [("m/f/g/d/0", "m/f"), ("m/f/x", "m/f"), ("prefix_k_0_key", ""), ("a/b", ""), ("", "")]
)
def test_the_space_of_a_name(name: str, space: str) -> None:
    assert space_of(name) == space
