"""The core of the fetcher, driven at random (csrc/tests/core-shell.c)."""

from pathlib import Path

import pytest
from support.needs import rounds
from support.sanitized_build import run_sanitized

TURNS = 50_000


def run(build: Path, *arguments: str | Path) -> list[int]:
    """Return how many subscriptions were served, failed, and were ended; the units of
    the longest run, and how many runs have waited for memory."""
    done = run_sanitized(build / "csrc/tests/core-shell", *arguments)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("seed", rounds(3))
def test_random_ends_leave_nothing_behind(
    sanitized_build: Path, tmp_path: Path, seed: int
) -> None:
    """The program itself checks the data, that no subscription is called after its
    end, also when another one's callback ends it, and that no unit is left. Runs that
    break off make the next ones shorter; of some, all of the object comes."""
    found = []
    for units in (1, 2, 32):
        for whole, cache in ((0, []), (0, ["cache"]), (10, ["whole"])):
            words = [str(seed + 1), str(TURNS), str(units), str(whole)]
            cache = [tmp_path / f"{name}-{units}" for name in cache]
            ends = run(sanitized_build, *words, *cache)
            assert ends[0] and ends[2]
            if not whole:
                assert ends[3] == units or units == 32
                found.append(ends)
    *_, longest, resumed = zip(*found)
    assert 4 < max(longest) and sum(resumed)
