#!/usr/bin/env python3
"""Run the parts of the tests, each within its budget, and say how it went.

scripts/test sets the machine up and calls this. What a part selects is an expression of
pytest's markers; pyproject.toml says what the markers mean.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
RESULTS = PROJECT / "build/test-results"
QUARANTINE = PROJECT / "tests/quarantine.txt"
DURATIONS = PROJECT / "tests/durations.json"
REQUIRE = os.environ.get("BTRFS_UBLK_REQUIRE") == "1"
PYTHON = str(PROJECT / ".venv/bin/python")
LIB = PROJECT / "scripts/lib"

#: A part that takes so many times its budget is ended.
OVERDUE = 4
#: Of one test in an emulated machine, with others busy beside it.
VM_TEST_LIMIT_S = 600
#: To list tests, not to run them.
COLLECTING_S = 300
QUARANTINED_AT_MOST, UNKNOWN_AT_MOST_DAYS = 10, 14
#: Tests that took longer are left out by --quick.
QUICK_AT_MOST_S = 1.0
SLOWEST = 10
#: Shorter ones are not in tests/durations.json.
WORTH_KEEPING_S = 1.0

#: The kernels that --all boots, and which tests of ublk each of them has to pass.
KERNELS = ("6.12", "latest")
#: On 6.1, the oldest supported kernel, which has no ublk of today: kills with FUSE.
OLDEST = "6.1"
#: Folders with tests that make devices, and with others.
_BOTH = ("bench", "campaigns", "docs", "system")
#: What the gate runs of the tests that drive other programs.
_SNAPSHOTTER = tuple(
    f"system/containers/test_snapshotter{name}.py" for name in ("", "_lazy", "_overlay")
)
_BESIDE_UBLK = "not vm and not timing and not containerd2"
_BESIDE = f"not ublk and {_BESIDE_UBLK}"


@dataclass(frozen=True)
class Part:
    """Tests that one command runs: pytest, or something else where it has `argv`."""

    name: str
    budget_s: int
    select: str = ""
    workers: int = 0
    hide_devices: bool = False
    kernel: str = ""
    arch: str = ""
    argv: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    #: Below tests/; loading the others would take a worker ten seconds.
    folders: tuple[str, ...] = ()


@dataclass
class Outcome:
    part: Part
    seconds: float = 0.0
    tests: list[dict[str, Any]] = field(default_factory=list)
    #: Of a run that ended badly without a failed test, or was none.
    fault: str = ""

    def of(self, outcome: str) -> list[dict[str, Any]]:
        return [test for test in self.tests if test["outcome"] == outcome]


def lanes(mode: str, *, lint: bool, no_vm: str, ublk: bool) -> list[list[Part]]:
    """Return what runs beside each other: parts of one lane run one after the other.

    ``ublk`` says that the running kernel has the driver; ``no_vm`` why no VM boots.
    """
    gate = "" if mode == "all" else " and not thorough"
    argv = ("./apply-lint.sh", "--check", *(["--no-analyzer"] if mode != "all" else []))
    checks = [Part("lint", 150, argv=argv)] if lint else []
    plain = Part(
        *("without devices", 480, f"not device and {_BESIDE}{gate}", 4, True),
        folders=("unit", "c", *_BOTH),
    )
    here = f"(device or ublk) and {_BESIDE if not ublk else _BESIDE_UBLK}{gate}"
    folders = ("device", *_SNAPSHOTTER, "system/peers")
    devices = Part("devices", 540, here, 3, folders=folders)
    vm = Part("ublk, Linux latest", 480, "ublk and gate_ublk", kernel="latest")
    machines = [vm]
    if mode == "quick":
        at_most = (f"--at-most={QUICK_AT_MOST_S}",)
        return [checks, [replace(plain, budget_s=120, options=at_most)]]
    if mode == "all":
        plain = replace(plain, budget_s=1200)
        devices = replace(devices, budget_s=1800, folders=("device", *_BOTH))
        every = replace(vm, budget_s=3600, select="ublk")
        machines = [
            replace(every, name=f"ublk, Linux {kernel}", kernel=kernel)
            for kernel in KERNELS
        ]
        kills = "fuse and data and not thorough"
        machines.append(Part(f"FUSE, Linux {OLDEST}", 1200, kills, kernel=OLDEST))
    return [[*checks, plain], [devices], [] if ublk or no_vm else machines]


def last_parts(mode: str, *, no_vm: str, ublk: bool) -> list[Part]:
    """Return what runs at the end, one after the other, with nothing beside it."""
    if mode != "all":
        return []
    alone = "(timing or vm)" if not no_vm else "timing and not vm"
    here = "" if ublk else " and not ublk"
    parts = [
        Part("alone, and measuring", 1200, f"{alone}{here}"),
        Part("packages, deb", 2700, argv=("scripts/package", "deb", "--check")),
        Part("packages, rpm", 2700, argv=("scripts/package", "rpm")),
        Part("containerd 2", 3600, argv=("scripts/containerd",)),
    ]
    if not no_vm:
        files = ("tests/c", "tests/device/server", "tests/device/recovery")
        select = "not thorough and not timing"
        for kernel in ("latest", "latest-16k"):
            name = f"arm64, Linux {kernel}"
            arm64 = Part(name, 3600, select, kernel=kernel, arch="arm64", options=files)
            parts.append(arm64)
    return parts


def chosen(parts: Sequence[Part], wanted: Sequence[str]) -> list[Part]:
    """Return the parts whose name has one of the texts that are wanted in it."""
    return [part for part in parts if any(text in part.name for text in wanted)]


class Runner:
    """Runs parts, keeps what they say below build/test-results, and counts."""

    def __init__(self, pytest_options: Sequence[str]) -> None:
        self._options = list(pytest_options)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._ending = False
        self.outcomes: list[Outcome] = []

    def run(self, part: Part, *, only: Sequence[str] = ()) -> Outcome:
        """Run a part, or ``only`` some of its tests, one after the other."""
        name = re.sub(r"\W+", "-", part.name) + ("-again" if only else "")
        results = RESULTS / f"{name}.jsonl"
        argv = part.argv or self._pytest(part, results, only)
        begun_s = time.monotonic()
        log = RESULTS / f"{name}.log"
        status = self._bounded(argv, part.budget_s * OVERDUE, log)
        outcome = Outcome(part, time.monotonic() - begun_s)
        if part.argv:
            word = "failed" if status else "passed"
            outcome.tests = [{"id": part.name, "outcome": word, "data": True}]
            outcome.tests[0] |= {"seconds": outcome.seconds, "text": ""}
        elif results.exists():
            outcome.tests = [json.loads(x) for x in results.read_text().splitlines()]
        if status not in (0, 5) and not outcome.of("failed"):
            outcome.fault = f"pytest ended with status {status}"
        elif not outcome.tests and REQUIRE and not self._options:
            outcome.fault = "no test was run"
        return outcome

    def run_lanes(self, lanes: Sequence[Sequence[Part]]) -> None:
        """Run lanes beside each other; print how each part ended as it ends."""

        def run_lane(parts: Sequence[Part]) -> None:
            for part in parts:
                if not self._ending:
                    outcome = self.run(part)
                    self.outcomes.append(outcome)
                    say(f"{row(outcome)}")

        threads = [threading.Thread(target=run_lane, args=(lane,)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def end(self) -> None:
        """End what runs, and start nothing more."""
        self._ending = True
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)  # pytest tears tests down

    def _pytest(self, part: Part, results: Path, only: Sequence[str]) -> list[str]:
        python = "python3" if part.arch else PYTHON
        # What two pytest processes share would be torn by the second.
        argv = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        argv += [f"--results={results}", *part.options]
        if only:
            argv += ["-n", "1"] if part.hide_devices else []
        else:
            argv += ["-m", part.select, *self._options]
            if part.workers and not any(x.startswith("-n") for x in self._options):
                argv += ["-n", str(part.workers), "--dist", "worksteal"]
        if part.hide_devices:
            argv += ["--hide-devices"]
        argv += only or [f"tests/{folder}" for folder in part.folders]
        if not part.kernel:
            return argv
        if not only and not part.arch:
            argv += files_for_vm(part)
        vm = ["scripts/vm", "--kernel", part.kernel, "--memory", "3G", "--verbose"]
        vm += ["--arch", part.arch] if part.arch else []
        vm += ["--timeout", str(part.budget_s * OVERDUE - 60)]
        vm += ["--console", str(results.with_suffix(".console"))]
        vm += ["--env", f"BTRFS_UBLK_SOAK_PERCENT={soak_percent(5)}"]
        return [*vm, "--", *argv, "--timeout", str(VM_TEST_LIMIT_S)]

    def _bounded(self, argv: Sequence[str], limit_s: float, log: Path) -> int:
        bounded = [sys.executable, str(LIB / "bounded.py"), str(int(limit_s)), *argv]
        environment = os.environ | {"BTRFS_UBLK_SOAK_PERCENT": soak_percent(5)}
        with log.open("wb") as output:
            process = subprocess.Popen(
                bounded,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=PROJECT,
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                return process.wait()
            finally:
                self._running.discard(process)

    def run_failed_again(self) -> list[str]:
        """Run what failed once more, alone, but for tests of data. Returns the names of
        those that passed then: both outputs are kept, and they go into quarantine."""
        flaky = []
        for outcome in list(self.outcomes):
            again = [x["id"] for x in outcome.of("failed") if not x["data"]]
            if not again or self._ending:
                continue
            say(f"{outcome.part.name}: running {len(again)} once more, alone")
            second = {x["id"]: x for x in self.run(outcome.part, only=again).tests}
            for test in outcome.of("failed"):
                if second.get(test["id"], test)["outcome"] == "passed":
                    test["outcome"] = "flaky"
                    flaky.append(test["id"])
        return sorted(flaky)


def files_for_vm(part: Part) -> list[str]:
    """Return the files whose tests a VM runs: an emulated CPU would take minutes to
    load all of them, and has not what some libraries want of a CPU."""
    word = r"\bgate_ublk\b" if "gate_ublk" in part.select else r"\b(ublk|front_end)\b"
    files = (PROJECT / "tests").rglob("test_*.py")
    named = [x for x in files if re.search(word, x.read_text(encoding="utf-8"))]
    collect = [PYTHON, *"-m pytest -p no:cacheprovider --collect-only -qq -m".split()]
    listed = subprocess.run(
        [*collect, part.select, *(str(x.relative_to(PROJECT)) for x in sorted(named))],
        stdout=subprocess.PIPE,
        cwd=PROJECT,
        text=True,
        timeout=COLLECTING_S,
    )
    if listed.returncode not in (0, 5):  # 5: pytest has found none
        listed.check_returncode()
    return re.findall(r"^(tests/\S+\.py): \d+$", listed.stdout, re.MULTILINE)


def soak_percent(default: int) -> str:
    return os.environ.get("BTRFS_UBLK_SOAK_PERCENT", str(default))


def row(outcome: Outcome) -> str:
    """Return a part's line of the table."""
    budget_s, seconds = outcome.part.budget_s, outcome.seconds
    counts = [f"{len(outcome.of(x))} {x}" for x in ("passed", "failed", "skipped")]
    over = " OVER ITS BUDGET" if seconds > budget_s else ""
    fault = f" {outcome.fault}" if outcome.fault else ""
    name = outcome.part.name
    times = f"{seconds:5.0f} of {budget_s:4} s"
    return f"{name:20} {times}: {', '.join(counts)}{over}{fault}"


def quarantined(today: date) -> tuple[list[str], list[str]]:
    """Return the entries of tests/quarantine.txt, and what is wrong with them."""
    lines = QUARANTINE.read_text(encoding="utf-8").splitlines()
    entries = [x for x in lines if x.strip() and not x.startswith("#")]
    faults = []
    if len(entries) > QUARANTINED_AT_MOST:
        faults.append(f"{len(entries)} tests in quarantine: mend some")
    for entry in entries:
        day, name, reason = entry.split(maxsplit=2)
        age = (today - date.fromisoformat(day)).days
        if reason == "unknown" and age > UNKNOWN_AT_MOST_DAYS:
            faults.append(f"in quarantine for {age} days, cause unknown: {name}")
    return entries, faults


def put_into_quarantine(flaky: Sequence[str], entries: Sequence[str]) -> None:
    known = {entry.split(maxsplit=2)[1] for entry in entries}
    with QUARANTINE.open("a", encoding="utf-8") as file:
        for name in flaky:
            if name.replace(" ", "_") not in known:
                day = date.today().isoformat()
                print(f"{day} {name.replace(' ', '_')} unknown", file=file)


def keep_durations(outcomes: Sequence[Outcome]) -> None:
    """Write tests/durations.json, with a line for each file of tests: of tests on this
    kernel, and alike on others."""
    files: dict[str, dict[str, float]] = {}
    for outcome in outcomes:
        for test in outcome.tests:
            lasts = test["seconds"] >= WORTH_KEEPING_S
            if lasts and not outcome.part.kernel and not outcome.part.argv:
                file, _, name = test["id"].partition("::")
                files.setdefault(file, {})[name] = test["seconds"]
    lines = [
        f"{json.dumps(file)}: {json.dumps(files[file], sort_keys=True)}"
        for file in sorted(files)
    ]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def conclude(runner: Runner, flaky: Sequence[str], missing: Sequence[str]) -> int:
    """Print failures, slow tests, parts and counts; return the exit status."""
    outcomes = runner.outcomes
    for outcome in outcomes:
        for test in outcome.of("failed"):
            print(f"\n=== failed: {test['id']} ({outcome.part.name})\n{test['text']}")
        if outcome.fault or (outcome.part.argv and outcome.of("failed")):
            name = re.sub(r"\W+", "-", outcome.part.name)
            log = (RESULTS / f"{name}.log").read_text(errors="replace")
            print(f"\n=== {outcome.part.name}, the end of its log\n{log[-6000:]}")
    tests = [
        (x["seconds"], x["id"]) for o in outcomes if not o.part.argv for x in o.tests
    ]
    print("\nThe slowest tests:")
    for seconds, name in sorted(tests, reverse=True)[:SLOWEST]:
        print(f"{seconds:8.1f} s  {name}")
    print()
    for outcome in outcomes:
        print(row(outcome))
    entries, faults = quarantined(date.today())
    counts = {
        x: sum(len(o.of(x)) for o in outcomes) for x in ("passed", "failed", "skipped")
    }
    counts["passed"] += len(flaky)
    counts["failed"] += len([o for o in outcomes if o.fault])
    for reason in missing:
        counts["failed" if REQUIRE else "skipped"] += 1
        print(f"{'failed' if REQUIRE else 'skipped'}: {reason}")
    for fault in faults:
        print(f"failed: {fault}")
    put_into_quarantine(flaky, entries)
    for name in flaky:
        print(f"flaky: {name}")
    for outcome in outcomes:
        for test in outcome.of("skipped"):
            print(f"skipped: {test['id']}: {test['text']}")
    print(f"{len(flaky)} flaky")
    status = int(bool(counts["failed"] or faults))
    if counts["skipped"] and REQUIRE:
        say("BTRFS_UBLK_REQUIRE=1 allows no skipped test")
        status = 1
    # What decides is the last line, which others read.
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return status


@contextlib.contextmanager
def ended_by_signals(runner: Runner) -> Iterator[None]:
    def end(number: int, _frame: object) -> None:
        runner.end()
        say(f"ended by {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        yield
    finally:
        runner.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("quick", "gate", "all"), default="gate")
    parser.add_argument("--no-lint", action="store_true")
    parser.add_argument("--no-vm", metavar="REASON", default="")
    parser.add_argument("--vm-not-wanted", action="store_true")
    parser.add_argument("--ublk", action="store_true", help="this kernel has ublk")
    parser.add_argument("--part", action="append", metavar="TEXT", dest="wanted")
    parser.add_argument("pytest_options", nargs="*")
    given = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    for old in RESULTS.glob("*"):
        old.unlink()
    runner = Runner(given.pytest_options)
    with ended_by_signals(runner):
        lint, ublk, no_vm = not given.no_lint, given.ublk, given.no_vm
        beside = lanes(given.mode, lint=lint, ublk=ublk, no_vm=no_vm)
        last = last_parts(given.mode, no_vm=no_vm, ublk=ublk)
        if given.wanted:
            beside = [chosen(lane, given.wanted) for lane in beside]
            last = chosen(last, given.wanted)
        runner.run_lanes(beside)
        for part in last:
            runner.run_lanes([[part]])
        flaky = runner.run_failed_again()
    missing = []
    if given.no_vm and not (given.vm_not_wanted or given.ublk):
        missing = [f"tests of ublk: {given.no_vm}"]
    status = conclude(runner, flaky, missing)
    whole = not (given.pytest_options or given.wanted)
    if given.mode == "all" and not status and whole:
        keep_durations(runner.outcomes)
    return status


if __name__ == "__main__":
    sys.exit(main())
