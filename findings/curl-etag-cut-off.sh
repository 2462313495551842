#!/usr/bin/env bash
# curl keeps the ETag of a download that was cut off: the next run says 304, ends with
# status 0, and leaves half a file for ever.
#
# Version: curl 7.88.1-10+deb12u15 (Debian 12).
# Why it surprises: --etag-save and --etag-compare with one file are the manual's way to
# fetch what has changed. The first run fails as it should (status 18). But it has
# written the ETag when the header came, and nothing takes it back. So the next run asks
# whether the file that it never got has changed, and the answer is no. A job that runs
# each night reports one failure, and success from then on. --remove-on-error removes the
# file, but keeps the ETag, and later runs succeed without making a file at all.
# Source: curl, src/tool_cb_hdr.c, tool_header_cb(), writes the ETag of any answer and flushes
# it; src/tool_operate.c, post_per_transfer(), looks at the result only for the output file.
#
# Output seen (the file has 100000 bytes):
#   run 1: status 18, 40000 bytes
#   run 2: status 0, HTTP 304, 40000 bytes
#   with --remove-on-error, run 1: status 18, no file
#   with --remove-on-error, run 2: status 0, HTTP 304, no file
#
# With Python, and a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
server=
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if [ -n "$server" ]; then kill "$server" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download curl=7.88.1-10+deb12u15 libcurl4=7.88.1-10+deb12u15
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu

cat >serve.py <<'PY'
"""Cut the first answer for each path off after 40000 of 100000 bytes."""
import http.server

seen = set()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.headers.get("If-None-Match") == '"v1"'
        self.send_response(304 if known else 200)
        self.send_header("ETag", '"v1"')
        if not known:
            self.send_header("Content-Length", "100000")
        self.end_headers()
        if not known:
            self.wfile.write(bytes(100000 if self.path in seen else 40000))
        seen.add(self.path)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
with open("port.new", "w") as file:
    file.write(str(server.server_port))
PY
echo 'import os; os.rename("port.new", "port"); server.serve_forever()' >>serve.py
python3 serve.py &
server=$!
for _ in $(seq 300); do
    if [ -s port ]; then break; fi
    sleep 0.1
done

run() { # NAME TITLE OPTION…
    local name=$1 title=$2 status=0 got="no file" code
    shift 2
    code=$(timeout 60 root/usr/bin/curl -s --etag-save "$name.etag" --etag-compare "$name.etag" \
        -o "$name" -w '%{http_code}' "$@" "http://127.0.0.1:$(cat port)/$name") || status=$?
    if [ -e "$name" ]; then got="$(stat -c %s "$name") bytes"; fi
    if [ "$code" = 304 ]; then got="HTTP 304, $got"; fi
    echo "$title: status $status, $got" | tee -a seen
}
run plain "run 1"
run plain "run 2"
run removed "with --remove-on-error, run 1" --remove-on-error
run removed "with --remove-on-error, run 2" --remove-on-error
cat >wanted <<'END'
run 1: status 18, 40000 bytes
run 2: status 0, HTTP 304, 40000 bytes
with --remove-on-error, run 1: status 18, no file
with --remove-on-error, run 2: status 0, HTTP 304, no file
END
diff wanted seen
