"""Backends by name: built-in, absent, from another package, or wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.storage import harness, test_failures_contract
from transferd.config import Config, from_tree
from transferd.errors import ConfigError
from transferd.storage.base import Blob, Outcome, Storage
from transferd.storage.file import FileStorage
from transferd.storage.memory import MemoryStorage
from transferd.storage.registry import BACKENDS, NO_BACKEND, TOKEN_INDEXED, create_storage, create_storages

FAILS_ELSEWHERE = {"object"}  # in tests/storage/test_object_store.py, with a real server that fails
ROOT = Path(__file__).parents[2]


def config(backend: str) -> Config:
    return from_tree({"storage": {"backend": backend}})


def test_built_in_backends_are_made_by_name_and_touch_nothing_yet(tmp_path: Path) -> None:
    path = tmp_path / "blocks"
    made = create_storage(from_tree({"storage": {"backend": "file", "file": {"path": str(path)}}}))
    assert isinstance(made, FileStorage)
    assert not path.exists()
    assert isinstance(create_storage(config("memory")), MemoryStorage)


def test_none_is_no_storage() -> None:
    assert create_storage(config("none")) is None


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        ("redis", f"expected one of {', '.join([*BACKENDS, TOKEN_INDEXED, NO_BACKEND])}, or package.module:Class"),
        ("", "expected one of"),
        ("no_such_package.storage:Thing", "this installation has no module no_such_package.storage"),
        ("transferd.storage.nothing:Thing", "this installation has no module transferd.storage.nothing"),
        ("transferd.storage.memory:Nothing", "has no Storage class 'Nothing'"),
        ("transferd.storage.memory:np", "has no Storage class 'np'"),
        ("transferd.config:Config", "has no Storage class 'Config'"),
        ("transferd.storage.memory:", "has no Storage class ''"),
        (":Thing", "fails to load"),
    ],
)
def test_a_backend_that_cannot_be_had_is_one_line_with_its_name(backend: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        create_storage(config(backend))
    text = str(refusal.value)
    assert text.startswith("storage.backend: ")
    assert problem in text
    assert repr(backend) in text
    assert "\n" not in text


def test_a_missing_dependency_of_a_backend_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_backend.py").write_text("import surely_not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs the Python package surely_not_installed_anywhere"):
        create_storage(config("needy_backend:Thing"))


@pytest.mark.parametrize("name", BACKENDS)
def test_each_backend_is_under_the_contract_and_in_the_reference(name: str) -> None:
    class_name = BACKENDS[name].partition(":")[2]
    assert hasattr(harness, class_name), "make it in BACKENDS of tests/storage/harness.py, for the contract suite"
    assert name in FAILS_ELSEWHERE or hasattr(test_failures_contract, class_name), "add it to KINDS there"
    [row] = re.findall(r"(?m)^\| `storage.backend` \|.*$", (ROOT / "docs" / "configuration.md").read_text())
    assert f"`{name}`" in row


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_lists_its_objects_exactly_if_it_has_a_keeper(name: str) -> None:
    backend: type[Storage] = getattr(harness, BACKENDS[name].partition(":")[2])
    assert backend.lists == (backend.keeper is not Storage.keeper)


class NullStorage(Storage):
    """A backend outside the package, made the way the registry says."""

    backend = "null"

    def __init__(self, config: Config, *, clock: object) -> None:
        self.made_with = config, clock

    async def open(self) -> None: ...
    async def exists(self, names: Sequence[str]) -> list[bool]:
        return [False] * len(names)

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        return []

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        return []

    async def quarantine(self, name: str) -> None: ...
    async def close(self) -> None: ...
    def statistics(self) -> dict[str, object]:
        return {}


def test_a_backend_of_another_package_is_made_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "elsewhere", sys.modules[__name__])
    made = create_storage(config("elsewhere:NullStorage"))
    assert isinstance(made, NullStorage)
    assert made.made_with[0].storage.backend == "elsewhere:NullStorage"


def test_the_registry_imports_no_backend_until_one_is_chosen() -> None:
    code = (
        "import sys, transferd.storage.registry; print([m for m in sys.modules if m.startswith('transferd.storage.')])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    modules = (
        "queues",
        "chains",
        "lru",
        "selection",
        "orders",
        "pins",
        "running",
        "keeping",
        "levels",
        "levels.base",
        "base",
        "tokens",
        "registry",
    )
    assert printed.strip() == str([f"transferd.storage.{name}" for name in modules])


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (
            {"engines": {"storage_share": 0.5}, "storage": {"backend": "mooncake"}},
            "engines.storage_share: requires a backend that knows its own objects; mooncake cannot keep shares (0.5)",
        ),
        ({"storage": {"backend": "memory", "scrub_rate": "1MiB"}}, "storage.scrub_rate: requires a backend that can"),
        ({"storage": {"levels": ["mooncake", "file"]}}, "storage.levels: the first level must know its own objects"),
        ({"storage": {"levels": ["memory", "object"]}}, "storage.object.url: expected s3://"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        create_storages(from_tree({"cache": {}} | tree))
    assert str(refusal.value).startswith(problem)


def test_a_backend_of_another_package_is_asked_for_anything() -> None:
    mine = "transferd.storage.memory:MemoryStorage"
    tree = {"storage": {"backend": mine, "scrub_rate": "1MiB"}, "engines": {"storage_share": 0.5}}
    assert isinstance(create_storages(from_tree(tree))[1], MemoryStorage)


def test_each_backend_says_what_it_takes_of_this_machine() -> None:
    tree = {"storage": {"file": {"path": ["/a", "/b"], "capacity": "1GiB"}, "memory": {"capacity": "3MiB"}}}
    described = from_tree(tree | {"cache": {"ranks": 4}})
    assert [one.paths for one in FileStorage.directories(described.storage)] == [["/a"], ["/b"]]
    assert (MemoryStorage.directories(described.storage), FileStorage.memory_of(described)) == ([], 0)
    assert MemoryStorage.memory_of(described) == 3 * 2**20
