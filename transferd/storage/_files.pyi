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
def get_file(path: str, data: memoryview, flags: int, /) -> float | None: ...
