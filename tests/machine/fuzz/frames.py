"""Messages as an attacker makes them: noise, damaged ones, and well-formed ones with nonsense inside."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from tests.support.bodies import BODIES, least
from transferd.tasks import ReadStorageTask, SwapInTask, SwapOutTask, Task, TokenIds, WriteStorageTask
from transferd.wire import protocol as wire

# Blocks that hostile tasks may touch. Honest clients use those below: a task of a stranger on one's own
# blocks is not malformed, and nobody promises anything about it.
HOSTILE_BLOCKS = range(32, 48)
KEYS = [f"hostile {i}" for i in range(32)]
# What any client may ask and what would keep all others from being served.
NEVER = (wire.Pause, wire.Drain, wire.SetGeneration, wire.ClearCache, wire.RestoreCache, wire.Unregister)

_VERSION = bytes([wire.PROTOCOL_VERSION])
_JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, float("nan"), float("inf"), -0.0),
    *("", "\x00", "a" * 2000, "../../etc/passwd", "é\U0001f4a3", b"", b"4", b"8\x00", b"\xff" * 100),
    *([], {}, [[]] * 3, {"": ""}, {"type": "write"}, [None] * 50, {1: 2}),
)
# Bytes that announce more than there is, nest without end, or are no text.
_TRAPS = (
    b"",
    b"\x00",
    b"\x02\x93\x01\xc2\x80",
    _VERSION,
    _VERSION + b"\x91" * 5000,
    _VERSION + b"\x93\x01\xc2" + b"\x81\xa1a" * 5000,
    _VERSION + b"\xdd\xff\xff\xff\xff",
    _VERSION + b"\x93\x01\xc2\xdf\xff\xff\xff\xff",
    _VERSION + b"\x93\x01\xc2\x81\xa4type\xdb\xff\xff\xff\xff",
    _VERSION + b"\x93\x01\xc2\x81\xa4type\xc6\xff\xff\xff\xff",
    _VERSION + b"\x93\x01\xc2\x82\xa4type\xa5write\xa7task_id\xa2\xff\xfe",
    _VERSION + b"\x93\xc1\xc1\xc1",
    _VERSION + b"\x93\x01\xc2\xc7\xff\x05" + bytes(300),
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00",
)


def corpus() -> list[bytes]:
    """One good message of every kind."""
    blocks, tokens = list(HOSTILE_BLOCKS[:4]), TokenIds(range(256))
    bodies: list[wire.Body] = [
        WriteStorageTask(task_id="w", keys=KEYS[:4], gpu_block_ids=blocks, token_ids=tokens, timeout=1.0),
        ReadStorageTask(task_id="r", keys=KEYS[:4], gpu_block_ids=blocks, timeout=0.5),
        ReadStorageTask(task_id="rp", keys=KEYS[:4], gpu_block_ids=blocks, timeout=0.5, by_parts=True),
        WriteStorageTask(task_id="wh", keys=KEYS[:4], cpu_block_ids=blocks, timeout=1.0),
        ReadStorageTask(task_id="rh", keys=KEYS[:4], cpu_block_ids=blocks, timeout=0.5),
        SwapOutTask(task_id="o", gpu_block_ids=blocks, cpu_block_ids=blocks, swap_node_ids=(1, "two")),
        SwapInTask(task_id="i", gpu_block_ids=blocks, cpu_block_ids=blocks),
        wire.Hello(),
        wire.Bye(),
        wire.Cancel("w"),
        wire.Settled("w", 9),
        wire.Match(KEYS),
        wire.Exists(KEYS),
        wire.Resume("me", "proof"),
        wire.ClosedGenerations(["an earlier one"]),
        wire.Purge(["k"], "model", "generation", "engine", 3600.0, dry_run=True),
        wire.Pin(["k", "l"], 60.0),
        wire.Unpin(["k"]),
        wire.Prefetch("p", ["k"], "memory", 0.5),
        wire.Prefetch("p", ["k"] * 9, "attic", 1e8),
        wire.Warm(2**62, "memory", "model"),
        wire.ChangeLevel("attic", leaves=True),
        wire.MakeCopies(leaves=False),
        wire.RestartCheck(),
        wire.Why("k"),
        wire.Record(5),
        wire.Stats(),
        wire.Attach(0),
        wire.Attach(-1),
        WriteStorageTask(task_id="s", keys=KEYS[:4], gpu_block_ids=blocks, token_ids=tokens, salt="tenant"),
        ReadStorageTask(task_id="t", keys=KEYS[:4], gpu_block_ids=blocks, token_ids=tokens, salt="é" * 2000),
        wire.Match(token_ids=tokens, salt="tenant"),
        wire.Locate(tokens, "tenant"),
        wire.Locate(keys=["a", "b"]),
    ]
    bodies += [least(kind) for kind in BODIES if not any(type(body) is kind for body in bodies)]
    return [wire.encode_request(seq, body, ack=bool(seq % 2)) for seq, body in enumerate(bodies, start=1)]


class Frames:
    """Draws messages from a seed. `kinds` says what has been drawn; `passed`, how many of them are requests."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.passed = 0
        self._corpus = corpus()
        self._makers: tuple[Callable[[], bytes], ...] = (
            *(self._noise, self._trap, self._cut, self._splice, self._good),
            *(self._bytes, self._bytes, self._tree, self._tree, self._tree),
        )

    def draw(self) -> bytes:
        """A message that no honest client can be hurt by."""
        while True:
            frame = self.chance.choice(self._makers)()
            if self._harmless(frame):
                return frame

    def _harmless(self, frame: bytes) -> bool:
        try:
            body = wire.decode_request(frame).body
        except wire.Malformed:
            return True
        if isinstance(body, NEVER) or (isinstance(body, Task) and not self._on_own_blocks(body)):
            return False
        self.passed += 1
        return True

    @staticmethod
    def _on_own_blocks(task: Task) -> bool:
        ids = [*task.gpu_block_ids, *(getattr(task, "cpu_block_ids", ()) or ())]
        return all(block in HOSTILE_BLOCKS for block in ids)

    # --- kinds --------------------------------------------------------------------------------------

    def _noise(self) -> bytes:
        return self.chance.choice((b"", _VERSION)) + self.chance.randbytes(self.chance.randrange(120))

    def _trap(self) -> bytes:
        return self.chance.choice(_TRAPS)

    def _good(self) -> bytes:
        """A good message under a name that nobody has used."""
        tree = msgspec.msgpack.decode(self.chance.choice(self._corpus)[1:])
        tree[0] = self.chance.getrandbits(40)
        if "task_id" in tree[2]:
            tree[2]["task_id"] = f"hostile-{self.chance.getrandbits(40)}"
        return _VERSION + msgspec.msgpack.encode(tree)

    def _cut(self) -> bytes:
        frame = self.chance.choice(self._corpus)
        return frame[: self.chance.randrange(len(frame))]

    def _splice(self) -> bytes:
        one, other = self.chance.choice(self._corpus), self.chance.choice(self._corpus)
        return one[: self.chance.randrange(len(one))] + other[self.chance.randrange(len(other)) :]

    def _bytes(self) -> bytes:
        """A few bytes changed, added or taken out."""
        frame = bytearray(self.chance.choice(self._corpus))
        for _ in range(self.chance.choice((1, 1, 2, 8))):
            place = self.chance.randrange(len(frame) or 1)
            match self.chance.randrange(3):
                case 0 if frame:
                    frame[place] = self.chance.randrange(256)
                case 1:
                    frame.insert(place, self.chance.randrange(256))
                case _:
                    del frame[place : place + 1]
        return bytes(frame)

    def _tree(self) -> bytes:
        """Well-formed, with one value replaced, removed or doubled."""
        tree = msgspec.msgpack.decode(self.chance.choice(self._corpus)[1:])
        self._disturb(tree)
        try:
            return _VERSION + msgspec.msgpack.encode(tree)
        except (TypeError, ValueError, OverflowError):
            return _VERSION

    def _disturb(self, tree: Any) -> None:
        places = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not places:
            return
        place = self.chance.choice(places)
        value = tree[place]
        if isinstance(value, dict | list) and value and self.chance.random() < 0.8:
            self._disturb(value)
        elif self.chance.random() < 0.2:
            del tree[place]
        elif isinstance(tree, list) and self.chance.random() < 0.3:
            tree[place:place] = [value] * self.chance.choice((1, 1000))
        else:
            tree[place] = self.chance.choice(_JUNK)
