"""The C helpers and test programs under AddressSanitizer and UBSan."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
from support.paths import PROJECT

from btrfs_ublk.base.helpers import HELPERS_VARIABLE

#: What nobody has set is the same at each run, and good for nothing. Less optimisation
#: and debug information take half as long to compile, and reports name lines as well.
_OPTIONS = (
    "-Db_sanitize=address,undefined",
    "-Db_lundef=false",
    "-Dtests=true",
    "-Doptimization=1",
    "-Dc_args=-ftrivial-auto-var-init=pattern -g1",
)
BUILD_TIMEOUT_S = 900
#: A virtual environment's own tools are found also when it is not activated.
SEARCH_PATH = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
)


def _run(*argv: str | Path) -> None:
    done = subprocess.run(
        [str(word) for word in argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIMEOUT_S,
        env=os.environ | {"PATH": SEARCH_PATH},
    )
    assert done.returncode == 0, f"{argv} failed:\n{done.stdout[-4000:]}"


@pytest.fixture(scope="session")
def sanitized_build() -> Path:
    """Build directory; helpers are in csrc/tools, test programs in csrc/tests.

    It is kept (and brought up to date) between runs, because a fresh one takes ten
    seconds; BTRFS_UBLK_SANITIZED_BUILD names another place.
    """
    if not _has_tools():
        if os.environ.get("BTRFS_UBLK_REQUIRE") == "1":
            pytest.fail("meson and ninja are needed for the sanitizer build")
        pytest.skip("meson and ninja are needed for the sanitizer build")
    return _build()


def bring_helpers_up_to_date() -> None:
    """Compile what has changed of the helpers that the package runs in a checkout."""
    build = PROJECT / f"build/cp{sys.version_info.major}{sys.version_info.minor}"
    in_vm = os.environ.get("BTRFS_UBLK_IN_VM") == "1"
    if not in_vm and (build / "build.ninja").exists() and _has_tools():
        _run("ninja", "-C", build)


def _has_tools() -> bool:
    return all(shutil.which(tool, path=SEARCH_PATH) for tool in ("meson", "ninja"))


def _build() -> Path:
    build = Path(
        os.environ.get("BTRFS_UBLK_SANITIZED_BUILD", PROJECT / "build" / "sanitized")
    )
    if os.environ.get("BTRFS_UBLK_IN_VM") == "1" and (build / "build.ninja").exists():
        return build  # as the host built it: emulation would take minutes
    build.parent.mkdir(parents=True, exist_ok=True)
    with build.with_suffix(".lock").open("w") as lock:  # of several runs of tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        _bring_up_to_date(build)
    return build


def _bring_up_to_date(build: Path) -> None:
    if not (build / "build.ninja").exists():
        _run("meson", "setup", *_OPTIONS, "--werror", build, PROJECT)
    else:  # it may be older than these options
        _run("ninja", "-C", build, "build.ninja")
        rules = (build / "build.ninja").read_text(encoding="utf-8")
        if not all(x in rules for x in ("csrc/tests/", "-var-init=pattern -g1", "-O1")):
            _run("meson", "setup", "--reconfigure", *_OPTIONS, build, PROJECT)
    _run("ninja", "-C", build)


#: Any report ends the program with a status that no test expects.
SANITIZER_ENVIRONMENT = {
    "ASAN_OPTIONS": "exitcode=99:detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99:print_stacktrace=1",
}


def run_sanitized(
    program: Path,
    *arguments: object,
    given: bytes = b"",
    statuses: Collection[int] = (0,),
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Run a program of that build, which must end with one of these statuses."""
    done = subprocess.run(
        [program, *map(str, arguments)],
        input=given,
        capture_output=True,
        timeout=300,
        env=os.environ | SANITIZER_ENVIRONMENT | dict(environment or {}),
    )
    assert done.returncode in statuses, done.stderr.decode(errors="replace")[-4000:]
    return done


@pytest.fixture
def sanitized_helpers(sanitized_build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package runs the helpers of that build, whose reports fail them."""
    monkeypatch.setenv(HELPERS_VARIABLE, str(sanitized_build / "csrc/tools"))
    for name, value in SANITIZER_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def sanitized_servers(sanitized_helpers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of how a server ends: the leak checker needs /proc, which the namespace
    of a server does not have."""
    options = SANITIZER_ENVIRONMENT["ASAN_OPTIONS"]
    monkeypatch.setenv("ASAN_OPTIONS", options.replace("leaks=1", "leaks=0"))


if __name__ == "__main__":  # before several runs of tests want it
    _build()
