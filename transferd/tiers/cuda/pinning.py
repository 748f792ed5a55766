"""Host memory that GPUs can reach: on the NUMA node next to the GPU, registered with CUDA.

Registered memory is locked, and a DMA engine reads and writes it directly. The driver copies any other memory
through its own small buffer, which halves the speed and prevents overlap. Memory that CUDA refuses to register
still works, and `pin` returns the reason.
"""

from __future__ import annotations

import bisect
import contextlib
import threading

from transferd.errors import DeviceLost, TierError
from transferd.tiers.cuda.bindings import open_driver
from transferd.tiers.cuda.driver import Driver, find_device
from transferd.tiers.cuda.waits import waits_of
from transferd.tiers.pinned import node_of_pci

_registered: dict[int, int] = {}  # address → bytes of each registration of this process, for every device
_starts: list[int] = []  # the addresses, ascending
_lock = threading.Lock()


def is_registered(address: int) -> bool:
    """Whether this process has registered memory with CUDA that begins at this address."""
    return address in _registered


def boundaries(address: int, nbytes: int) -> list[int]:
    """The addresses within a range at which another registration begins: no DMA may cross them."""
    with _lock:
        return _starts[bisect.bisect_right(_starts, address) : bisect.bisect_left(_starts, address + nbytes)]


class CudaPinning:
    """Pins memory for one GPU. Holds the GPU's primary context while any memory is pinned.

    Raises TierError without a driver, or for a device that does not exist.
    """

    def __init__(self, device: int | str, driver: Driver | None = None) -> None:
        self._driver = driver if driver is not None else open_driver()
        info = find_device(self._driver, device)
        self._device = info.index
        self.node = node_of_pci(info.pci)

    def pin(self, address: int, nbytes: int) -> str:
        """Register memory. Returns "", or why CUDA refused."""
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
            bisect.insort(_starts, address)
        return ""

    def unpin(self, address: int, nbytes: int) -> None:  # noqa: ARG002 - CUDA knows how long it is
        """Undo `pin`, once. Does nothing if the device was lost. Raises TierError."""
        driver = self._driver
        with _lock:
            del _registered[address]
            _starts.remove(address)
        with contextlib.suppress(DeviceLost):
            context = driver.retain(self._device)  # the same context: the driver counts references
            try:
                with driver.current(context), waits_of(driver, context).apart("unpinning host memory"):
                    driver.unregister_host(address)
            finally:
                driver.release(self._device)
                driver.release(self._device)
