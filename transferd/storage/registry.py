"""Which class a backend name stands for. A new backend is one file and one line here.

A name with a colon is a class outside this package: "package.module:Class".
"""

from __future__ import annotations

import importlib
from typing import cast

from transferd.clock import SYSTEM_CLOCK, Clock
from transferd.config import Config
from transferd.errors import ConfigError
from transferd.storage.base import Storage

_CLASSES = {
    "memory": "transferd.storage.memory:MemoryStorage",
    "file": "transferd.storage.file:FileStorage",
    "mooncake": "transferd.storage.mooncake:MooncakeStorage",
    "attention_store": "transferd.storage.attention_store:AttentionStorage",
}


def create_storage(config: Config, clock: Clock = SYSTEM_CLOCK) -> Storage | None:
    """The configured backend, not yet open; None for "none". Raises ConfigError."""
    name = config.storage.backend
    if name == "none":
        return None
    target = name if ":" in name else _CLASSES.get(name)
    if target is None:
        known = ", ".join([*_CLASSES, "none"])
        raise ConfigError("storage.backend", f"expected one of {known}, or package.module:Class", name)
    module, _, attribute = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError("storage.backend", f"cannot be loaded, is its extra installed? {error}", name) from error
    return cast("Storage", factory(config, clock=clock))
