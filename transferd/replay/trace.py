"""Request traces in Mooncake's format, and a generated workload for where there is none.

A trace is JSON lines: timestamp (ms), input_length and output_length (tokens), hash_ids: one id for
each block of the input. Equal ids mean equal blocks *with equal prefixes*: an id already names the
whole chain up to it (Mooncake, FAST'25).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transferd.errors import RequestError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it came (ms since the start of the trace) and which prefix blocks it has."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` requests of a trace file. Raises RequestError naming the line that is wrong."""
    try:
        with path.open(encoding="utf-8") as lines:
            return list(islice(_parse(path, lines), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read: {error}", code="bad_trace") from error


def _parse(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            ids = tuple(int(i) for i in item["hash_ids"])
            yield TraceRequest(
                float(item.get("timestamp", 0)),
                int(item.get("input_length", 0)),
                int(item.get("output_length", 0)),
                ids,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{path}:{number}: not a trace line: {error!r}", code="bad_trace") from error


def generated_workload(seed: int, requests: int) -> list[TraceRequest]:
    """Conversations of several turns over a few shared system prompts, interleaved.

    Each turn repeats the conversation so far and adds to it, which is what makes prefix caches pay.
    """
    rng = random.Random(seed)
    fresh = iter(range(1, 10**9))
    systems = [[next(fresh) for _ in range(rng.randint(2, 5))] for _ in range(3)]
    conversations = [list(rng.choice(systems)) for _ in range(max(1, requests // 4))]
    workload: list[TraceRequest] = []
    for number in range(requests):
        conversation = rng.choice(conversations)
        conversation.extend(next(fresh) for _ in range(rng.randint(1, 4)))
        workload.append(TraceRequest(number * 10.0, len(conversation) * 512, 256, tuple(conversation)))
    return workload
