"""A pause belongs to who made it: nobody takes it over by saying its holder's name, which every report shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.machine.hostile.raw_peer import RawPeer
from tests.support.waits import wait_until
from transferd import SyncClient
from transferd.client.launch import DaemonProcess, running
from transferd.control.gate import MOST_HOLDS
from transferd.wire import protocol as wire

CACHE = {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 4, "device_blocks": 8}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    tree = {"cache": CACHE, "storage": {"backend": "memory"}, "metrics": {"listen": ""}}
    with running(tree, tmp_path_factory.mktemp("holds")) as started:
        yield started


def held(client: SyncClient) -> list[tuple[str, str]]:
    return [(row["what"], row["holder"]) for row in client.stats()["held"]]


def joined(endpoint: str) -> RawPeer:
    peer = RawPeer(endpoint)
    peer.greet()
    assert isinstance(peer.ask(wire.Hello()), wire.Welcome)
    return peer


@pytest.mark.parametrize("holder", ["a client of ours", "one that sends no proof", "a connection"])
@pytest.mark.parametrize("what", ["pause", "drain"])
def test_who_says_a_holders_name_takes_nothing_over(daemon: DaemonProcess, holder: str, what: str) -> None:
    """The impostor reads the name in a report, asks for the same, and leaves: the hold would go with it."""
    ask = wire.Pause if what == "pause" else wire.Drain
    with SyncClient(daemon.endpoint) as client, joined(daemon.endpoint) as raw:
        if holder == "a client of ours":
            client.pause() if what == "pause" else client.drain()
        else:
            assert isinstance(raw.ask(ask("" if holder == "a connection" else "old client"), 2), wire.Value)
        [(_, name)] = held(client)
        for proof in ("", "0" * 32, name, f"connection {name.removeprefix('client ')}"):
            if (holder, proof) == ("one that sends no proof", ""):
                continue  # an older client, which shows nothing: its name is all that it has
            with joined(daemon.endpoint) as impostor:
                assert isinstance(impostor.ask(ask(name, proof), 2), wire.Value)
                assert held(client) == [(what, name), (what, name)], "they are two holders"
                impostor.send(wire.encode_request(3, wire.Bye()))
            wait_until(lambda: len(held(client)) == 1, "the impostor's own ends with it")
            assert held(client) == [(what, name)]
        client.resume()  # its own or, because it holds nothing, everybody's
        assert held(client) == []


def test_one_client_holds_a_bounded_number(daemon: DaemonProcess) -> None:
    """It may name as many holders as it likes. The bound is the engine's, so that more connections do not help."""
    with SyncClient(daemon.endpoint) as client, joined(daemon.endpoint) as one, joined(daemon.endpoint) as other:
        answers = [one.ask(wire.Pause(f"h{number}"), number) for number in range(2, MOST_HOLDS + 3)]
        assert all(isinstance(answer, wire.Value) for answer in answers[:MOST_HOLDS])
        for refused in (answers[-1], other.ask(wire.Drain("one more"), 2)):
            assert isinstance(refused, wire.Refused)
            assert refused.error.code == "too_many_requests"
        assert isinstance(one.ask(wire.Pause("h2"), 5000), wire.Value), "a repetition takes no place"
        assert len(held(client)) == MOST_HOLDS
        client.resume()
        assert isinstance(other.ask(wire.Drain("one more"), 3), wire.Value)
        client.resume()
        assert held(client) == []
