"""Plays requests over two nodes: decode must get what prefill computed, byte for byte.

Each request takes the steps that it takes in production: the prefill engine fills its blocks and calls `write_all`;
the decode engine poisons its own blocks, calls `read_all` and compares. In storage mode the second engine follows the
first; in direct mode both run at the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.report import percentiles_ms
from transferd.cli.replay.trace import TraceRequest
from transferd.client.client import Client
from transferd.errors import HandoverFailed
from transferd.tasks import TRACE_BLOCK_TOKENS, TaskResult

TIMEOUT_S = 30.0
MOST_LISTED = 5  # the most errors that a report lists; it counts all


@dataclass(slots=True)
class PdDemoReport:
    """The figures of one mode."""

    mode: str
    network: str
    requests: int = 0
    blocks: int = 0  # blocks handed over, each on every rank
    incomplete_blocks: int = 0  # how many of these were incomplete
    bytes: int = 0  # on all ranks together
    verify_failures: int = 0
    failures: int = 0  # requests that were not handed over
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return self.requests > 0 and not self.verify_failures and not self.failures

    def error(self, text: str) -> None:
        if len(self.errors) < MOST_LISTED:
            self.errors.append(text)

    def tree(self) -> dict[str, Any]:
        names = ("mode", "network", "requests", "blocks", "incomplete_blocks", "bytes", "verify_failures", "failures")
        counts = {name: getattr(self, name) for name in (*names, "seconds", "errors")}
        latency = {"write_all": percentiles_ms(self.write_s), "read_all": percentiles_ms(self.read_s)}
        return counts | {"latency_ms": latency}


@dataclass(slots=True)
class Side:
    """One engine: its client, its device memory, and which of its blocks are free."""

    client: Client
    data: KvData
    free: list[int]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's tokens, and what each of its blocks must contain."""

    request_id: str
    tokens: list[int]
    contents: list[int]
    incomplete: bool


def prompts(requests: Sequence[TraceRequest], block_size: int, most: int) -> list[Prompt]:
    """Turn requests into tokens, block by block as in the trace, the last one as full as there; at most `most`."""
    made = []
    for number, request in enumerate(requests):
        ids = request.hash_ids[:most]
        tokens = [hash_id * block_size + i for hash_id in ids for i in range(block_size)]
        last = (request.input_length % TRACE_BLOCK_TOKENS) * block_size // TRACE_BLOCK_TOKENS
        incomplete = last > 0 and len(ids) == len(request.hash_ids)
        contents = [2 * hash_id for hash_id in ids]
        if incomplete:
            del tokens[len(tokens) - block_size + last :]
            contents[-1] += 1  # with fewer tokens it is a different block
        if tokens:
            made.append(Prompt(f"request-{number}", tokens, contents, incomplete))
    return made


class PdDemo:
    """Plays sequences over two sides. Each running sequence has blocks of its own."""

    def __init__(self, prefill: Side, decode: Side, report: PdDemoReport) -> None:
        self._prefill = prefill
        self._decode = decode
        self._report = report

    async def play(self, todo: Sequence[Prompt], concurrency: int) -> None:
        """Play all sequences, `concurrency` at a time."""
        left = iter(todo)
        before = time.monotonic()

        async def player() -> None:
            for sequence in left:
                await self._hand_over(sequence)
                self._report.requests += 1

        await asyncio.gather(*(player() for _ in range(concurrency)))
        self._report.seconds = time.monotonic() - before

    async def _hand_over(self, sequence: Prompt) -> None:
        count = len(sequence.contents)
        source, target = ([side.free.pop() for _ in range(count)] for side in (self._prefill, self._decode))
        try:
            for block, content in zip(source, sequence.contents, strict=True):
                self._prefill.data.fill(block, content)
            self._decode.data.poison(target)
            writing = asyncio.ensure_future(self._write(sequence, source))
            if self._report.mode == "storage":
                await asyncio.wait([writing])
            reading = asyncio.ensure_future(self._read(sequence, target))
            results = await asyncio.gather(writing, reading, return_exceptions=True)
            for result in results:
                if isinstance(result, HandoverFailed):
                    self._report.error(f"{sequence.request_id}: {result}")
                elif isinstance(result, BaseException):
                    raise result
            if any(isinstance(result, BaseException) for result in results):
                self._report.failures += 1
                return
            self._compare(sequence, target)
        finally:
            self._prefill.free += source
            self._decode.free += target

    async def _write(self, sequence: Prompt, blocks: list[int]) -> TaskResult:
        before = time.monotonic()
        result = await self._prefill.client.write_all(
            sequence.request_id, sequence.tokens, blocks, timeout=TIMEOUT_S, settled=True
        )
        self._report.write_s.append(time.monotonic() - before)
        return result

    async def _read(self, sequence: Prompt, blocks: list[int]) -> TaskResult:
        before = time.monotonic()
        result = await self._decode.client.read_all(
            sequence.request_id,
            sequence.tokens,
            blocks,
            peer=self._prefill.client.pd_address,
            timeout=TIMEOUT_S,
            settled=True,
        )
        self._report.read_s.append(time.monotonic() - before)
        self._report.bytes += result.bytes
        return result

    def _compare(self, sequence: Prompt, target: list[int]) -> None:
        self._report.blocks += len(target)
        self._report.incomplete_blocks += sequence.incomplete
        for block, content in zip(target, sequence.contents, strict=True):
            mismatch = self._decode.data.verify(block, content)
            if mismatch is not None:
                self._report.verify_failures += 1
                self._report.error(f"{sequence.request_id}: {mismatch}")


def most_blocks(device_blocks: int, concurrency: int) -> int:
    """How many blocks a sequence may have so that `concurrency` sequences fit at the same time."""
    return device_blocks // concurrency
