"""What can go wrong, typed by whose fault it is.

Three sides can be at fault, and a caller reacts differently to each:

* the **caller** (`RequestError`, `ConfigError`): the input is wrong, nothing was touched, and
  sending it again changes nothing;
* the **world** (`TierError`, `StorageError` and their kin): the input was fine, a device, a disk or
  a peer was not; trying again later may work;
* **us** (`InvariantError`): a promise this package makes to itself was broken. It carries the story
  of the task it happened to. Please report it.

Every error has a stable `code`, which is what travels on the wire and what metrics count. Foreign
exceptions (OSError, a vendor's integer codes) are translated once, at the boundary of the module
that talks to the foreign thing; nothing else in the package catches broadly.
"""

from __future__ import annotations

from typing import Any, ClassVar


class TransferError(Exception):
    """Base of every error that transferd raises on purpose. `code` is stable; the message is for people."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self._code = code

    @property
    def reason(self) -> str:
        """The code of this one error: the class's, unless the raiser was more precise."""
        return self._code or self.code


# --- the caller's side ----------------------------------------------------------------------------


class RequestError(TransferError):
    """A task or control message that can never succeed as it is. Answered `rejected`; nothing was touched."""

    code = "bad_request"


class ProtocolError(RequestError):
    """Bytes that are not a message of this protocol version. Counted; the connection stays."""

    code = "malformed"


class ConfigError(TransferError):
    """A configuration value that cannot be used. `key` is `section.key`; str() is one complete line."""

    code = "bad_config"

    def __init__(self, key: str, problem: str, value: object = None) -> None:
        shown = "" if value is None else f" ({value!r})"
        super().__init__(one_line(f"{key}: {problem}{shown}"))
        self.key = key


def one_line(text: str) -> str:
    """The text with every character that does not print written as an escape: one line, and safe on a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# --- the world's side -----------------------------------------------------------------------------


class TierError(TransferError):
    """A copy between device and host memory failed; the bytes at the target are undefined."""

    code = "tier_error"


class DeviceLost(TierError):
    """The device is gone for good (context lost, handle of a dead engine). Its rank dies with it."""

    code = "device_lost"


class EngineGone(TierError):
    """The process that made this memory, or this handle to it, is no more."""

    code = "engine_gone"


class RankDied(TransferError):
    """A rank left the group. Rounds open now and every round later end with this error, which names the culprit."""

    code = "rank_died"

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} died: {cause}")
        self.rank = rank


class StorageError(TransferError):
    """The storage backend could not do what was asked. Other objects of the batch may be fine."""

    code = "storage_error"


class StorageFull(StorageError):
    """No room for the object, also after evicting what may be evicted."""

    code = "storage_full"


class StorageUnavailable(StorageError):
    """The backend does not answer (its circuit breaker is open, its master is gone). Quick by design."""

    code = "storage_unavailable"


class HandoverFailed(TransferError):
    """A sequence did not go from prefill to decode completely. The code is that of the cause, as with any task.

    result: the TaskResult; what it claims is less than what was asked for, and none of it should be used.
    http_status: what an engine answers the request with.
    """

    code = "handover_failed"
    http_status: ClassVar[int] = 502

    def __init__(self, message: str, *, code: str | None = None, result: Any = None) -> None:
        super().__init__(message, code=code)
        self.result = result


class PeerLost(TransferError):
    """The daemon at the other end of a direct transfer has gone, or its memory could not be reached."""

    code = "peer_lost"


class PeerRefused(TransferError):
    """The daemon at the other end of a direct transfer would not have it, or gave it up. The code says why."""

    code = "peer_refused"


class ConnectTimeout(TransferError):
    """No daemon answered, or none became ready, within the time allowed."""

    code = "connect_timeout"


class DaemonLost(TransferError):
    """The daemon stopped answering, or came back with another boot id, while a request was under way."""

    code = "daemon_lost"


class NoThreads(TransferError):
    """The system starts no more threads for this process. What was asked for was not done, and never will be."""

    code = "no_threads"


class OutOfMemory(TransferError):
    """The system gives this process no more memory. What was asked for was not done; later it may be."""

    code = "out_of_memory"


class StillRunning(TransferError):
    """Something does not end: a call into storage, a copy. What it works on was not given back."""

    code = "still_running"


class Closed(TransferError):
    """You closed this object and used it afterwards."""

    code = "closed"


# --- our side -------------------------------------------------------------------------------------


class InvariantError(TransferError):
    """A bug in transferd. The message tells the story of the object it happened to."""

    code = "internal"
