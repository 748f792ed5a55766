"""The house rules that a machine can check: who may import whom, how large things get, what is never used."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import mutate

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transferd"

# A folder or file of transferd/ imports only from itself and from those before it in this line.
ORDER = [
    "errors", "runtime", "tasks", "barrier", "config", "blocks", "observability", "control", "wire", "tiers", "storage",
    "client", "workers", "daemon", "adapters", "cli",
]  # fmt: skip
ABOVE_ALL = ["__init__", "__main__"]  # the public names, and `python -m transferd`

# A client is imported into the engine's process: it may know the wire and the shared memory, nothing else.
CLIENT_MAY_IMPORT = {
    "client", "wire", "errors", "tasks", "config", "runtime.aio", "runtime.clock", "runtime.compat",
    "runtime.descriptors", "blocks.keys", "blocks.fingerprint", "tiers.segment", "tiers.owner", "tiers.offered",
    "tiers.cuda.engine", "observability.recorder",
}  # fmt: skip

LONGEST_FILE = 600
LONG_FILES: dict[str, str] = {
    "dispatcher.py": "one state machine; its parts are files of their own beside it",
}
LONGEST_FUNCTION = 70
CRUMB = 60  # a file with fewer lines that only one other file imports belongs into that file, unless it is listed here
CRUMBS = {
    "adapters.embedded": "engines import it by name, in a process of their own",
    "adapters.fastdeploy.memory": "the one file there that needs a GPU",
    "wire.codes": "the names in a table of the documentation, which a test compares",
    "wire.hooks": "what msgpack calls for foreign types, beside the format in protocol.py, which is full",
    "adapters.fastdeploy.replies": "FastDeploy's answers, beside its requests in items.py",
    "adapters.shared_caches": "engines import it",
    "adapters.mooncake_store.as_mooncake.mooncake.store": "engines import it, by the name that Mooncake's library has",
    "adapters.sglang.weights": "one state machine, apart from the calls of SGLang",
    "adapters.vllm.announced": "one decision, pure and tested alone",
    "adapters.vllm.jobs": "one state machine, tested alone",
    "adapters.vllm.metrics": "imported by vLLM's class names",
    "adapters.vllm.plugin": "vLLM's entry point, loaded in each of its processes, which must import no connector",
    "cli.pool.lend": "imports a pool's client, which the other commands must not wait for",
    "client.blocking": "beside it lies blocking.pyi, made by a script",
    "client.identity": "one rule, pure and tested alone",
    "client.timeline": "engines import it",
    "storage.attention_store.own_blocks": "the guarded copies, apart from the calls of the SDK",
    "storage.pruning": "one count of directories, tested alone",
    "storage.quarantine": "one directory with its own bounds, tested alone",
    "daemon.kv_events.pool_watch": "its caller is the daemon, which owns all feeds",
    "workers.canary": "the daemon's half of the check; its caller is the daemon",
}

BANNED = {
    r"\bpickle\b": "wire input is never trusted",
    r"shell=True": "no text becomes a command",
    r"os\.system\(": "no text becomes a command",
    r"time\.sleep\(": "nothing waits by sleeping in a thread",
}


def modules() -> Iterator[tuple[Path, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All that a module says. Kept, because nearly every rule looks at each module."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def module_of(path: Path) -> ast.Module:
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    return module


@pytest.fixture(scope="module", autouse=True)
def _forgotten_at_the_end() -> Iterator[None]:
    yield
    nodes.cache_clear()


def imports(path: Path) -> Iterator[str]:
    """Modules of this package that a file imports anywhere, without the leading package name."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("transferd"):
            base = node.module.removeprefix("transferd").lstrip(".")
            if base:
                yield base
            else:
                yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("transferd.") for a in node.names if a.name.startswith("transferd."))


def top(module: str) -> str:
    return module.split(".")[0]


def test_the_order_names_what_is_there() -> None:
    entries = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir() if path.name[0] not in "_."}
    assert entries - {"py"} == set(ORDER), "ORDER and transferd/ differ (docs/architecture.md has the same line)"
    assert " ".join(ORDER) in (ROOT / "docs" / "architecture.md").read_text()
    assert len(ORDER) <= 16


def test_the_picture_of_the_tree_is_what_the_tree_says() -> None:
    script = ROOT / "scripts" / "draw_architecture.py"
    done = subprocess.run([sys.executable, script, "--check"], check=False, timeout=60)
    assert done.returncode == 0, "run: python scripts/draw_architecture.py"


def test_a_folder_imports_only_from_those_before_it() -> None:
    order = {name: position for position, name in enumerate(ORDER + ABOVE_ALL)}
    wrong = [
        f"{name} imports {imported}"
        for path, name in modules()
        for imported in imports(path)
        if order[top(imported)] > order[top(name)]
    ]
    assert not wrong, "\n".join(wrong)


def knows() -> dict[str, set[str]]:
    """For each module, the modules that it imports anywhere: also for types only, and within functions."""
    names = {name.removesuffix(".__init__") for _, name in modules()}
    graph: dict[str, set[str]] = {}
    for path, name in modules():
        known = graph[name.removesuffix(".__init__")] = set[str]()
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transferd."):
                base = node.module.removeprefix("transferd.")  # type: ignore[union-attr]
                known.update(one if (one := f"{base}.{alias.name}") in names else base for alias in node.names)
            elif isinstance(node, ast.Import):
                known.update(a.name.removeprefix("transferd.") for a in node.names if a.name.startswith("transferd."))
    return graph


def test_no_two_modules_know_each_other_not_even_for_types() -> None:
    graph = knows()
    assert graph["daemon.server"] >= {"daemon.engines", "daemon.requests"}, "the graph is read"
    reached = {name: _reached(graph, name) for name in graph}
    circles = {
        " -> ".join(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in graph
        if name in reached[name]
    }
    assert not circles


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What a module knows, itself or through others; itself only if it is in a circle."""
    found: set[str] = set()
    todo = list(graph.get(start, ()))
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += graph.get(name, ())
    return found


def test_every_folder_says_what_may_live_there() -> None:
    for folder in sorted(path for path in PACKAGE.rglob("*") if path.is_dir() and list(path.glob("*.py"))):
        docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert docstring, folder


def test_the_client_knows_the_wire_and_nothing_else() -> None:
    for path in sorted((PACKAGE / "client").glob("*.py")):
        for imported in imports(path) if path.stem != "launch" else ():  # which starts daemons, for tests
            assert {imported, top(imported)} & CLIENT_MAY_IMPORT, f"{path.stem} imports {imported}"


def test_importing_the_client_loads_nothing_heavy() -> None:
    code = "import sys, transferd.client; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    heavy = {"cuda", "mooncake", "paddle", "uvloop", "torch", "cupy"} & set(out.split())
    assert not heavy


@pytest.mark.parametrize(
    ("path", "name"), list(modules()), ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_a_module_keeps_the_house_rules(path: Path, name: str) -> None:
    text = path.read_text()
    tree = module_of(path)
    for pattern, reason in BANNED.items():
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        found = re.search(pattern, _without_docstrings(tree, code))
        assert not found, f"{name}: {found and found[0]!r}: {reason}"
    assert ast.get_docstring(tree), f"{name} does not say what it is"
    lines = len(text.splitlines())
    assert lines <= LONGEST_FILE or path.name in LONG_FILES, f"{name} has {lines} lines: is it two nouns?"
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{name}.{node.name} has {length} lines"
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            small = all(isinstance(item, ast.Pass | ast.AnnAssign | ast.Assign) for item in node.body)
            assert ast.get_docstring(node) or small, f"{name}.{node.name} does not say what it is"


def test_a_small_file_with_one_importer_says_why_it_is_alone() -> None:
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for path, name in modules():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("transferd"):
                base = node.module.removeprefix("transferd").lstrip(".")
                for imported in (base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)):
                    importers[imported].add(name)
    crumbs = {
        name
        for path, name in modules()
        if path.stem not in ("__init__", "__main__")
        and len(path.read_text().splitlines()) < CRUMB
        and len(importers[name]) <= 1
        and importers[name] != {"cli.main"}  # a file for each command
    }
    assert crumbs - set(CRUMBS) == set(), "join each with its importer, or say in CRUMBS why it is alone"


def test_a_module_gives_each_name_once() -> None:
    """A second `_libc` has none of the argument types of the first, and cuts addresses to 32 bits."""
    twice = {}
    for path, name in modules():
        names: Counter[str] = Counter()
        for part in module_of(path).body:
            if isinstance(part, ast.Assign):
                names.update(target.id for target in part.targets if isinstance(target, ast.Name))
            elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names[part.name] += 1
        if again := [one for one, count in names.items() if count > 1 and one != "_"]:
            twice[name] = again
    assert not twice


def test_a_class_name_means_one_thing() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, name in modules():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def _without_docstrings(tree: ast.Module, text: str) -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node, clean=False)
            if doc:
                text = text.replace(doc, "")
    return text


def test_the_changelog_keeps_its_shape() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\]", text, re.MULTILINE)
    assert headings
    assert headings[0] == "Unreleased"
    newest = text.split("\n## [")[1]
    assert len(newest.splitlines()) <= 60, "the rest belongs into the full list beside it"
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= allowed


def test_the_readme_names_only_commands_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    help_text = subprocess.run(
        [sys.executable, "-m", "transferd", "--help"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for verb in re.findall(r"^\s*(?:\.venv/bin/)?transferd ([a-z-]+)", text, re.MULTILINE):
        assert verb in help_text, f"README shows `transferd {verb}`"


@pytest.fixture
def tracked() -> list[Path]:
    """The files that git tracks, without those that were just removed."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).exists()]


def test_no_machine_path_is_in_the_tree(tracked: list[Path]) -> None:
    for path in tracked:
        if path.suffix in {".py", ".md", ".toml", ".service", ".json", ".c", ".h"} and path != Path(__file__):
            assert not re.search(r"/work/|/root/", path.read_text(errors="replace")), path


def test_nothing_compiled_is_in_the_tree(tracked: list[Path]) -> None:
    binary = {str(path.relative_to(ROOT)) for path in tracked if b"\0" in path.read_bytes()}
    assert binary == {"docs/page.png", "docs/page_phone.png"}, "built here, or one more picture?"


def test_each_adapter_of_an_engine_has_a_page_and_tests() -> None:
    engines = {path.parent.name for path in (PACKAGE / "adapters").glob("*/__init__.py")} - {"common"}
    assert engines >= {"fastdeploy", "vllm"}
    for engine in engines:
        assert f"(docs/{engine}.md)" in (ROOT / "README.md").read_text(), f"README has no row for {engine}"
        assert list((ROOT / "tests" / "adapters").glob(f"test_{engine}_*.py")), engine


def test_each_page_is_in_the_menu_of_the_site() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == set()


# --- tests ----------------------------------------------------------------------------------------

MIRRORED = ["control", "daemon", "workers", "storage", "config", "runtime"]


def test_each_module_has_a_test_file_of_its_name_in_the_folder_of_its_name() -> None:
    """So that a reader, and `make mutate`, find the nearest tests without a search."""
    named = {path.relative_to(PACKAGE).with_suffix("") for path, _ in modules() if path.name != "__init__.py"}
    mirrored = {module for module in named if module.parts[0] in MIRRORED}
    assert {module.parts[0] for module in mirrored} == set(MIRRORED)
    files = {module: ROOT / "tests" / module.parent / f"test_{module.name}.py" for module in mirrored}
    missing = sorted(module.as_posix() for module, file in files.items() if not file.exists())
    assert not missing, f"write a test file for {missing}"
    for module, file in files.items():
        assert str(file.relative_to(ROOT)) in mutate.tests_of(module.as_posix())


def test_each_test_asserts() -> None:
    """Itself, or in a helper of the tests; that nothing raises or hangs is not enough to fail when it should."""
    asserting: set[str] = set()
    others: list[tuple[str, str, set[str]]] = []  # functions without an assert: where, name, what they call
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if _asserts(node):
                    asserting.add(node.name)
                else:
                    others.append((f"{path.relative_to(ROOT)}::{node.name}", node.name, _names(node)))
    for _ in range(3):  # helpers that call helpers
        asserting |= {name for _, name, calls in others if calls & asserting}
    silent = {where for where, name, calls in others if name.startswith("test_") and not calls & asserting}
    assert silent <= ASSERT_ELSEWHERE, f"these tests cannot fail: {sorted(silent - ASSERT_ELSEWHERE)}"


# Tests whose assertions run in another process, or in a function that they find by its name.
ASSERT_ELSEWHERE = {
    "tests/machine/fuzz/test_targets.py::test_any_bytes",
    "tests/runtime/test_threads.py::test_the_system_refuses_threads_and_nothing_refused_ever_runs",
}


def _asserts(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr in ("raises", "warns"))
        for node in ast.walk(function)
    )


def _names(function: ast.AST) -> set[str]:
    """The functions that it calls or passes on, by their last name; not those that every class has."""
    found: set[str] = set()
    for call in ast.walk(function):
        if isinstance(call, ast.Call):
            for one in (call.func, *call.args, *(keyword.value for keyword in call.keywords)):
                found |= (
                    {one.attr} if isinstance(one, ast.Attribute) else {one.id} if isinstance(one, ast.Name) else set()
                )
    return found - {"open", "close", "start", "run", "get", "put", "send", "read", "write", "wait", "step", "end"}


BACKENDS = {"file", "memory", "mooncake", "object"}
MAY_NAME_BACKENDS = {
    "storage.registry": "maps names to classes",
    "config.sections": "the defaults, and the names of sections",
    "cli.bench.storage": "its option says what to measure, each beside something else",
    "adapters.fastdeploy.words": "FastDeploy's own option has these names",
    "storage.mooncake.store": "the name of the Python package that it needs",
}


def test_nothing_is_decided_by_the_name_of_a_backend() -> None:
    """What a backend can do is an attribute of its class: a class of another package has other names."""
    wrong = []
    for path, name in modules():
        if name in MAY_NAME_BACKENDS:
            continue
        for node in nodes(path):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            names = {one.value for side in sides for one in ast.walk(side) if isinstance(one, ast.Constant)} & BACKENDS
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                values = [one.value for one in node.elts if isinstance(one, ast.Constant)]
                names |= set(values) if values and len(values) == len(node.elts) and set(values) <= BACKENDS else set()
            if not names or not isinstance(node, ast.expr):
                continue
            about_backends = any(word in ast.unparse(node) for word in ("backend", "level", "storage", "title", "kind"))
            if about_backends or not isinstance(node, ast.Compare):
                wrong.append(f"{name}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "give the class an attribute"
