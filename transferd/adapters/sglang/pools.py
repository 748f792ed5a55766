"""One of SGLang's host pools: where its pages lie, and the engine through which they are stored and loaded.

In every layout, a pool gives the addresses of a page's pieces (`get_page_buffer_meta`): K and V, or one of each for
every layer, or all in one. We take sizes and strides from the first pages, and check them against the last page. Each
pool of each rank is a separate engine of one rank, because each of SGLang's ranks calls its storage separately. Pools
that SGLang moves together, at the same page numbers, are one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from transferd.adapters.common.copied import CopiedBlocks, Pieces
from transferd.adapters.common.entry import EngineFacts, OfferedMemory
from transferd.adapters.common.link import BlockTasks, Link
from transferd.adapters.common.memory import Mapped, bytes_at, shared_memory_at
from transferd.adapters.common.read_leases import LeasedBlocks
from transferd.adapters.common.slots import Slots
from transferd.adapters.sglang.settings import SGLANG, PoolSettings
from transferd.errors import ConfigError, TierError


@dataclass(frozen=True, slots=True)
class PageGrid:
    """The pages of a host pool."""

    tokens: int  # slots of one page in SGLang's indices
    count: int  # pages
    addresses: tuple[int, ...]  # of each piece of page 0
    sizes: tuple[int, ...]  # of each piece, in bytes
    strides: tuple[int, ...]  # of each piece, from page to page

    def numbers(self, indices: Any, pages: int) -> list[int]:
        """The numbers of the pages at these indices of SGLang. Raises TierError if they are not whole pages."""
        first = np.asarray(indices).reshape(-1)[:: self.tokens]
        if len(first) != pages or len(indices) != pages * self.tokens or np.any(first % self.tokens):
            raise TierError(f"{len(indices)} indices for {pages} pages of {self.tokens} tokens, or not whole pages")
        found: list[int] = (first // self.tokens).tolist()
        return found

    def pieces(self, page: int) -> Pieces:
        """Where a page lies."""
        each = zip(self.addresses, self.strides, self.sizes, strict=True)
        return [(start + page * stride, size) for start, stride, size in each]

    def views(self) -> Callable[[int], list[memoryview]]:
        """Returns the bytes of a page's pieces. The memory has to outlive these."""
        each = list(zip(self.addresses, self.strides, self.sizes, strict=True))
        lie = [(bytes_at(at, (self.count - 1) * step + size), step, size) for at, step, size in each]
        return lambda page: [whole[page * step : page * step + size] for whole, step, size in lie]


def has_pages(pool: Any) -> bool:
    """Whether a pool has memory. DeepSeek V4's main pool only numbers the pages that the pools beside it have."""
    return getattr(pool, "kv_buffer", pool) is not None


class JoinedPools:
    """Host pools that SGLang moves together, as one pool: its page is the page of each of them. members: by name."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = members
        grids = {name: pages_of(name, pool) for name, pool in members.items()}
        self.page_size = next(iter(grids.values())).tokens
        self.size = self.page_size * min(one.count for one in grids.values())
        self.layout = ", ".join(sorted({str(getattr(pool, "layout", "")) for pool in members.values()}))
        kinds = [f"{name}, {kind(one)}, {getattr(one, 'storage_format_tag', '')}" for name, one in members.items()]
        self.storage_format_tag = "; ".join(kinds)
        if any(one.tokens != self.page_size for one in grids.values()):
            raise _refused(min(members), self, "pools that belong together have other pages")

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Where one page lies."""
        each = [pool.get_page_buffer_meta(indices) for pool in self.members.values()]
        return [one for addresses, _ in each for one in addresses], [one for _, sizes in each for one in sizes]


def kind(pool: Any) -> str:
    """The name of a pool's class, or those of its members'."""
    return " + ".join(sorted({type(one).__name__ for one in getattr(pool, "members", {"": pool}).values()}))


def pages_of(name: str, pool: Any) -> PageGrid:
    """Where the pages of a host pool lie. Raises ConfigError in one line if they cannot be found, or form no grid."""
    tokens = int(getattr(pool, "logical_page_size", 0) or pool.page_size)
    count = int(getattr(pool, "logical_size", 0) or pool.size) // tokens
    at = {page: _pieces(name, pool, page, tokens) for page in {0, min(1, count - 1), count - 1}}
    (first, sizes), (second, _), (last, _) = at[0], at[min(1, count - 1)], at[count - 1]
    strides = tuple(b - a for a, b in zip(first, second, strict=True)) if count > 1 else sizes
    grid = all(start + (count - 1) * stride == end for start, stride, end in zip(first, strides, last, strict=True))
    if any(more != sizes for _, more in at.values()) or not grid:
        raise _refused(name, pool, "its pages do not lie at equal distances")
    return PageGrid(tokens, count, first, sizes, strides)


def _pieces(name: str, pool: Any, page: int, tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    arange = getattr(sys.modules.get("torch"), "arange", np.arange)  # SGLang's pools want tensors
    try:
        addresses, sizes = pool.get_page_buffer_meta(arange(page * tokens, (page + 1) * tokens))
        found = tuple(map(int, addresses)), tuple(map(int, sizes))
    except (AttributeError, NotImplementedError, ValueError, TypeError) as error:
        raise _refused(name, pool, f"it does not say where its pages lie ({error})") from error
    if not found[0] or len(found[0]) != len(found[1]):
        raise _refused(name, pool, "it does not say where its pages lie")
    return found


def _refused(name: str, pool: Any, why: str) -> ConfigError:
    what = f"{why}: use --hicache-mem-layout page_first, or another storage backend for this model"
    return ConfigError(f"SGLang's host pool {name}", what, f"{type(pool).__name__}, {getattr(pool, 'layout', '')}")


def offered(pages: PageGrid) -> OfferedMemory:
    """The pool's memory, as an engine of one rank offers it. Raises TierError if it is private.

    Some pools allocate each of their tensors separately; each is then a separate memory.
    """
    files: dict[tuple[int, int], list[Mapped]] = {}
    pieces = []
    for address, size, stride in zip(pages.addresses, pages.sizes, pages.strides, strict=True):
        piece = shared_memory_at(address, (pages.count - 1) * stride + size)
        _ = piece.name or piece.descriptor()  # SGLang's own allocator maps shared memory that no one can open
        files.setdefault(piece.identity, []).append(piece)
        pieces.append((piece, stride))
    ranges = []
    for parts in files.values():
        start, end = min(one.offset for one in parts), max(one.offset + one.nbytes for one in parts)
        ranges.append(replace(parts[0], offset=start, nbytes=end - start))
    order = list(files)
    segments = []
    for piece, stride in pieces:
        which = order.index(piece.identity)
        segments.append((piece.offset - ranges[which].offset, stride, which))
    return OfferedMemory(0, ranges[0], segments, more=ranges[1:])


class AttachedPool:
    """One host pool at the daemon. Thread-safe, as SGLang's storage threads need it.

    name, host: SGLang's name of the pool, and the pool.
    clears: see weights.Pooled.
    engine: the engine's name.
    model, generation, fingerprint: of every object.
    starts_daemon: whether a daemon is started here if none runs.

    Raises ConfigError in one line if SGLang's settings or the pool cannot be served.
    """

    def __init__(
        self,
        name: str,
        host: Any,
        engine: str,
        model: str,
        generation: str,
        chosen: PoolSettings,
        fingerprint: Mapping[str, Any],
        *,
        starts_daemon: bool,
    ) -> None:
        self.name, self.host = name, host
        self.pages = pages_of(name, host)
        self._chosen = chosen
        self._slots: Slots | None = None
        self.facts = EngineFacts(
            name=engine,
            model=model,
            generation=generation,
            identity=f"sglang/{name}",
            ranks=1,
            page_bytes=self.pages.sizes,
            fingerprint=fingerprint,
            **self._memory(),
        )
        members: Mapping[str, Any] = getattr(host, "members", {name: host})
        self.clears: dict[str, object] = dict.fromkeys(members)
        self._members = [(one, member, member.clear) for one, member in members.items()]
        for one, member, clear in self._members:  # not every pool shows it otherwise
            member.clear = functools.partial(self._watched_clear, one, clear)
        finder = chosen.finder(SGLANG, self.facts if starts_daemon else None)
        enter = functools.partial(self.facts.enter, canary=False)  # every page may be in use
        self.link = Link(finder, engine, enter)
        self._copies: CopiedBlocks | None = None
        if self._slots is not None:
            times = {"timeout": chosen.timeout, "load_timeout": chosen.load_timeout}
            self._copies = CopiedBlocks(self.link, self._slots, f"pages of {name}", **times)
        self._tasks = BlockTasks(self.link, f"pages of {name}")
        self._leased = LeasedBlocks(self.link)
        self._views = None if getattr(host, "on_gpu", False) else self.pages.views()

    def _memory(self) -> dict[str, Any]:
        """The engine's blocks: the pool's pages, or slots for them if no other process can map the pool."""
        if getattr(self.host, "on_gpu", False):
            return {"blocks": self.pages.count, "memory": self.host.device_memory(self.pages)}
        try:
            return {"blocks": self.pages.count, "memory": offered(self.pages)}
        except TierError as error:
            SGLANG.log.warning("transferd: pages of %s are copied: %s%s", self.name, error, self._chosen.to_share)
        self._slots = Slots.within(sum(self.pages.sizes), self._chosen.buffer_bytes)
        return {"blocks": self._slots.count, "memory": self._slots.offered(self.pages.sizes)}

    def _watched_clear(self, name: str, clear: Callable[[], None]) -> None:
        clear()
        self.clears[name] = object()

    def close(self, timeout: float) -> None:
        """Leave the daemon, in about `timeout` seconds."""
        self._leased.close()
        for _, member, clear in self._members:
            member.clear = clear
        self.link.close(timeout)
        if self._slots is not None:
            self._slots.close()

    @property
    def page_bytes(self) -> int:
        return self.facts.block_bytes

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """For each key whether its page can be loaded. All False while no daemon answers."""
        return self._leased.look_up(keys) if keys else []

    def renew(self, generation: str) -> None:
        """Serve this generation from now on; what was looked up in another one is not loaded."""
        self._leased.forget()
        self.link.renew(generation)

    def store(self, keys: Sequence[str], indices: Any) -> list[bool]:
        """Store the pages at these indices; for each key whether that succeeded. Waits until they are free again."""
        pages = self.pages.numbers(indices, len(keys))
        if self._copies is not None:
            return self._copies.store(keys, [self.pages.pieces(page) for page in pages])
        task = self._tasks.write(keys, pages, self._chosen.timeout)
        return self._tasks.moved(task, self.link.carry_out(task))

    def load(self, keys: Sequence[str], indices: Any, progressed: Callable[[int], object] | None = None) -> list[bool]:
        """Load pages to these indices; for each key whether its bytes are there. Waits until nothing writes to them.

        Those that the last look-up has found in the page cache are read here, and the daemon loads the rest.
        progressed: called with how many leading pieces of all pages are there, as parts are loaded.
        """
        pages = self.pages.numbers(indices, len(keys))
        loaded = [False] * len(keys)
        if self._views is not None and self._leased:
            loaded = self._leased.read(keys, list(map(self._views, pages)))
        rest = [i for i, one in enumerate(loaded) if not one]
        if rest:
            moved = self._loaded([keys[i] for i in rest], [pages[i] for i in rest], progressed)
            for i, one in zip(rest, moved, strict=True):
                loaded[i] = one
        elif progressed is not None:
            progressed(len(self.pages.sizes))
        return loaded

    def _loaded(
        self, keys: Sequence[str], pages: Sequence[int], progressed: Callable[[int], object] | None
    ) -> list[bool]:
        """Have the daemon load pages."""
        if self._copies is not None:
            return self._copies.load(keys, [self.pages.pieces(page) for page in pages])
        task = self._tasks.read(keys, pages, self._chosen.load_timeout, by_parts=progressed is not None)
        return self._tasks.moved(task, self.link.carry_out(task, progressed))
