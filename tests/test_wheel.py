"""The wheel: made without a compiler, installed beside nothing of this tree, and at work."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from transferd.runtime.version import RELEASE, RELEASED

pytestmark = pytest.mark.one_loop

ROOT = Path(__file__).parent.parent
BUILD = f"{RELEASE}.{'post' if RELEASED else 'dev'}20261129081338+g0123456789ab"
NEEDED = ("transferd/py.typed", "transferd/observability/page.html", "transferd/tiers/kernels/move_blocks.cu")


@pytest.mark.timeout(600)
def test_a_wheel_is_made_and_works_where_there_is_no_compiler(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy: a build leaves its own directories behind, and takes from them
    source.mkdir()
    (source / "scripts").mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "scripts/build_name.py"):
        shutil.copy(ROOT / name, source / name)
    for name in ("systemd", "deploy"):
        shutil.copytree(ROOT / name, source / name)
    shutil.copytree(ROOT / "transferd", source / "transferd", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    made = subprocess.run(
        [*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source)],
        env=os.environ | {"CC": "/bin/false", "TRANSFERD_COMMIT": "0123456789abcdef 1795940018 a subject"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if "setuptools" in made.stderr and made.returncode:
        pytest.skip("no package index gives this machine setuptools to build with")
    assert made.returncode == 0, made.stderr
    (wheel,) = tmp_path.glob("*.whl")
    tag = "-cp311-abi3-" if sys.version_info >= (3, 11) else "-cp310-cp310-"
    assert tag in wheel.name, "one wheel for every Python from 3.11 on, and one for 3.10"
    names = zipfile.ZipFile(wheel).namelist()
    assert set(NEEDED) <= set(names)
    assert not [name for name in names if name.endswith(".so") or name.startswith("tests")]
    only = ("transferd/cli/bench/", "transferd/cli/demo_pd/", "transferd/adapters/conformance")
    assert not [name for name in names if name.startswith(only)], "what only a checkout has"
    subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(tmp_path / "there"), str(wheel)], check=True, timeout=200
    )
    there = os.environ | {"PYTHONPATH": str(tmp_path / "there")}
    transferd = [sys.executable, "-m", "transferd"]
    version = subprocess.run(
        [*transferd, "version"], env=there, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert version.stdout == f"transferd {BUILD}\n"
    assert f"transferd-{BUILD}-" in wheel.name, "two builds never have one name"
    written = subprocess.run(
        [*transferd, "files", "out", "--format", "json"], env=there, capture_output=True, check=True, cwd=tmp_path
    )
    of_tree = [
        path.relative_to(ROOT)
        for folder in ("systemd", "deploy")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    assert sorted(json.loads(written.stdout)["written"]) == sorted(f"out/{path}" for path in of_tree)
    done = subprocess.run(
        [*transferd, "demo", "--format", "json"],
        env=there,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
        cwd=tmp_path,
    )
    for words, why in (
        (["bench", "copy"], "No such command 'bench'"),
        (["demo", "--pd"], "from a checkout of transferd"),
    ):
        left_out = subprocess.run([*transferd, *words], env=there, capture_output=True, text=True, cwd=tmp_path)
        assert (left_out.returncode, why in left_out.stderr) == (2, True), left_out.stderr
    report = json.loads(done.stdout)
    assert report["blocks_verified"] > 0
    assert (report["verify_failures"], report["errors"]) == (0, [])
    assert min(report["hit_blocks"].values()) > 0, "every tier was used"


@pytest.mark.parametrize("free_threaded", [0, 1])
def test_a_free_threaded_python_installs_it_without_the_extensions(
    free_threaded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their limited API has no such build, and setuptools refuses to make a wheel of it instead of leaving it out."""
    given: list[dict[str, Any]] = []
    stub = SimpleNamespace(Extension=lambda name, *_, **__: name, setup=lambda **more: given.append(more))
    monkeypatch.setitem(sys.modules, "setuptools", stub)
    monkeypatch.setitem(sys.modules, "setuptools.command.build_py", SimpleNamespace(build_py=object))
    known = sysconfig.get_config_var
    monkeypatch.setattr(
        sysconfig, "get_config_var", lambda name: {"Py_GIL_DISABLED": free_threaded}.get(name, known(name))
    )
    runpy.run_path(str(ROOT / "setup.py"))
    (one,) = given
    assert ("ext_modules" in one, "options" in one) == (not free_threaded, not free_threaded)
