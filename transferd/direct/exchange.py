"""All direct transfers of one daemon: who is sending what, who expects what from whom."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from transferd.direct.carrier import Carrier
from transferd.direct.connection import Connection, connect
from transferd.direct.inbound import Inbound
from transferd.direct.messages import (
    VERSION,
    Begin,
    Done,
    Landed,
    Message,
    Post,
    Refused,
    Want,
    Withdraw,
    Withdrawn,
)
from transferd.direct.outbound import Outbound
from transferd.errors import ConfigError, PeerLost, PeerRefused, TransferError
from transferd.tasks import ErrorInfo

log = structlog.get_logger(__name__)

MAX_PARKED = 4096  # receivers that came before their sender
Share = tuple[str, int]  # of a transfer: its id and the rank


@dataclass(slots=True, eq=False)
class _Sender:
    """A daemon that sends to this one; connected while `users` are."""

    connecting: asyncio.Task[Connection]
    users: set[Inbound] = field(default_factory=set)


class Exchange:
    """Listens for receivers, connects to senders. Owns the carrier and all connections from `open` to `close`.

    listen: host:port. ranks: of this daemon; a receiver with more of them is refused.
    """

    def __init__(self, carrier: Carrier, listen: str, ranks: int) -> None:
        self.carrier = carrier
        self.address = ""
        self._listen = listen
        self._ranks = ranks
        self._server: asyncio.Server | None = None
        self._receivers: set[Connection] = set()
        self._senders: dict[str, _Sender] = {}
        self._parked: dict[Share, tuple[Want, Connection]] = {}
        self._outbounds: dict[Share, Outbound] = {}
        self._inbounds: dict[Share, Inbound] = {}
        self._counts: Counter[str] = Counter()
        self._closing = False
        self._from_receiver: dict[type, Callable[[Connection, Any], None]] = {
            Want: self._want,
            Post: self._post,
            Done: self._done,
            Withdraw: self._withdraw,
        }
        self._from_sender: dict[type, Callable[[Inbound, Any], None]] = {
            Begin: lambda inbound, _: inbound.begins(),
            Landed: lambda inbound, message: inbound.landed(message),
            Withdrawn: lambda inbound, _: inbound.withdrawn(),
            Refused: self._refused,
        }

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Raises ConfigError when the address cannot be used or the carrier does not start."""
        await self.carrier.open()
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(self._accept, host.strip("[]"), int(port))
        except OSError as error:
            raise ConfigError("pd.listen", f"cannot be listened on: {error.strerror or error}", self._listen) from error
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def hang_up(self) -> None:
        """End every connection and take no new one: transfers under way fail on both sides within HOLD_S."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        connections = [sender.connecting.result() for sender in self._senders.values() if _is_there(sender)]
        for sender in self._senders.values():
            sender.connecting.cancel()
        for connection in [*self._receivers, *connections]:
            await connection.close()

    async def close(self) -> None:
        """After every Sender and Receiver has ended. Idempotent."""
        await self.hang_up()
        await self.carrier.close()

    def statistics(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "sending": len(self._outbounds),
            "receiving": len(self._inbounds),
            "waiting": len(self._parked),
            "refused": {name: count for name, count in self._counts.items() if count},
        }

    # --- for the ranks ------------------------------------------------------------------------------

    def outbound(self, transfer: str, rank: int, names: Sequence[str]) -> Outbound:
        """Begin to send. Raises TransferError when that is being done already."""
        share = transfer, rank
        if share in self._outbounds:
            raise TransferError(f"{transfer!r} is being sent already", code="already_sending")
        outbound = Outbound(transfer, rank, names, self.carrier, self._sent)
        self._outbounds[share] = outbound
        if share in self._parked:
            self._meet(outbound, *self._parked.pop(share))
        return outbound

    def inbound(self, transfer: str, rank: int, names: Sequence[str], peer: str) -> Inbound:
        """Begin to receive. Raises TransferError when an earlier attempt has not quite ended."""
        share = transfer, rank
        if share in self._inbounds:
            raise TransferError(f"{transfer!r} is being received already", code="already_receiving")

        def join(inbound: Inbound) -> Any:
            return self._connected(inbound, peer)

        inbound = Inbound(transfer, rank, names, self.carrier.address, join, self._received)
        self._inbounds[share] = inbound
        return inbound

    def _sent(self, outbound: Outbound) -> None:
        self._outbounds.pop((outbound.transfer, outbound.rank), None)

    def _received(self, inbound: Inbound) -> None:
        self._inbounds.pop((inbound.transfer, inbound.rank), None)
        for peer, sender in list(self._senders.items()):
            sender.users.discard(inbound)
            if not sender.users and sender.connecting.done():
                del self._senders[peer]
                if _is_there(sender):
                    sender.connecting.result().finish()

    # --- this daemon sends --------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing:
            writer.transport.abort()
            return
        self._receivers.add(Connection(reader, writer, self._hear_receiver, self._receiver_gone))

    def _hear_receiver(self, connection: Connection, message: Message) -> None:
        handle = self._from_receiver.get(type(message))
        if handle is None:
            raise PeerRefused(f"a receiver says {type(message).__name__}, which only a sender may")
        handle(connection, message)

    def _want(self, connection: Connection, want: Want) -> None:
        share = want.transfer, want.rank
        outbound = self._outbounds.get(share)
        if want.version != VERSION:
            self._refuse(connection, share, "version_mismatch", f"this daemon speaks version {VERSION}")
        elif not 0 <= want.rank < self._ranks:
            self._refuse(connection, share, "layout_mismatch", f"this daemon has {self._ranks} ranks")
        elif share in self._parked or (outbound is not None and outbound.peer is not None):
            self._refuse(connection, share, "already_sending", "another receiver has asked for it")
        elif outbound is not None:
            self._meet(outbound, want, connection)
        elif len(self._parked) >= MAX_PARKED:
            self._refuse(connection, share, "busy", f"{MAX_PARKED} receivers are waiting already")
        else:
            self._parked[share] = want, connection

    def _meet(self, outbound: Outbound, want: Want, connection: Connection) -> None:
        outbound.wanted(want, connection)
        if outbound.peer is None:  # it did not fit, so the other ranks' shares are no use either
            self._counts["mismatch"] += 1
            error = PeerRefused(f"rank {outbound.rank} of the receiver expects other blocks", code="blocks_mismatch")
            for other in self._outbounds.values():
                if other.transfer == outbound.transfer and other is not outbound:
                    other.fail(error)

    def _post(self, connection: Connection, post: Post) -> None:
        outbound = self._outbounds.get((post.transfer, post.rank))
        if outbound is not None and outbound.peer is connection:
            outbound.posts(post)

    def _done(self, connection: Connection, done: Done) -> None:
        outbound = self._outbounds.get((done.transfer, done.rank))
        if outbound is not None and outbound.peer is connection:
            outbound.done()

    def _withdraw(self, connection: Connection, withdraw: Withdraw) -> None:
        share = withdraw.transfer, withdraw.rank
        outbound = self._outbounds.get(share)
        if outbound is not None and outbound.peer is connection:
            outbound.withdrawn(withdraw.error)
            return
        if share in self._parked and self._parked[share][1] is connection:
            del self._parked[share]
        connection.send(Withdrawn(*share))

    def _refuse(self, connection: Connection, share: Share, code: str, why: str) -> None:
        self._counts[code] += 1
        connection.send(Refused(*share, ErrorInfo(code, why)))

    def _receiver_gone(self, connection: Connection, why: str) -> None:
        self._receivers.discard(connection)
        self._parked = {share: (want, who) for share, (want, who) in self._parked.items() if who is not connection}
        for outbound in list(self._outbounds.values()):
            if outbound.peer is connection:
                outbound.lost(why)

    # --- this daemon receives -----------------------------------------------------------------------

    async def _connected(self, inbound: Inbound, peer: str) -> Connection:
        """The connection to a sender, shared by all transfers from it. Raises PeerLost."""
        if self._closing:
            raise PeerLost("this daemon is shutting down")
        sender = self._senders.get(peer)
        if sender is None:
            host, _, port = peer.rpartition(":")
            opening = connect(host.strip("[]"), int(port), self._hear_sender, self._sender_gone)
            sender = self._senders[peer] = _Sender(asyncio.get_running_loop().create_task(opening))
        sender.users.add(inbound)
        await asyncio.wait([sender.connecting])
        if sender.connecting.cancelled():
            raise PeerLost("this daemon is shutting down")
        return sender.connecting.result()

    def _hear_sender(self, connection: Connection, message: Message) -> None:
        handle = self._from_sender.get(type(message))
        if handle is None:
            raise PeerRefused(f"a sender says {type(message).__name__}, which only a receiver may")
        inbound = self._inbounds.get((message.transfer, message.rank))
        if inbound is not None and inbound.peer is connection:
            handle(inbound, message)

    def _refused(self, inbound: Inbound, refused: Refused) -> None:
        self._counts[refused.error.code] += 1
        inbound.refused(refused.error)
        for other in list(self._inbounds.values()):  # the other ranks' shares are no use without this one
            if other.transfer == inbound.transfer and other is not inbound:
                other.give_up(refused.error)

    def _sender_gone(self, connection: Connection, why: str) -> None:
        for peer, sender in list(self._senders.items()):
            if _is_there(sender) and sender.connecting.result() is connection:
                del self._senders[peer]
                for inbound in list(sender.users):
                    inbound.lost(why)


def _is_there(sender: _Sender) -> bool:
    task = sender.connecting
    return task.done() and not task.cancelled() and task.exception() is None
