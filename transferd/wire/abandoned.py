"""What becomes of sockets that nobody closed: their owner was dropped, or they came into a forked child."""

from __future__ import annotations

import os
import weakref

import zmq

_inherited: list[object] = []


def keep(*things: object) -> None:
    """Hold on to what this forked child may neither use nor free: it shares the parent's descriptors."""
    _inherited.append(things)


def free_with(
    owner: object, socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None
) -> weakref.finalize:  # type: ignore[type-arg]
    """Close the socket, and its context if given, once `owner` has been collected, in whatever thread.

    pyzmq alone would hang there: a context that is collected together with an open socket waits for that socket.
    The result's `detach` calls it off.
    """
    finalizer = weakref.finalize(owner, _free, socket, context, os.getpid())
    finalizer.atexit = False  # another thread may still be at work on the socket then
    return finalizer


def _free(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None, pid: int) -> None:
    if os.getpid() != pid:
        keep(socket, context)
        return
    socket.close(0)
    if context is not None:
        context.term()
