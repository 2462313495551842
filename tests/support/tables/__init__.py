"""Rules that C and Python both keep: a table of cases for each, which tests of both
read."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.web_servers import response


def cases(rule: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        Path(__file__).with_name(f"{rule}.json").read_text(encoding="utf-8")
    )
    return found


def name(case: dict[str, Any]) -> str:
    return str(case["why"])


def retry_after(case: dict[str, Any]) -> str:
    """Return the header of a case: DATE+3000 is in so many seconds."""
    text = str(case["header"])
    if not text.startswith("DATE"):
        return text
    after_s, zone = text[4:].split()
    at = time.gmtime(time.time() + int(after_s))
    return time.strftime("%a, %d %b %Y %H:%M:%S ", at) + zone


def redirecting(case: dict[str, Any], answer: bytes) -> Callable[[str], bytes]:
    """Return a server's script: it redirects all but what asks for "/elsewhere" or
    beside it, which gets the answer."""

    def script(request: str) -> bytes:
        line, *headers = request.splitlines()
        if "elsewhere" in line:
            return answer
        host = next(x for x in headers if x.lower().startswith("host: "))[6:]
        where = case["location"].replace("HOST", host) or line.split()[1]
        return response(f"{case['status']} There\nLocation: {where}")

    return script


def was_followed(requests: Sequence[str]) -> bool:
    return any("elsewhere" in each.splitlines()[0] for each in requests)
