"""Files that somebody has removed leave the index: those that are looked at, and then all others."""

from __future__ import annotations

from pathlib import Path

from tests.storage.harness import Open, file_config
from tests.support.waits import until
from transferd.storage.file import FileStorage


async def test_a_look_finds_what_is_gone_and_has_all_others_checked(open_storage: Open, tmp_path: Path) -> None:
    storage = FileStorage(file_config(tmp_path, 2**30))
    store = await open_storage(storage)
    names = [f"demo/f/g/{i:040x}/0" for i in range(40)]
    await store.put(*((name, b"x" * 100) for name in names))
    kept, *others = sorted((tmp_path / "objects").rglob("*@0"))
    for path in others:
        path.unlink()
    found = await storage.look(names[-2:])
    assert found == [False, False]
    await until(lambda: storage.statistics()["objects"] == 1)
    assert storage.statistics()["gone"] == 39
    assert kept.is_file()
