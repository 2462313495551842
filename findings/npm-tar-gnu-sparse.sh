#!/usr/bin/env bash
# npm's tar leaves sparse files out of what it unpacks, silently, even where strict.
#
# Versions: tar (npm) 7.5.23 on Node.js 20; archives of GNU tar 1.34 (Debian 12).
# Why it surprises: `tar --sparse` of GNU tar writes by default a member of type "S", and
# does so for each file with a hole. npm's tar knows the type by name, `strict: true`
# turns warnings into errors, and still extract() succeeds, warns of nothing and creates
# no such file; list() does not show it either. A virtual disk or a database in the
# archive is just gone, while the small files beside it are there. Python's tarfile,
# Go and libarchive unpack it. tar-fs, also of npm, raises an error.
# (With --format=posix there is a file, of another name and with the map of holes in it.)
# Source: node-tar, src/read-entry.ts: the constructor of ReadEntry sets "ignore" for all
# types that its switch does not list. src/types.ts lists "S" as SparseFile, the switch
# does not. src/parse.ts skips ignored entries; "ignoredEntry" is its only sign.
#
# Output seen:
#   GNU tar lists: disk small
#   npm's tar, strict, lists: small
#   npm's tar, strict, unpacks: small (exit status 0, warnings: 0)
#
# With Node.js and a network for npm. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
timeout 120 npm install --silent --no-audit --no-fund --ignore-scripts tar@7.5.23 >/dev/null

truncate -s 1M disk
echo data | dd of=disk bs=1 seek=500000 conv=notrunc status=none
echo data >small
tar --sparse --format=gnu -cf sparse.tar disk small
mkdir unpacked

cat >unpack.js <<'JS'
const tar = require('tar');
let warnings = 0;
const options = { file: 'sparse.tar', sync: true, strict: true, onwarn: () => warnings++ };
const names = [];
tar.list({ ...options, onReadEntry: (entry) => names.push(entry.path) });
console.log(names.join(' '));
tar.extract({ ...options, cwd: 'unpacked' });
console.log(warnings);
JS
status=0
timeout 60 node unpack.js >out || status=$?

known=$(tar -tf sparse.tar | xargs)
listed=$(sed -n 1p out)
unpacked=$(find unpacked -type f -printf '%P\n' | xargs)
echo "GNU tar lists: $known"
echo "npm's tar, strict, lists: $listed"
echo "npm's tar, strict, unpacks: $unpacked (exit status $status, warnings: $(sed -n 2p out))"
[ "$known/$listed/$unpacked/$status/$(sed -n 2p out)" = "disk small/small/small/0/0" ]
