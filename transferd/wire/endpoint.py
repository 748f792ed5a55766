"""Where a daemon listens: taking an address for oneself, and giving it back.

libzmq's bind on ipc:// unlinks whatever lies at the path, also the socket of a daemon that is alive,
and two daemons would then share a name while only the second hears anything. So an ipc path is
claimed first, by an exclusive lock on `<path>.lock`. The kernel drops that lock when its holder dies,
however it dies: a live daemon is never robbed and a dead one never hinders the next. The lock file
itself stays (removing a lock file while somebody opens it is how two holders come to be).

Other programs know nothing of that lock. So a socket that lies at the path is asked, too: only one that
nobody listens on (connect() is refused) is taken for a leftover and removed.

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


class EndpointLock:
    """The exclusive right to bind one endpoint. Owns the lock file's descriptor; release() gives both back.

    key: where the endpoint stands in the configuration. Raises ConfigError, one line that names key and
    endpoint, when somebody else has it or it cannot be had.
    """

    def __init__(self, endpoint: str, key: str = "server.endpoint") -> None:
        self.endpoint = endpoint
        self._key = key
        scheme, _, address = endpoint.partition("://")
        # "*" is a path that libzmq makes up, "@name" lives outside the file system: nothing to protect.
        is_file = scheme == "ipc" and address != "*" and not address.startswith("@")
        self._path = address if is_file else None
        self._lock = -1
        if self._path is not None:
            self._take(self._path)

    def _take(self, path: str) -> None:
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            problem = f"cannot make the lock file {path}.lock: {error.strerror}"
            raise ConfigError(self._key, problem, self.endpoint) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_leftover(path)
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError(self._key, "is in use by another daemon", self.endpoint) from error
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock

    def _check_leftover(self, path: str) -> None:
        """Raise ConfigError for anything at the path but a socket that nobody listens on."""
        try:
            mode = os.lstat(path).st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(self._key, f"cannot be looked at: {error.strerror}", self.endpoint) from error
        if not stat.S_ISSOCK(mode):
            raise ConfigError(self._key, "exists and is not a socket; it is not mine to remove", self.endpoint)
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM | sockets.SOCK_CLOEXEC) as probe:
            probe.setblocking(False)  # a full backlog must not hold up the start; it belongs to a listener, too
            try:
                answer = probe.connect_ex(path)
            except OSError as error:  # a path that is too long for any socket
                raise ConfigError(self._key, f"cannot be bound: {error}", self.endpoint) from error
        if answer in (errno.ECONNREFUSED, errno.ENOENT):
            return
        if answer in (errno.EACCES, errno.EPERM):
            problem = "is a socket that I may not connect to, so it may be in use; it is not mine to remove"
            raise ConfigError(self._key, problem, self.endpoint)
        raise ConfigError(self._key, "is in use by another program", self.endpoint)

    def bind(self, socket: zmq.Socket[bytes], mode: int, gid: int = -1) -> str:
        """Bind and return the endpoint as it really is (a wildcard port or path filled in).

        mode, gid: of the socket file; -1 leaves the process's own group.
        """
        # Between bind and chmod nobody but us may connect; the mode asked for may be wider or narrower.
        before = os.umask(0o177)
        try:
            socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            in_use = error.errno == zmq.EADDRINUSE
            problem = "is in use" if in_use else f"cannot be bound: {os.strerror(error.errno or 0)}"
            raise ConfigError(self._key, problem, self.endpoint) from error
        finally:
            os.umask(before)
        bound: str = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        scheme, _, address = bound.partition("://")
        if scheme == "ipc" and not address.startswith("@"):
            self._give(address, mode, gid)
        return bound

    def _give(self, path: str, mode: int, gid: int) -> None:
        """Open the socket file to those who may connect: the group first, so that no other has it meanwhile."""
        try:
            if gid >= 0:
                os.chown(path, -1, gid)
            os.chmod(path, mode)
        except OSError as error:
            problem = f"its socket cannot be given to group {gid}: {error.strerror}"
            raise ConfigError(self._key, problem, path) from error

    def release(self) -> None:
        """Remove the socket file and let go. Call it after the socket has been closed. Idempotent."""
        if self._lock < 0:
            return
        assert self._path is not None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._lock)
        self._lock = -1
