"""Which class a device name stands for. A new tier is one file and one line here.

A name with a colon is a class outside this package: "package.module:Class".
"""

from __future__ import annotations

import importlib
from typing import cast

from transferd.config import Config
from transferd.errors import ConfigError
from transferd.layout.base import BlockLayout
from transferd.offload import Offload
from transferd.tiers.base import DeviceTier

_CLASSES = {
    "shm": "transferd.tiers.shm:ShmDeviceTier",
    "paddle": "transferd.tiers.paddle:PaddleDeviceTier",
    "cuda": "transferd.tiers.cuda:CudaDeviceTier",
}


def create_device_tier(config: Config, layout: BlockLayout, rank: int, offload: Offload) -> DeviceTier:
    """One rank's device tier, not yet open. Raises ConfigError."""
    name = config.cache.device
    target = name if ":" in name else _CLASSES.get(name)
    if target is None:
        raise ConfigError("cache.device", f"expected one of {', '.join(_CLASSES)}, or package.module:Class", name)
    module, _, attribute = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError("cache.device", f"cannot be loaded, is its extra installed? {error}", name) from error
    if config.cache.ownership == "attach" and not getattr(factory, "attaches", False):
        raise ConfigError("cache.ownership", f"the {name} device is always created by the daemon", "attach")
    return cast("DeviceTier", factory(layout, rank, config.cache.device_of_rank[rank], offload))
