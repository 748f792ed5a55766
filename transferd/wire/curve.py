"""CURVE for tcp:// beyond loopback: keys from files, and the keys of permitted clients.

The server proves its identity with its key pair. Without a directory of client keys, any client that knows the
server's public key may connect; with one, only the clients in it may. curve_server.py makes the handshake.

Keys are ZeroMQ's Z85 text, 40 characters, one key per file. The daemon refuses a secret key that every user can
read, and a directory to which every user can add a key.
"""

from __future__ import annotations

import functools
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import zmq
from zmq.utils import z85

from transferd.config.environment import read_file
from transferd.config.sections import CurveSection
from transferd.errors import ConfigError

if TYPE_CHECKING:
    from transferd.wire.curve_server import CurveServer

LONGEST_KEY_FILE = 4096  # bytes


def server_side(section: CurveSection) -> tuple[Callable[..., CurveServer], frozenset[bytes] | None]:
    """Read the keys that `[server.curve]` names. Raises ConfigError, also if the package for them is missing.

    Returns what makes the server's side of a handshake, and the public keys of permitted clients, 32 bytes each; if
    None, any client that has our public key may connect.
    """
    name, path = "server.curve.secret_key_file", Path(section.secret_key_file)
    secret = _read_key(name, path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o007:
        raise ConfigError(name, f"is readable by every user (mode {mode:04o}); run chmod 640 on it", str(path))
    allowed = client_keys(section.client_keys_dir) if section.client_keys_dir else None
    try:
        from transferd.wire.curve_server import CurveServer
    except ImportError as error:
        raise ConfigError("server.curve", f"needs the Python package PyNaCl (pip install pynacl): {error}") from None
    return functools.partial(CurveServer, z85.decode(secret)), allowed


@dataclass(frozen=True, slots=True)
class ClientCurve:
    """A client's keys: the daemon's public key, and its own pair (`zmq.curve_keypair()`), all in Z85.

    Keys may be bytes or text. Raises ConfigError, which names the key but does not show it.
    """

    server_key: bytes
    public_key: bytes
    secret_key: bytes

    def __post_init__(self) -> None:
        for name in ("server_key", "public_key", "secret_key"):
            object.__setattr__(self, name, _client_key(name, getattr(self, name)))

    @classmethod
    def load(cls, key_file: Path | None, server_key_file: Path | None) -> ClientCurve:
        """Read a client's secret key and the daemon's public key, each from its file. Raises ConfigError."""
        if key_file is None or server_key_file is None:
            missing = "--key-file" if key_file is None else "--server-key-file"
            both = "--key-file (the client's secret key) and --server-key-file (the daemon's public key)"
            raise ConfigError(missing, f"is missing; pass both {both}")
        secret = _read_key("--key-file", key_file)
        return cls(_read_key("--server-key-file", server_key_file), zmq.curve_public(secret), secret)

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)


def _client_key(name: str, key: object) -> bytes:
    found = f"{len(key)} characters" if isinstance(key, str | bytes) else type(key).__name__
    try:
        plain = key.encode("ascii") if isinstance(key, str) else key
        if isinstance(plain, bytes) and len(plain) == 40:
            z85.decode(plain)
            return plain
    except (ValueError, KeyError):
        found = "other characters"
    raise ConfigError(f"curve.{name}", f"expected a CURVE key of 40 characters in Z85, got {found}")


def client_keys(directory: str) -> frozenset[bytes]:
    """The public keys in a directory, one a file, as 32 bytes each. Raises ConfigError."""
    name, path = "server.curve.client_keys_dir", Path(directory)
    try:
        if path.stat().st_mode & 0o002:
            raise ConfigError(name, "is writable by every user; run chmod o-w on it", directory)
        files = sorted(file for file in path.iterdir() if file.is_file())
    except OSError as error:
        raise ConfigError(name, f"cannot be read: {error.strerror}", directory) from error
    return frozenset(z85.decode(_read_key(name, file)) for file in files)


def _read_key(name: str, path: Path) -> bytes:
    try:
        key = read_file(path, LONGEST_KEY_FILE).strip()
        if len(key) != 40:
            raise ValueError(f"has {len(key)} characters")
        z85.decode(key)
    except OSError as error:
        raise ConfigError(name, f"cannot be read: {error.strerror}", str(path)) from error
    except (ValueError, KeyError) as error:
        # The key itself must not reach a log.
        raise ConfigError(name, "expected one CURVE key of 40 characters in Z85", str(path)) from error
    return key
