"""The daemon's side of the wire: decodes, routes, answers. Decides nothing about tasks.

Bad input is answered with a typed refusal and counted; it never reaches the coordinator. Clients are
known by the name their connection has; one that is silent for `client_timeout` has gone. While no
client is known, no timer runs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog

from transferd import protocol as wire
from transferd.clock import SYSTEM_CLOCK, Clock
from transferd.errors import RequestError, TransferError
from transferd.tasks import ErrorInfo, Status, Task, TaskResult
from transferd.transport import ServerTransport
from transferd.version import VERSION

log = structlog.get_logger(__name__)

MAX_WAITING_REQUESTS = 1024  # match, pause and drain requests that may wait at once


class Coordinator(Protocol):
    """What the server asks of the core; see coordinator.py."""

    @property
    def ready(self) -> bool: ...
    @property
    def boot_id(self) -> str: ...
    @property
    def generation(self) -> str: ...
    def submit(self, client: bytes, seq: int, task: Task) -> bool: ...
    def cancel(self, task_id: str) -> bool: ...
    async def match(self, keys: list[str]) -> int: ...
    async def pause(self) -> None: ...
    def resume(self) -> object: ...
    async def drain(self) -> None: ...
    def set_generation(self, generation: str) -> object: ...
    def client_gone(self, client: bytes) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def device_handle(self, rank: int) -> dict[str, Any]: ...


class Server:
    """Speaks the protocol with every client of one transport. Owns the transport from `start` to `close`."""

    def __init__(
        self,
        transport: ServerTransport,
        coordinator: Coordinator,
        *,
        clock: Clock = SYSTEM_CLOCK,
        max_message: int = 64 * 1024**2,
        client_timeout: float = 5.0,
    ) -> None:
        self._transport = transport
        self._coordinator = coordinator
        self._clock = clock
        self._max_message = max_message
        self._client_timeout = client_timeout
        self._seen: dict[bytes, float] = {}  # clients by when they last said something
        self._reaper: asyncio.TimerHandle | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._rejects: Counter[str] = Counter()
        self._messages = 0
        self._undeliverable = 0
        self._handlers: dict[type, Callable[[bytes, int, Any], None]] = {
            wire.Hello: self._hello,
            wire.Bye: self._bye,
            wire.Cancel: lambda peer, seq, m: self._value(peer, seq, self._coordinator.cancel(m.task_id)),
            wire.Match: lambda peer, seq, m: self._later(peer, seq, self._coordinator.match(m.keys)),
            wire.Pause: lambda peer, seq, _: self._later(peer, seq, self._coordinator.pause()),
            wire.Resume: lambda peer, seq, _: self._value(peer, seq, self._coordinator.resume()),
            wire.Drain: lambda peer, seq, _: self._later(peer, seq, self._coordinator.drain()),
            wire.SetGeneration: lambda peer, seq, m: self._value(
                peer, seq, self._coordinator.set_generation(m.generation)
            ),
            wire.Stats: lambda peer, seq, _: self._value(peer, seq, self._coordinator.stats()),
            wire.Attach: lambda peer, seq, m: self._value(peer, seq, self._coordinator.device_handle(m.rank)),
        }

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        self._transport.start(self._received)

    def deliver(self, client: bytes, seq: int, result: TaskResult) -> None:
        """Send one terminal result to the client that waits for it; one that has gone costs nothing."""
        self._send(client, seq, wire.Result(result))

    async def close(self) -> None:
        """Stop listening; what was sent is handed out within the transport's linger."""
        if self._reaper is not None:
            self._reaper.cancel()
        for task in self._waiting:
            task.cancel("the daemon is shutting down")
        if self._waiting:
            await asyncio.wait(self._waiting)
        self._transport.close()

    def statistics(self) -> dict[str, Any]:
        return {
            "clients": len(self._seen),
            "messages": self._messages,
            "undeliverable": self._undeliverable,
            "rejects": dict(self._rejects),
        }

    # --- receiving ----------------------------------------------------------------------------------

    def _received(self, peer: bytes, payload: bytes) -> None:
        self._messages += 1
        try:
            if len(payload) > self._max_message:
                what = f"a message of {len(payload)} bytes, {self._max_message} are allowed"
                raise wire.Malformed(what, code="too_large")
            request = wire.decode_request(payload)
        except wire.Malformed as error:
            self._refuse(peer, error)
            return
        self._heard_from(peer)
        body, seq = request.body, request.seq
        if isinstance(body, Task):
            if self._coordinator.submit(peer, seq, body) and request.ack:
                self._send(peer, seq, wire.Accepted())
            return
        try:
            self._handlers[type(body)](peer, seq, body)
        except TransferError as error:
            self._refused(peer, seq, error)

    def _refuse(self, peer: bytes, error: wire.Malformed) -> None:
        """A task that could not be read is rejected like any other; anything else is refused."""
        self._rejects[error.reason] += 1
        info = ErrorInfo(error.reason, str(error))
        if error.task_id is None:
            self._send(peer, error.seq, wire.Refused(info))
            return
        result = TaskResult(
            task_id=error.task_id,
            status=Status.REJECTED,
            error=info,
            generation=self._coordinator.generation,
            boot_id=self._coordinator.boot_id,
        )
        self._send(peer, error.seq, wire.Result(result))

    def _hello(self, peer: bytes, seq: int, _: wire.Hello) -> None:
        core = self._coordinator
        self._send(peer, seq, wire.Welcome(core.boot_id, core.ready, VERSION, core.generation, self._max_message))

    def _bye(self, peer: bytes, _seq: int, _: wire.Bye) -> None:
        if self._seen.pop(peer, None) is not None:
            self._coordinator.client_gone(peer)

    # --- answering ----------------------------------------------------------------------------------

    def _send(self, peer: bytes, seq: int, body: wire.ReplyBody) -> None:
        if not self._transport.send(peer, wire.encode_reply(seq, body)):
            self._undeliverable += 1

    def _value(self, peer: bytes, seq: int, value: Any) -> None:
        self._send(peer, seq, wire.Value(value))

    def _refused(self, peer: bytes, seq: int, error: TransferError) -> None:
        self._send(peer, seq, wire.Refused(ErrorInfo(error.reason, str(error))))

    def _later(self, peer: bytes, seq: int, work: Coroutine[Any, Any, Any]) -> None:
        """Answer when `work` is done; bounded in number."""
        if len(self._waiting) >= MAX_WAITING_REQUESTS:
            work.close()
            raise RequestError(f"{MAX_WAITING_REQUESTS} requests are waiting already", code="too_many_requests")
        task = asyncio.get_running_loop().create_task(self._answer(peer, seq, work))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _answer(self, peer: bytes, seq: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            self._value(peer, seq, await work)
        except TransferError as error:
            self._refused(peer, seq, error)
        except asyncio.CancelledError:
            self._send(peer, seq, wire.Refused(ErrorInfo("shutdown", "the daemon is shutting down")))

    # --- who is there -------------------------------------------------------------------------------

    def _heard_from(self, peer: bytes) -> None:
        self._seen[peer] = self._clock.monotonic()
        if self._reaper is None:
            self._look_later()

    def _look_later(self) -> None:
        self._reaper = asyncio.get_running_loop().call_later(self._client_timeout / 2, self._reap)

    def _reap(self) -> None:
        self._reaper = None
        silent_since = self._clock.monotonic() - self._client_timeout
        for peer, seen in list(self._seen.items()):
            if seen < silent_since:
                del self._seen[peer]
                log.info("client gone", client=peer.hex())
                self._coordinator.client_gone(peer)
        if self._seen:
            self._look_later()
