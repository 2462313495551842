"""Print "PASSED FAILED SKIPPED" of a pytest run, from its JUnit report.

count_tests.py REPORT STATUS: a run that ended badly without saying so in its report
(killed, a guest that died, an error while collecting) counts as one failure.  So does,
with BTRFS_UBLK_REQUIRE=1, a run in which no test passed or failed.
"""

import os
import sys
import xml.etree.ElementTree as ElementTree

_NO_TESTS_COLLECTED = 5
#: What only other kernels have, which other parts of the run test: as in conftest.py.
_INAPPLICABLE = "does not apply: "


def main(report: str, status: int) -> None:
    passed = failed = skipped = 0
    try:
        suites = ElementTree.parse(report).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        suites = iter(())
    for suite in suites:
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        left_out = int(suite.get("skipped", 0))
        inapplicable = sum(
            note.get("message", "").startswith(_INAPPLICABLE)
            for note in suite.iter("skipped")
        )
        failed += bad
        skipped += left_out - inapplicable
        passed += int(suite.get("tests", 0)) - bad - left_out
    if status not in (0, _NO_TESTS_COLLECTED) and not failed:
        failed = 1
    if os.environ.get("BTRFS_UBLK_REQUIRE") == "1" and not (passed or failed):
        print(f"{report}: no test was run", file=sys.stderr)
        failed = 1
    print(max(passed, 0), failed, skipped)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
