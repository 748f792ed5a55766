"""Locks and binds an endpoint, and releases it.

libzmq's bind on ipc:// unlinks whatever is at the path, even the socket of a live daemon; two daemons would then
share a name while only the second one receives anything. So the daemon first takes an exclusive lock on
`<path>.lock`. The kernel drops that lock when its holder dies, however it dies: a live daemon keeps its endpoint,
and a dead one does not block the next. The lock file itself stays, because removing it while another process
opens it would let two processes hold the lock.

Other programs do not know the lock. So the daemon also probes a socket at the path, and removes it only if no process
listens on it (connect() is refused).

tcp:// needs no lock: the kernel refuses a second listener.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket as sockets
import stat

import zmq

from transferd.errors import ConfigError
from transferd.wire.credentials import user_name


class EndpointLock:
    """The exclusive right to bind one endpoint. Owns the descriptor of the lock file; `release` frees both.

    key: the endpoint's key in the configuration. Raises ConfigError, one line that names key and endpoint, if another
    process has the endpoint or the lock cannot be taken.
    """

    def __init__(self, endpoint: str, key: str = "server.endpoint") -> None:
        self.endpoint = endpoint
        self._key = key
        scheme, _, address = endpoint.partition("://")
        # libzmq chooses the path for "*", and "@name" is not in the file system: no path needs protection.
        is_file = scheme == "ipc" and address != "*" and not address.startswith("@")
        self._path = address if is_file else None
        self._lock = -1
        if self._path is not None:
            self._take(self._path)

    def _take(self, path: str) -> None:
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            problem = _why_not_locked(f"{path}.lock", error)
            raise ConfigError(self._key, problem, self.endpoint) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_leftover(path, self._key, self.endpoint)
        except BlockingIOError as error:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            os.close(lock)
            who = f"another daemon (pid {holder})" if holder.isdigit() else "another daemon"
            raise ConfigError(self._key, f"is in use by {who}", self.endpoint) from error
        except BaseException:
            os.close(lock)
            raise
        with contextlib.suppress(OSError):  # a full disk: then a second daemon cannot say who holds the lock
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock

    def bind(self, socket: zmq.Socket[bytes], mode: int, gid: int = -1) -> str:
        """Bind; return the actual endpoint, with a wildcard port or path filled in.

        mode, gid: of the socket file; a gid of -1 keeps the process's own group.
        """
        # Between bind and chmod no other user may connect; the requested mode may be wider or narrower.
        before = os.umask(0o177)
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            in_use = error.errno == zmq.EADDRINUSE
            problem = "is in use" if in_use else f"cannot bind: {os.strerror(error.errno or 0)}"
            raise ConfigError(self._key, problem, self.endpoint) from error
        finally:
            os.umask(before)
        bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        scheme, _, address = bound.partition("://")
        if scheme == "ipc" and not address.startswith("@"):
            self._give(address, mode, gid)
        return bound

    def _give(self, path: str, mode: int, gid: int) -> None:
        """Set the group first, then the mode, so that no other group has access in between."""
        try:
            if gid >= 0:
                os.chown(path, -1, gid)
            os.chmod(path, mode)
        except OSError as error:
            problem = f"cannot set group {gid} and mode {mode:04o} on the socket: {error.strerror}"
            raise ConfigError(self._key, problem, path) from error

    def release(self) -> None:
        """Remove the socket file and release the lock. Call it after the socket is closed. Idempotent."""
        if self._lock < 0:
            return
        assert self._path is not None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._lock)
        self._lock = -1


def check_path(path: str, key: str, endpoint: str) -> None:
    """Raise ConfigError if a daemon of this user could not lock or bind the path. Takes no lock and creates no file.

    A running transferd at the path is no error, so that its configuration can be checked while it runs.
    """
    lock = f"{path}.lock"
    if not os.path.lexists(lock):
        _check_leftover(path, key, endpoint)
    elif not os.access(lock, os.R_OK | os.W_OK):
        raise ConfigError(
            key, _why_not_locked(lock, PermissionError(errno.EACCES, os.strerror(errno.EACCES))), endpoint
        )


def _check_leftover(path: str, key: str, endpoint: str) -> None:
    """Raise ConfigError unless the path is free or holds a socket without a listener."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(key, f"cannot check the path: {error.strerror}", endpoint) from error
    if not stat.S_ISSOCK(mode):
        raise ConfigError(key, "the path exists and is not a socket; refusing to replace it", endpoint)
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)  # a full backlog must not block the start; it also means that a process listens
        try:
            answer = probe.connect_ex(path)
        except OSError as error:  # the path is too long for a socket
            raise ConfigError(key, f"cannot bind: {error}", endpoint) from error
    if answer in (errno.ECONNREFUSED, errno.ENOENT):
        return
    if answer in (errno.EACCES, errno.EPERM):
        problem = "permission denied on the existing socket, so it may be in use; refusing to replace it"
        raise ConfigError(key, problem, endpoint)
    raise ConfigError(key, "is in use by another program", endpoint)


def _why_not_locked(lock: str, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            owner = os.lstat(lock).st_uid
            if owner != os.geteuid():
                return f"the lock file {lock} belongs to user {user_name(owner)}; remove it if no daemon uses it"
    return f"cannot create the lock file {lock}: {error.strerror}"
