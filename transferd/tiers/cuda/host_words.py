"""Timelines' words in host memory: a page that daemon and engine map, and the thread that looks at it.

A stream of the engine writes its number there as well (cuStreamWriteValue64), so no stream of the daemon waits for
another process, and nothing that frees memory has to be kept apart from such waits (waits.py). The page is a memfd of
the daemon's. An engine that can open it says so in the page; for any other the words in device memory serve, which
every engine writes (docs/adr/0133).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable

from transferd.errors import Closed, RequestError, TierError, TransferError
from transferd.runtime.threads import start_thread
from transferd.tasks import TIMELINE_SLOTS as SLOTS
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.ipc import ExportedPage
from transferd.tiers.offered import identity_of
from transferd.tiers.owner import as_data, check_owner, this_process
from transferd.tiers.segment import SharedSegment, unnamed_segment

STRIDE = 64  # bytes from word to word, so that two words never share a line of the memory system
_EACH = STRIDE // 8
_MAPPED = SLOTS * _EACH  # the word that an engine sets once it has mapped the page
LOOK_S = 50e-6  # between two looks at first
LATE_S = 1e-3  # and at most
PART = 256  # looks grow rarer, so that a wait is noticed within this part of its time: a hung engine costs little

Passed = Callable[[TransferError | None], None]


class HostWait:
    """Something that waits for a word of a page."""

    __slots__ = ("page", "passed", "slot", "value")

    def __init__(self, page: HostWords, slot: int, value: int, passed: Passed) -> None:
        self.page, self.slot, self.value, self.passed = page, slot, value, passed

    def withdraw(self) -> bool:
        """Stop waiting. Returns False if `passed` has been called, or is about to be."""
        return watch.withdraw(self)


class HostWords:
    """A rank's page in the daemon. Owns it until `close`. Raises TierError, if there is no memory."""

    def __init__(self) -> None:
        self._segment = unnamed_segment(mmap.PAGESIZE)
        self._words = self._segment.buffer.cast("q")
        fd = self._segment.descriptor
        self.exported = ExportedPage(fd=fd, inode=identity_of(fd), owner=as_data(this_process()))

    @property
    def mapped(self) -> bool:
        """Whether an engine has mapped the page since it was last given away."""
        return bool(self._words[_MAPPED])

    def given(self) -> ExportedPage:
        """The page for another engine, which may be one that cannot map it."""
        self._words[_MAPPED] = 0
        return self.exported

    def reached(self, slot: int) -> int:
        """The number that this timeline has reached; 0 if its engine has not mapped the page."""
        return self._words[slot * _EACH]

    def close(self) -> None:
        """End all waits with Closed, and free the page."""
        watch.end(self)
        self._words.release()
        self._segment.close()


def open_page(page: ExportedPage, driver: Driver) -> SharedSegment | None:
    """The daemon's page in the engine's process, registered with CUDA; None if this process cannot have it.

    Requires a context. The caller unregisters and closes it.
    """
    segment: SharedSegment | None = None
    try:
        owner = check_owner(page.owner)
        if owner.namespace != this_process().namespace:
            return None
        fd = os.open(f"/proc/{owner.pid}/fd/{page.fd}", os.O_RDWR | os.O_CLOEXEC)
        segment = SharedSegment("a rank's timelines", mmap.PAGESIZE, create=False, fd=fd)
        if segment.identity != tuple(page.inode):
            raise TierError("the page of a rank's timelines is another file here")
        driver.register_host(segment.address, segment.nbytes)
    except (OSError, RequestError, TierError):
        if segment is not None:
            segment.close()
        return None
    with segment.buffer.cast("q") as words:
        words[_MAPPED] = 1
    return segment


class _WordWatch:
    """Looks at the words that somebody waits for, from one thread for all ranks, which runs only meanwhile."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: list[HostWait] = []  # replaced, never changed: `waiting` reads it without the lock
        self._since = 0.0  # when the newest wait began
        self._runs = False

    def hold(self, wait: HostWait) -> HostWait:
        """Have `wait.passed` called, from the thread, when its word is large enough. Raises NoThreads."""
        with self._changed:
            if not self._runs:
                start_thread("transferd-timelines", self._serve)
                self._runs = True
            self._waits = [*self._waits, wait]
            self._since = time.monotonic()
            self._changed.notify()
        return wait

    def withdraw(self, wait: HostWait) -> bool:
        return bool(self._take(lambda one: one is wait))

    def end(self, page: HostWords) -> None:
        """End the waits for a page's words with Closed. Afterwards the thread does not look at the page."""
        for wait in self._take(lambda one: one.page is page):
            wait.passed(Closed("the device memory is being closed"))

    def waiting(self, page: HostWords) -> dict[int, int]:
        """{slot: the smallest number waited for}."""
        waits = sorted(((one.slot, one.value) for one in self._waits if one.page is page), reverse=True)
        return dict(waits)

    def _take(self, which: Callable[[HostWait], bool]) -> list[HostWait]:
        with self._changed:
            taken = [one for one in self._waits if which(one)]
            if taken:
                self._waits = [one for one in self._waits if one not in taken]
        return taken

    def _serve(self) -> None:
        while True:
            over = self._take(lambda one: one.page.reached(one.slot) >= one.value)
            for wait in over:
                wait.passed(None)
            with self._changed:
                if not self._waits:
                    self._runs = False
                    return
                if not over:  # nobody signals what a GPU has written; a new wait is looked at soon
                    self._changed.wait(min(LATE_S, max(LOOK_S, (time.monotonic() - self._since) / PART)))


watch = _WordWatch()
