"""The page at `/` of the metrics port, a single file, and what it polls.

The content security policy allows the page's own script and style by their hashes, and nothing else. So a name that
a client chose can only ever be shown as text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from transferd.errors import RequestError
from transferd.observability.http import Page

FILE = Path(__file__).with_name("page.html")
ROWS = 300  # tasks per poll: enough for the timeline's ten seconds at 30 tasks a second


@functools.cache
def front_page() -> Page:
    text = FILE.read_text(encoding="utf-8")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(text, 'script')}",
            f"style-src {_hash(text, 'style')}",
            *("connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        ]
    )
    headers = (
        ("content-security-policy", policy),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
    )
    return Page(text.encode(), "text/html; charset=utf-8", headers=headers)


def _hash(text: str, tag: str) -> str:
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


def as_json(value: Any) -> Page:
    headers = (("x-content-type-options", "nosniff"),)
    return Page(json.dumps(value, default=str).encode() + b"\n", "application/json", headers=headers)


def story_page(explain: Callable[[str, str], dict[str, Any]], query: str) -> Page:
    """The story of the task in `task=…` of `engine=…` ("": that of [cache]); 404 with the reason if there is none."""
    try:
        asked = parse_qs(query, max_num_fields=4)
        task_id, engine = (asked.get(key, [""])[0] for key in ("task", "engine"))
        if not task_id:
            return Page(b"expected ?task=ID&engine=NAME\n", status=404)
        return as_json(explain(task_id, engine))
    except (RequestError, ValueError) as error:  # ValueError: more fields than that
        return Page(f"{error}\n".encode(errors="replace"), status=404)
