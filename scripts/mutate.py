"""Mutation testing: do a module's own tests notice small bugs in it?

    make mutate MODULE=control/order

Makes one small change at a time to `transferd/<MODULE>.py`, in a copy of the tree, and runs the test files of the same
name, and those in MORE, against it: a comparison or a sum is another one, a number is one more or less, a condition or
a flag is turned round, a loop does nothing, an `except` catches nothing, a call or an assignment is dropped. Prints
each change that no test noticed, then the share that was noticed. Some survivors change nothing that can be observed;
docs/testing.md lists these. The rest ask for a test.

cosmic-ray makes the changes. Each one is tested in a fork that has pytest loaded: half of a run would be imports.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parso
import pytest
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator

ROOT = Path(__file__).resolve().parent.parent
TEST_TIMEOUT_S = 30  # for one test: a change may make it wait for ever
CPU_LIMIT_S = 60  # for all tests of one change: it may make an import run for ever
WALL_LIMIT_S = 120  # and it may make a fixture wait for ever, after the timeout of its test
MEMORY_LIMIT = 8 << 30  # and it may make a list grow for ever
LOADED = ("asyncio", "hypothesis.stateful", "hypothesis.strategies", "msgspec", "numpy", "uvloop", "xxhash", "zmq")
# Tests of other names that a module's changes are tried on, too: by module, below tests/.
MORE = {
    "blocks/formats": ("blocks/test_possible.py",),
    "control/order": ("control/test_task_state.py", "control/test_byte_ranges.py"),
    "wire/connection": ("wire/test_acceptor.py", "wire/test_transport_contract.py"),
    "workers/job": tuple(f"workers/test_{what}.py" for what in ("read", "write", "swap", "peer", "parts", "in_place")),
}
# Of cosmic-ray's replacements for an operator the nearest ones: a change that is easy to overlook. `A | B` is left
# alone, as it is nearly always a type. So are decorators, without which a dataclass cannot even be imported.
OPERATORS = (
    *(f"ReplaceComparisonOperator_{swap}" for swap in ("Eq_NotEq", "NotEq_Eq", "Is_IsNot", "IsNot_Is")),
    *(f"ReplaceComparisonOperator_{swap}" for swap in ("Lt_LtE", "Lt_NotEq", "LtE_Lt", "LtE_Eq")),
    *(f"ReplaceComparisonOperator_{swap}" for swap in ("Gt_GtE", "Gt_NotEq", "GtE_Gt", "GtE_Eq")),
    *(f"ReplaceBinaryOperator_{swap}" for swap in ("Add_Sub", "Sub_Add", "Mul_FloorDiv", "Div_Mul", "FloorDiv_Mul")),
    *(f"ReplaceBinaryOperator_{swap}" for swap in ("Mod_Mul", "BitAnd_BitOr", "BitXor_BitAnd", "LShift_RShift")),
    *("ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_Invert"),
    *("AddNot", "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "NumberReplacer"),
    "ZeroIterationForLoop",
)
AUGMENTED = ("+=", "-=", "*=", "/=", "|=", "&=")


class DropStatement(Operator):
    """Drops a call whose value nobody takes, a `del`, and an assignment to anything but a local name."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "simple_stmt":
            statement = node.children[0]
            drops = statement.type in ("atom_expr", "del_stmt")
            if statement.type == "expr_stmt":
                target, by = statement.children[:2]
                drops = target.type == "atom_expr" or (target.type == "name" and by.get_code().strip() in AUGMENTED)
            if drops:
                yield statement.start_pos, statement.end_pos

    def mutate(self, node: Any, _: int) -> Any:
        dropped = parso.parse("pass").children[0]
        dropped.prefix = node.children[0].get_first_leaf().prefix
        node.children[0] = dropped
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class SwapIn(Operator):
    """`in` becomes `not in`, and the other way round."""

    def mutation_positions(self, node: Any) -> Iterator[Any]:
        if node.type == "comparison" and node.children[1].get_code().split() in (["in"], ["not", "in"]):
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Any, _: int) -> Any:
        swapped = " in" if node.children[1].type == "comp_op" else " not in"
        node.children[1] = parso.parse(swapped).children[0]
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


def tests_of(module: str) -> list[str]:
    """The test files of the module's name, test_order.py, and test_order_*.py if there are any; then those in MORE."""
    folder, _, name = module.rpartition("/")
    files = (ROOT / "tests" / folder).glob(f"test_{name}*.py")
    found = [path for path in files if path.stem == f"test_{name}" or path.stem.startswith(f"test_{name}_")]
    found.sort(key=lambda path: (path.stem.endswith("_stateful"), path.name))  # the slow ones last
    found += [ROOT / "tests" / other for other in MORE.get(module, ())]
    if not found:
        sys.exit(f"transferd/{module}.py has no test file of its name: expected tests/{folder}/test_{name}.py")
    return [str(path.relative_to(ROOT)) for path in found]


def mutants(source: str) -> Iterator[str]:
    """The source with one change, for each change there is."""
    operators = [get_operator(f"core/{name}")() for name in OPERATORS]
    for operator in (*operators, DropStatement(), SwapIn()):
        occurrence = 0
        while (mutant := mutate_code(source, operator, occurrence)) is not None:
            occurrence += 1
            if mutant != source:
                yield mutant


def passes(copy: Path, tests: list[str]) -> bool:
    """Run the tests in the copy of the tree, in a process of their own."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        os.setsid()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        os.chdir(copy)
        sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in (str(ROOT), str(ROOT / "scripts"), ""))]
        limits = [f"timeout={TEST_TIMEOUT_S}", "faulthandler_timeout=0"]
        options = ["-x", "--assert=plain", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=mutate"]
        status = 1
        try:
            status = int(pytest.main([*options, *(word for limit in limits for word in ("-o", limit)), *tests]))
        finally:
            os._exit(status)  # also when pytest itself fails: this process is a copy of the one that waits
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], WALL_LIMIT_S)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    return os.waitpid(child, 0)[1] == 0


def as_diff(source: str, mutant: str) -> str:
    lines = difflib.unified_diff(source.splitlines(), mutant.splitlines(), lineterm="", n=1)
    return "\n".join(list(lines)[2:])


def run(module: str, part: tuple[int, int]) -> tuple[int, int]:
    """How many changes were tried, and how many noticed. Prints the others as they are found."""
    for name in LOADED:
        importlib.import_module(name)
    sys.dont_write_bytecode = True  # a cached mutant of the same second and size would be taken for the next one
    tests, noticed = tests_of(module), 0
    with tempfile.TemporaryDirectory(prefix="transferd-mutate-") as directory:
        copy = Path(directory)
        for name in ("transferd", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        changed = copy / "transferd" / f"{module}.py"
        source = changed.read_text()
        if not passes(copy, tests):
            sys.exit(f"the tests of {module} fail before anything is changed: {' '.join(tests)}")
        chosen = list(mutants(source))[part[0] - 1 :: part[1]]
        for mutant in chosen:
            changed.write_text(mutant)
            if passes(copy, tests):
                print(as_diff(source, mutant), end="\n\n", flush=True)
            else:
                noticed += 1
    return len(chosen), noticed


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("module", help="as a path below transferd/, without .py: control/order")
    parser.add_argument("--goal", type=float, default=0.0, help="exit 1 below this share noticed (0 … 1)")
    parser.add_argument("--part", default="1/1", help="try only every n-th change: 1/3, 2/3 or 3/3")
    options = parser.parse_args()
    first, parts = map(int, options.part.split("/"))
    began = time.monotonic()
    tried, noticed = run(options.module, (first, parts))
    share = noticed / tried if tried else 1.0
    took = time.monotonic() - began
    print(f"{options.module}: {noticed} of {tried} changes noticed ({share:.1%}), in {took:.0f} s")
    return 0 if share >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
