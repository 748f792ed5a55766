"""The GPU that a rank is configured for."""

from __future__ import annotations

from transferd.errors import TierError
from transferd.tiers.cuda.driver import NO_DRIVER, DeviceInfo, Driver


def find_device(driver: Driver, index: int) -> DeviceInfo:
    """The device with this index. Raises TierError that says which devices there are."""
    count = driver.device_count()
    if count == 0:
        raise TierError("this process sees no GPU: check CUDA_VISIBLE_DEVICES", code=NO_DRIVER)
    if not 0 <= index < count:
        seen = "1 GPU, device 0" if count == 1 else f"{count} GPUs, devices 0 … {count - 1}"
        raise TierError(f"there is no device {index}: this process sees {seen}", code=NO_DRIVER)
    return driver.describe(index)
