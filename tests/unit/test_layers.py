"""Imports go downwards through the layers of HACKING.md."""

import ast
import functools
from importlib import import_module
from pathlib import Path

import pytest

import btrfs_ublk

PACKAGE = Path(btrfs_ublk.__file__).parent

#: From the bottom up; a module may import from its own layer and those below.
LAYERS = [
    {"errors", "units", "base"},
    {"kernel"},
    {"physmap", "content"},
    {"server"},
    # What commands do with devices asks supervision, which is made of the rest.
    {"device", "supervision"},
    {"daemon"},
    {"seed"},
    {"image"},
    {"volume"},
    {"containers"},
    {"testing"},
    {"ops"},
    {"api"},
    {"bench"},
    {"ops.doctor"},
    {"cli", "demo", "demo_image"},
    {"ops.manual", "command"},
]
MAX_LINES = 800


def layer_of(module: str) -> int:
    """The layer of ``btrfs_ublk.NAME[.…]``; the package itself is at the bottom."""
    parts = module.split(".")
    if len(parts) == 1:
        return 0
    # The longer name first: parts of ``ops`` are above what others of it are below.
    for name in (".".join(parts[1:3]), parts[1]):
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
    raise AssertionError(f"{module} has no layer: add it to LAYERS and to HACKING.md")


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@functools.cache
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


@pytest.mark.parametrize(
    "package", "content device image kernel physmap seed server volume".split()
)
def test_packages_offer_what_type_checkers_see(package: str) -> None:
    path = PACKAGE / package / "__init__.py"
    seen = {
        alias.name: node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module != "btrfs_ublk.base.exports"
        for alias in node.names
        if alias.name != "TYPE_CHECKING"
    }
    offering = import_module(f"btrfs_ublk.{package}")
    assert offering.__all__ == sorted(seen)
    # A module of that name would take its place once it is imported.
    assert not {path.stem for path in path.parent.iterdir()} & seen.keys()
    for name, module in seen.items():
        assert module is not None
        assert getattr(offering, name) is getattr(import_module(module), name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        offering.no_such_name


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
