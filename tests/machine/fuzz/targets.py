"""What a fuzzer calls with any bytes at all: each target raises only if a promise was broken.

The same functions run under hypothesis (test_targets.py) and atheris (run.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from tests.machine.fuzz.frames import corpus
from tests.support.dispatch import limits
from transferd.blocks.formats import FOOTER_BYTES, Inspection, NotSealed, stamp_of_name
from transferd.blocks.layout import build_layout
from transferd.config import Config, from_tree, load, to_tree
from transferd.config.toml import to_toml
from transferd.control.admission import check_task, content_hash
from transferd.errors import ConfigError, ProtocolError, RequestError
from transferd.runtime.compat import tomllib
from transferd.storage.paths import name_of, path_of
from transferd.storage.peer import messages as peer_wire
from transferd.tasks import ErrorInfo, Task
from transferd.wire import protocol as wire
from transferd.wire.zmtp import COMMAND, Frames, Null, ZmtpError, command, greeting, header, properties

_LIMITS = limits()
_MAX = 64 * 1024


def request(data: bytes) -> None:
    """A request is read, or refused as Malformed with a seq that fits the wire; what was read can be written."""
    read = _read(data)
    if isinstance(read, wire.Malformed):
        assert 0 <= read.seq < 2**63
        wire.encode_reply(read.seq, wire.Refused(ErrorInfo(read.reason, str(read))))
        return
    written = _write(read)
    assert _write(wire.decode_request(written)) == written
    if isinstance(read.body, Task):
        with contextlib.suppress(RequestError):
            check_task(read.body, _LIMITS)
            read.body.footprint()
        content_hash(read.body)


def _read(data: bytes) -> wire.Request | wire.Malformed:
    try:
        return wire.decode_request(data, _MAX)
    except wire.Malformed as refusal:
        return refusal


def _write(request: wire.Request) -> bytes:
    return wire.encode_request(request.seq, request.body, ack=request.ack, session=request.session)


def reply(data: bytes) -> None:
    """A reply is read or Malformed."""
    with contextlib.suppress(wire.Malformed):
        wire.decode_reply(data)


def peer(data: bytes) -> None:
    """A message of another daemon is read or refused."""
    with contextlib.suppress(ProtocolError):
        peer_wire.decode(data)


def config(data: bytes) -> None:
    """A configuration is accepted or refused with one line; what was accepted can be printed and read again."""
    try:
        tree = tomllib.loads(data.decode("utf-8", "replace"))
    except (tomllib.TOMLDecodeError, RecursionError):
        return
    accepted = _accepted(lambda: from_tree(tree))
    if accepted is not None:
        assert to_tree(from_tree(tomllib.loads(to_toml(to_tree(accepted))))) == to_tree(accepted)
        if accepted.cache is not None:
            with contextlib.suppress(ConfigError):
                build_layout(accepted.cache)


def override(data: bytes) -> None:
    """So it is with a text of --set or of the environment."""
    text = data.decode("utf-8", "replace")
    _accepted(lambda: load(None, overrides=[text], env={}))
    key, _, value = text.partition("=")
    _accepted(lambda: load(None, env={f"TRANSFERD_{key}": value}))


def _accepted(make: Callable[[], Config]) -> Config | None:
    try:
        return make()
    except ConfigError as error:
        told = str(error)
    assert told.isprintable(), "a mistake is one line"
    return None


def stored(data: bytes) -> None:
    """No stored bytes but the right ones pass for an object."""
    name = f"m/f/g/{'ab' * 20}/0"
    inspection = Inspection(stamp_of_name(name), len(data))
    if inspection.footer(data[max(0, len(data) - FOOTER_BYTES) :]) is None:
        inspection.payload(memoryview(data)[:-FOOTER_BYTES])
        assert inspection.damage() is not None, "a fuzzer found a preimage, or there is no check"


def path(data: bytes) -> None:
    """A path is a name's, or nobody's; whose it is has no other."""
    text = data.decode("utf-8", "replace")
    name = name_of(text)
    if name is not None:
        assert path_of(name) == text
        with contextlib.suppress(NotSealed):
            stamp_of_name(name)


def zmtp(data: bytes) -> None:
    """What a peer sends is a greeting, commands and frames, or breaks the protocol. The first byte cuts it in two."""
    frames, null = Frames(4096), Null(b"ROUTER", frozenset((b"DEALER",)), "")
    cut, greeted = (data[0] if data else 0), False
    with contextlib.suppress(ZmtpError):
        for piece in (data[1:cut], data[max(1, cut) :]):
            if frames.space is None:
                frames.feed(piece)
            else:
                count = min(len(frames.space), len(piece))
                frames.space[:count] = piece[:count]
                frames.filled(count)
            if not (greeted := greeted or frames.greeting(b"NULL")):
                continue
            while (frame := frames.next()) is not None:
                assert len(frame[1]) <= 4096
                if frame[0] & COMMAND and not null.done:
                    null.receive(bytes(frame[1]))
            if frames.wanted:
                frames.begin()


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (request, reply, peer, config, override, stored, path, zmtp)
}


def seeds(target: str) -> list[bytes]:
    """Inputs to begin with."""
    if target == "request":
        return corpus()
    if target == "reply":
        return [
            wire.encode_reply(1, body)
            for body in (
                wire.Accepted(),
                wire.TaskProgress(2),
                wire.Value({"a": [1]}),
                wire.Refused(ErrorInfo("a", "b")),
            )
        ]
    if target == "peer":
        slot, error = peer_wire.PostedSlot("name", 4096, 128), ErrorInfo("code", "what")
        messages: list[peer_wire.PeerMessage] = [
            peer_wire.Want("t", 0, 1, names=["name"], engine="host:1"),
            peer_wire.Post("t", 0, 1, slots=[slot]),
            peer_wire.Landed("t", 0, 1, names=["name"], error=error),
            peer_wire.Withdraw("t", 0, 1, error=error),
            peer_wire.Done("t", 0, 1),
        ]
        return [peer_wire.encode(message)[4:] for message in messages]
    if target == "config":
        whole = to_toml(to_tree(from_tree({"cache": {}}))).encode()
        return [whole, b'[cache]\nattention = "mla"\n', b"[storage.file]\n"]
    if target == "override":
        return [b"server.endpoint=ipc:///x", b"CACHE__RANKS=3", b"host.staging='1MiB'", b"cache.devices=[0,1]"]
    if target == "zmtp":
        ready = command(b"READY", properties({b"Socket-Type": b"DEALER", b"Identity": b"me"}))
        good = greeting(b"NULL", as_server=False) + header(COMMAND, len(ready)) + ready + header(0, 3) + b"abc"
        return [b"\0" + good, b"\x46" + good, b"\x80" + good + header(0, 3000) + bytes(3000)]
    if target == "path":
        return [path_of(f"m/f/g/{'ab' * 20}/0").encode()]
    return [bytes(FOOTER_BYTES), b"tfdblock" * 40]
