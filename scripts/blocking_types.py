"""Writes transferd/client/blocking.pyi: the blocking forms of a client's calls, for type checkers and editors.

    python scripts/blocking_types.py [--check]    # --check: exit 1 if the file differs

Reads the calls' source, so the types are those of the async methods.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "transferd" / "client"
STUB = CLIENT / "blocking.pyi"
CLASSES = {  # the file and the name of each class of calls; its blocking form
    ("store", "StoreCalls"): "BlockingStore",
    ("cache", "CacheCalls"): "BlockingCache",
    ("engines", "ControlCalls"): "BlockingControl",
    ("reports", "ReportCalls"): "BlockingReports",
    ("client", "Client"): "BlockingClient(BlockingStore, BlockingCache, BlockingControl, BlockingReports)",
}
OWN = frozenset({"connect", "close", "push", "on_new_boot"})  # SyncClient's own forms
HEAD = "# The types of blocking.py. Made by scripts/blocking_types.py: do not edit."


def stub() -> str:
    """The text of the file."""
    from transferd.client.calls import ASYNCIO_ONLY

    imports: dict[str, str] = {}
    classes = []
    for (module, kind), form in CLASSES.items():
        tree = ast.parse((CLIENT / f"{module}.py").read_text())
        imports |= _imports(tree) | {one: f"from transferd.client.{module} import {one}" for one in _classes(tree)}
        (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
        forms = [text for node in found.body if (text := _form(node, ASYNCIO_ONLY | OWN))]
        classes.append("\n".join([f"class {form}:", *forms]))
    used = {node.id for text in classes for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    lines = sorted({line for name, line in imports.items() if name in used and not name.endswith("Calls")})
    text = "\n".join([HEAD, *lines, "", *classes])
    for tool in (["check", "--select", "I", "--fix", "-q"], ["format"]):  # as the house has its files
        command = [sys.executable, "-m", "ruff", *tool, "--stdin-filename", str(STUB), "-"]
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def _imports(tree: ast.Module) -> dict[str, str]:
    """For each name that a module imports, the import."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module not in (None, "__future__"):
            for alias in node.names:
                one = alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
                found[alias.asname or alias.name] = f"from {node.module} import {one}"
    return found


def _classes(tree: ast.Module) -> list[str]:
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def _form(node: ast.stmt, without: frozenset[str]) -> str:
    """The blocking form of a method, or a property; "" for what has none."""
    if (
        not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or node.name.startswith("_")
        or node.name in without
    ):
        return ""
    reads = [one for one in node.decorator_list if isinstance(one, ast.Name) and one.id == "property"]
    if isinstance(node, ast.FunctionDef) and not reads:
        return ""
    made = ast.FunctionDef(node.name, node.args, [ast.Expr(ast.Constant(...))], list(reads), node.returns, lineno=0)
    for default in (*made.args.defaults, *made.args.kw_defaults):
        if isinstance(default, ast.Name):  # a constant of its module
            default.id = "..."
    return "\n".join(f"    {line}" for line in ast.unparse(ast.fix_missing_locations(made)).splitlines())


def main() -> None:
    text = stub()
    if "--check" not in sys.argv:
        STUB.write_text(text)
    elif text != STUB.read_text():
        sys.exit(f"{STUB.name} differs: run python scripts/blocking_types.py")


if __name__ == "__main__":
    main()
