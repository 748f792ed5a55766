"""CURVE for tcp:// beyond loopback: keys from files, and who may connect.

Two answers to "who are you": a server alone proves itself by its key pair, and any client that knows
the server's public key may connect; with a directory of client keys, only those may. The second needs
an answer to libzmq's ZAP question (RFC 27) before each connection: `KeyGate` gives it on the event
loop, from a set read once, without pyzmq's authentication thread.

Keys are ZeroMQ's Z85 text, 40 characters, one key a file.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from transferd.config import CurveSection
from transferd.errors import ConfigError

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"transferd"


@dataclass(frozen=True, slots=True)
class ServerCurve:
    """The daemon's side. allowed: the public keys (Z85) that may connect; None = everyone who knows ours."""

    secret_key: bytes
    allowed: frozenset[bytes] | None = None

    @classmethod
    def load(cls, section: CurveSection) -> ServerCurve:
        """Read the keys that `[server.curve]` names. Raises ConfigError."""
        secret = _read_key("server.curve.secret_key_file", Path(section.secret_key_file))
        if not section.client_keys_dir:
            return cls(secret)
        name = "server.curve.client_keys_dir"
        try:
            files = sorted(path for path in Path(section.client_keys_dir).iterdir() if path.is_file())
        except OSError as error:
            raise ConfigError(name, f"cannot be read: {error.strerror}", section.client_keys_dir) from error
        return cls(secret, frozenset(_read_key(name, path) for path in files))

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)
        if self.allowed is not None:
            socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)

    def open_gate(self, context: zmq.Context[zmq.Socket[bytes]]) -> KeyGate | None:
        """What lets only `allowed` in; None where everybody may. The caller closes it."""
        return None if self.allowed is None else KeyGate(context, self.allowed)


@dataclass(frozen=True, slots=True)
class ClientCurve:
    """A client's side: the daemon's public key, and its own pair (`zmq.curve_keypair()`), all Z85."""

    server_key: bytes
    public_key: bytes
    secret_key: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public_key)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret_key)


class KeyGate:
    """Answers libzmq's ZAP questions for one context. Must be open before the server socket binds."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: frozenset[bytes]) -> None:
        self.refused = 0
        self._allowed = allowed
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)  # an answer is of no use once the context goes
        self._socket.bind(_ZAP_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._fd = self._number(zmq.FD)
        self._loop.add_reader(self._fd, self._answer_all)

    def _answer_all(self) -> None:
        # A REP socket alternates strictly, so this ends when no question waits.
        while self._number(zmq.EVENTS) & zmq.POLLIN:
            self._socket.send_multipart(self._answer(self._socket.recv_multipart(zmq.DONTWAIT)))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """Version, request id, domain, address, identity, mechanism, credentials → version, id, verdict."""
        good = len(question) == 7 and question[2] == _ZAP_DOMAIN and question[5] == b"CURVE"
        if good and z85.encode(question[6]) in self._allowed:
            return [b"1.0", question[1], b"200", b"OK", b"", b""]
        self.refused += 1
        return [b"1.0", question[1] if len(question) > 1 else b"", b"400", b"this key is not known here", b"", b""]

    def _number(self, option: int) -> int:
        value = self._socket.getsockopt(option)
        assert isinstance(value, int)
        return value

    def close(self) -> None:
        """Idempotent."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._socket.close()


def _read_key(name: str, path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
        if len(key) != 40:
            raise ValueError(f"has {len(key)} characters")
        z85.decode(key)
    except OSError as error:
        raise ConfigError(name, f"cannot be read: {error.strerror}", str(path)) from error
    except (ValueError, KeyError) as error:
        # The key itself must not reach a log.
        raise ConfigError(name, "expected one CURVE key of 40 characters in Z85", str(path)) from error
    return key
