#!/usr/bin/env python3
"""Write docs/compatibility.md: run tests/system/peers/, or take what it has found.

Usage: scripts/compatibility.py [--found]     (--found: of runs before)
"""

import json
import re
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
RESULTS = PROJECT / "build" / "compatibility"
PAGE = PROJECT / "docs" / "compatibility.md"
CHECKS = ("whole and in parts", "empty", "replaced", "restarted", "refusal")
KINDS = {"web": "Web servers", "S3": "S3 stores", "registry": "Container registries"}

HEAD = """# Compatibility

`scripts/compatibility.py` writes this page from what `tests/system/peers/` finds: real
servers of packages, on loopback, behind a mounted volume. What a server *hides*, as a
change within a second, is in [limits.md](limits.md#what-servers-hide).

- **whole and in parts**: all of an object, and 50 ranges past the page cache
- **empty**: an object without bytes is an empty file
- **replaced**: when other bytes of the same size are put in its place, none of them is
  read beside those of before
- **restarted**: a read waits for a server that is away, and then has its bytes
- **refusal**: what is said of an object that is not there
"""


def cell(text: str) -> str:
    """Without where it is, which another column has."""
    return re.sub(r"^.*HOST\S*: ", "", text).replace("|", "\\|")


def page(results: list[dict[str, object]]) -> str:
    parts = [HEAD]
    for kind, title in KINDS.items():
        names = " | ".join(CHECKS)
        parts += [f"\n## {title}\n", f"| | version | {names} | why | ran |"]
        parts.append("|---" * (len(CHECKS) + 4) + "|")
        for about in results:
            found = about["found"]
            if about["kind"] != kind or not isinstance(found, dict):
                continue
            said = [str(found.get(x, "")) for x in CHECKS]
            row = [about["name"], about["version"], *said, about["notes"]]
            row.append(about["date"])
            parts.append(f"| {' | '.join(cell(str(x)) for x in row)} |")
    return "\n".join(parts) + "\n"


def main() -> int:
    if sys.argv[1:] not in ([], ["--found"]):
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    if not sys.argv[1:]:
        python = PROJECT / ".venv" / "bin" / "python"
        tests = ["tests/system/peers", "-k", "contract", "-p", "no:cacheprovider"]
        command = [str(python), "-m", "pytest", "-q", *tests]
        status = subprocess.run(command, cwd=PROJECT).returncode
    found = [json.loads(x.read_text()) for x in sorted(RESULTS.glob("*.json"))]
    PAGE.write_text(page(sorted(found, key=lambda x: str(x["name"]).lower())))
    return status


if __name__ == "__main__":
    sys.exit(main())
