"""The earlier name of tests/machine/gpu/check.py, which written instructions start: `python -m tests.gpu.check`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("tests.machine.gpu.check", run_name="__main__", alter_sys=True)
