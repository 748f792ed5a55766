"""The transport between peers: all transfers that one daemon sends to or receives from other daemons."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from transferd.errors import ConfigError, PeerLost, PeerRefused, TransferError
from transferd.runtime.aio import every
from transferd.storage.peer.carrier import Carrier
from transferd.storage.peer.connection import PeerConnection, PeerConnections, connect
from transferd.storage.peer.messages import (
    ABOUT_A_TRANSFER,
    VERSION,
    Begin,
    Done,
    FromSender,
    Landed,
    PeerMessage,
    Post,
    Refusal,
    Want,
    Withdraw,
    Withdrawn,
    theirs,
)
from transferd.storage.peer.outbound import Inbound, Outbound
from transferd.tasks import ErrorInfo

log = structlog.get_logger(__name__)

MAX_PARKED = 4096  # receivers that arrived before their sender
MAX_PARKED_BYTES = 128 * 1024**2  # of the names for which these wait, about 150 each
MAX_RECEIVERS = 1024  # connections
Share = tuple[str, int]  # of a transfer: its id and the rank
Attempt = tuple[str, int, int]  # and the receiver's number for it


@dataclass(frozen=True, slots=True, eq=False)
class _WaitingReceiver:
    """A receiver that came before its sender. nbytes: memory of its names."""

    want: Want
    connection: PeerConnection
    nbytes: int


class PeerTransport:
    """Listens for receivers and connects to senders. Owns the carrier and all connections from `open` to `close`.

    listen: host:port.
    ranks: how many ranks this daemon has; it refuses receivers of higher ranks.
    """

    def __init__(self, carrier: Carrier, listen: str, ranks: int) -> None:
        self.carrier = carrier
        self.address = ""
        self._listen = listen
        self._ranks = ranks
        self._server: asyncio.Server | None = None
        self._receivers: set[PeerConnection] = set()
        self._senders: dict[str, asyncio.Task[PeerConnection]] = {}  # connections by address, made or being made
        self._parked: dict[Share, _WaitingReceiver] = {}
        self._outbounds: dict[Share, Outbound] = {}
        self._draining: set[Outbound] = set()  # their tasks are over, but their writes still run
        self._inbounds: dict[Attempt, Inbound] = {}
        self._attempts = itertools.count(1)
        self._counts: Counter[str] = Counter()
        self._closing = False
        self._from_sender: dict[type, Callable[[Inbound, Any], None]] = {
            Begin: lambda inbound, _: inbound.begins(),
            Landed: lambda inbound, message: inbound.landed(message),
            Withdrawn: lambda inbound, _: inbound.let_go(),
            Refusal: self._refused,
        }

    async def open(self) -> None:
        """Listen and start the carrier. Raises ConfigError if either fails."""
        await self.carrier.open()
        self._connections = PeerConnections()
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._accept, host.strip("[]"), int(port))
        except OSError as error:
            raise ConfigError("pd.listen", f"cannot listen here: {error.strerror or error}", self._listen) from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def hang_up(self) -> None:
        """Close every connection and accept no new one. Running transfers fail on both sides within HOLD_S."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        connections = [sender.result() for sender in self._senders.values() if _is_there(sender)]
        for sender in self._senders.values():
            sender.cancel()
        await every(connection.close() for connection in [*self._receivers, *connections])

    async def close(self) -> None:
        """Free everything, also after an `open` that failed. Call it after every transfer has ended. Idempotent."""
        await self.hang_up()
        if self._server is not None:
            self._connections.room.close()
        await self.carrier.close()

    def statistics(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "sending": len(self._outbounds),
            "receiving": len(self._inbounds),
            "waiting": len(self._parked),
            "refused": {name: count for name, count in self._counts.items() if count},
        }

    def outbound(self, transfer: str, rank: int, names: Sequence[str]) -> Outbound:
        """Begin to send. Raises TransferError if this transfer is already being sent."""
        share = transfer, rank
        before = self._outbounds.get(share)
        if before is not None:
            if not before.ended:
                raise TransferError(f"transfer {transfer!r} is already being sent", code="already_sending")
            self._draining.add(before)
        outbound = self._outbounds[share] = Outbound(transfer, rank, 0, list(names), self.carrier, self._sent)
        if share in self._parked:
            parked = self._parked.pop(share)
            self._meet(outbound, parked.want, parked.connection)
        return outbound

    def inbound(self, transfer: str, rank: int, names: Sequence[str], peer: str) -> Inbound:
        """Begin to receive: a new attempt, independent of earlier ones. peer: the sender's address."""
        attempt, engine = next(self._attempts), self.carrier.address
        inbound = Inbound(transfer, rank, attempt, list(names), engine, peer, self._connected, self._received)
        self._inbounds[inbound.share] = inbound
        return inbound

    def _sent(self, outbound: Outbound) -> None:
        self._draining.discard(outbound)
        share = outbound.transfer, outbound.rank
        if self._outbounds.get(share) is outbound:
            del self._outbounds[share]

    def _received(self, inbound: Inbound) -> None:
        self._inbounds.pop(inbound.share, None)
        self._tidy(inbound.sender)

    def _tidy(self, peer: str) -> None:
        """Drop a connection to a sender that failed or has ended, and close one that no transfer uses."""
        sender = self._senders.get(peer)
        if sender is None or not sender.done():
            return
        if not _is_there(sender) or sender.result().closed:
            del self._senders[peer]
        elif not any(inbound.sender == peer for inbound in self._inbounds.values()):
            del self._senders[peer]
            sender.result().finish()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing or len(self._receivers) >= MAX_RECEIVERS:
            writer.transport.abort()
            return
        hear, gone = self._hear_receiver, self._receiver_gone
        self._receivers.add(PeerConnection(reader, writer, hear, gone, self._connections))

    def _hear_receiver(self, connection: PeerConnection, message: PeerMessage) -> None:
        if isinstance(message, FromSender):
            raise PeerRefused(f"a receiver sent {type(message).__name__}, which only a sender may send")
        if isinstance(message, Want):
            self._want(connection, message)
        elif (outbound := self._met(connection, message)) is not None:
            outbound.hear(message)
        elif isinstance(message, Withdraw):
            self._unpark(connection, message)

    def _want(self, connection: PeerConnection, want: Want) -> None:
        share = want.transfer, want.rank
        outbound, parked = self._outbounds.get(share), self._parked.get(share)
        if want.version != VERSION:
            self._refuse(connection, want, "version_mismatch", f"this daemon speaks version {VERSION}")
        elif not 0 <= want.rank < self._ranks:
            self._refuse(connection, want, "layout_mismatch", f"this daemon has {self._ranks} ranks")
        elif outbound is not None and outbound.open:
            self._meet(outbound, want, connection)
        elif (outbound is not None and outbound.peer is not None and not outbound.ended) or (
            parked is not None and parked.connection is not connection
        ):
            self._refuse(connection, want, "already_sending", "another receiver has asked for it")
        else:
            nbytes = sum(map(sys.getsizeof, (*want.names, want.names)))
            waiting = sum(one.nbytes for one in self._parked.values())
            if nbytes + waiting > MAX_PARKED_BYTES or len(self._parked) >= MAX_PARKED:
                self._refuse(connection, want, "busy", "too many receivers are waiting already")
            else:  # replaces an earlier attempt of the same receiver
                self._parked[share] = _WaitingReceiver(want, connection, nbytes)

    def _meet(self, outbound: Outbound, want: Want, connection: PeerConnection) -> None:
        outbound.wanted(want, connection)
        if outbound.peer is None:  # its objects differ, which makes the other ranks' shares useless
            self._counts["mismatch"] += 1
            error = PeerRefused(f"rank {outbound.rank} of the receiver expects other blocks", code="blocks_mismatch")
            for other in self._outbounds.values():
                if other.transfer == outbound.transfer and other is not outbound:
                    other.fail(error)

    def _met(self, connection: PeerConnection, message: Post | Done | Withdraw) -> Outbound | None:
        """The Outbound that a receiver's message belongs to; None if it is over."""
        now = self._outbounds.get((message.transfer, message.rank))
        for outbound in (*self._draining, now):
            if outbound is not None and outbound.peer is connection and outbound.share == _share(message):
                return outbound
        return None

    def _unpark(self, connection: PeerConnection, withdraw: Withdraw) -> None:
        share = withdraw.transfer, withdraw.rank
        parked = self._parked.get(share)
        if parked is not None and parked.connection is connection and parked.want.attempt == withdraw.attempt:
            del self._parked[share]
        connection.send(Withdrawn(*_share(withdraw)))

    def _refuse(self, connection: PeerConnection, want: Want, code: str, why: str) -> None:
        self._counts[code] += 1
        connection.send(Refusal(*_share(want), ErrorInfo(code, why)))

    def _receiver_gone(self, connection: PeerConnection, why: str) -> None:
        self._receivers.discard(connection)
        self._parked = {share: one for share, one in self._parked.items() if one.connection is not connection}
        for outbound in [*self._outbounds.values(), *self._draining]:
            if outbound.peer is connection:
                outbound.lost(why)

    async def _connected(self, peer: str) -> PeerConnection:
        """The connection to a sender, shared by all transfers from it. Raises PeerLost."""
        if self._closing:
            raise PeerLost("this daemon is shutting down")
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = asyncio.get_running_loop().create_task(self._dial(peer))
            sender.add_done_callback(lambda _: self._tidy(peer))
        await asyncio.wait([sender])
        if sender.cancelled():
            raise PeerLost("this daemon is shutting down")
        if sender.result().closed:
            raise PeerLost("the sending daemon closed the connection")
        return sender.result()

    async def _dial(self, peer: str) -> PeerConnection:
        return PeerConnection(*await connect(peer), self._hear_sender, self._sender_gone, self._connections)

    def _hear_sender(self, connection: PeerConnection, message: PeerMessage) -> None:
        handle = self._from_sender.get(type(message))
        if handle is None:
            raise PeerRefused(f"a sender sent {type(message).__name__}, which only a receiver may send")
        inbound = self._inbounds.get(_share(message))
        if inbound is not None and inbound.peer is connection:
            handle(inbound, message)

    def _refused(self, inbound: Inbound, refused: Refusal) -> None:
        error = theirs(refused.error)
        self._counts[error.code if error.code in ABOUT_A_TRANSFER else "other"] += 1
        inbound.refused(error)
        for other in list(self._inbounds.values()):  # the other ranks' shares are useless without this one
            if other.transfer == inbound.transfer and other is not inbound:
                other.cancel(error)

    def _sender_gone(self, connection: PeerConnection, why: str) -> None:
        for peer in list(self._senders):
            self._tidy(peer)
        for inbound in list(self._inbounds.values()):
            if inbound.peer is connection:
                inbound.lost(why)


def _is_there(sender: asyncio.Task[PeerConnection]) -> bool:
    return sender.done() and not sender.cancelled() and sender.exception() is None


def _share(message: PeerMessage) -> Attempt:
    return message.transfer, message.rank, message.attempt
