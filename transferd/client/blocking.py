"""The blocking forms of a client's calls, made from them: the same names, parameters and docstrings, without `await`.

scripts/blocking_types.py writes blocking.pyi, which says the same to type checkers and editors; a test compares them.
"""

import functools
import inspect
from typing import Any

from transferd.client.calls import ASYNCIO_ONLY
from transferd.client.client import Client


def blocking(member: Any, name: str) -> Any:
    """The blocking form of a coroutine method, or a property that reads the client's; None of anything else."""
    if isinstance(member, property):
        return property(lambda self: getattr(self._client, name), doc=member.__doc__)
    if not inspect.iscoroutinefunction(member) or name in ASYNCIO_ONLY:
        return None

    @functools.wraps(member)
    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(member(self._client, *args, **kwargs))

    call.__qualname__ = f"SyncClient.{name}"
    return call


def _forms() -> type:
    members = {name: inspect.getattr_static(Client, name) for name in dir(Client) if not name.startswith("_")}
    forms = {name: form for name, member in members.items() if (form := blocking(member, name)) is not None}
    return type("BlockingClient", (), forms)


BlockingClient = _forms()
