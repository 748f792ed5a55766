"""SGLang's own launcher on the CPU: `python -m tests.machine.with_sglang.server` and SGLang's arguments.

SGLang starts its scheduler as a further process, which imports this file, too.
"""

from __future__ import annotations

import runpy

from tests.machine.with_sglang import standins

standins.nothing_pinned()
standins.copies_on_the_cpu()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
