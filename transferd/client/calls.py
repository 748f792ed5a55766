"""What groups a client's calls: `client.store`, `client.cache`, `client.control`, `client.reports` (docs/adr/0117).

A group is a class of calls that the client inherits, so each call has one definition and one name: `client.match` and
`client.store.match` are the same. A GroupClient inherits some of these classes and asks all nodes; a SyncClient has
their blocking forms.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast, overload

from transferd.runtime.compat import Self
from transferd.tasks import Task, TaskResult
from transferd.wire import protocol as wire

T = TypeVar("T")
CONTROL_TIMEOUT_S = 30.0  # for a request that the daemon can answer at once
# Calls without a blocking form: SyncClient.start is that of `insist`, and the client's own parts use the others.
ASYNCIO_ONLY = frozenset({"insist", "withdraw"})


class Calls:
    """What a group's calls are made of. The client defines it."""

    async def _ask(self, body: wire.ControlRequest, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        """Send one request and wait for its value. Raises what control requests raise (Client)."""
        raise NotImplementedError

    async def wait_ready(self, timeout: float | None = None) -> None:
        raise NotImplementedError

    async def submit(self, task: Task) -> TaskResult:
        raise NotImplementedError

    async def cancel(self, task_id: str) -> bool:
        raise NotImplementedError


class CallGroup(Generic[T]):
    """An attribute of a client: its calls that the class `calls` defines, and only these."""

    def __init__(self, calls: type[T]) -> None:
        self.__doc__ = calls.__doc__
        own = {name for base in calls.__mro__ if base not in (Calls, object) for name in vars(base)}
        self.names = sorted(name for name in own if not name.startswith("_"))

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: object, owner: type) -> T: ...
    def __get__(self, client: object | None, owner: type) -> Self | T:
        return self if client is None else cast("T", _Grouped(client, self))


class _Grouped:
    """A group of one client."""

    __slots__ = ("_client", "_group")

    def __init__(self, client: object, group: CallGroup[Any]) -> None:
        self._client, self._group = client, group

    def __getattr__(self, name: str) -> Any:
        if name not in self._group.names:
            where = f"{type(self._client).__name__}.{self._group.name}"
            raise AttributeError(f"{where} has no {name!r}; it has {', '.join(self._group.names)}")
        return getattr(self._client, name)

    def __dir__(self) -> list[str]:
        return self._group.names
