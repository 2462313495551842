"""Imports go downwards through the layers of the README."""

from __future__ import annotations

import ast
from pathlib import Path

import btrfs_ublk

PACKAGE = Path(btrfs_ublk.__file__).parent

#: From the bottom up; a module may import from its own layer and those below.
LAYERS = [
    {"errors", "units", "log", "readers", "directories", "records"},
    {"interrupts", "libraries", "process", "ledger", "abandoned", "undo"},
    {"capabilities", "helpers", "entry", "progress", "versions"},
    {"resources"},
    {"physmap", "cache", "lazy"},
    {"server"},
    {"device"},
    {"monitor"},
    {"seed"},
    {"sprout"},
    {"volume"},
    {"testing"},
    {"gc"},
    {"volumes"},
    {"api"},
    {"bench"},
    {"doctor"},
    {"bugreport"},
    {"cli", "demo"},
    {"manual"},
]
MAX_LINES = 500


def layer_of(module: str) -> int:
    """The layer of ``btrfs_ublk.NAME[.…]``; the package itself is at the bottom."""
    parts = module.split(".")
    if len(parts) == 1:
        return 0
    for number, names in enumerate(LAYERS):
        if parts[1] in names:
            return number
    raise AssertionError(f"{module} has no layer: add it to LAYERS and to the README")


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """The modules of this package that a file names in its imports."""
    if path == PACKAGE / "__init__.py":
        return set()  # it offers the API, and imports that when it is wanted
    known = modules()
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                # "from package import module" is about the module alone.
                member = f"{node.module}.{alias.name}"
                names.add(member if member in known else node.module or "")
    return {name for name in names if name.split(".")[0] == "btrfs_ublk"}


def test_imports_go_downwards() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules().items()
        for imported in imports(path)
        if layer_of(imported) > layer_of(module)
    ]
    assert wrong == []


def test_modules_stay_small() -> None:
    long = {
        module: lines
        for module, path in modules().items()
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_imports_form_no_cycle() -> None:
    graph = {module: imports(path) for module, path in modules().items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module in done:
            return
        for imported in graph.get(module, set()) - {module}:
            visit(imported, (*path, module))
        done.add(module)

    for module in graph:
        visit(module, ())
