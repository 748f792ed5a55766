"""Facts about a model that change the bytes of its KV blocks, and their digest, which is part of every object's name.

A fact is a name in plain words and a value: {"rope theta": 10000.0, "weights": "/models/a, 14 files, 3f0c…"}. Engines
share blocks only if all of their facts agree. The digest is SHA-256 over `transferd facts v1`, a zero byte, and the
facts as JSON: names sorted, no blanks, ASCII; its first 24 hex digits. Their order does not matter, everything else
does: 1, 1.0, "1" and true are four values. An engine without facts has no digest, and its objects keep the names that
they had before there were facts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

MOST_FACTS = 64
MOST_NAME = 64  # characters
MOST_BYTES = 16 * 1024  # of all facts as JSON
SHOWN = 120  # characters of a value in a difference

Facts = Mapping[str, Any]  # values: text, numbers, booleans, and lists of these

_VERSION = b"transferd facts v1\0"


def digest(facts: Facts) -> str:
    """24 hex digits; "" if there are no facts."""
    return hashlib.sha256(_VERSION + canonical(facts)).hexdigest()[:24] if facts else ""


def canonical(facts: Facts) -> bytes:
    """The facts in the digest's form."""
    return json.dumps(dict(facts), sort_keys=True, separators=(",", ":")).encode("ascii")


def refusal(facts: Facts) -> str:
    """Why these facts cannot be used; "" if they can."""
    if len(facts) > MOST_FACTS:
        return f"has {len(facts)} facts, at most {MOST_FACTS} are possible"
    for name, value in facts.items():
        if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
            return f"names a fact {name!r:.80}: a name is text of 1 to {MOST_NAME} characters"
        for item in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(item, str | bool | int | float):
                return f"{name!r} is {item!r:.80}: a fact is text, a number, a boolean, or a list of these"
            if isinstance(item, float) and not math.isfinite(item):
                return f"{name!r} is {item}: a number must be finite"
    size = len(canonical(facts))
    return "" if size <= MOST_BYTES else f"takes {size} bytes as JSON, at most {MOST_BYTES} are possible"


def differences(ours: Facts, theirs: Facts) -> list[str]:
    """The facts in which two engines differ, each in words: `rope theta 10000.0 / 1000000.0`. Empty if they agree."""
    return [
        f"{name} {_shown(ours, name)} / {_shown(theirs, name)}"
        for name in sorted({*ours, *theirs})
        if name not in ours or name not in theirs or canonical({"": ours[name]}) != canonical({"": theirs[name]})
    ]


def _shown(facts: Facts, name: str) -> str:
    if name not in facts:
        return "(none)"
    text = str(facts[name])
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
