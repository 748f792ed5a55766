"""This process's own TCP connections to an address, and how to end them.

The library owns its connections, and gives no way to end one. If a connection's packets vanish, a call waits for the
60 s of the library's own limit, and the kernel keeps trying to connect for two minutes after that. The sockets are
descriptors of this process, though: shutting one down fails every call that waits for it, also in the library.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

Address = tuple[str, int]

_TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
_LISTENING = "0A"
_NO_INODE = "0"
_TCP_INFO = struct.Struct("=52xI72xQ")  # of linux/tcp.h: tcpi_last_data_recv (ms), tcpi_bytes_received
_spared: set[int] = set()


@contextlib.contextmanager
def spared(ours: socket.socket) -> Iterator[None]:
    """Within this context, `end` spares this connection, which is not the library's."""
    inode = _inode(ours)
    _spared.add(inode)
    try:
        yield
    finally:
        _spared.discard(inode)


def end(addresses: Collection[Address]) -> int:
    """Shut down this process's connections to these addresses, made or being made. Returns how many there were."""
    inodes = {inode for inode, _, remote, state in _sockets() if remote in addresses and state != _LISTENING} - _spared
    ended = 0
    for copy in _copies(inodes):
        try:
            copy.shutdown(socket.SHUT_RDWR)
            ended += 1
        except OSError:  # it has ended by itself
            pass
    return ended


def heard(addresses: Collection[Address], within: float) -> bool:
    """Whether bytes have come from one of these addresses in the last `within` seconds, on connections not spared."""
    for copy in _copies({inode for inode, _, remote, _ in _sockets() if remote in addresses} - _spared):
        try:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except OSError:  # it has ended
            continue
        if len(info) == _TCP_INFO.size:
            silent_ms, received = _TCP_INFO.unpack(info)
            if received and silent_ms <= within * 1000:
                return True
    return False


def remote() -> set[Address]:
    """The addresses that connections of this network namespace lead to. Other processes' are among them."""
    return {remote for _, _, remote, state in _sockets() if state != _LISTENING}


def listening() -> set[int]:
    """The ports on which this process listens."""
    ports = {inode: local[1] for inode, local, _, state in _sockets() if state == _LISTENING}
    return {ports[_inode(copy)] for copy in _copies(ports)}


def _copies(inodes: Collection[int]) -> Iterator[socket.socket]:
    """A copy of each descriptor of this process that is one of these sockets; each is closed before the next one."""
    if not inodes:
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            number = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        # Look at the copy: the number may name another file by now.
        if os.fstat(number).st_ino not in inodes:
            os.close(number)
            continue
        try:
            copy = socket.socket(fileno=number)
        except OSError:  # no socket, but a file of that number
            os.close(number)
            continue
        with copy:
            yield copy


def _inode(of: socket.socket) -> int:
    return os.fstat(of.fileno()).st_ino


def _sockets() -> Iterator[tuple[int, Address, Address, str]]:
    """Every TCP socket of the network namespace: inode, local and remote address, state."""
    for table in _TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:  # no IPv6 here
            continue
        for line in lines:
            fields = line.split()
            if fields[9] != _NO_INODE:
                yield int(fields[9]), _address(fields[1]), _address(fields[2]), fields[3]


def _address(text: str) -> Address:
    """`0100007F:1F90` is 127.0.0.1, port 8080: words of 4 bytes in the machine's order."""
    words, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(words[i : i + 8], 16)) for i in range(0, len(words), 8))
    if len(packed) == 4:
        return socket.inet_ntop(socket.AF_INET, packed), int(port, 16)
    if packed.startswith(bytes(10) + b"\xff\xff"):  # IPv4 in an IPv6 socket
        return socket.inet_ntop(socket.AF_INET, packed[12:]), int(port, 16)
    return socket.inet_ntop(socket.AF_INET6, packed), int(port, 16)
