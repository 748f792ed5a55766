"""Subscribes to the KV events of other nodes, for the open token index (following.py has the rules).

Each peer has a SUB socket, a monitor that reports its connects and disconnects, and a DEALER socket for replays. All
share one context, which has one thread. Nothing polls: libzmq reconnects by itself, and an unanswered replay request is
repeated after a while.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from transferd.config.sections import PeerSection
from transferd.daemon.kv_events.following import SEQUENCE_BYTES, Follower
from transferd.errors import ConfigError
from transferd.observability.report import FollowedReport
from transferd.runtime.aio import Timer
from transferd.runtime.descriptors import check_free
from transferd.storage.attention_store.open_index import TokenIndex
from transferd.wire.transport import Channel, set_common_options

log = structlog.get_logger(__name__)

RECEIVE_HWM = 1000  # batches that may wait for the loop; more are dropped, which leaves a gap
MAX_BATCH = 64 * 1024**2  # bytes
ASK_AGAIN_S = 5.0
SOCKETS_EACH = 4  # SUB, DEALER, and both ends of the monitor
OWN_DESCRIPTORS = 8  # of the context and its threads
DESCRIPTORS_EACH = SOCKETS_EACH + 2  # and two connections


class FollowedNodes:
    """The nodes that are followed. Owns their context and their sockets from `start` to `close`."""

    def __init__(self, sections: Mapping[str, PeerSection], index: TokenIndex, max_blocks: int) -> None:
        """Connect nothing yet.

        sections: by the node's name.
        max_blocks: a node that announces more is forgotten.
        """
        self._nodes = [FollowedNode(node, section, index, max_blocks) for node, section in sections.items()]
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def start(self) -> None:
        """Connect in the background. Raises ConfigError for an endpoint that libzmq rejects, NoDescriptors."""
        check_free(OWN_DESCRIPTORS + DESCRIPTORS_EACH * len(self._nodes), "to follow the KV events of other nodes")
        self._context = context = zmq.Context(io_threads=1)
        context.set(zmq.MAX_SOCKETS, SOCKETS_EACH * (len(self._nodes) + 1))
        try:
            for node in self._nodes:
                node.start(context)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Forget the nodes' announcements, and close the sockets. Idempotent."""
        for node in self._nodes:
            node.close()
        if self._context is not None:
            self._context.destroy(0)
            self._context = None

    def statistics(self) -> dict[str, FollowedReport]:
        return {node.follower.node: msgspec.structs.replace(node.follower.counts) for node in self._nodes}


class FollowedNode:
    """One node that is followed. Owns its sockets from `start` to `close`."""

    def __init__(self, node: str, section: PeerSection, index: TokenIndex, max_blocks: int) -> None:
        self._section = section
        ask = self._ask if section.replay_endpoint else None
        self.follower = Follower(index, node, max_blocks, ask)
        self._channels: list[Channel] = []
        self._replay: Channel | None = None
        self._again = Timer()

    def start(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Connect in the background. Raises ConfigError for an endpoint that libzmq rejects; then call `close`."""
        if self._section.replay_endpoint:
            socket = context.socket(zmq.DEALER)
            self._open(socket, self._section.replay_endpoint)
            self._replay = Channel(socket, self._replayed)
            self._channels.append(self._replay)
        socket = context.socket(zmq.SUB)
        # Watch before connecting anything, so that no connection is missed.
        wanted = int(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        monitor = socket.get_monitor_socket(wanted)
        self._channels.append(Channel(monitor, self._monitored))
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._open(socket, self._section.endpoint)
        self._channels.append(Channel(socket, self._live))

    def _open(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        set_common_options(socket, [endpoint], 0)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_HWM)
        socket.setsockopt(zmq.SNDHWM, 16)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_BATCH)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            key = f"storage.attention_store.peers.{self.follower.node}"
            raise ConfigError(key, f"cannot connect: {error}", endpoint) from error

    def close(self) -> None:
        """Forget the node's announcements, and close the sockets. Idempotent."""
        self._again.cancel()
        channels, self._channels, self._replay = self._channels, [], None
        for channel in reversed(channels):  # the socket before its monitor
            channel.close()
        self.follower.disconnected()

    # --- input: each reads exactly one message, or raises zmq.Again -------------------------------------

    def _live(self, socket: zmq.Socket[bytes]) -> None:
        frames = _frames(socket)
        if len(frames) == 3 and len(frames[1]) == SEQUENCE_BYTES:
            self.follower.live(int.from_bytes(frames[1], "big"), frames[2])

    def _replayed(self, socket: zmq.Socket[bytes]) -> None:
        frames = _frames(socket)
        # vLLM sends the topic only since 0.26.
        if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != SEQUENCE_BYTES:
            return
        self._ask_again_later()  # the replay is arriving, so give it more time
        self.follower.replayed(int.from_bytes(frames[-2], "big", signed=True), frames[-1])

    def _monitored(self, socket: zmq.Socket[bytes]) -> None:
        event = parse_monitor_message(_frames(socket))["event"]
        node = self.follower.node
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            log.info("following the KV events of a node", node=node, endpoint=self._section.endpoint)
            self.follower.connected()
        elif event == zmq.EVENT_DISCONNECTED:
            log.info("lost the connection to a node; forgetting its announcements", node=node)
            self.follower.disconnected()

    # --- output -------------------------------------------------------------------------------------

    def _ask(self, sequence: int) -> None:
        self._ask_again_later()
        if self._replay is None:
            return
        wanted = sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True)
        try:
            self._replay.socket.send_multipart([b"", wanted], zmq.DONTWAIT)
        except zmq.Again:
            pass  # too many requests are unanswered; the timer asks again
        finally:
            self._replay.check_soon()

    def _ask_again_later(self) -> None:
        self._again.set(ASK_AGAIN_S, self.follower.unanswered)


def _frames(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Read one message, but at most five of its frames: no known message has more."""
    frames = [socket.recv(zmq.DONTWAIT)]
    while socket.getsockopt(zmq.RCVMORE):
        frames.append(socket.recv(zmq.DONTWAIT))
        del frames[5:]
    return frames
