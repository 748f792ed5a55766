from collections.abc import Sequence

def put_file(
    spare: str | None,
    temporary: str,
    path: str,
    data: memoryview,
    direct: int,
    flags: int,
    mode: int,
    allocates: bool,
    syncs: bool,
    /,
) -> tuple[int, int]: ...
def load_file(
    path: str, data: memoryview, flags: int, maps: bool, fetched: bool, wanted: tuple[int, int, int], /
) -> tuple[float, memoryview | None, int] | None: ...
def load_warm(path: str, pieces: Sequence[memoryview], flags: int, end: int) -> tuple[int, bytes] | None: ...
def unmap(mapping: int, /) -> bool: ...
def forget_files() -> None: ...
def catch_bus_errors() -> None: ...
