from collections.abc import Callable, Sequence
from typing import Any

def prepared_store(
    orders: list[tuple[str, memoryview | None, int, int, str, str | None]],
    slots: list[memoryview],
    nbytes: int,
    run: int,
    lent: Any,
    fill: Callable[[int, memoryview, bool], bool] | None,
    near: bool,
    flags: int,
    mode: int,
    directory_mode: int,
    allocates: bool,
    syncs: bool,
    lock: str,
    device: int,
    inode: int,
    /,
) -> Any: ...
def prepared_load(
    orders: list[tuple[str, memoryview | None, int, int]],
    slots: list[memoryview],
    nbytes: int,
    run: int,
    lent: Any,
    take: Callable[[int, memoryview], bool] | None,
    busy: bytes | bytearray,
    flags: int,
    wanted: tuple[int, int, int],
    /,
) -> Any: ...
def answers(native: Any, /) -> list[int]: ...
def load_warm(orders: list[tuple[str, Sequence[memoryview], bytes]], flags: int, /) -> list[bool]: ...
def warm_readers(threads: int, /) -> Any: ...
def begin_warm(
    readers: Any, orders: list[tuple[str, Sequence[memoryview], bytes]], flags: int, ended: Callable[..., object], /
) -> None: ...
def finished_warm(readers: Any, /) -> list[tuple[Callable[..., object], list[bool]]]: ...
def end_warm(readers: Any, /) -> None: ...
def catch_bus_errors() -> None: ...
