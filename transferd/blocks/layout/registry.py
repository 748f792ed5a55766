"""Maps attention names to layout files. A new family needs one file, and one line here."""

from __future__ import annotations

import dataclasses
import importlib

from transferd.blocks import fingerprint
from transferd.blocks.layout.base import BlockLayout
from transferd.config import CacheSection
from transferd.errors import ConfigError

_MODULES = {
    "gqa": "transferd.blocks.layout.gqa",  # also MHA and MQA: they differ only in kv_heads
    "mla": "transferd.blocks.layout.mla",
    "dsa": "transferd.blocks.layout.dsa",
    "pages": "transferd.blocks.layout.pages",
}


def build_layout(cache: CacheSection) -> BlockLayout:
    """The layout of one rank's cache. Raises ConfigError."""
    module = _MODULES.get(cache.attention)
    if module is None:
        raise ConfigError("cache.attention", f"expected one of {', '.join(_MODULES)}", cache.attention)
    layout: BlockLayout = importlib.import_module(module).layout(cache)
    if not cache.fingerprint:
        return layout
    if why := fingerprint.refusal(cache.fingerprint):
        raise ConfigError("cache.fingerprint", why)
    return dataclasses.replace(layout, identity=f"{layout.identity} facts={fingerprint.digest(cache.fingerprint)}")
