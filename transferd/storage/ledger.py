"""A disk's list of orders (orders.py), in a file beside its objects, so that no restart and no absence forgets one.

    <root>/orders   MAGIC, checksum of the rest (xxh3, u64), the list (JSON)

Each order replaces the file, which is on the medium when `write` returns, whatever `storage.file.fsync` says: there are
few orders. A damaged file is useless as a whole; one that cannot be opened or read may be whole, and is waited for.

Blocking; called from I/O threads, one call at a time.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable

import msgspec
import xxhash

from transferd.config.environment import open_regular
from transferd.storage.journal import write_anew
from transferd.storage.opening import READ_FLAGS
from transferd.storage.orders import Listed

MAGIC = b"transferd orders 1\n"
_CHECKSUM = struct.Struct("<Q")
_LONGEST = 1024**3  # of a file that is read: so long that 30 million objects may be pinned

_decoder = msgspec.json.Decoder(Listed)  # at import: in any thread, a first use of a type is not safe (compat.py)


class Ledger:
    """See the module. lost: why the directory is another one than before; "" if it is the same.

    listed: what the file says, and with `behind` what it should say.
    behind: the file lacks what `listed` has, because the disk was full.
    """

    def __init__(self, path: str, lost: Callable[[], str]) -> None:
        self._path = path
        self._lost = lost
        self.listed = Listed()
        self.behind = False

    def read(self) -> None:
        """Read the file anew. Raises OSError if nobody can know what it says; then the list has a problem, too."""
        try:
            with open_regular(self._path, READ_FLAGS) as file:
                self.listed = _decoded(file.read(_LONGEST))
        except ValueError as error:
            self.listed = Listed(problem=str(error))
        except FileNotFoundError:
            self.listed = Listed()
        except OSError as error:
            self.listed = Listed(problem=error.strerror or str(error))
            if error.errno != errno.ELOOP:
                raise

    def write(self, listed: Listed) -> None:
        """Replace the file. Raises OSError."""
        self.listed, self.behind = listed, True
        if problem := self._lost():
            raise FileNotFoundError(problem)
        body = msgspec.json.encode(listed)
        write_anew(self._path, [MAGIC, _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)), body])
        self.behind = False


def _decoded(data: bytes) -> Listed:
    start = len(MAGIC) + _CHECKSUM.size
    if len(data) < start or not data.startswith(MAGIC):
        return Listed(problem="it does not begin like a list of orders")
    if _CHECKSUM.unpack_from(data, len(MAGIC))[0] != xxhash.xxh3_64_intdigest(data[start:]):
        return Listed(problem="it is damaged")
    try:
        return _decoder.decode(data[start:])
    except msgspec.DecodeError as error:
        return Listed(problem=str(error))
