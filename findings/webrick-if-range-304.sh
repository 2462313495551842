#!/usr/bin/env bash
# WEBrick answers 304, "not modified", to a resumed download whose If-Range matches.
#
# Version: ruby-webrick 1.8.1-1 with ruby3.1 (Debian 12).
# Why it surprises: If-Range means "the part if it is still the same file, else all of
# it". The answers are 206 and 200; a client that sends no If-None-Match cannot take 304,
# as it has only the first half. Where the validator does *not* match, WEBrick sends a
# part of the new file (206) and not all of it, which a client then adds to its half of
# the old one. So each of the two answers is the wrong one, while a Range alone is
# answered well, and tests that send just that pass.
# Source: webrick, lib/webrick/httpservlet/filehandler.rb: not_modified?() counts an
# If-Range that matches, by date or by ETag, among the conditions for 304, and do_GET()
# asks it before it looks at the range; nothing else reads If-Range.
#
# Output seen:
#   Range alone: 206
#   If-Range with its ETag: 304
#   If-Range with its date: 304
#   If-Range with another ETag: 206
#
# With a network for apt. It fails when that behaviour has changed.
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
apt-get -qq download ruby-webrick=1.8.1-1 ruby3.1=3.1.2-7+deb12u1 \
    libruby3.1=3.1.2-7+deb12u1 libyaml-0-2=0.2.5-1 libgmp10=2:6.2.1+dfsg1-1.1
for package in ./*.deb; do dpkg-deb -x "$package" root; done
lib=$work/root/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$lib
export RUBYLIB=$work/root/usr/lib/ruby/3.1.0:$lib/ruby/3.1.0
webrick=$(echo root/usr/share/rubygems-integration/all/gems/webrick-*/lib)

mkdir www && head -c 3000 /dev/zero >www/file
touch -d '2020-01-01 00:00:00' www/file
cat >serve.rb <<'RB'
require 'webrick'
server = WEBrick::HTTPServer.new(BindAddress: '127.0.0.1', Port: 0, DocumentRoot: 'www',
                                 AccessLog: [], Logger: WEBrick::Log.new(File::NULL))
File.write('port', server.listeners[0].addr[1])
server.start
RB
timeout 60 root/usr/bin/ruby3.1 --disable-gems -I "$webrick" serve.rb &
server=$!
for _ in $(seq 100); do
    if [ -s port ]; then break; fi
    sleep 0.1
done
url=http://127.0.0.1:$(cat port)/file
header() { curl -sS -m 10 -I "$url" | tr -d '\r' | sed -n "s/^$1: //Ip"; }
status() { curl -sS -m 10 -o body -w '%{http_code}\n' -r 1000-1999 "$@" "$url"; }
{
    echo "Range alone: $(status)"
    echo "If-Range with its ETag: $(status -H "If-Range: $(header ETag)")"
    echo "If-Range with its date: $(status -H "If-Range: $(header Last-Modified)")"
    echo "If-Range with another ETag: $(status -H 'If-Range: "other"')"
} | tee seen
cat >wanted <<'END'
Range alone: 206
If-Range with its ETag: 304
If-Range with its date: 304
If-Range with another ETag: 206
END
diff wanted seen
