"""The pools of one of SGLang's ranks at the daemon, for each of SGLang's two seams: HiCache and the external linker.

Nothing here needs SGLang, whose objects it only reads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from transferd.adapters.common.settings import engine_name
from transferd.adapters.sglang import arguments, identity, weights
from transferd.adapters.sglang.pools import AttachedPool, JoinedPools, has_pages, pages_of
from transferd.adapters.sglang.settings import SGLANG, PoolSettings
from transferd.errors import ConfigError, TierError, TransferError
from transferd.runtime.clock import SYSTEM_CLOCK

KV = "kv"
LEAVE_TIMEOUT_S = 2.0
GIGABYTE = 1e9
TRAILING, GROUPS = "trailing_pages", "block_groups"  # SGLang's PoolHitPolicy

DEEPSEEK, STATES = "deepseek_v4", "_state"

Move = Callable[[AttachedPool, Sequence[str], Any], list[bool]]
Moved = Callable[[str, Sequence[str] | None, Any], list[bool]]


def family(name: str) -> str:
    """Pools of one family are one engine: SGLang moves them in one call, with the same keys and page numbers.

    Those are the pools of DeepSeek V4 that go by the main pool's numbers, and its states, by the windows' numbers.
    """
    if not name.startswith(DEEPSEEK):
        return name
    return DEEPSEEK + STATES if name.endswith(STATES) else DEEPSEEK


class RankPools:
    """Each family of pools is an engine of one rank. Raises ConfigError if SGLang names no model.

    config: SGLang's HiCacheStorageConfig.
    """

    def __init__(self, config: Any, chosen: PoolSettings) -> None:
        self._config, self._chosen = config, chosen
        self._arguments = arguments.of_this_server()
        self._life = SYSTEM_CLOCK.fresh_id()
        self._model = config.model_name or (self._arguments or {}).get("model_path", "")
        if not self._model:
            raise ConfigError("--served-model-name", "is needed, because pages are stored under the model's name")
        self.pools: dict[str, AttachedPool] = {}
        self._families: dict[str, dict[str, Any]] = {}  # pools by name
        self.without_pages: set[str] = set()  # pools that only number pages, as the main one of DeepSeek V4
        self._weights = weights.WeightVersion(chosen.generation, weights.of_sglang)

    def add(self, name: str, host: Any) -> None:
        """Offer the daemon a pool, or another one of that name; one of a family by `wait_ready`, with the others.

        Raises ConfigError, TierError.
        """
        if not has_pages(host):
            self.without_pages.add(name)
        elif family(name) == name:
            self._attach(name, host)
        else:
            members = self._families.setdefault(family(name), {})
            members[name] = host
            if family(name) in self.pools:
                self._attach(family(name), JoinedPools(members))

    def _engine(self, name: str) -> str:
        return name if name in self.without_pages else family(name)

    def _attach(self, name: str, host: Any) -> None:
        if name in self.pools:
            if self.pools[name].host is host:
                return
            self.pools.pop(name).close(LEAVE_TIMEOUT_S)
        config, pages = self._config, pages_of(name, host)
        rank = f"dp{config.dp_rank}-pp{config.pp_rank}-cp{config.attn_cp_rank}-tp{config.tp_rank}"
        first = not (config.dp_rank or config.pp_rank or config.attn_cp_rank or config.tp_rank)
        self.pools[name] = AttachedPool(
            name,
            host,
            engine_name(self._chosen.name or f"sglang-{os.getpid()}-{self._life[:4]}", f"-{rank}-{name}"),
            self._model,
            self._weights.generation,
            self._chosen,
            identity.facts(config, name, host, pages, self._chosen, self._arguments, self._life),
            starts_daemon=first and not self.pools,
        )

    def wait_ready(self) -> None:
        """Wait for the daemon, at most start_timeout seconds; SGLang starts without it if none answers.

        Raises ConfigError, TierError for families of pools.
        """
        for name, members in self._families.items():
            self._attach(name, JoinedPools(members))
        until = time.monotonic() + self._chosen.start_timeout
        for pool in self.pools.values():
            if not pool.link.wait_ready(max(0.0, until - time.monotonic())):
                what = "transferd: no daemon after %g s; SGLang starts without it"
                SGLANG.log.warning(what, self._chosen.start_timeout)
                return

    def close(self) -> None:
        """Leave the daemon. Nothing is being moved any more."""
        for pool in self.pools.values():
            pool.close(LEAVE_TIMEOUT_S)
        self.pools.clear()

    def there(self, name: str, keys: Sequence[str]) -> list[bool]:
        """For each key, whether this pool's page can be loaded."""
        if name in self.without_pages:  # then the pools beside it decide
            return [True] * len(keys)
        pool = self.pools.get(self._engine(name))
        self._weights.follow(self.pools.values())
        return [False] * len(keys) if pool is None else pool.exists(keys)

    def restorable(self, keys: Sequence[str], transfers: Sequence[Any]) -> tuple[list[int], dict[Any, int]]:
        """The lengths of prefixes, in pages, that the main pool and all of these can restore; how far each pool can."""
        deciding = [one for one in transfers if one.hit_policy != GROUPS]
        if KV in self.without_pages and not deciding:
            return [], {}
        kv = leading(self.there(KV, keys))
        # SGLang skips what it believes to be stored: a pool without pages is no proof
        found: dict[Any, int] = {KV: kv} if kv and KV not in self.without_pages else {}
        whole = set(range(1, kv + 1))
        seen: dict[str, list[bool]] = {}
        for transfer in deciding:
            if not whole:
                break
            engine = self._engine(name := str(transfer.name))
            there = seen[engine] = seen.get(engine) or self.there(name, keys[:kv])
            if transfer.hit_policy == TRAILING:
                last = max(1, len(transfer.keys or ()))
                mine = {end for end in range(1, kv + 1) if all(there[max(0, end - last) : end])}
            else:
                mine = set(range(1, leading(there) + 1))
            if mine:
                found[transfer.name] = max(mine)
            whole &= mine
        return sorted(whole), found

    def moved_together(self, transfers: Sequence[Any], moved: Moved) -> dict[Any, list[bool]]:
        """Move pages of host pools, as SGLang's second interface has them; for each page of each pool whether it was.

        moved: moves those of one engine.
        """
        engines: dict[str, list[Any]] = {}
        for one in transfers:
            engines.setdefault(self._engine(str(one.name)), []).append(one)
        found: dict[Any, list[bool]] = {}
        for name, some in engines.items():
            if name not in self._families or _whole(self._families[name], some):
                each = moved(name, some[0].keys, some[0].host_indices)
            else:
                each = [False] * len(some[0].keys or ())
            found |= {one.name: each for one in some}
        return found

    def moved(self, name: str, keys: Sequence[str] | None, indices: Any, move: Move) -> tuple[list[bool], float]:
        """Move pages of a pool; for each of them whether it was, and how many seconds that took. Raises nothing."""
        pool, keys = self.pools.get(name), keys or []
        if name in self.without_pages:
            return [True] * len(keys), 0.0
        fresh = self._weights.follow(self.pools.values())
        if pool is None or not keys or indices is None or (move is AttachedPool.store and not fresh):
            return [False] * len(keys), 0.0
        began = time.perf_counter()
        try:
            return move(pool, keys, indices), time.perf_counter() - began
        except TierError as error:  # SGLang's threads end with an exception
            SGLANG.log.warning("transferd: pages of %s are not moved: %s", name, error)
            return [False] * len(keys), 0.0

    def purge(self) -> None:
        """Remove all stored pages of this model and generation, of every rank and pool. Raises TransferError."""
        pool = next(iter(self.pools.values()), None)
        if pool is None:
            raise TransferError("SGLang has not handed over its host pool yet", code="not_connected")
        generation = self._weights.generation
        purged = pool.link.purge(pool.facts.model, generation)
        what = "transferd: cleared %s, generation %r: %d objects, %.1f GB"
        SGLANG.log.info(what, pool.facts.model, generation, purged.objects, purged.bytes / GIGABYTE)


def _whole(members: Collection[str], transfers: Sequence[Any]) -> bool:
    """Whether these move the same pages of every pool of a family. We know of no call of SGLang that does not."""
    first = transfers[0]
    alike = all(
        one.keys == first.keys and np.array_equal(np.asarray(one.host_indices), np.asarray(first.host_indices))
        for one in transfers
    )
    if alike and {str(one.name) for one in transfers} == set(members):
        return True
    what = "transferd: SGLang moves some pools of %s only, which is not served: their pages count as missing"
    SGLANG.log.warning(what, ", ".join(members))
    return False


def leading(there: Sequence[bool]) -> int:
    return next((i for i, one in enumerate(there) if not one), len(there))
