#!/usr/bin/env bash
# Tornado keeps the ETag of a file that has changed, and goes on calling it a strong one: it
# is the hash of the content that the process has seen first.
#
# Version: tornado 6.6.1 (PyPI); StaticFileHandler as it is by default.
# Why it surprises: an ETag that is SHA-512 of the content looks like the best there is. As
# long as the server runs, a replaced file has the new bytes, size and Last-Modified under
# the ETag of the old ones. If-None-Match gets 304 where all has changed, so a browser goes on
# showing the old file. A download that is resumed after the change is a mixture, even with
# If-Range, and even of a client that compares the ETags of all answers.
# Source: tornado/web.py, StaticFileHandler._get_cached_version(): the key is the path, and
# nothing looks at the time or the size. Application(static_hash_cache=False), also implied by
# debug=True, cures it: the hashes are forgotten with each request, and so all of a file is
# read for each, also for a range of a byte.
#
# Output seen:
#   by default: If-None-Match 304; the range has the new bytes, same ETag True, same date False
#   static_hash_cache=False: If-None-Match 200; the range has the new bytes, same ETag False, same date False
#
# With Python, pip and a network for it. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
timeout 120 python3 -m venv --without-pip lib 2>/dev/null
timeout 120 python3 -m pip --python lib/bin/python install -q tornado==6.6.1

cat >ask.py <<'PY'
import asyncio, os, pathlib
from tornado.httpclient import AsyncHTTPClient
from tornado.httpserver import HTTPServer
from tornado.testing import bind_unused_port
from tornado.web import Application, StaticFileHandler

www = pathlib.Path("www")
www.mkdir()


def write(content: bytes, date: int) -> None:
    (www / "new").write_bytes(content)
    os.utime(www / "new", (date, date))
    (www / "new").rename(www / "file")


async def main(title: str, **settings: bool) -> None:
    StaticFileHandler.reset()
    write(b"a" * 3000, 1_500_000_000)
    socket, port = bind_unused_port()
    server = HTTPServer(Application([("/(.*)", StaticFileHandler, {"path": www})], **settings))
    server.add_socket(socket)

    async def get(**headers: str):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        url = f"http://127.0.0.1:{port}/file"
        return await AsyncHTTPClient().fetch(url, headers=headers, raise_error=False)

    before = (await get()).headers
    write(b"b" * 3000, 1_600_000_000)
    again = await get(If_None_Match=before["ETag"])
    part = await get(Range="bytes=1000-1999", If_Range=before["ETag"])
    assert part.code == 206 and part.body == b"b" * 1000
    same = ", ".join(
        f"same {what} {part.headers[name] == before[name]}"
        for what, name in [("ETag", "ETag"), ("date", "Last-Modified")]
    )
    print(f"{title}: If-None-Match {again.code}; the range has the new bytes, {same}")
    server.stop()


asyncio.run(main("by default"))
asyncio.run(main("static_hash_cache=False", static_hash_cache=False))
PY
timeout 60 lib/bin/python ask.py | tee seen
cat >wanted <<'END'
by default: If-None-Match 304; the range has the new bytes, same ETag True, same date False
static_hash_cache=False: If-None-Match 200; the range has the new bytes, same ETag False, same date False
END
diff wanted seen
