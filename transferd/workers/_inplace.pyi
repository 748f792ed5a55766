import numpy as np
import numpy.typing as npt

def new_state(ends: tuple[int, ...], /) -> bytearray: ...
def checksums(state: bytearray, /) -> tuple[int, ...]: ...
def collect(
    target: memoryview,
    offset: int,
    address: int,
    parts: npt.NDArray[np.int64],
    block: int,
    state: bytearray,
    kept: bool,
    /,
) -> None: ...
def copy_memory(
    source: memoryview, offset: int, address: int, parts: npt.NDArray[np.int64], block: int, state: bytearray, /
) -> int: ...
