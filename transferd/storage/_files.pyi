def put_file(
    temporary: str,
    path: str,
    data: memoryview,
    direct: int,
    flags: int,
    mode: int,
    is_new: bool,
    allocates: bool,
    syncs: bool,
    /,
) -> tuple[int, int]: ...
def get_file(path: str, data: memoryview, flags: int, /) -> float | None: ...
