"""What pyproject.toml cannot say stably: the optional C extension (see tiers/hostcopy.py)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "transferd.tiers._copyruns",
            ["transferd/tiers/_copyruns.c"],
            py_limited_api=True,
            extra_compile_args=["-O3"],
            optional=True,  # without a compiler or Python.h the install still works, on the slower twin
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for every Python from 3.11 on
)
