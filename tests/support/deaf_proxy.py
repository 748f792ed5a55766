"""A proxy in front of a server, in threads of this process, that goes deaf: some requests never get an answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

PIECE = 1 << 16


class DeafProxy:
    """A TCP proxy. `deaf_to`: a connection over which this word comes carries nothing more, and stays open."""

    def __init__(self, url: str) -> None:
        split = urlsplit(url)
        assert split.hostname is not None
        assert split.port is not None
        self._server = (split.hostname, split.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self.deaf_to: bytes | None = None
        self.swallowed = 0  # connections that carry nothing more

    @property
    def endpoint(self) -> str:
        return "http://{}:{}".format(*self._listener.getsockname())

    def start(self) -> None:
        self._threads[0].start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()  # it may just have accepted one more
        for one in self._open[1:]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    thread = threading.Thread(target=self._carry, args=(source, sink))
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                if self.deaf_to is not None and self.deaf_to in piece:
                    self.swallowed += 1
                    while source.recv(PIECE):
                        pass
                    return
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def deaf_proxy(url: str) -> Iterator[DeafProxy]:
    proxy = DeafProxy(url)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
