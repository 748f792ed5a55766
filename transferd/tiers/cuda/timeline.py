"""Timelines: numbers in device memory, shared by both sides, that say how far an engine's streams have come.

A rank has SLOTS timelines, one 64-bit word each, in memory of the daemon's that the rank's handle names. The engine's
process of that rank puts the write of a larger number on its compute stream (`EngineTimelines.advance`). A task names a
timeline and a number (`after`, from client.timeline); on each rank its copies begin once that rank's word has
reached the number. So the order of the task's push and the rank's write does not matter: copies wait for a rank that
is a step behind, and another stream uses another word. (docs/adr/0043)

The daemon owns the words, so they survive an engine's death. Each word has a stream of its own for waits (gate.py), so
a wait delays only tasks that name the word. Before the daemon frees the words, it ends every wait itself.
"""

from __future__ import annotations

import ctypes

from transferd.errors import RequestError, TierError
from transferd.tasks import TIMELINE_SLOTS as SLOTS
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.gate import CLOSE_S, GateWait, Passed, StreamGate
from transferd.tiers.cuda.ipc import BLOCK, ExportedTimelines
from transferd.tiers.cuda.owned import CopyHung, Owned

STRIDE = 64  # bytes from word to word, so that two words never share a line of the GPU's memory system
NBYTES = BLOCK
END = 2**63 - 1  # larger than every number that a task may name


class Timelines:
    """The daemon's side of one rank: the words, and a gate for each word that a task has ever named.

    Creating requires the context to be current. Raises TierError; then nothing is left behind. Owns words and gates
    until `stop` and `close`.
    """

    def __init__(self, driver: Driver, context: int) -> None:
        self._driver = driver
        self._context = context
        self._owned = Owned()
        self._gates: dict[int, StreamGate] = {}
        try:
            self._words = driver.allocate(NBYTES)
            self._owned.add(lambda: driver.free(self._words))
            # Created before any wait: this stream ends waits, so it must never queue behind one.
            self._release = driver.create_stream(urgent=True)
            self._owned.add(lambda: driver.destroy_stream(self._release))
            driver.fill(self._words, 0, NBYTES, self._release)
            driver.synchronize_stream(self._release)
            self.exported = ExportedTimelines(
                handle=driver.export_memory(self._words).hex(), slots=SLOTS, stride=STRIDE
            )
        except BaseException:
            self._owned.release()
            raise

    def _gate(self, slot: int) -> StreamGate:
        if not 0 <= slot < SLOTS:
            raise RequestError(f"a rank has timelines 0 to {SLOTS - 1}, not {slot}", code="bad_value")
        gate = self._gates.get(slot)
        if gate is None:
            word = self._words + slot * STRIDE

            def wait(stream: int, value: int) -> None:
                self._driver.wait_value(word, value, stream)

            gate = self._gates[slot] = StreamGate(self._driver, self._context, f"transferd-cuda-timeline-{slot}", wait)
        return gate

    def reached(self, slot: int) -> int:
        """A number that this timeline is known to have reached; it may have passed it."""
        gate = self._gates.get(slot)
        return 0 if gate is None else gate.reached

    def hold(self, slot: int, value: int, passed: Passed) -> GateWait:
        """Call `passed`, from another thread, when the timeline has reached `value`. Raises RequestError, NoThreads."""
        return self._gate(slot).hold(value, passed)

    @property
    def waiting(self) -> dict[int, int]:
        """{slot: number waited for} of the timelines that have waiters now."""
        waits = [(slot, gate.waits_for) for slot, gate in self._gates.items()]
        return {slot: value for slot, value in waits if value is not None}

    def stop(self) -> None:
        """End every wait, even if the engine is dead. Idempotent. Raises CopyHung if a wait does not end."""
        for gate in self._gates.values():
            gate.dismiss()
        stuck = [slot for slot, gate in self._gates.items() if not gate.ended(0.0)]
        if stuck:
            self._let_go(stuck)
        for slot in stuck:
            if not self._gates[slot].ended(CLOSE_S):
                raise CopyHung(f"the wait for timeline {slot} does not end; the device's memory stays allocated")

    def _let_go(self, slots: list[int]) -> None:
        end = ctypes.c_int64(END)
        with self._driver.current(self._context):
            for slot in slots:
                self._driver.copy(self._words + slot * STRIDE, ctypes.addressof(end), 8, self._release)
            self._driver.synchronize_stream(self._release)

    def close(self) -> None:
        """Free everything, after `stop`. Requires the context. Raises the first TierError, after the rest."""
        first: TierError | None = None
        for gate in self._gates.values():
            try:
                gate.close()
            except TierError as error:
                first = first or error
        self._owned.release()
        if first is not None:
            raise first


class EngineTimelines:
    """The engine's side: the words of one rank, mapped. Obtained from `engine.attach` or `engine.timelines`."""

    def __init__(self, driver: Driver, context: int, words: int, exported: ExportedTimelines, owner: object) -> None:
        self._driver = driver
        self._context = context
        self._words = words
        self._exported = exported
        self._owner = owner  # keeps the mapping alive

    def advance(self, after: tuple[int, int], stream: int) -> None:
        """Advance the timeline behind all work that is on this CUDA stream (its address) now.

        after: the pair that the waiting tasks name (`client.timeline`). Call it on every rank. It puts
        one small write on the stream and waits for nothing. Raises RequestError, TierError.
        """
        slot, value = after
        if not 0 <= slot < self._exported.slots:
            raise RequestError(f"this rank has timelines 0 to {self._exported.slots - 1}, not {slot}", code="bad_value")
        with self._driver.current(self._context):
            self._driver.write_value(self._words + slot * self._exported.stride, value, stream)
