"""The other end of the gates: hears where every process is, and decides who goes on when."""

from __future__ import annotations

import asyncio
import contextlib
import json
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transferd.runtime import compat

Message = dict[str, Any]
ACCEPT_TURNS = 8  # of the loop: from a connection that is there to its writer takes fewer


@dataclass(frozen=True)
class Passage:
    """One process at one gate, held until `go`."""

    message: Message
    writer: asyncio.StreamWriter

    def go(self, word: str = "go") -> None:
        """Let it go on. Nothing happens when the process is no more."""
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(word.encode() + b"\n")
            self.writer.close()


class Keeper:
    """Listens on a unix socket. Gates that are not armed open at once.

    `arm` says which gate to hold and when; from the moment it holds, every later passage of the same gate
    is held, too, until `release`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: Counter[str] = Counter()
        self._server: asyncio.Server | None = None
        self._held: list[Passage] = []
        self._phase = ""
        self._ripe: Callable[[list[Message]], bool] = lambda _: False
        self._seen: list[Message] = []
        self._reached = asyncio.Event()
        self._idle: asyncio.Queue[Passage] = asyncio.Queue()
        self.rounds: asyncio.Queue[Passage] = asyncio.Queue()  # of the bystander (watch.py)
        self._let_go = False
        self._writers: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()  # an open one is in the loop's hands

    async def open(self) -> None:
        """Listen; also again after `close`."""
        self._let_go = False
        self._server = await asyncio.start_unix_server(self._passage, self.path)

    def let_go(self) -> None:
        """Open every gate for good: whoever waits, or still comes, is to end."""
        self._let_go = True
        self.release()
        for waiting in (self._idle, self.rounds):
            while not waiting.empty():
                waiting.get_nowait().go("end")

    async def close(self) -> None:
        """Stop listening, and close what is still open; best when the processes have ended."""
        self.let_go()
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for writer in list(self._writers):
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _passage(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        line = await reader.readline()
        if not line:
            writer.close()
            return
        message: Message = json.loads(line)
        phase = message["phase"]
        self.passed[phase] += 1
        passage = Passage(message, writer)
        if self._let_go:
            passage.go("end")
            return
        if phase in ("idle", "round"):
            (self._idle if phase == "idle" else self.rounds).put_nowait(passage)
            return
        if phase != self._phase:
            passage.go()
            return
        self._seen.append(message)
        if self._reached.is_set() or self._ripe(self._seen):
            self._held.append(passage)
            self._reached.set()
        else:
            passage.go()

    def arm(self, phase: str, ripe: Callable[[list[Message]], bool]) -> None:
        """Hold at `phase` as soon as `ripe`, asked with the passages so far, says so."""
        self._phase, self._ripe, self._seen = phase, ripe, []
        self._reached.clear()

    async def reached(self, timeout: float) -> None:
        """Wait until a process is held at the armed gate. Raises TimeoutError."""
        async with compat.timeout(timeout):
            await self._reached.wait()

    def release(self) -> None:
        """Disarm, and let all go on."""
        self._phase = ""
        held, self._held = self._held, []
        for passage in held:
            passage.go()

    async def idle_engine(self, pid: int, timeout: float) -> Passage:
        """Wait until the engine with this pid has nothing to do. Raises TimeoutError."""
        async with compat.timeout(timeout):
            while True:
                passage = await self._idle.get()
                if passage.message["pid"] == pid:
                    return passage
