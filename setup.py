"""What pyproject.toml cannot say: optional C extensions, the operator's files in the wheel, and the build's name."""

import runpy
import shutil
import sys
import sysconfig
from email import message_from_string
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
OPERATORS_FILES = ("systemd", "deploy")  # `transferd files` writes them; cli/files.py
# For who works on transferd, or on an adapter: they have this tree. A wheel is for servers and their operators.
TREE_ONLY = ("transferd.cli.bench", "transferd.cli.demo_pd", "transferd.adapters.conformance")

# The extensions need buffers, which are in the limited API from CPython 3.11 on: one build, and so one wheel, serves
# every later Python. A build for 3.10 serves 3.10 alone.
STABLE = sys.version_info >= (3, 11)
EXTENSIONS = (
    "runtime/_crew", "storage/_files", "storage/_memory", "tiers/_guard", "tiers/_copyruns", "workers/_inplace",
)  # fmt: skip
NAME_OF_BUILD = "runtime/build"  # transferd/runtime/version.py reads it


def build_name() -> str:
    """What this source distribution says, or the name of a build of this tree."""
    if (said := ROOT / "PKG-INFO").exists():
        return str(message_from_string(said.read_text(encoding="utf-8"))["Version"])
    name: str = runpy.run_path(str(ROOT / "scripts" / "build_name.py"))["of_this_tree"]()
    return name


BUILD = build_name()


class BuildWithFiles(build_py):
    """Adds the operator's files and the name of the build to a wheel, and leaves out what is for the tree alone.

    An editable install is the tree.
    """

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        if self.editable_mode:
            return found
        return [one for one in found if not f"{package}.{one[1]}".startswith(TREE_ONLY)]

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "transferd"
        for folder in OPERATORS_FILES:
            shutil.copytree(ROOT / folder, package / "packaged" / folder, dirs_exist_ok=True)
        (package / NAME_OF_BUILD).write_text(BUILD + "\n", encoding="ascii")


if sysconfig.get_config_var("Py_GIL_DISABLED"):  # free-threaded: there is no stable ABI before Python 3.15
    setup(version=BUILD, cmdclass={"build_py": BuildWithFiles})  # on the slower twins
else:
    setup(
        version=BUILD,
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
            for name in (
                "runtime/_crew",
                "storage/_files",
                "storage/_memory",
                "tiers/_guard",
                "tiers/_copyruns",
                "workers/_inplace",
            )
        ],
        options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE else {},
    )
