"""Frees sockets that were never closed: their owner was garbage-collected, or a forked child inherited them."""

from __future__ import annotations

import os
import weakref

import zmq

_inherited: list[object] = []


def keep(*things: object) -> None:
    """Keep references to objects that a forked child may neither use nor free: they share the parent's descriptors."""
    _inherited.append(things)


def free_with(
    owner: object, socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None
) -> weakref.finalize:  # type: ignore[type-arg]
    """Close the socket, and the context if given, once `owner` has been garbage-collected, in any thread.

    pyzmq alone would hang: a context that is collected together with an open socket waits for that socket.
    Call `detach` on the result to cancel it.
    """
    finalizer = weakref.finalize(owner, _free, socket, context, os.getpid())
    finalizer.atexit = False  # at exit another thread may still use the socket
    return finalizer


def _free(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None, pid: int) -> None:
    if os.getpid() != pid:
        keep(socket, context)
        return
    socket.close(0)
    if context is not None:
        context.term()
