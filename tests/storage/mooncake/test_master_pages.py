"""The pages of a master: what is read from real ones, and what is said of anything else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from transferd.cli.pool.local import Lender, Master
from transferd.cli.pool.master import master_executable
from transferd.errors import ConfigError, StorageUnavailable
from transferd.storage.mooncake.master_pages import (
    BATCH,
    pages_address,
    read_all,
    read_named,
    read_page,
    read_segments,
)

needs_mooncake = pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")


@pytest.mark.parametrize(
    ("configured", "master", "address"),
    [
        ("", "10.0.0.1:50051", "10.0.0.1:9003"),
        ("", "[fd00::1]:50051", "[fd00::1]:9003"),
        ("10.0.0.2:7", "etcd://10.0.0.1:2379", "10.0.0.2:7"),
    ],
)
def test_the_pages_are_beside_the_master_unless_they_are_configured(configured: str, master: str, address: str) -> None:
    assert pages_address(configured, master) == address


@pytest.mark.parametrize(("configured", "master"), [("", "etcd://10.0.0.1:2379"), ("", ""), ("nonsense", "10.0.0.1:1")])
def test_an_address_that_nobody_can_know_is_an_error_of_its_key(configured: str, master: str) -> None:
    with pytest.raises(ConfigError, match="master_pages"):
        pages_address(configured, master)


@needs_mooncake
def test_a_real_masters_pages_say_who_lends_memory_and_who_has_what_without_a_lease(tmp_path: Path) -> None:
    from mooncake.store import MooncakeDistributedStore

    with Master(tmp_path / "master.log") as master, Lender(master, 64 * 1024**2, tmp_path / "lender.log"):
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * 1024**2, "tcp", "", master.address) == 0
        keys = [f"a%20model/0123/gen/{number:064x}/0" for number in range(BATCH + 50)]
        assert store.put_batch([*keys, "with,comma"], [b"x" * 100] * (len(keys) + 1)) == 0
        pages = f"127.0.0.1:{master.metrics_port}"
        (segment,) = read_segments(pages)
        assert segment.name in master.segments()
        assert (segment.capacity, segment.takes) == (64 * 1024**2, True)
        assert segment.used >= 100 * len(keys)
        everything = list(read_all(pages))
        assert [len(some) for some in everything] == [BATCH, 50], "in batches, the key with a comma left out"
        found = [one for some in everything for one in some]
        assert sorted(one.key for one in found) == sorted(keys)
        assert {(one.nbytes, one.nodes) for one in found} == {(100, (segment.node,))}
        assert next(read_named(pages, ["absent", keys[0]])) == [(keys[0], 100, (segment.node,))]
        assert store.remove(keys[0]) == 0, "not leased: a lookup by the library leases, and then this is refused"
        assert next(read_named(pages, keys[:2])) == [(keys[1], 100, (segment.node,))]
        store.close()


class _Other(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>\n" if self.path != "/get_segments_detail" else b'{"segments": [{}]}')

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.fixture
def other() -> Iterator[str]:
    """The address of a web server that is no master."""
    server = HTTPServer(("127.0.0.1", 0), _Other)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_server_that_is_not_a_master_is_named_with_its_address(other: str) -> None:
    named, everything = lambda address: list(read_named(address, ["k"])), lambda address: list(read_all(address))
    for read in (read_segments, named, everything):
        with pytest.raises(StorageUnavailable, match=f"{other} does not answer like a Mooncake master"):
            read(other)


def test_an_address_without_a_master_is_reported(other: str) -> None:
    host, port = other.split(":")
    with pytest.raises(StorageUnavailable, match=r"no Mooncake master answers at 127\.0\.0\.2"):
        read_page(f"{host[:-1]}2:{port}", "metrics")
