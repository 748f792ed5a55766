"""The GPU that a rank is configured for."""

from __future__ import annotations

from transferd.errors import TierError
from transferd.tiers.cuda.driver import NO_DRIVER, DeviceInfo, Driver


def find_device(driver: Driver, which: int | str) -> DeviceInfo:
    """The device with this index, or with this UUID. Raises TierError that says which devices there are."""
    count = driver.device_count()
    if count == 0:
        raise TierError("this process sees no GPU: check CUDA_VISIBLE_DEVICES", code=NO_DRIVER)
    if isinstance(which, str):
        return _with_uuid(driver, which, count)
    if not 0 <= which < count:
        seen = "1 GPU, device 0" if count == 1 else f"{count} GPUs, devices 0 … {count - 1}"
        raise TierError(f"there is no device {which}: this process sees {seen}", code=NO_DRIVER)
    return driver.describe(which)


def _with_uuid(driver: Driver, uuid: str, count: int) -> DeviceInfo:
    """uuid: as nvidia-smi writes it, or only its 32 hex digits."""
    wanted = uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()
    for info in map(driver.describe, range(count)):
        if info.uuid == wanted:
            return info
    what = f"GPU {uuid} is not among the {count} that this process sees: check CUDA_VISIBLE_DEVICES"
    raise TierError(what, code=NO_DRIVER)
