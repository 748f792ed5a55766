"""What pyproject.toml cannot say stably: the optional C extensions of put_file.py, hostcopy.py and block_memory.py."""

import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

# The extensions need buffers, which are in the limited API from CPython 3.11 on: one build, and so one wheel, serves
# every later Python. A build for 3.10 serves 3.10 alone.
STABLE = sys.version_info >= (3, 11)

if sysconfig.get_config_var("Py_GIL_DISABLED"):  # free-threaded: there is no stable ABI before Python 3.15
    setup()  # on the slower twins
else:
    setup(
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
