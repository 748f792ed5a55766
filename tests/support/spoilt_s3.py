"""A small S3 server in threads of this process, whose answers a test spoils.

`spoil` gets each request and the right answer, and returns the answer to send; None closes the connection.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

NO_SUCH_KEY = b"<?xml version='1.0'?><Error><Code>NoSuchKey</Code><Message>there is no such key</Message></Error>"


@dataclass(frozen=True)
class Request:
    """headers: their names in lower case."""

    method: str
    key: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """length: what the header says, if not the body's own."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    length: int | None = None


def refusal(status: int, code: str, message: str = "because") -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a connection that finds no place in it is tried again after 1 s, 3 s, …


class SpoiltS3:
    """See the module. objects: by key. asked: how many requests of each method came."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: Counter[str] = Counter()
        self.spoil: Callable[[Request, Answer], Answer | None] = lambda _, answer: answer
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _serve(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                key = unquote(urlsplit(self.path).path).partition("/")[2].partition("/")[2]
                server._answer(self, Request(self.command, key, headers, self.rfile.read(length)))

            do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _serve  # noqa: N815 - the library's names

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Listener(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, handler: BaseHTTPRequestHandler, request: Request) -> None:
        with self._lock:
            self.asked[request.method] += 1
        self.requests.append(replace(request, body=b""))
        answer = self.spoil(request, self._right(request))
        if answer is None:
            handler.close_connection = True
            return
        handler.send_response(answer.status)
        headers = {"ETag": '"tag"', "Last-Modified": "Sat, 28 Nov 2026 12:00:00 GMT"} | answer.headers
        for name, value in headers.items():
            handler.send_header(name, value)
        length = len(answer.body) if answer.length is None else answer.length
        if answer.status != 204:
            handler.send_header("Content-Length", str(length))
        handler.end_headers()
        if request.method != "HEAD":
            handler.wfile.write(answer.body)
        if answer.length is not None and answer.length != len(answer.body):
            handler.close_connection = True

    def _right(self, request: Request) -> Answer:
        if request.method == "PUT":
            self.objects[request.key] = request.body
            return Answer()
        if request.method == "DELETE":
            self.objects.pop(request.key, None)
            return Answer(204)
        body = self.objects.get(request.key)
        return Answer(404, NO_SUCH_KEY) if body is None else Answer(body=body)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextlib.contextmanager
def spoilt_s3() -> Iterator[SpoiltS3]:
    server = SpoiltS3()
    server.start()
    try:
        yield server
    finally:
        server.close()
