"""Includes of C go downwards through the layers of csrc/, and never in a circle."""

import re

from support.paths import PROJECT

CSRC = PROJECT / "csrc"

#: From the bottom up. A folder's files may include its own, and those of layers below.
LAYERS = [
    {"base"},
    {"btrfs", "content", "physmap"},
    {"fetch", "image"},
    {"lazy"},
    {"server"},
    {"tools", "bench"},
    {"tests"},
]

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def unit_of(name: str) -> str:
    """``content/map`` is content/map.h together with content/map.c."""
    return name.rpartition(".")[0]


def includes() -> dict[str, set[str]]:
    """The units that each unit includes."""
    graph: dict[str, set[str]] = {}
    for path in sorted(CSRC.rglob("*.[ch]")):
        unit = unit_of(path.relative_to(CSRC).as_posix())
        included = graph.setdefault(unit, set())
        for name in _INCLUDE.findall(path.read_text()):
            assert (CSRC / name).exists(), f"{path}: name {name} from csrc/ on"
            included.add(unit_of(name))
        included.discard(unit)
    return graph


def circles(graph: dict[str, set[str]]) -> list[str]:
    """One way around each, as ``a -> b -> a``; empty when there is none."""
    found = []
    done: set[str] = set()

    def visit(unit: str, path: tuple[str, ...]) -> None:
        if unit in path:
            found.append(" -> ".join([*path[path.index(unit) :], unit]))
        elif unit not in done:
            for included in sorted(graph[unit]):
                visit(included, (*path, unit))
            done.add(unit)

    for unit in graph:
        visit(unit, ())
    return found


def layer_of(unit: str) -> int:
    folder = unit.partition("/")[0]
    for number, folders in enumerate(LAYERS):
        if folder in folders:
            return number
    raise AssertionError(f"{unit} has no layer: add it to LAYERS and to HACKING.md")


def test_includes_go_downwards() -> None:
    wrong = [
        f"{unit} includes {included}"
        for unit, all_included in includes().items()
        for included in all_included
        if unit.partition("/")[0] != included.partition("/")[0]
        and layer_of(included) >= layer_of(unit)
    ]
    assert wrong == []


def test_includes_form_no_circle() -> None:
    assert circles(includes()) == []


def test_no_file_is_too_long() -> None:
    lines = {
        path.relative_to(CSRC).as_posix(): len(path.read_text().splitlines())
        for path in CSRC.rglob("*.[ch]")
    }
    assert {name: count for name, count in lines.items() if count > 800} == {}
