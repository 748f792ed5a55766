"""A browser that believes it talks to another host reads nothing of a daemon's pages (DNS rebinding)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from transferd.cli.pool.master import free_port
from transferd.client.launch import running

PATHS = ["/", "/live", "/status", "/metrics", "/explain?task=t", "/healthz", "/readyz", "/nothing"]


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    number = free_port()
    metrics = {"listen": f"0.0.0.0:{number}", "hosts": ["KV-1.example.com"]}
    with running({"metrics": metrics, "storage": {"backend": "memory"}}, tmp_path):
        yield number


def ask(port: int, host: str | None, path: str = "/status", version: str = "1.1") -> bytes:
    """The whole answer to a request with this Host header, from a connection to this machine."""
    header = "" if host is None else f"Host: {host}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(f"GET {path} HTTP/{version}\r\n{header}\r\n".encode())
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_a_page_of_another_name_reads_nothing(port: int) -> None:
    evil = [
        "evil.example",
        "[::1].evil.example",
        f"evil.example:{port}",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0",
        "kv-1",
        "*",
    ]
    for host in evil:
        for path in PATHS:
            head, _, body = ask(port, host, path).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 421 "), (host, path)
            assert b"metrics.hosts" in body
            assert b"transferd" not in body
            assert len(body.splitlines()) == 1


def test_probes_scrapers_and_people_are_answered(port: int) -> None:
    own = ["127.0.0.1", "10.1.2.3", "[::1]", "localhost", "LocalHost.", socket.gethostname(), "kv-1.example.com"]
    for host in [*own, *(f"{name}:{port}" for name in own)]:
        assert ask(port, host).startswith(b"HTTP/1.1 200 "), host
    assert ask(port, None, "/healthz", version="1.0").startswith(b"HTTP/1.1 200 ")
