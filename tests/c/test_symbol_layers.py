"""Files of csrc/lazy call files below them: calls form no circle but those listed here.

Headers say less than symbols do: core.h declares what several files define.
"""

import subprocess
from pathlib import Path

from support.paths import PROJECT

LAZY = PROJECT / "csrc/lazy"

#: Files that call each other, and why they may.
KNOWN_CIRCLES = {
    # one cache in parts: what opens an object makes room for it, which opens others
    frozenset(
        {f"cache/{name}" for name in ("bits", "contents", "evict")}
        | {f"cache/{name}" for name in ("frequency", "lock", "object")}
        | {f"cache/{name}" for name in ("pending", "room", "state", "whole")}
    ),
    # the process fails the runs that it has, and a run needs the process
    frozenset({"process/front", "process/inquiries", "process/life"}),
    # an exchange waits for a login, which may need an exchange for its token
    frozenset({"mirror/exchange", "mirror/login"}),
}

_DEFINED = set("TDBRVWiC")


def objects(build: Path) -> dict[str, Path]:
    """The built object of each file, as ``mirror/file``."""
    names = {
        path.relative_to(LAZY).with_suffix("").as_posix() for path in LAZY.rglob("*.c")
    }
    by_object = {name.replace("/", "_") + ".c.o": name for name in names}
    found = {
        by_object[path.name]: path
        for path in (build / "csrc/lazy").glob("*.p/*.o")
        if path.name in by_object
    }
    assert names == set(found), "each file of csrc/lazy is in a library"
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


def calls(build: Path) -> dict[str, set[str]]:
    """The files that each file needs."""
    all_symbols = {name: symbols(path) for name, path in objects(build).items()}
    owner = {
        symbol: name
        for name, (defined, _needed) in all_symbols.items()
        for symbol in defined
    }
    return {
        name: {owner[symbol] for symbol in needed if symbol in owner} - {name}
        for name, (_defined, needed) in all_symbols.items()
    }


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of which each file needs each other one, perhaps by way of others."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            for name in graph[waiting.pop()] - found:
                found.add(name)
                waiting.append(name)
        return found

    reach = {name: reached(name) for name in graph}
    return {
        frozenset(other for other in reach[name] if name in reach[other])
        for name in graph
        if name in reach[name]
    }


def test_calls_form_no_new_circle(sanitized_build: Path) -> None:
    assert circles(calls(sanitized_build)) == KNOWN_CIRCLES


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == {frozenset({"b", "c"})}
