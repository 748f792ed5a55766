"""What can go wrong, typed by whose fault it is.

Three sides can be at fault, and a caller reacts differently to each:

* the **caller** (`RequestError`, `ConfigError`): the input is wrong. Nothing was touched, and a retry
  fails again;
* the **world** (`TierError`, `StorageError` and their kin): the input was fine, but a device, a disk or a
  peer failed. A later retry may work;
* **us** (`InvariantError`): transferd broke one of its own invariants. The error carries the story of the
  task. Please report it.

Every error has a stable `code`, which travels on the wire and which metrics count. Foreign exceptions
(OSError, a vendor's integer codes) are translated once, in the module that talks to the foreign API;
nothing else in the package catches broadly.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Refusal = Literal["silent", "passing", "full", "denied", "object"]
"""What a failed storage call says of the next one. The backend sorts its errors; nobody else reads their texts.

silent    nobody answered: ask again once a probe is answered
passing   not now (too many requests, expired credentials, an unknown error): ask again, after growing pauses
full      no room: ask again, as room may come
denied    not before an operator does something (no access, no bucket, a read-only disk)
object    never: this object is not taken, whatever happens to others
"""

LONGEST_SHOWN = 300  # characters of a key, or of a value, in a message


class TransferError(Exception):
    """Base class of every error that transferd raises on purpose. `code` is stable; the message is for people."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self._code = code

    @property
    def reason(self) -> str:
        """This error's code: the class's code, unless the raiser gave a more precise one."""
        return self._code or self.code


# --- the caller's side ----------------------------------------------------------------------------


class RequestError(TransferError):
    """A task or control message that can never succeed as it is. It is answered `rejected`; nothing was touched."""

    code = "bad_request"


class ProtocolError(RequestError):
    """Bytes that are not a message of this protocol version. They are counted; the connection stays open."""

    code = "malformed"


class ConfigError(TransferError):
    """A configuration value that cannot be used. `key` is `section.key`; str() is one short line."""

    code = "bad_config"

    def __init__(self, key: str, problem: str, value: object = None) -> None:
        shown = "" if value is None else f" ({_short(_shown(value))})"
        super().__init__(one_line(f"{_short(key)}: {problem}{shown}"))
        self.key = key


def _shown(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an integer with thousands of digits
        return "a number that is too long to show"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def one_line(text: str) -> str:
    """Escape every non-printable character: the text becomes one line and is safe to show on a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# --- the world's side -----------------------------------------------------------------------------


class TierError(TransferError):
    """A copy between device and host memory failed; the contents of the target are undefined."""

    code = "tier_error"


class DeviceLost(TierError):
    """The device is lost for good (context lost, handle of a dead engine). Its rank dies with it."""

    code = "device_lost"


class MemoryLost(DeviceLost):
    """Shared memory vanished under a copy: another process truncated it, or it could not be allocated when needed."""


class EngineGone(TierError):
    """The process that created this memory, or this handle to it, has exited."""

    code = "engine_gone"


class RankDied(TransferError):
    """A rank died. Open rounds and all later rounds end with this error, which names the rank and the cause."""

    code = "rank_died"

    def __init__(self, rank: int, cause: str) -> None:
        super().__init__(f"rank {rank} died: {cause}")
        self.rank = rank


class StorageError(TransferError):
    """The storage backend could not complete an operation. Other objects of the batch may be fine.

    refusal: whether it helps to ask again.
    """

    code = "storage_error"
    refusal: Refusal = "passing"

    def __init__(self, message: str, *, code: str | None = None, refusal: Refusal | None = None) -> None:
        super().__init__(message, code=code)
        if refusal is not None:
            self.refusal = refusal


class StorageFull(StorageError):
    """There is no room for the object, even after evicting everything that may be evicted."""

    code = "storage_full"
    refusal = "full"


class StorageUnavailable(StorageError):
    """The backend does not answer (its circuit breaker is open, its master is gone). Raised quickly, by design."""

    code = "storage_unavailable"
    refusal = "silent"


class HandoverFailed(TransferError):
    """The handover of a sequence from prefill to decode was not complete. The code is that of the cause.

    result: the TaskResult. It lists fewer blocks than requested; use none of them.
    http_status: the status with which an engine should answer the request.
    """

    code = "handover_failed"
    http_status: ClassVar[int] = 502

    def __init__(self, message: str, *, code: str | None = None, result: Any = None) -> None:
        super().__init__(message, code=code)
        self.result = result


class PeerLost(TransferError):
    """The daemon at the other end of a direct transfer is gone, or its memory cannot be reached."""

    code = "peer_lost"


class PeerRefused(TransferError):
    """The daemon at the other end of a direct transfer refused or cancelled it. The code says why."""

    code = "peer_refused"


class ConnectTimeout(TransferError):
    """No daemon answered, or the daemon did not become ready, in time."""

    code = "connect_timeout"


class ConnectRefused(ConnectTimeout):
    """A daemon answers, and refuses this client. Its code and message are the daemon's: waiting longer changes nothing.

    Nothing else than a ConnectTimeout that comes early, so whoever expects that one need not know this one.
    """

    code = "connect_refused"


class DaemonLost(TransferError):
    """The daemon stopped answering, or came back with another boot id, while a request was pending."""

    code = "daemon_lost"


class NoThreads(TransferError):
    """The system refused to start another thread. The requested work did not run and will not run."""

    code = "no_threads"


class NoDescriptors(TransferError):
    """This process may open no more files. Nothing was opened; a later retry may work."""

    code = "no_descriptors"


class OutOfMemory(TransferError):
    """The system gives this process no more memory. The operation did not take place; a later retry may work."""

    code = "out_of_memory"


class StillRunning(TransferError):
    """A storage call or a copy hangs. The memory that it uses was not freed."""

    code = "still_running"


class Closed(TransferError):
    """The object was used after it was closed."""

    code = "closed"


# --- our side -------------------------------------------------------------------------------------


class InvariantError(TransferError):
    """A bug in transferd. The message includes the story of the task that hit it."""

    code = "internal"
