"""The pytest plugin, in generated projects of its users."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from support.needs import Need
from support.system_state import SystemState
from support.waiting import wait_until

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
        "PYTEST_ADDOPTS",
        "-p no:cacheprovider -W 'ignore:Module already imported'",
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


def test_empty_settings_are_not_given(pytester: pytest.Pytester) -> None:
    """As pytest before 8 says it of all that are not."""
    names = "front_end", "images", "timeout"
    settings = "".join(f"btrfs_ublk_{name} =\n" for name in names)
    pytester.makeini(f"[pytest]\n{settings}")
    pytester.makepyfile("def test_it(): pass")
    pytester.runpytest_inprocess().assert_outcomes(passed=1)


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
def test_a_failed_test_that_has_a_file_open_leaves_no_volume_busy(
    pytester: pytest.Pytester, state_of_system: Callable[[], SystemState]
) -> None:
    before = state_of_system()
    pytester.makepyfile("""
        import pytest

        def test_it(btrfs_ublk_volume):
            file = (btrfs_ublk_volume.target / "file").open("w")
            with pytest.raises(ZeroDivisionError) as caught:
                1 / 0
            assert file is None
        """)
    run(pytester).assert_outcomes(failed=1)
    assert state_of_system() == before


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


@pytest.mark.device
def test_a_volume_with_a_file_that_stays_open_goes_after_the_end_of_pytest(
    pytester: pytest.Pytester, state_of_system: Callable[[], SystemState]
) -> None:
    """And one line says so."""
    before = state_of_system()
    pytester.makepyfile("""
        KEPT = []

        def test_it(btrfs_ublk_volume):
            KEPT.append((btrfs_ublk_volume.target / "file").open("w"))
        """)
    result = run(pytester)
    result.assert_outcomes(passed=1, errors=1)
    # After pytest's own summary of the run.
    last = str(result.stdout).rpartition(" 1 error in ")[2].splitlines()[1:]
    said = [line for line in [*last, *result.errlines] if line]
    assert len(said) == 1, said
    assert "taken down after the end of this process" in said[0]
    assert re.search(r"has open \S+/mnt/file", said[0]), said
    wait_until(lambda: state_of_system() == before, state_of_system)


def test_fixtures_without_privileges_need_none(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import os

        def test_it(btrfs_ublk_seed, btrfs_ublk_range_server):
            assert os.geteuid() == 65534
            assert btrfs_ublk_seed.path.stat().st_size
            assert btrfs_ublk_range_server.put("x", b"x").startswith("http://127.")

        def test_volume(btrfs_ublk_volume): pass
        """)
    who = ["unshare", "--user", "--map-user=65534", "--map-group=65534"]
    if subprocess.run([*who, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("user namespaces: unshare(1) makes none here")
    result = pytester.run(*who, sys.executable, "-m", "pytest", "-ra", timeout=100)
    result.assert_outcomes(passed=1, skipped=1)
    assert "root: the effective user is 65534, not 0" in str(result.stdout)


def test_it_costs_nothing_where_it_is_not_used(pytester: pytest.Pytester) -> None:
    """Neither time for imports, nor the usual end by a signal."""
    pytester.makepyfile("""
        import signal, sys

        def test_it():
            ours = {x for x in sys.modules if x.startswith("btrfs_ublk.")}
            assert not [x for x in ours if not x.startswith("btrfs_ublk.testing")]
            assert not {"click", "psutil", "rich", "http.server"} & set(sys.modules)
            assert "btrfs_ublk.testing.plugin" in ours
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        """)
    run(pytester).assert_outcomes(passed=1)


def test_its_tests_can_be_chosen(pytester: pytest.Pytester) -> None:
    """The marker is of all tests that use a fixture, and of no other one."""
    pytester.makepyfile("""
        def test_with(btrfs_ublk_range_server): pass
        def test_without(): pass
        """)
    result = pytester.runpytest_inprocess("-m", "btrfs_ublk", "--collect-only", "-q")
    (chosen,) = [line for line in result.outlines if "::" in line]
    assert chosen.endswith("::test_with")


@pytest.mark.device
def test_wrong_files_are_shown_at_the_line_of_the_test(
    pytester: pytest.Pytester, need: Need
) -> None:
    """And not at one of ours, behind pages of our frames."""
    need(BTRFS, LOOP)
    pytester.makepyfile("""
        def test_it(btrfs_ublk_volume_factory, btrfs_ublk_range_server):
            url = btrfs_ublk_range_server.url("nothing")
            btrfs_ublk_volume_factory(files={"name": url})
        """)
    result = run(pytester)
    result.assert_outcomes(failed=1)
    result.stdout.re_match_lines([r">\s+btrfs_ublk_volume_factory\(files=.*"])
    result.stdout.re_match_lines([r"E\s+.*Refused: .*/nothing: HTTP status 404"])
    result.stdout.no_fnmatch_line("*block_server.py*")
    result.stdout.no_fnmatch_line("*volume_fixtures.py:*")
