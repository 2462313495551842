"""Files of csrc call files below them: between folders, and within those that fetch.

Headers say less than symbols do: core.h declares what several files define.
"""

import subprocess
from pathlib import Path

from support.paths import PROJECT

CSRC = PROJECT / "csrc"

#: From the bottom up. Files of a folder call each other, and those of folders before.
FOLDERS = (
    "base",
    "content",
    "content/cache",
    "content/codec",
    "content/store",
    "fetch",
    "fetch/mirror",
    "fetch/process",
    "lazy",
)

#: Files that call each other, and why they may.
KNOWN_CIRCLES = {
    # one cache in parts: what opens an object makes room for it, which opens others
    frozenset(
        {f"content/cache/{name}" for name in ("bits", "contents", "evict")}
        | {f"content/cache/{name}" for name in ("frequency", "lock", "object")}
        | {f"content/cache/{name}" for name in ("pending", "room", "state", "whole")}
    ),
    # the process fails the runs that it has, and a run needs the process
    frozenset(f"fetch/process/{name}" for name in ("front", "inquiries", "life")),
    # an exchange waits for a login, which may need an exchange for its token
    frozenset({"fetch/mirror/exchange", "fetch/mirror/login"}),
}

_DEFINED = set("TDBRVWiC")


def objects(build: Path) -> dict[str, Path]:
    """The built object of each file, as ``fetch/mirror/file``."""
    found: dict[str, Path] = {}
    for folder in sorted({name.partition("/")[0] for name in FOLDERS}):
        names = {
            path.relative_to(CSRC / folder).with_suffix("").as_posix()
            for path in (CSRC / folder).rglob("*.c")
        }
        by_object = {name.replace("/", "_") + ".c.o": name for name in names}
        of_folder = {
            by_object[path.name]: path
            for path in (build / "csrc" / folder).glob("*.p/*.o")
            if path.name in by_object
        }
        assert names == set(of_folder), f"each file of csrc/{folder} is in a library"
        found |= {f"{folder}/{name}": path for name, path in of_folder.items()}
    return found


def symbols(path: Path) -> tuple[set[str], set[str]]:
    """What an object defines for others, and what it needs of them."""
    listing = subprocess.run(
        ["nm", "--extern-only", path], check=True, capture_output=True, text=True
    ).stdout
    defined, needed = set(), set()
    for line in listing.splitlines():
        kind, name = line.split()[-2:]
        if kind == "U":
            needed.add(name)
        elif kind in _DEFINED:
            defined.add(name)
    return defined, needed


def calls(build: Path) -> dict[str, dict[str, set[str]]]:
    """The files that each file needs, with the symbols that it needs of them."""
    all_symbols = {name: symbols(path) for name, path in objects(build).items()}
    owner = {
        symbol: name
        for name, (defined, _needed) in all_symbols.items()
        for symbol in defined
    }
    graph: dict[str, dict[str, set[str]]] = {}
    for name, (_defined, needed) in all_symbols.items():
        of_name = graph.setdefault(name, {})
        for symbol in needed:
            if owner.get(symbol, name) != name:
                of_name.setdefault(owner[symbol], set()).add(symbol)
    return graph


def upward(graph: dict[str, dict[str, set[str]]]) -> set[str]:
    """What a file needs of a folder above its own, as ``file: symbol of file``."""

    def level(name: str) -> int:
        return FOLDERS.index(name.rpartition("/")[0])

    return {
        f"{name}: {symbol} of {other}"
        for name, others in graph.items()
        for other, of_other in others.items()
        if level(other) > level(name)
        for symbol in of_other
    }


def circles(graph: dict[str, dict[str, set[str]]]) -> set[frozenset[str]]:
    """Groups of which each file needs each other one, perhaps by way of others."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph[waiting.pop()].keys() - found:
                found.add(name)
                waiting.append(name)
        return found

    reach = {name: reached(name) for name in graph}
    return {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in graph
        if name in reach[name]
    }


def test_calls_go_downwards_and_form_no_new_circle(sanitized_build: Path) -> None:
    graph = calls(sanitized_build)
    assert upward(graph) == set()
    assert circles(graph) == KNOWN_CIRCLES


def test_a_circle_is_found() -> None:
    graph = {"a": {"b": {"f"}}, "b": {"c": {"g"}}, "c": {"b": {"h"}}, "d": {"a": {"i"}}}
    assert circles(graph) == {frozenset({"b", "c"})}


def test_a_call_upwards_is_found() -> None:
    graph = {
        "base/low": {"fetch/high": {"climb"}},
        "fetch/high": {"base/low": {"fall"}},
    }
    assert upward(graph) == {"base/low: climb of fetch/high"}
