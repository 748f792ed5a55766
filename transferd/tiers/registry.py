"""Maps device names to classes. A new tier needs one file, and one line here."""

from __future__ import annotations

from transferd.blocks.layout.base import BlockLayout
from transferd.config import Config
from transferd.config.loading import load_class
from transferd.config.ownership import Creator, creator
from transferd.errors import ConfigError
from transferd.runtime.threads import Threads
from transferd.tiers.base import DeviceTier
from transferd.tiers.pinned import Pinning

DEVICES = {
    "shm": "transferd.tiers.shm:ShmDeviceTier",
    "paddle": "transferd.tiers.paddle:PaddleDeviceTier",
    "cuda": "transferd.tiers.cuda:CudaDeviceTier",
}  # "package.module:Class" is a class outside this package


def create_device_tier(config: Config, layout: BlockLayout, rank: int, threads: Threads) -> DeviceTier:
    """One rank's device tier, not yet open. Raises ConfigError."""
    return check_device(config).configured(config, layout, rank, config.geometry.device_of_rank[rank], threads)


def check_device(config: Config) -> type[DeviceTier]:
    """The class of the configured device, checked to load and to support `cache.ownership`. Raises ConfigError."""
    tier = _class_of(config)
    if creator(config) is Creator.ENGINE and not tier.attaches:
        name, ownership = config.geometry.device, config.geometry.ownership
        what = f'the {name} device cannot attach to an engine\'s memory: set "create", so that the daemon allocates it'
        raise ConfigError("cache.ownership", what, ownership)
    if config.geometry.windows and not tier.windows:
        what = f"the {config.geometry.device} device cannot have windows; shared memory can (shm)"
        raise ConfigError("cache.windows", what, config.geometry.windows)
    return tier


def create_pinning(config: Config, rank: int) -> Pinning:
    """The Pinning for a rank's host memory. Raises ConfigError, or TierError if there is no such device."""
    return _class_of(config).pinning(config.geometry.device_of_rank[rank])


def _class_of(config: Config) -> type[DeviceTier]:
    name = config.geometry.device
    target = name if ":" in name else DEVICES.get(name)
    if target is None:
        raise ConfigError("cache.device", f"expected one of {', '.join(DEVICES)}, or package.module:Class", name)
    tier: type[DeviceTier] = load_class("cache.device", name, target, DeviceTier)
    return tier
