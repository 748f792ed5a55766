"""The kernel, loaded once on each device of this process, however many ranks use it.

Loading a kernel may wait for everything that is under way in the context (CUDA's guide, lazy loading), so for as long
as another rank waits for its engine. The first rank on a device loads it, when no rank can be waiting there.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.kernel import NAME


@dataclass(slots=True)
class _Loaded:
    module: int
    function: int
    holders: int = 0


_lock = threading.Lock()  # ranks open at the same time: one loads, the others wait for it
_loaded: weakref.WeakKeyDictionary[Driver, dict[int, _Loaded]] = weakref.WeakKeyDictionary()


def take_kernel(driver: Driver, device: int, image: bytes) -> int:
    """The kernel's function. Give it back with `give_kernel`. Needs the device's context. Raises TierError."""
    with _lock:
        here = _loaded.setdefault(driver, {})
        if device not in here:
            module = driver.load(image)
            try:
                here[device] = _Loaded(module, driver.function(module, NAME))
            except BaseException:
                driver.unload(module)
                raise
        here[device].holders += 1
        return here[device].function


def give_kernel(driver: Driver, device: int) -> None:
    """The last holder's call unloads the kernel. Needs the device's context. Raises TierError."""
    with _lock:
        held = _loaded[driver][device]
        held.holders -= 1
        if not held.holders:
            del _loaded[driver][device]
            driver.unload(held.module)
