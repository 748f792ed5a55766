"""What pyproject.toml cannot say stably: the optional C extensions (see tiers/hostcopy.py and recorder.py)."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "transferd.tiers._copyruns",
            ["transferd/tiers/_copyruns.c"],
            py_limited_api=True,
            extra_compile_args=["-O3"],
            optional=True,  # without a compiler or Python.h the install still works, on the slower twin
        ),
        Extension(
            "transferd.observability._steps",
            ["transferd/observability/_steps.c"],
            py_limited_api=True,
            extra_compile_args=["-O3"],
            optional=True,
        ),
    ]
)
