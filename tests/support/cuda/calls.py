"""What every call of a fake driver goes through: it is written down, may be refused, and needs a context."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

from transferd.tiers.cuda.driver import STICKY, DeviceInfo, failure

# Calls that may answer CUDA_ERROR_UNKNOWN although the context is well, by CUDA's name: the thing cannot be shared.
_SHARING = {
    "open_memory": "cuIpcOpenMemHandle",
    "open_event": "cuIpcOpenEventHandle",
    "export_memory": "cuIpcGetMemHandle",
    "export_event": "cuIpcGetEventHandle",
}
_CONTEXT = 0xC000  # of device 0; the next device's is one higher


class Calls:
    """The book of calls, scripted refusals, devices and their contexts.

    calls: every call in order. answer: the last refusal, as CUDA names it. problems: what a real driver
    would not have noticed.
    """

    def __init__(self, devices: int) -> None:
        self.calls: list[str] = []
        self.problems: list[str] = []
        self.answer = ""
        self._devices = devices
        self._refusals: dict[str, tuple[int, str]] = {}
        self._lost = ""
        self._contexts: Counter[int] = Counter()
        self._here = threading.local()
        self._handles = iter(range(0x10000, 1 << 40, 0x10))
        self._changed = threading.Condition(threading.RLock())

    def refuse(self, call: str, answer: str, after: int = 0) -> None:
        """Answer the call after `after` more of its name with this CUresult. A sticky one holds for ever."""
        self._refusals[call] = (after, answer)

    def count(self, call: str) -> int:
        """How often it was called."""
        return self.calls.count(call)

    @contextlib.contextmanager
    def _call(self, name: str, *, anywhere: bool = False) -> Iterator[None]:
        """One call, alone. anywhere: it needs no current context."""
        with self._changed:
            self.calls.append(name)
            self._check_lost(name)
            after, answer = self._refusals.get(name, (-1, ""))
            if answer and after == 0:
                del self._refusals[name]
                self._refuse(name, answer)
            if answer:
                self._refusals[name] = (after - 1, answer)
            if not anywhere and not self._stack:
                self._refuse(name, "CUDA_ERROR_INVALID_CONTEXT")
            yield
            self._changed.notify_all()

    def _refuse(self, call: str, answer: str) -> NoReturn:
        self.answer = answer
        if answer in STICKY and not (answer == "CUDA_ERROR_UNKNOWN" and call in _SHARING):
            self._lost = answer
        raise failure(_SHARING.get(call, call), answer, "fake")

    def _new(self) -> int:
        return next(self._handles)

    # --- devices and contexts -----------------------------------------------------------------------

    @property
    def _stack(self) -> list[int]:
        """This thread's contexts."""
        if not hasattr(self._here, "stack"):
            self._here.stack = []
        stack: list[int] = self._here.stack
        return stack

    def device_count(self) -> int:
        with self._call("device_count", anywhere=True):
            return self._devices

    def describe(self, index: int) -> DeviceInfo:
        with self._call("describe", anywhere=True):
            name, pci = "Fake GPU", f"ffff:{index:02x}:00.0"
            return DeviceInfo(index, name, f"{index:032x}", pci, (9, 0), words=getattr(self, "_words", True))

    def retain(self, index: int) -> int:
        with self._call("retain", anywhere=True):
            self._contexts[index] += 1
            return _CONTEXT + index

    def release(self, index: int) -> None:
        with self._changed:
            self.calls.append("release")
            if not self._contexts[index]:
                self.problems.append(f"the context of device {index} is released once too often")
                return
            self._contexts[index] -= 1
            self._check_lost("release")

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        self.push(context)
        try:
            yield
        finally:
            self.pop()

    def current_device(self) -> int | None:
        return self._stack[-1] - _CONTEXT if self._stack else None

    def allow_during_capture(self) -> None:
        with self._call("allow_during_capture", anywhere=True):
            pass

    def push(self, context: int) -> None:
        if not self._contexts[context - _CONTEXT]:
            self._refuse("cuCtxPushCurrent", "CUDA_ERROR_CONTEXT_IS_DESTROYED")
        self._check_lost("cuCtxPushCurrent")
        self._stack.append(context)

    def pop(self) -> int:
        context = self._stack.pop()
        self._check_lost("cuCtxPopCurrent")
        return context

    def _check_lost(self, call: str) -> None:
        """Any call may answer with what an earlier one has brought about: CUDA's manual says so of these, too."""
        if self._lost:
            self._refuse(call, self._lost)
