#!/usr/bin/env bash
# koa-range promises bytes that there are not: a range that goes past the end of a file is
# answered with its own length, and the rest never comes.
#
# Version: koa-range 0.3.0 (npm) with koa 2 and koa-static 5 on Node.js 20, as local-web-server
# 5.4.0 has them.
# Why it surprises: clients ask so all the time, and RFC 9110 (14.1.2) has the range end with
# the file: whoever reads in blocks of a fixed size asks past the end with the last of them.
# Here that is 206, with a Content-Range and a Content-Length of what was asked for, then the
# bytes that there are, and then nothing: the connection stays open until one of both gives
# up. A range that begins past the end is not 416 but hangs as well, and the first byte of an
# empty file is "bytes 0-0/*" without any.
# Source: koa-range, index.js: Content-Range and Content-Length are made of the two numbers of
# the request, and the file's length is only used for an end that is missing.
#
# Output seen (a file of 3000 bytes; curl waits for three seconds):
#   bytes=2000-2999: 206, bytes 2000-2999/3000, length 1000, 1000 bytes came
#   bytes=2000-3999: 206, bytes 2000-3999/3000, length 2000, 1000 bytes came, then it hung
#   bytes=3000-3999: 206, bytes 3000-3999/3000, length 1000, 0 bytes came, then it hung
#   empty, bytes=0-0: 206, bytes 0-0/*, length none, 0 bytes came
#
# With Node.js, curl and a network for npm. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || :; wait; rm -rf "$work"' EXIT
cd "$work"
timeout 120 npm install --silent --no-audit --no-fund --ignore-scripts \
    koa-range@0.3.0 koa@2 koa-static@5 >/dev/null
mkdir www && head -c 3000 /dev/zero >www/file && : >www/empty

cat >serve.js <<'JS'
const app = new (require('koa'))();
app.use(require('koa-range')).use(require('koa-static')('www'));
const server = app.listen(0, '127.0.0.1', () => console.log(server.address().port));
JS
node serve.js >port 2>log &
server=$!
timeout 30 bash -c 'until [ -s port ]; do sleep 0.1; done'

ask() { # FILE RANGE WHAT
    local status=0 code range length
    curl -s -m 3 -o body -D headers -r "$2" "http://127.0.0.1:$(cat port)/$1" || status=$?
    [ -e body ] || : >body
    code=$(awk 'NR == 1 { print $2 }' headers)
    range=$(tr -d '\r' <headers | sed -n 's/^Content-Range: //Ip')
    length=$(tr -d '\r' <headers | sed -n 's/^Content-Length: //Ip')
    echo "$3bytes=$2: $code, $range, length ${length:-none}, $(stat -c %s body) bytes came$(
        [ "$status" != 28 ] || echo ', then it hung')"
    rm body
}

{
    ask file 2000-2999 ''
    ask file 2000-3999 ''
    ask file 3000-3999 ''
    ask empty 0-0 'empty, '
} | tee seen
cat >wanted <<'END'
bytes=2000-2999: 206, bytes 2000-2999/3000, length 1000, 1000 bytes came
bytes=2000-3999: 206, bytes 2000-3999/3000, length 2000, 1000 bytes came, then it hung
bytes=3000-3999: 206, bytes 3000-3999/3000, length 1000, 0 bytes came, then it hung
empty, bytes=0-0: 206, bytes 0-0/*, length none, 0 bytes came
END
diff wanted seen
