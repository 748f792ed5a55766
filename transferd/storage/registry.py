"""Maps backend names to classes. A new keyed backend needs one file, and one line here.

A name with a colon is a class outside this package: `package.module:Class`. Every backend class must be a `Storage`
and is created by its `from_config`, which by default calls `Class(config, clock=clock)`. Only the chosen module is
imported, so a missing extra matters only to those who use it.
"""

from __future__ import annotations

from collections.abc import Sequence

from transferd.config import Config, LevelSection
from transferd.config.loading import load_class
from transferd.errors import ConfigError
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.storage.base import Index, SlotStorage, Storage
from transferd.storage.tokens import TokenStorage

BACKENDS = {
    "memory": "transferd.storage.memory:MemoryStorage",
    "file": "transferd.storage.file:FileStorage",
    "mooncake": "transferd.storage.mooncake:MooncakeStorage",
    "object": "transferd.storage.object_store:ObjectStorage",
}
SEVERAL_DISKS = "transferd.storage.disks:Disks"  # "file", if storage.file.path is a list
TOKEN_INDEXED = "attention_store"
NO_BACKEND = "none"


def create_storages(
    config: Config, clock: Clock = SYSTEM_CLOCK, keyed: Storage | None = None
) -> tuple[TokenStorage | None, Storage | None]:
    """The configured token-indexed storage, if any, and the keyed storage behind it or instead of it. None is open.

    keyed: replaces the configured keyed storage. Raises ConfigError.
    """
    if keyed is None:
        _check(config, backends_of(config))
    storage, section = config.storage, config.storage.attention_store
    if storage.backend != TOKEN_INDEXED:
        return None, create_storage(config, clock) if keyed is None else keyed
    if section.driver == "sdk":
        from transferd.storage.attention_store.sdk import SdkTokenStorage

        return SdkTokenStorage(storage, config.geometry, clock=clock), None
    from transferd.storage.attention_store.open_index import OpenTokenStorage

    if keyed is None:
        keyed = _create("storage.attention_store.data", section.data, config, clock)
    return OpenTokenStorage(section.pod_name or "", config.geometry.block_size, keyed), keyed


def create_storage(config: Config, clock: Clock = SYSTEM_CLOCK) -> Storage | None:
    """The configured keyed backend, or levels of several, not yet open; None for "none". Raises ConfigError."""
    levels = config.storage.levels
    if len(levels) < 2:
        key = "storage.levels" if levels else "storage.backend"
        return _create(key, config.storage.backends[0], config, clock)
    from transferd.storage.levels.level import StoreLevel
    from transferd.storage.levels.stack import LevelsStorage

    made = []
    for number, name in enumerate(levels):
        storage = _create("storage.levels", name, config, clock)
        assert storage is not None  # rules.py
        section = config.storage.level.get(name, LevelSection())
        made.append(StoreLevel(number, name, storage, section, clock.monotonic))
    return LevelsStorage(made, clock)


def backends_of(config: Config) -> list[type[Storage]]:
    """The classes of the keyed backends that a configuration names, the fastest first. Raises ConfigError."""
    storage = config.storage
    if storage.backend == TOKEN_INDEXED:
        section = storage.attention_store
        named = {} if section.driver == "sdk" else {"storage.attention_store.data": [section.data]}
    else:
        named = {"storage.levels" if storage.levels else "storage.backend": storage.backends}
    each = [(key, name) for key, names in named.items() for name in names if name != NO_BACKEND]
    return [_backend(key, name, config) for key, name in each]


def _check(config: Config, backends: Sequence[type[Storage]]) -> None:
    """Check the settings that only some backends can fulfil; one of another package may be able to. Raises ConfigError.

    backends: the classes of those that hold blocks.
    """
    storage = config.storage
    each = list(zip(storage.backends, backends, strict=False))
    if storage.scrub_rate and not any(backend.scrubs or ":" in name for name, backend in each):
        what = f"requires a backend that can list its objects; {storage.title} cannot"
        raise ConfigError("storage.scrub_rate", what, str(storage.scrub_rate))
    if not each or each[0][1].lists or ":" in each[0][0]:
        return
    if config.engines.storage_share:
        what = f"requires a backend that knows its own objects; {storage.title} cannot keep shares"
        raise ConfigError("engines.storage_share", what, config.engines.storage_share)
    if len(each) > 1:
        what = "the first level must know its own objects, so that it can keep what is not copied below"
        raise ConfigError("storage.levels", f"{what}: memory or file", each[0][0])


def _create(key: str, name: str, config: Config, clock: Clock) -> Storage | None:
    return None if name == NO_BACKEND else _backend(key, name, config).from_config(config, clock=clock)


def _backend(key: str, name: str, config: Config) -> type[Storage]:
    target = name if ":" in name else BACKENDS.get(name)
    if target is None:
        others = [TOKEN_INDEXED, NO_BACKEND] if key == "storage.backend" else [NO_BACKEND]
        known = ", ".join([*BACKENDS, *others])
        raise ConfigError(key, f"expected one of {known}, or package.module:Class", name)
    backend = _load(key, name, target)
    return _load(key, name, SEVERAL_DISKS) if len(backend.directories(config.storage)) > 1 else backend


def _load(key: str, name: str, target: str) -> type[Storage]:
    backend: type[Storage] = load_class(key, name, target, Storage)
    more: list[type] = []
    if backend.__abstractmethods__ & {"store", "load"} and hasattr(backend, "put"):
        more.append(SlotStorage)  # it has only `put` and `get`
    if not issubclass(backend, Index) and any(hasattr(backend, name) for name in vars(Index) if name[0] != "_"):
        more.append(Index)  # until 0.4, Index's methods belonged to Storage
    return type(backend.__name__, (backend, *more), {}) if more else backend
