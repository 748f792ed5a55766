"""The page at `/` of the metrics port, a single file, and the data that it polls.

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
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from transferd.errors import RequestError
from transferd.observability.http import Page

FILE = Path(__file__).with_name("page.html")
ROWS = 300  # tasks per poll: enough for the timeline's ten seconds at 30 tasks a second
LISTED = 25  # of the slow or failed ones


class PageParts(NamedTuple):
    """The page's sources besides the report. Each takes an engine's name, or "" for all engines."""

    timeline: Callable[[int, str], list[dict[str, Any]]]  # the running and the newest tasks; at most so many
    tasks: Callable[[str, int, str], list[dict[str, Any]]]  # "slow" or "failed"; at most so many
    history: Callable[[str], dict[str, list[Any]]]


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


def live_page(shown: dict[str, Any], live: PageParts, query: str) -> Page:
    """The data that the page polls.

    query: `engine=NAME` for one engine's tasks, `show=slow` or `failed` for a list of those.
    shown: the part that does not depend on the query.
    """
    engine, show = _asked(query, "engine", "show")
    if show not in ("", "slow", "failed"):
        return Page(b"expected show=slow or show=failed\n", status=404)
    listed = live.tasks(show, LISTED, engine) if show else None
    return as_json(shown | {"tasks": live.timeline(ROWS, engine), "listed": listed, "history": live.history(engine)})


def story_page(explain: Callable[[str, str], dict[str, Any]], query: str) -> Page:
    """The story of the task in `task=…` of `engine=…` ("" for that of [cache]); 404 with a reason if there is none."""
    task_id, engine = _asked(query, "task", "engine")
    if not task_id:
        return Page(b"expected ?task=ID&engine=NAME\n", status=404)
    try:
        return as_json(explain(task_id, engine))
    except RequestError as error:
        return Page(f"{error}\n".encode(errors="replace"), status=404)


def _asked(query: str, *names: str) -> list[str]:
    """The values of a query; "" for what it lacks. A query of more fields asks for nothing."""
    fields = dict(parse_qsl(query)) if query.count("&") < len(names) else {}
    return [fields.get(name, "") for name in names]
