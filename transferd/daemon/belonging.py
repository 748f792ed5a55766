"""Who is a part of a registered engine, and who may only control it (docs/adr/0068). Pure decisions; engines.py acts.

A registration has a token, which the registering client chose at random. Clients that show it belong to the engine:
they get `ready`, push tasks, offer and attach memory. A name alone proves nothing, since two engines may be configured
with the same one. Operators have no token, but the rights of a user: a process of the user who registered the engine,
of the daemon's user or of root may control it.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from transferd.errors import RequestError
from transferd.tasks import ErrorInfo

NOT_THIS_ENGINE = "not_this_engine"


def digest(token: str) -> str:
    """Stands for a registration in reports and logs, which must not contain its token; "" for ""."""
    return hashlib.sha256(f"transferd registration {token}".encode()).hexdigest()[:12] if token else ""


def shows(token: str, shown: str) -> bool:
    """Whether `shown` is the token, in a time that does not depend on where they differ."""
    return hmac.compare_digest(token.encode(), shown.encode())


def refusal(name: str, token: str, owner: int | None, shown: str, uid: int | None) -> ErrorInfo | None:
    """Why a client of the user `uid` that has shown `shown` does not belong to the engine; None if it does.

    token, owner: of the engine's registration; owner is the user id, None for a client of tcp, which has no user. So
        no client of tcp belongs to an engine that was registered over ipc, and no client of ipc to one of tcp.
    """
    if owner != uid:
        whose = "a client of a tcp:// endpoint" if owner is None else f"the user {owner}"
        return ErrorInfo("not_yours", f"the engine {name!r} belongs to {whose}")
    if shows(token, shown):
        return None
    said = f"shows the token of registration {digest(shown)}" if shown else "shows no token"
    what = f"the engine {name!r} is another one: it is registration {digest(token)}, and this client {said}"
    return ErrorInfo(NOT_THIS_ENGINE, f"{what}; pass the token that `register` returned, or take another name")


def check_operator(uid: int | None, what: str) -> None:
    """Raise RequestError unless this is the daemon's user or root. what: what only they may do."""
    if not is_operator(uid):
        raise RequestError(f"only the daemon's user and root may {what}", code="not_yours")


def may_control(owner: int | None, uid: int | None) -> bool:
    """Whether a process of the user `uid` may control an engine of the user `owner` without its token."""
    return owner is not None and uid in (owner, os.geteuid(), 0)


def is_operator(uid: int | None) -> bool:
    """Whether a process of the user `uid` may change what all engines have stored: the daemon's user, and root."""
    return uid in (os.geteuid(), 0)
