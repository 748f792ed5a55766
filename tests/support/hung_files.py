"""Files whose reads and writes do not return while there is a file PATH.hangs: a disk or a mount that hangs.

Plugged into a real daemon by module path, as `tests.support.hung_files:HungFiles`. The store's threads really hang.
"""

from __future__ import annotations

import os
import time
from typing import Any

from transferd.storage.base import Item, Take
from transferd.storage.batch import Answer
from transferd.storage.file import FileStorage

HANGS = ".hangs"


class HungFiles(FileStorage):
    """See the module."""

    backend = "hung"

    def _write(self, name: str, data: memoryview, spare: Any) -> None:
        self._hang()
        super()._write(name, data, spare)

    def _read(self, item: Item, slot: memoryview, take: Take | None) -> Answer:
        self._hang()
        return super()._read(item, slot, take)

    def _hang(self) -> None:
        while os.path.exists(self._path + HANGS):
            time.sleep(0.02)
