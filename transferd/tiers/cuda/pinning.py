"""Host memory that GPUs reach: on the NUMA node next to the GPU, registered with CUDA.

Registered memory is locked, and a DMA engine reads and writes it directly; the driver copies any other
memory through a small buffer of its own, which costs half of the speed and the overlap. Where registering
is refused the memory works all the same, and says so.
"""

from __future__ import annotations

import contextlib
import threading

from transferd.errors import DeviceLost, TierError
from transferd.tiers.cuda.bindings import open_driver
from transferd.tiers.cuda.device import find_device
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.numa import node_of_pci

_registered: dict[int, int] = {}  # address → bytes, of this process: what is registered is so for every device
_lock = threading.Lock()


def is_registered(address: int) -> bool:
    """Memory that begins here was registered with CUDA by this process."""
    return address in _registered


class CudaPinning:
    """Pins for one GPU. Holds its primary context for as long as anything is pinned.

    Raises TierError without a driver or for a device that is not there.
    """

    def __init__(self, device: int, driver: Driver | None = None) -> None:
        self._driver = driver if driver is not None else open_driver()
        self._device = device
        self.node = node_of_pci(find_device(self._driver, device).pci)

    def pin(self, address: int, nbytes: int) -> str:
        """Register. Returns why not, or "" when it is."""
        driver = self._driver
        try:
            context = driver.retain(self._device)
        except TierError as error:
            return str(error)
        try:
            with driver.current(context):
                driver.register_host(address, nbytes)
        except TierError as error:
            with contextlib.suppress(DeviceLost):
                driver.release(self._device)
            return str(error)
        with _lock:
            _registered[address] = nbytes
        return ""

    def unpin(self, address: int, nbytes: int) -> None:  # noqa: ARG002 - CUDA knows how long it is
        """Undo `pin`, once; nothing is left to undo on a device that was lost. Raises TierError."""
        driver = self._driver
        with _lock:
            del _registered[address]
        with contextlib.suppress(DeviceLost):
            context = driver.retain(self._device)  # the same one: it is counted
            try:
                with driver.current(context):
                    driver.unregister_host(address)
            finally:
                driver.release(self._device)
                driver.release(self._device)
