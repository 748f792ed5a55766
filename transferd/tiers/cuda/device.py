"""Finding the GPU that a rank is configured for."""

from __future__ import annotations

from transferd.errors import TierError
from transferd.tiers.cuda.driver import NO_DRIVER, DeviceInfo, Driver


def find_device(driver: Driver, index: int) -> DeviceInfo:
    """The device with this index. Raises TierError naming what there is."""
    count = driver.device_count()
    if count == 0:
        raise TierError("there is no GPU that this process may use (CUDA_VISIBLE_DEVICES?)", code=NO_DRIVER)
    if not 0 <= index < count:
        raise TierError(f"device {index} is not there: this process sees {count} GPUs, 0 … {count - 1}", code=NO_DRIVER)
    return driver.describe(index)
