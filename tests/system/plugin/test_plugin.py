"""The pytest plugin, in generated projects of its users."""

import re
from collections.abc import Callable

import pytest
from support.needs import Need
from support.system_state import SystemState

from btrfs_ublk.base.capabilities import BTRFS, LOOP
from btrfs_ublk.base.helpers import HELPERS_VARIABLE
from btrfs_ublk.server import FrontEndName
from btrfs_ublk.testing.settings import REQUIRE_VARIABLE

pytest_plugins = "pytester"

#: Some of each scope, and what tells one of them from another.
SOME = {
    "btrfs_ublk_seed": "path",
    "btrfs_ublk_range_server_module": "base_url",
    "btrfs_ublk_volume_module": "target",
    "btrfs_ublk_loop_session": "path",
    "btrfs_ublk_device_session": "device",
    "btrfs_ublk_volume_session": "target",
}


@pytest.fixture(autouse=True)
def _plain(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what the test sets; and the warnings of an installation."""
    monkeypatch.delenv(REQUIRE_VARIABLE, raising=False)
    # In this process, the plugin is there before pytest can rewrite its assertions.
    monkeypatch.setenv(
        "PYTEST_ADDOPTS", "-p no:cacheprovider -W 'ignore:Module already imported'"
    )
    pytester.makeini("[pytest]\naddopts = --strict-markers")


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(*arguments, timeout=250)


def test_things_of_each_scope(
    pytester: pytest.Pytester,
    front_end: FrontEndName,
    need: Need,
    state_of_system: Callable[[], SystemState],
) -> None:
    """Two modules, the first with two tests: which of them share what."""
    need(BTRFS, LOOP)
    before = state_of_system()
    test = f"""
        import pytest

        @pytest.mark.parametrize("number", NUMBERS)
        def test_it(number, {", ".join(SOME)}):
            for name, key in {SOME!r}.items():
                print("\\nmade", name, getattr(locals()[name], key))
            volume, server = btrfs_ublk_volume_session, btrfs_ublk_device_session
            assert volume.server.front_end == {front_end!r}
            assert server.front_end == {front_end!r}
            size = (1 << 40) - 4096
            with open(server.device, "rb") as device:
                device.seek(size)
                assert device.read(8) == size.to_bytes(8, "little")
            name = f"{{__name__}}-{{number}}"
            with volume.clone(name, offset=4096, size_bytes=size).open("rb") as file:
                assert file.read(8) == (4096).to_bytes(8, "little")
    """
    pytester.makepyfile(
        test_a=test.replace("NUMBERS", "(1, 2)"), test_b=test.replace("NUMBERS", "[3]")
    )
    result = run(pytester, "-s", f"--btrfs-ublk-front-end={front_end}")
    result.assert_outcomes(passed=3)
    for name in SOME:
        made = [line.split()[2] for line in result.outlines if f"made {name} " in line]
        new = [made[0] != made[1], made[1] != made[2]]
        expected = {"module": [False, True], "session": [False, False]}
        assert new == expected.get(name.rpartition("_")[2], [True, True]), name
    assert state_of_system() == before


def test_there_are_six_fixtures_of_each_thing(pytester: pytest.Pytester) -> None:
    """And each says what it is."""
    result = pytester.runpytest_inprocess("--fixtures")
    told = "\n".join(result.outlines)
    for thing in ("loop", "device", "seed", "volume", "range_server"):
        for factory in ("", "_factory"):
            for scope in ("", "_module", "_session"):
                place = rf" \[{scope[1:]} scope\]" if scope else ""
                name = f"btrfs_ublk_{thing}{factory}{scope}"
                assert re.search(rf"^{name}{place} -- .*\n    \S", told, re.M), name
    assert (
        "no docstring" not in told.partition("btrfs_ublk")[2].partition("fixtures d")[0]
    )


@pytest.mark.device
def test_files_of_a_volume_are_fetched_in_parallel_processes(
    pytester: pytest.Pytester, need: Need, state_of_system: Callable[[], SystemState]
) -> None:
    """Two processes share a server, each has volumes of its own: and what is not read
    is not fetched.
    """
    before = state_of_system()
    pytester.makepyfile("""
        import mmap, random
        import pytest

        DATA = random.Random(5).randbytes(3_000_001)

        @pytest.fixture(scope="module")
        def volume(btrfs_ublk_volume_factory_module, btrfs_ublk_range_server_module):
            server = btrfs_ublk_range_server_module
            urls = {"a/data": server.put("the data", DATA), "o": server.put("o", DATA)}
            return btrfs_ublk_volume_factory_module(files=urls)

        @pytest.mark.parametrize("number", range(4))
        def test_it(volume, number, btrfs_ublk_range_server_module):
            path = volume.target / "a/data"
            assert path.stat().st_size == len(DATA)
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=1) as map:
                assert map[number * 700_000:][:9] == DATA[number * 700_000:][:9]
            assert path.read_bytes() == DATA
            served = btrfs_ublk_range_server_module.served()
            assert sum(x.length for x in served if x.path == "/o") < 2
            path.write_bytes(b"mine")
            path.write_bytes(DATA)
        """)
    result = run(pytester, "-n2")
    result.assert_outcomes(passed=4)
    assert state_of_system() == before


@pytest.mark.parametrize("how", ["", "option", "ini", "environment"])
def test_what_is_missing_skips_or_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv(HELPERS_VARIABLE, "/nowhere")
    if how == "ini":
        pytester.makeini("[pytest]\nbtrfs_ublk_require = true")
    elif how == "environment":
        monkeypatch.setenv(REQUIRE_VARIABLE, "1")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.btrfs_ublk(requires="btrfs-progs")
        def test_marker(): pass

        @pytest.fixture(scope="session")
        def seed(btrfs_ublk_seed_factory_session):
            return btrfs_ublk_seed_factory_session(1 << 30)

        def test_fixture(seed): pass

        @pytest.mark.btrfs_ublk(requires=[])
        def test_neither(btrfs_ublk_range_server): pass
        """)
    options = ["--btrfs-ublk-require"] if how == "option" else []
    result = pytester.runpytest_inprocess("-ra", *options)
    outcomes = {"errors": 2} if how else {"skipped": 2}
    result.assert_outcomes(passed=1, **outcomes)
    said = str(result.stdout)
    assert "btrfs: it is not on PATH (install the package btrfs-progs)" in said
    assert "the helper btrfs-ublk-mkseed is not at /nowhere/btrfs-ublk-mkseed" in said
    assert "needed" not in said if not how else "required, but btrfs" in said


@pytest.mark.parametrize(
    "options, text",
    [
        (
            ["--btrfs-ublk-front-end=nbd"],
            "is 'nbd', it must be one of auto, ublk, fuse",
        ),
        (["--btrfs-ublk-images=none"], "is 'none', it must be a directory"),
        (["--btrfs-ublk-timeout=-1"], "is '-1', it must be a number of seconds"),
        (["-o", "btrfs_ublk_timeout=soon"], "btrfs_ublk_timeout) is 'soon', it must"),
    ],
)
def test_wrong_settings_end_the_run(
    pytester: pytest.Pytester, options: list[str], text: str
) -> None:
    result = pytester.runpytest_inprocess(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert text in str(result.stderr)


@pytest.mark.parametrize(
    "test, text",
    [
        (
            "@pytest.mark.btrfs_ublk('fuse')\ndef test_it(): pass",
            "the marker btrfs_ublk does not know ['fuse']; it takes front_end and",
        ),
        (
            "@pytest.mark.btrfs_ublk(front_end='nbd')\ndef test_it(): pass",
            "does not know front_end 'nbd'; there are auto, ublk, fuse",
        ),
        (
            "@pytest.mark.btrfs_ublk(requires='zfs')\ndef test_it(): pass",
            "does not know requires ['zfs']; there are root, btrfs, loop,",
        ),
        (
            "@pytest.mark.btrfs_ublk(front_end='fuse')\n"
            "def test_it(btrfs_ublk_volume_session): pass",
            "says front_end='fuse', but btrfs_ublk_volume_session is shared, and has "
            "'auto'",
        ),
    ],
)
@pytest.mark.device
def test_wrong_markers_fail_the_test(
    pytester: pytest.Pytester, test: str, text: str
) -> None:
    pytester.makepyfile(f"import pytest\n{test}")
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(errors=1)
    assert text in str(result.stdout)


@pytest.mark.device
def test_a_volume_that_is_in_use_is_an_error_that_says_by_whom(
    pytester: pytest.Pytester, state_of_system: Callable[[], SystemState]
) -> None:
    """And once it is not, it is gone."""
    before = state_of_system()
    pytester.makepyfile("""
        import subprocess

        def test_it(btrfs_ublk_volume, request):
            name = request.config.rootpath / "go on"
            script = 'read line <&3; until [ -e "$0" ]; do sleep 0.1; done; exit'
            (btrfs_ublk_volume.target / "file").write_text("line")
            reader = subprocess.Popen(
                ["bash", "-c", 'exec 3<"$1"; echo open; ' + script, str(name),
                 btrfs_ublk_volume.target / "file"],
                stdout=subprocess.PIPE,
            )
            assert reader.stdout.readline() == b"open\\n"
            reader.stdout.close()

        def test_later(request):
            (request.config.rootpath / "go on").touch()
        """)
    result = run(pytester)
    result.assert_outcomes(passed=2, errors=1)
    assert "still mounted and busy: pid " in str(result.stdout)
    assert "(bash): has open" in str(result.stdout)
    assert state_of_system() == before
