#!/usr/bin/env bash
# Squid answers 200 with wrong bytes where If-Range does not match what it has stored: the
# body begins at the range, and ends with a piece of the file for the second time.
#
# Version: Squid 5.7 (Debian 12), with its default memory cache, in front of Python's
# http.server.
# Why it surprises: the status, Content-Length and Last-Modified are those of the whole new
# file, and nothing says that the content is not. Those who ask so are clients that resume a
# download after the file has changed; RFC 9110 (13.1.5) promises them all of the new one.
# They get a file of the right size with other content. The first of them is answered well,
# as Squid has to ask the server; the others are answered of what it has stored then.
# Source: seen on the wire; Squid's code was not read.
#
# Output seen (750 words of four bytes, each its own number; the range begins at word 100):
#   without a range: 200, 3000 bytes, from 000 on: the file
#   range: 206, 8 bytes, from 100 on
#   range, If-Range does not match: 200, 3000 bytes, from 100 on: another file
#   the last 400 bytes of that: words 650 to 749, after words 650 to 749
#
# With Debian's package squid, Python and curl. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'kill "${server:-}" "${squid:-}" 2>/dev/null || :; wait; rm -rf "$work"' EXIT
chmod 755 "$work" # of root's directory, Squid's user reads its configuration
cd "$work"
mkdir www && seq -f '%03g' 0 749 | tr '\n' ' ' >www/file
touch -d 2020-01-01 www/file

read -r origin port < <(python3 -c '
import socket
some = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(one.getsockname()[1] for one in some))')
python3 -m http.server --bind 127.0.0.1 --directory www "$origin" >/dev/null 2>&1 &
server=$!
cat >squid.conf <<END
http_port 127.0.0.1:$port accel defaultsite=localhost
cache_peer 127.0.0.1 parent $origin 0 no-query originserver
http_access allow all
pid_filename $work/pid
access_log none
cache_log /dev/null
netdb_filename none
pinger_enable off
memory_cache_shared off
shutdown_lifetime 0 seconds
END
squid -N -f squid.conf >log 2>&1 &
squid=$!
for each in "$origin" "$port"; do
    timeout 30 bash -c "until curl -s -o /dev/null http://127.0.0.1:$each/; do sleep 0.2; done"
done

ask() { # WHAT [OPTION OF CURL…]
    local what=$1 same=
    shift
    curl -s -m 20 -o body -w '%{http_code}' "$@" "http://127.0.0.1:$port/file" >status
    if [ "$(stat -c %s body)" = 3000 ]; then
        same=": another file"
        ! cmp -s body www/file || same=": the file"
    fi
    echo "$what: $(cat status), $(stat -c %s body) bytes, from $(head -c 3 body) on$same"
}

{
    ask 'without a range'
    ask range -r 400-407
    ask 'range, If-Range does not match' -r 400-407 -H 'If-Range: "other"'
    [ "$(tail -c 400 body)" = "$(tail -c 800 body | head -c 400)" ]
    echo "the last 400 bytes of that: words $(tail -c 400 body | head -c 3) to $(tail -c 4 body |
        head -c 3), after words $(tail -c 800 body | head -c 3) to $(tail -c 404 body | head -c 3)"
} | tee seen
cat >wanted <<'END'
without a range: 200, 3000 bytes, from 000 on: the file
range: 206, 8 bytes, from 100 on
range, If-Range does not match: 200, 3000 bytes, from 100 on: another file
the last 400 bytes of that: words 650 to 749, after words 650 to 749
END
diff wanted seen
