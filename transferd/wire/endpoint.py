"""Locks an endpoint, listens on it, and releases it.

The socket file of a daemon that was killed stays, so the next daemon must remove it; but if it removed that of a live
daemon, only the second one would receive anything. So the daemon first takes an exclusive lock on
`<path>.lock`. The kernel drops that lock when its holder dies, however it dies: a live daemon keeps its endpoint,
and a dead one does not block the next. The lock file itself stays, because removing it while another process
opens it would let two processes hold the lock.

Other programs do not use the lock. So the daemon also probes a socket at the path, and removes it only if no process
listens on it (connect() is refused).

tcp:// needs no lock: the kernel refuses a second listener.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket as sockets
import stat
import struct
import tempfile

from transferd.errors import ConfigError
from transferd.wire.credentials import user_name

DIRECTORY_MODE = 0o750  # of a directory that is made for the socket, as the unit's RuntimeDirectoryMode=
BACKLOG = 1024  # an engine may start hundreds of clients at once
_SIOCGIFADDR = 0x8915  # linux/sockios.h


class EndpointLock:
    """The exclusive right to bind one endpoint. Owns the descriptor of the lock file; `release` frees both.

    key: the endpoint's key in the configuration. Raises ConfigError, one line that names key and endpoint, if another
    process has the endpoint or the lock cannot be taken.
    """

    def __init__(self, endpoint: str, key: str = "server.endpoint") -> None:
        self.endpoint = endpoint
        self._key = key
        scheme, _, address = endpoint.partition("://")
        self._directory = ""  # of a path that we choose
        # We choose the path for "*", and "@name" is not in the file system: no path needs protection.
        is_file = scheme == "ipc" and address != "*" and not address.startswith("@")
        self._path = address if is_file else None
        self._lock = -1
        if self._path is not None:
            self._take(self._path)

    def _take(self, path: str) -> None:
        try:
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.mkdir(os.path.dirname(path) or ".", DIRECTORY_MODE)
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
        with contextlib.suppress(OSError):  # a full disk: then a second daemon's error cannot name the lock's holder
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock

    def listen(self, mode: int, gid: int = -1) -> sockets.socket:
        """Listen; the caller owns the socket. `endpoint` then has a wildcard port or path filled in.

        mode, gid: of the socket file; a gid of -1 keeps the process's own group. Raises ConfigError.
        """
        scheme, _, address = self.endpoint.partition("://")
        try:
            listening = self._unix(address, mode, gid) if scheme == "ipc" else self._tcp(address)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            problem = "is in use" if in_use else f"cannot bind: {error.strerror or error}"
            raise ConfigError(self._key, problem, self.endpoint) from error
        listening.setblocking(False)
        return listening

    def _unix(self, address: str, mode: int, gid: int) -> sockets.socket:
        if address == "*":
            self._directory = tempfile.mkdtemp(prefix="transferd-")
            address = f"{self._directory}/socket"
            self.endpoint = f"ipc://{address}"
        is_file = not address.startswith("@")
        listening = sockets.socket(sockets.AF_UNIX)
        # Between bind and chmod no other user may connect; the requested mode may be wider or narrower.
        before = os.umask(0o177)
        try:
            if is_file:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address)  # we hold the lock, and the probe has found no listener
            listening.bind(address if is_file else f"\0{address[1:]}")
            if is_file:
                self._give(address, mode, gid)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
        finally:
            os.umask(before)
        return listening

    def _tcp(self, address: str) -> sockets.socket:
        host, _, port = address.rpartition(":")
        family, place = _resolved(host, 0 if port == "*" else int(port))
        listening = sockets.socket(family)
        try:
            # Connections inherit these. Keep-alive drops a remote host that lost power after a minute.
            for level, option, value in (
                (sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1),
                (sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1),
                (sockets.IPPROTO_TCP, sockets.TCP_KEEPIDLE, 30),
                (sockets.IPPROTO_TCP, sockets.TCP_KEEPINTVL, 10),
                (sockets.IPPROTO_TCP, sockets.TCP_KEEPCNT, 3),
                (sockets.IPPROTO_TCP, sockets.TCP_NODELAY, 1),
            ):
                listening.setsockopt(level, option, value)
            if family == sockets.AF_INET6:
                listening.setsockopt(sockets.IPPROTO_IPV6, sockets.IPV6_V6ONLY, 0)
            listening.bind(place)
            listening.listen(BACKLOG)
        except BaseException:
            listening.close()
            raise
        bound, port_number = listening.getsockname()[:2]
        self.endpoint = f"tcp://{f'[{bound}]' if family == sockets.AF_INET6 else bound}:{port_number}"
        return listening

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
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = ""
        if self._lock < 0:
            return
        assert self._path is not None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._lock)
        self._lock = -1


def _resolved(host: str, port: int) -> tuple[sockets.AddressFamily, tuple[str, int]]:
    """Family and address for a host in an endpoint: *, an address, a name (as IPv4), or the name of an interface.

    Raises OSError.
    """
    if host.startswith("["):
        found = sockets.getaddrinfo(host.strip("[]"), port, sockets.AF_INET6, sockets.SOCK_STREAM)
        return sockets.AF_INET6, found[0][4]  # type: ignore[return-value]
    if host == "*":
        return sockets.AF_INET, ("0.0.0.0", port)
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        asked = struct.pack("256s", os.fsencode(host)[:15])
        return sockets.AF_INET, (sockets.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, asked)[20:24]), port)
    found = sockets.getaddrinfo(host, port, sockets.AF_INET, sockets.SOCK_STREAM)
    return sockets.AF_INET, found[0][4]  # type: ignore[return-value]


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
