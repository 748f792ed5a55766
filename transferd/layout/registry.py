"""Which layout file an attention name stands for. A new family is one file and one line here."""

from __future__ import annotations

import importlib

from transferd.config import CacheSection
from transferd.errors import ConfigError
from transferd.layout.base import BlockLayout

_MODULES = {
    "gqa": "transferd.layout.gqa",  # also MHA and MQA: they differ in kv_heads only
    "mla": "transferd.layout.mla",
    "dsa": "transferd.layout.dsa",
}


def build_layout(cache: CacheSection) -> BlockLayout:
    """The layout of one rank's cache. Raises ConfigError."""
    module = _MODULES.get(cache.attention)
    if module is None:
        raise ConfigError("cache.attention", f"expected one of {', '.join(_MODULES)}", cache.attention)
    layout: BlockLayout = importlib.import_module(module).layout(cache)
    return layout
