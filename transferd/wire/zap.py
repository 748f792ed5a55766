"""Decides who may connect: answers libzmq's request before each connection (ZAP, RFC 27).

libzmq makes a request for every connection to an endpoint that was bound with a domain, and delivers no message of
that connection before it has the answer. For ipc:// the request names the peer's uid and pid from the kernel
(SO_PEERCRED), for tcp:// its address and CURVE key. Every refusal is counted and logged with the peer.

The answers come from sets in memory, on the event loop. pyzmq's AsyncioAuthenticator does not fit: it does not know
uids, and does not pass the peer's address to the code that decides about a key (docs/adr/0025).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import structlog
import zmq
from zmq.utils import z85

from transferd.wire.credentials import peer_text, uid_of

log = structlog.get_logger(__name__)

KEYS = b"keys"  # the domain of tcp:// endpoints that require a known key; each list of users has its own domain
_ENDPOINT = "inproc://zeromq.zap.01"


class ConnectionGate:
    """Answers the ZAP requests of one context. Open it before the server's sockets bind; close it after them.

    uids: for each domain, the users who may connect. keys: the public keys (Z85) that may; you may replace `keys`
    while the gate is open. refused: number of refused connections, by reason.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        uids: Mapping[bytes, frozenset[int]],
        keys: frozenset[bytes] = frozenset(),
    ) -> None:
        self.keys = keys
        self.refused = Counter[str](unknown_key=0, unknown_user=0)
        self._uids = uids
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)  # an answer is useless once the context ends
        self._socket.bind(_ENDPOINT)
        self._loop = asyncio.get_running_loop()
        self._fd = self._number(zmq.FD)
        self._loop.add_reader(self._fd, self._answer_all)

    def _answer_all(self) -> None:
        # A REP socket strictly alternates between request and answer, so this ends when no request waits.
        while self._number(zmq.EVENTS) & zmq.POLLIN:
            self._socket.send_multipart(self._answer(self._socket.recv_multipart(zmq.DONTWAIT)))

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """A ZAP reply for a ZAP request (version, id, domain, address, identity, mechanism, credentials)."""
        _version, request, domain, address, _identity, mechanism, *credentials = [*question, *[b""] * 6]
        refusal = self._judge(domain, address.decode("ascii", "replace"), mechanism, credentials[0])
        verdict = [b"200", b"OK"] if not refusal else [b"400", b"not allowed to connect"]
        return [b"1.0", request, *verdict, b"", b""]

    def _judge(self, domain: bytes, address: str, mechanism: bytes, credential: bytes) -> str:
        """The reason to refuse this connection; "" to allow it."""
        if domain == KEYS:
            known = mechanism == b"CURVE" and len(credential) == 32 and z85.encode(credential) in self.keys
            refusal = "" if known else "unknown_key"
        else:
            uid = uid_of(address)
            allowed = mechanism == b"NULL" and uid is not None and uid in self._uids.get(domain, ())
            refusal = "" if allowed else "unknown_user"
        if refusal:
            self.refused[refusal] += 1
            log.warning("connection refused", reason=refusal, peer=peer_text(address))
        return refusal

    def _number(self, option: int) -> int:
        value = self._socket.getsockopt(option)
        assert isinstance(value, int)
        return value

    def close(self) -> None:
        """Stop answering and free the socket. Idempotent."""
        if self._socket.closed:
            return
        self._loop.remove_reader(self._fd)
        self._socket.close()
