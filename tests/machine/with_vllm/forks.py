"""Let vLLM fork its processes. On a CPU it spawns them, and each one imports vLLM, half a minute of a core.

python -m tests.machine.with_vllm.forks MODULE ARGUMENTS    run a module of vLLM's so
"""

from __future__ import annotations

import functools
import multiprocessing
import runpy
import sys


def use() -> None:
    """From now on, this process and those that it starts fork. Call it before there are threads."""
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = functools.partial(multiprocessing.get_context, "fork")


if __name__ == "__main__":
    use()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
