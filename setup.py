"""What pyproject.toml cannot say stably: the optional C extensions of put_file.py, hostcopy.py and block_memory.py."""

import sysconfig
from pathlib import Path

from setuptools import Extension, setup

if sysconfig.get_config_var("Py_GIL_DISABLED"):  # free-threaded: there is no stable ABI before Python 3.15
    setup()  # on the slower twins
else:
    setup(
        ext_modules=[
            Extension(
                f"transferd.{name.replace('/', '.')}",
                [f"transferd/{name}.c"],
                depends=sorted(map(str, Path("transferd").glob("*/*.h"))),
                py_limited_api=True,
                extra_compile_args=["-O3"],
                optional=True,  # without a compiler or Python.h the install still works, on the slower twins
            )
            for name in ("storage/_files", "tiers/_guard", "tiers/_copyruns", "workers/_inplace")
        ],
        options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for every Python from 3.11 on
    )
