"""The blocking forms of a client's calls, made from them: the same names, parameters and docstrings, without `await`.

scripts/blocking_types.py writes blocking.pyi, which says the same to type checkers and editors; a test compares them.
"""

import functools
import inspect
from typing import Any

from transferd.client.cache import CacheCalls
from transferd.client.calls import ASYNCIO_ONLY
from transferd.client.client import Client
from transferd.client.engines import ControlCalls
from transferd.client.reports import ReportCalls
from transferd.client.store import StoreCalls


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


def _forms(calls: type, *bases: type) -> type:
    own = {name: member for name, member in vars(calls).items() if not name.startswith("_")}
    forms = {name: form for name, member in own.items() if (form := blocking(member, name)) is not None}
    return type(f"Blocking{calls.__name__}", bases, {"__doc__": calls.__doc__, **forms})


BlockingStore = _forms(StoreCalls)
BlockingCache = _forms(CacheCalls)
BlockingControl = _forms(ControlCalls)
BlockingReports = _forms(ReportCalls)
BlockingClient = _forms(Client, BlockingStore, BlockingCache, BlockingControl, BlockingReports)
