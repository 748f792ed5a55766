"""A C extension that a test builds for itself, and loads."""

from __future__ import annotations

import importlib.util
import subprocess
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.cuda.shim import compiler


def compiled(source: Path, directory: Path, *flags: str) -> ModuleType:
    """The extension, built with these flags as well. Skips the test where nothing compiles."""
    gcc = compiler()
    if gcc is None:
        pytest.skip("this machine has no C compiler")
    built = directory / f"{source.stem}.so"
    usual = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    command = [gcc, *usual, *flags, str(source), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spec = importlib.util.spec_from_file_location(source.stem, built)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
