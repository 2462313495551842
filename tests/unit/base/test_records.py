"""The @dataclass that waits until it is used does what the standard library's does."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from btrfs_ublk.base.paths import OptionalPath
from btrfs_ublk.base.records import _waiting, dataclass


@dataclass(frozen=True)
class Point:
    x: int
    y: int = 2
    names: list[str] = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Further(Point):
    """With a docstring."""

    z: int = 3

    def __post_init__(self) -> None:
        assert self.z, self


class Plain(Further):
    pass


def test_it_is_made_when_it_is_used() -> None:
    @dataclass
    class Unused:
        x: int

    assert Unused in _waiting
    assert [each.name for each in dataclasses.fields(Unused)] == ["x"]
    assert Unused not in _waiting
    assert Unused.__doc__ == "Unused"


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda: Point(1), Point(1, 2, [])),
        (lambda: repr(Point(1)), "Point(x=1, y=2, names=[])"),
        (lambda: dataclasses.replace(Point(1), y=5), Point(1, 5)),
        (lambda: dataclasses.asdict(Further(1)), {"x": 1, "y": 2, "names": [], "z": 3}),
        (lambda: copy.deepcopy(Further(7, z=8)), Further(7, z=8)),
        (lambda: pickle.loads(pickle.dumps(Point(4))), Point(4)),
        (lambda: Point(1, names=["a"]) == Point(1), False),
        (lambda: Plain(1, z=4).z, 4),
        (lambda: [x.name for x in dataclasses.fields(Plain)], ["x", "y", "names", "z"]),
        (lambda: Further.__doc__, "With a docstring."),
    ],
)
def test_it_is_a_dataclass(act: Callable[[], Any], expected: Any) -> None:
    assert act() == expected


def test_wrong_arguments_and_changes_are_refused() -> None:
    wrong: list[Callable[..., object]] = [
        lambda make: make(),
        lambda make: make(1, 2, [], 4),
        lambda make: make(1, x=1),
        lambda make: make(1, other=1),
    ]
    for act in wrong:
        with pytest.raises(TypeError, match="__init__"):
            act(Point)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1).x = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"needs dataclasses\.dataclass"):
        dataclass(frozen=True)(type("Other", (dict,), {}))


def test_fields_may_be_descriptors_or_hidden() -> None:
    @dataclass(frozen=True)
    class Entered:
        path: OptionalPath = OptionalPath()
        secret: str = dataclasses.field(default="s", repr=False)
        note: str = dataclasses.field(default="", compare=False)

    assert Entered().path is None and Entered(path="a").path == Path("a")
    assert "secret" not in repr(Entered())
    assert Entered(note="a") == Entered() != Entered(secret="t")
    assert hash(Entered(note="a")) == hash(Entered())


def test_threads_may_be_the_first_at_once() -> None:
    for _ in range(50):

        @dataclass(frozen=True)
        class Shared:
            x: int

        start, made = threading.Barrier(4), []

        def make(start: Any = start, made: Any = made, kind: Any = Shared) -> None:
            start.wait()
            made.append(kind(1).x)

        threads = [threading.Thread(target=make) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [1] * 4
