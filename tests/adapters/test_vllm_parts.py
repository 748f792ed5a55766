"""The parts of the vLLM adapter that need no vLLM: memory, settings, interfaces, the daemon behind an engine."""

from __future__ import annotations

import importlib.metadata
import mmap
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from transferd.adapters.common import companion, memory, packaged
from transferd.adapters.common.directories import own_directory
from transferd.adapters.vllm import interfaces
from transferd.adapters.vllm.settings import VLLM, settings, warn_of_unstable_hashes
from transferd.errors import ConfigError, TierError


def test_memory_is_found_by_its_address_wherever_it_begins_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "pool"
    file.write_bytes(bytes(5 * mmap.PAGESIZE))
    with file.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 3 * mmap.PAGESIZE, offset=mmap.PAGESIZE)
        view = np.frombuffer(mapped, dtype=np.uint8)
        found = memory.shared_memory_at(view.ctypes.data + 64, 2 * mmap.PAGESIZE)
        assert (found.path, found.offset, found.nbytes) == (str(file), mmap.PAGESIZE + 64, 2 * mmap.PAGESIZE)
        assert os.fstat(found.descriptor()).st_ino == file.stat().st_ino
        assert not found.name, "it is not in /dev/shm"
        with pytest.raises(TierError, match="not one range"):
            memory.shared_memory_at(view.ctypes.data + 64, 3000 * mmap.PAGESIZE)
        del view
        mapped.close()


def test_memory_without_a_name_is_found_by_its_descriptor() -> None:
    fd = os.memfd_create("pool")
    os.ftruncate(fd, mmap.PAGESIZE)
    mapped = mmap.mmap(fd, mmap.PAGESIZE)
    view = np.frombuffer(mapped, dtype=np.uint8)
    found = memory.shared_memory_at(view.ctypes.data, mmap.PAGESIZE)
    assert not found.name
    assert os.fstat(found.descriptor()).st_ino == os.fstat(fd).st_ino
    del view
    mapped.close()
    os.close(fd)


def test_private_memory_is_refused() -> None:
    view = np.zeros(1 << 20, dtype=np.uint8)
    with pytest.raises(TierError, match="private"):
        memory.shared_memory_at(view.ctypes.data, view.nbytes)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"endpont": "x"}, "endpont"),
        ({"timeout": -1}, r"s\.timeout"),
        ({"timeout": "soon"}, "timeout"),
        ({"start_timeout": -1}, r"s\.start_timeout"),
        ({"capacity": "much"}, r"s\.capacity"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings("s", given)


def test_sizes_are_written_as_everywhere() -> None:
    assert settings("s", {"capacity": "2GiB"}).capacity_bytes == 2 * 2**30


def test_a_vllm_that_lacks_an_interface_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    old = types.ModuleType("vllm")
    old.__version__ = "0.9.1"  # type: ignore[attr-defined]
    old.__path__ = []
    monkeypatch.setitem(sys.modules, "vllm", old)
    monkeypatch.setitem(sys.modules, "vllm.v1", types.ModuleType("vllm.v1"))
    with pytest.raises(ConfigError) as caught:
        interfaces.require("TransferdTier", interfaces.TIER)
    text = str(caught.value)
    assert "\n" not in text
    assert "0.9.1" in text
    assert "SecondaryTierManager" in text or "tiering" in text


def test_the_package_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, transferd.adapters.vllm, transferd.adapters.vllm.scheduling, transferd.adapters.vllm.working;"
        "print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert told.stdout.strip() == "[]"


def test_a_named_endpoint_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(companion.ENDPOINT_VARIABLE, "ipc:///by/variable")
    assert companion.DaemonFinder(VLLM, endpoint="ipc:///x").find() == "ipc:///x"
    assert companion.DaemonFinder(VLLM).find() == "ipc:///by/variable"
    with pytest.raises(ConfigError, match="path, capacity"):
        companion.DaemonFinder(VLLM, path="/tmp/x")
    assert not list(tmp_path.iterdir())


def test_the_capacity_of_the_first_start_stays(tmp_path: Path) -> None:
    first = companion._capacity_of(tmp_path)
    (tmp_path / companion.CAPACITY_FILE).write_text("12345", encoding="ascii")
    assert first > 0
    assert companion._capacity_of(tmp_path) == 12345


@pytest.mark.parametrize(
    ("algorithm", "seed", "warned"),
    [("sha256", None, 0), ("sha256_cbor", None, 0), ("xxhash", None, 1), ("xxhash_cbor", None, 1), ("xxhash", "7", 0)],
)
def test_hashes_that_differ_from_start_to_start_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, algorithm: str, seed: str | None, warned: int
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    with caplog.at_level("WARNING", "vllm.transferd"):
        warn_of_unstable_hashes(types.SimpleNamespace(prefix_caching_hash_algo=algorithm))
    assert len(caplog.messages) == warned
    assert all(f"--prefix-caching-hash-algo {algorithm}" in message for message in caplog.messages)


def test_files_of_engines_that_have_ended_are_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = 2**22 + 1  # more than any pid can be
    gone = [f"{ended}.toml", f"{ended}.log"]
    kept = [f"{os.getpid()}.log", f"{os.getppid()}.toml", f"{ended}.txt", "capacity.log", "transferd.sock"]
    monkeypatch.delenv(companion.ENDPOINT_VARIABLE, raising=False)
    monkeypatch.setattr(packaged, "DEFAULT_ENDPOINT", f"ipc://{tmp_path}/packaged")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = own_directory("vllm")
    for name in (*gone, *kept):
        (directory / name).touch()

    def start(*_: object, **__: object) -> None:
        raise OSError("not in this test")

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match="not in this test"):
        companion.DaemonFinder(VLLM, path=str(tmp_path / "store"), capacity=2**20, block_bytes=4096).find()
    assert {file.name for file in directory.iterdir()} == {*kept, f"{os.getpid()}.toml", "start", "users"}


VALUES = """
class Values(type):
    def __getattr__(cls, name):
        if not name.isupper():  # a value of an enum
            raise AttributeError(name)
"""


def vllm_that_says(version: str, place: Path) -> None:
    """Create a package `vllm` of this version, with all that the adapter asks for, and nothing behind it."""
    for listed in (interfaces.TIER, interfaces.CONNECTOR):
        for module, names in listed.items():
            package = place.joinpath(*module.split("."))
            package.mkdir(parents=True, exist_ok=True)
            with (package / "__init__.py").open("a", encoding="ascii") as file:
                file.write(VALUES)
                for name in sorted({name.split(".")[0] for name in names}):
                    file.write(f"class {name}(metaclass=Values): pass\n")
                file.writelines(f"{name} = None\n" for name in names if "." in name)
    (place / "vllm/__init__.py").write_text(f"__version__ = {version!r}", encoding="ascii")


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        ("0.32.0", []),
        ("0.32.0+cu129", []),  # another build of the same version
        ("0.33.0", []),
        ("0.32.1", ["transferd: vLLM 0.32.1 is untested; tested with 0.32.0"]),
        ("0.34.0rc1+cpu", ["transferd: vLLM 0.34.0rc1+cpu is untested; tested with 0.32.0"]),
    ],
)
def test_a_version_that_nobody_tested_is_one_line(tmp_path: Path, version: str, lines: list[str]) -> None:
    """In each process of the engine, however many of the two classes it uses."""
    vllm_that_says(version, tmp_path)
    used = "from transferd.adapters.vllm import TransferdConnector, TransferdTier"
    done = subprocess.run(
        [sys.executable, "-c", f"import logging; logging.basicConfig(format='%(message)s'); {used}; {used}"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == lines


def test_vllm_finds_the_plugin_and_it_does_nothing_where_vllm_is_not() -> None:
    (found,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="transferd")
    found.load()()
