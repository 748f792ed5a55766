"""CurveZMQ (RFC 26) as the server speaks it: the handshake with keys, and the encryption of every frame after it.

    HELLO     the client's short-term key, and a box that proves it          client → server
    WELCOME   our short-term key and a cookie, in a box from our own key
    INITIATE  the cookie, and in a box: the client's key, its vouch, metadata
    READY     metadata in a box                                              then MESSAGE both ways

Our short-term key and the cookie are of one connection, and so a recorded handshake fails at its cookie. The
primitives are libsodium's, by PyNaCl.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from nacl import bindings
from nacl.exceptions import CryptoError

from transferd.wire.zmtp import COMMAND, MORE, NotAllowed, ZmtpError, check_socket_type, parse_command, properties

_HELLO, _INITIATE = 200 - 6, 96 + 8 + 16 + 128  # bytes of data: all, and the least
_MESSAGE = b"\x07MESSAGE"
_NONCES = 2**64 - 1


class CurveServer:
    """The server's side of one handshake.

    done: it has ended well.
    key: the client's public key, 32 bytes, once `done`.
    """

    name = b"CURVE"

    def __init__(
        self, secret: bytes, socket_type: bytes, permitted: frozenset[bytes], known: Callable[[bytes], bool]
    ) -> None:
        """Wait for the client's first message.

        secret: our key, 32 bytes.
        known: whether the client with this key may connect.
        """
        self.done = False
        self.key = b""
        self.cipher: CurveCipher | None = None  # for every frame, once `done`
        self._secret = secret
        self._metadata = properties({b"Socket-Type": socket_type, b"Identity": b""})
        self._permitted = permitted
        self._known = known
        self._client = b""  # its short-term key
        self._public, self._short = bindings.crypto_box_keypair()
        self._cookie = os.urandom(96)

    def receive(self, body: bytes) -> bytes:
        """The answer to a command of the client. Raises ZmtpError, NotAllowed."""
        name, data = parse_command(body)
        expected = b"INITIATE" if self._client else b"HELLO"
        if name != expected:
            raise ZmtpError(f"{expected.decode()} is expected, not {name[:16]!r}")
        try:
            return self._initiated(data) if self._client else self._greeted(data)
        except (CryptoError, ValueError, TypeError) as error:
            raise ZmtpError(f"a box in {expected.decode()} cannot be opened") from error

    def _greeted(self, data: bytes) -> bytes:
        if len(data) != _HELLO or data[:2] != b"\x01\x00":
            raise ZmtpError("HELLO has a wrong version or size")
        client = data[74:106]
        shared = bindings.crypto_box_beforenm(client, self._secret)
        opened = bindings.crypto_box_open_afternm(data[114:], b"CurveZMQHELLO---" + data[106:114], shared)
        if opened != bytes(64):
            raise ZmtpError("HELLO is not signed")
        self._client = client
        nonce = os.urandom(16)
        box = bindings.crypto_box_afternm(self._public + self._cookie, b"WELCOME-" + nonce, shared)
        return b"\x07WELCOME" + nonce + box

    def _initiated(self, data: bytes) -> bytes:
        if len(data) < _INITIATE or data[:96] != self._cookie:
            raise ZmtpError("INITIATE has a wrong size, or another connection's cookie")
        shared = bindings.crypto_box_beforenm(self._client, self._short)
        nonce = data[96:104]
        opened = bindings.crypto_box_open_afternm(data[104:], b"CurveZMQINITIATE" + nonce, shared)
        key, vouch_nonce, vouch, metadata = opened[:32], opened[32:48], opened[48:128], opened[128:]
        vouched = bindings.crypto_box_open(vouch, b"VOUCH---" + vouch_nonce, key, self._short)
        ours = bindings.crypto_scalarmult_base(self._secret)
        if vouched != self._client + ours:
            raise ZmtpError("the vouch in INITIATE is for somebody else")
        check_socket_type(metadata, self._permitted)
        if not self._known(key):
            raise NotAllowed("unknown_key")
        self.key, self.done = key, True
        self.cipher = CurveCipher(shared, int.from_bytes(nonce, "big"))
        return self.cipher.ready(self._metadata)


class CurveCipher:
    """Encrypts our frames and decrypts those of one client. Its nonces only grow, so no frame can be repeated."""

    overhead = len(_MESSAGE) + 8 + 16 + 1  # of a frame

    def __init__(self, shared: bytes, theirs: int) -> None:
        """Begin with our first nonce.

        shared: the key of both short-term pairs.
        theirs: the newest nonce of the client.
        """
        self._shared = shared
        self._theirs = theirs
        self._ours = 0

    def ready(self, metadata: bytes) -> bytes:
        nonce = self._nonce()
        return b"\x05READY" + nonce + bindings.crypto_box_afternm(metadata, b"CurveZMQREADY---" + nonce, self._shared)

    def _nonce(self) -> bytes:
        self._ours += 1
        return self._ours.to_bytes(8, "big")

    def encode(self, flags: int, body: bytes) -> bytes:
        nonce = self._nonce()
        inner = bytes(((flags & MORE) | (2 if flags & COMMAND else 0),)) + body
        return _MESSAGE + nonce + bindings.crypto_box_afternm(inner, b"CurveZMQMESSAGES" + nonce, self._shared)

    def decode(self, flags: int, body: bytes | memoryview) -> tuple[int, bytes]:
        """(flags, body) of a frame. Raises ZmtpError."""
        sealed = bytes(body)
        nonce = sealed[8:16]
        number = int.from_bytes(nonce, "big")
        if sealed[:8] != _MESSAGE or flags & MORE or not self._theirs < number < _NONCES:
            raise ZmtpError("a frame is not encrypted, or was sent before")
        try:
            opened = bindings.crypto_box_open_afternm(sealed[16:], b"CurveZMQMESSAGEC" + nonce, self._shared)
        except (CryptoError, ValueError, TypeError) as error:
            raise ZmtpError("a frame cannot be decrypted") from error
        if not opened:
            raise ZmtpError("a frame has no flags")
        self._theirs = number
        return (opened[0] & MORE) | (COMMAND if opened[0] & 2 else 0), opened[1:]
