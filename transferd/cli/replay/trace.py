"""Request traces in Mooncake's format, and a generated workload for use without a trace.

A trace is JSON lines: timestamp (ms), input_length and output_length (tokens), and hash_ids, one id for each block
of the input. Equal ids mean equal blocks *with equal prefixes*: an id names the whole chain up to its block
(Mooncake, FAST'25).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec

from transferd.config.environment import open_regular
from transferd.errors import RequestError
from transferd.tasks import TRACE_BLOCK_TOKENS

_Id = Annotated[int, msgspec.Meta(ge=0)]


class TraceRequest(msgspec.Struct, frozen=True):
    """One request: its arrival (ms since the start of the trace) and its prefix blocks."""

    hash_ids: tuple[_Id, ...]
    timestamp: float = 0.0
    input_length: int = 0
    output_length: int = 0


SHELLS_PIPES = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_decoder = msgspec.json.Decoder(TraceRequest)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace file. Reads no further line.

    Raises RequestError for an unreadable file, for a line that is not a request (with its number), and for a trace
    without requests.
    """
    try:
        # The pipe of a shell's <(zcat trace.gz) already has a writer, so this does not block.
        with open(path, "rb") if str(path).startswith(SHELLS_PIPES) else open_regular(path) as lines:
            requests = list(islice(parse_trace(lines, str(path)), limit))
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", error)
        raise RequestError(f"{path}: cannot be read: {problem}", code="bad_trace") from error
    if not requests:
        raise RequestError(f"{path}: the trace contains no requests", code="bad_trace")
    return requests


def parse_trace(lines: Iterable[bytes], name: str) -> Iterator[TraceRequest]:
    """Yield a request per line. Raises RequestError, with `name` and the line number."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{name}:{number}: not a trace line: {error}", code="bad_trace") from error


def generated_workload(seed: int, requests: int) -> list[TraceRequest]:
    """Conversations of several turns over a few shared system prompts, interleaved.

    Each turn repeats the conversation so far and adds to it, so a prefix cache helps.
    """
    rng = random.Random(seed)
    fresh = iter(range(1, 10**9))
    systems = [[next(fresh) for _ in range(rng.randint(2, 5))] for _ in range(3)]
    conversations = [list(rng.choice(systems)) for _ in range(max(1, requests // 4))]
    workload: list[TraceRequest] = []
    for number in range(requests):
        conversation = rng.choice(conversations)
        conversation.extend(next(fresh) for _ in range(rng.randint(1, 4)))
        workload.append(
            TraceRequest(
                hash_ids=tuple(conversation),
                timestamp=number * 10.0,
                input_length=len(conversation) * TRACE_BLOCK_TOKENS,
                output_length=TRACE_BLOCK_TOKENS // 2,
            )
        )
    return workload
