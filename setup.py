"""What pyproject.toml cannot say: optional C extensions, the operator's files in the wheel, and the commit."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OPERATORS_FILES = ("systemd", "deploy")  # `transferd files` writes them; cli/files.py

# The extensions need buffers, which are in the limited API from CPython 3.11 on: one build, and so one wheel, serves
# every later Python. A build for 3.10 serves 3.10 alone.
STABLE = sys.version_info >= (3, 11)


def commit() -> str:
    """Of this tree, or as whoever builds without git says; "" if neither is known."""
    if given := os.environ.get("TRANSFERD_COMMIT"):
        return given[:12]
    if not (ROOT / ".git").exists():
        return ""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()[:12]


class BuildWithFiles(build_py):
    """Adds the operator's files and the commit to a wheel. An editable install has them in its tree."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "transferd"
        for folder in OPERATORS_FILES:
            shutil.copytree(ROOT / folder, package / "packaged" / folder, dirs_exist_ok=True)
        if known := commit():
            (package / "runtime" / "commit").write_text(known + "\n", encoding="ascii")


if sysconfig.get_config_var("Py_GIL_DISABLED"):  # free-threaded: there is no stable ABI before Python 3.15
    setup(cmdclass={"build_py": BuildWithFiles})  # on the slower twins
else:
    setup(
        cmdclass={"build_py": BuildWithFiles},
        ext_modules=[
            Extension(
                f"transferd.{name.replace('/', '.')}",
                [f"transferd/{name}.c"],
                depends=sorted(map(str, Path("transferd").glob("*/*.h"))),
                py_limited_api=STABLE,
                define_macros=[("Py_LIMITED_API", "0x030B0000")] if STABLE else [],
                extra_compile_args=["-O3"],
                optional=True,  # without a compiler or Python.h the install still works, on the slower twins
            )
            for name in ("storage/_files", "tiers/_guard", "tiers/_copyruns", "workers/_inplace")
        ],
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
    )
