"""A pytest plugin: what each test took and said, and an order by what it took before.

``--results FILE`` gets one JSON object a line for each test: ``id``, ``outcome``
(passed, failed, skipped, inapplicable), ``seconds``, ``data`` (whether it says that
bytes are right) and ``text`` of a failure or a skip. ``tests/durations.json`` has the
seconds of slow tests on two idle CPUs; files with the longest tests run first.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support import workers
from support.paths import TESTS

DURATIONS = TESTS / "durations.json"
_INAPPLICABLE = "does not apply: "


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("scripts/test")
    group.addoption("--results", type=Path, help="Write each test's result to a file.")
    group.addoption(
        "--at-most",
        type=float,
        metavar="SECONDS",
        help="Leave out tests that took longer the last time (tests/durations.json).",
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("results")
    if path is not None and not workers.is_worker(config):
        config.pluginmanager.register(_Recorder(path))


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    durations: dict[str, float] = {
        f"{file}::{name}": seconds
        for file, tests in json.loads(DURATIONS.read_text()).items()
        for name, seconds in tests.items()
    }
    at_most = config.getoption("at_most")
    if at_most is not None:
        long = [x for x in items if durations.get(x.nodeid, 0) > at_most]
        config.hook.pytest_deselected(items=long)
        items[:] = [x for x in items if durations.get(x.nodeid, 0) <= at_most]
    longest: dict[str, float] = defaultdict(float)
    for item in items:
        file = item.nodeid.split("::")[0]
        longest[file] = max(longest[file], durations.get(item.nodeid, 0))
    # Within a file the order stays, as its tests share fixtures.
    items.sort(key=lambda item: -longest[item.nodeid.split("::")[0]])


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.setdefault(
            report.nodeid,
            {"id": report.nodeid, "outcome": "passed", "seconds": 0.0, "text": ""},
        )
        test["data"] = "data" in report.keywords
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.failed:
            test["outcome"] = "failed"
            sections = [f"--- {name}\n{text}" for name, text in report.sections]
            test["text"] += "\n".join([report.longreprtext, *sections])
        elif report.skipped and test["outcome"] == "passed":
            test["outcome"] = "skipped"
            reason = report.longrepr
            test["text"] = reason[2] if isinstance(reason, tuple) else str(reason)
            if test["text"].removeprefix("Skipped: ").startswith(_INAPPLICABLE):
                test["outcome"] = "inapplicable"
        if report.when not in ("setup", "call"):  # also of a worker that has crashed
            self._write(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tests[report.nodeid] = {
                **{"id": report.nodeid, "outcome": "failed", "seconds": 0.0},
                **{"data": True, "text": report.longreprtext},
            }
            self._write(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        for name in list(self._tests):  # of a session that was interrupted
            self._write(name)
        self._file.close()

    def _write(self, name: str) -> None:
        print(json.dumps(self._tests.pop(name)), file=self._file, flush=True)
