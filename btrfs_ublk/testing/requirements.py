"""Tests' requirements: without them, a test is skipped or fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from btrfs_ublk.testing.settings import FRONT_ENDS, settings_of

if TYPE_CHECKING:
    from btrfs_ublk.base.capabilities import Capability
    from btrfs_ublk.server import FrontEndName

MARKER = "btrfs_ublk"
_KEYS = ("front_end", "requires")
#: Fixtures that need a front end, and have a wider scope than one test.
_SERVED = tuple(
    f"btrfs_ublk_{thing}{factory}_{scope}"
    for thing in ("device", "volume")
    for factory in ("", "_factory")
    for scope in ("module", "session")
)


def need(config: pytest.Config, *capabilities: Capability) -> None:
    """Skip the test, or fail it under --btrfs-ublk-require, if one is missing."""
    for capability in capabilities:
        reason = capability.probe()
        if reason is not None:
            do_without(config, f"{capability.name}: {reason} ({capability.hint})")


def do_without(config: pytest.Config, what: str) -> NoReturn:
    """End a test because of ``what`` is missing."""
    if settings_of(config).require:
        pytest.fail(f"required, but {what}", pytrace=False)
    pytest.skip(what)


def front_end_of(node: pytest.Item | pytest.Collector) -> FrontEndName:
    """Return the front end of the closest marker of a test, its class or its module;
    else of the settings.
    """
    name: FrontEndName = settings_of(node.config).front_end
    # NB: the first marker may be the plugin's own, which names no front end.
    for marker in node.iter_markers(MARKER):
        if "front_end" in marker.kwargs:
            name = marker.kwargs["front_end"]
            break
    return name


def check_item(item: pytest.Item) -> None:
    """Check the markers of a test before any of its fixtures is made."""
    markers = list(item.iter_markers(MARKER))
    if not markers:
        return
    from btrfs_ublk.base import capabilities as known

    by_name: dict[str, Capability] = {
        "root": known.ROOT,
        "btrfs": known.BTRFS,
        "loop": known.LOOP,
        "fuse": known.FUSE,
        "ublk": known.UBLK,
        "btrfs-progs": known.BTRFS_PROGS,
    }
    for marker in markers:
        _check_marker(marker, by_name)
        requires = marker.kwargs.get("requires", ())
        need(item.config, *(by_name[name] for name in _listed(requires)))
    front_end = front_end_of(item)
    if any("front_end" in marker.kwargs for marker in markers):
        need(item.config, known.ROOT)
        if front_end == "ublk":
            need(item.config, known.UBLK)
        elif front_end == "fuse":
            need(item.config, known.FUSE, known.LOOP)
    _check_scopes(item, front_end)


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_marker(marker: pytest.Mark, by_name: dict[str, Capability]) -> None:
    wrong = None
    unknown = [key for key in marker.kwargs if key not in _KEYS]
    front_end = marker.kwargs.get("front_end", "auto")
    nameless = [
        x for x in _listed(marker.kwargs.get("requires", ())) if x not in by_name
    ]
    if marker.args or unknown:
        wrong = f"{[*marker.args, *unknown]}; it takes {' and '.join(_KEYS)}, by name"
    elif front_end not in FRONT_ENDS:
        wrong = f"front_end {front_end!r}; there are {', '.join(FRONT_ENDS)}"
    elif nameless:
        wrong = f"requires {nameless}; there are {', '.join(by_name)}"
    if wrong:
        pytest.fail(f"the marker {MARKER} does not know {wrong}", pytrace=False)


def _check_scopes(item: pytest.Item, front_end: FrontEndName) -> None:
    """Fail a test that wants another front end than that of a device it shares."""
    for name in set(_SERVED).intersection(getattr(item, "fixturenames", ())):
        module = item.getparent(pytest.Module)
        owner = module if name.endswith("_module") and module else item.session
        shared = front_end_of(owner)
        if front_end != shared:
            pytest.fail(
                f"the marker of this test says front_end={front_end!r}, but {name} "
                f"is shared, and has {shared!r}: mark the module (pytestmark), use a "
                "fixture of the test's own, or set --btrfs-ublk-front-end",
                pytrace=False,
            )
