"""Which class a backend name stands for. A new backend is one file and one line here.

A name with a colon is a class outside this package: `package.module:Class`. Every backend class is
called as `Class(config, clock=clock)` and must be a `Storage`. Modules are imported only when they
are chosen, so an absent extra matters to nobody else.
"""

from __future__ import annotations

import importlib

from transferd.clock import SYSTEM_CLOCK, Clock
from transferd.config import Config
from transferd.errors import ConfigError
from transferd.storage.base import Storage

BACKENDS = {
    "memory": "transferd.storage.memory:MemoryStorage",
    "file": "transferd.storage.file:FileStorage",
    "mooncake": "transferd.storage.mooncake:MooncakeStorage",
    "attention_store": "transferd.storage.attention_store:AttentionStorage",
}
NO_BACKEND = "none"


def create_storage(config: Config, clock: Clock = SYSTEM_CLOCK) -> Storage | None:
    """The configured backend, not yet open; None for "none". Raises ConfigError naming `storage.backend`."""
    name = config.storage.backend
    if name == NO_BACKEND:
        return None
    target = name if ":" in name else BACKENDS.get(name)
    if target is None:
        known = ", ".join([*BACKENDS, NO_BACKEND])
        raise ConfigError("storage.backend", f"expected one of {known}, or package.module:Class", name)
    backend = _load(name, target)
    storage = backend(config, clock=clock)
    assert isinstance(storage, Storage)
    return storage


def _load(name: str, target: str) -> type:
    module_name, _, class_name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            problem = f"there is no module {module_name} in this installation"
        else:
            problem = f"needs the Python package {error.name}, which is not installed"
        raise ConfigError("storage.backend", problem, name) from error
    except (ImportError, ValueError) as error:  # a shared library that is missing; an empty module name
        raise ConfigError("storage.backend", f"cannot be loaded: {error}", name) from error
    backend = getattr(module, class_name, None)
    if not (isinstance(backend, type) and issubclass(backend, Storage)):
        raise ConfigError("storage.backend", f"{module_name} has no Storage class {class_name!r}", name)
    return backend
