import numpy as np
import numpy.typing as npt

def new_state(payload_bytes: int, /) -> bytearray: ...
def checksum(state: bytearray, /) -> int: ...
def read_file(
    fd: int, last: bool, offset: int, address: int, parts: npt.NDArray[np.int64], block: int, state: bytearray, /
) -> int: ...
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
def catch_bus_errors() -> None: ...
def open_file(path: str, flags: int, nbytes: int, end: int, /) -> tuple[int, int, bytes, float]: ...
def open_direct(
    path: str, flags: int, nbytes: int, end: int, slot: memoryview, first: int, /
) -> tuple[int, bytes, float]: ...
def load_direct(
    fd: int,
    last: bool,
    offset: int,
    slot: memoryview,
    ready: int,
    at_once: int,
    address: int,
    parts: npt.NDArray[np.int64],
    block: int,
    state: bytearray,
    loan: bytearray,
    /,
) -> int: ...
def end_loan(loan: bytearray, /) -> int: ...
def unmap(mapping: int, /) -> None: ...
def forget_files() -> None: ...
def copy_mapped(
    mapping: int, last: bool, offset: int, address: int, parts: npt.NDArray[np.int64], block: int, state: bytearray, /
) -> int: ...
def copy_memory(
    source: memoryview, offset: int, address: int, parts: npt.NDArray[np.int64], block: int, state: bytearray, /
) -> int: ...
