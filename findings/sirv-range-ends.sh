#!/usr/bin/env bash
# sirv answers a request for the last bytes with the first ones, and for one byte with all.
#
# Version: sirv 3.0.2 (npm) on Node.js 20; Vite's and SvelteKit's preview servers use it.
# Why it surprises: "bytes=-5" is 206 with the six bytes 0-5. Formats that are read from
# their end (zip, Parquet) then have a wrong trailer: a client that looks at the status and
# not at Content-Range takes the file for broken. "bytes=0-0", which clients send to learn
# the length at the cost of a byte, is 206 with the whole file, however large.
# Source: sirv, packages/sirv/index.mjs, send(): both ends of the range are read by
# "parseInt(...) || default". A start that is missing is so the same as 0, and an end of 0
# is the same as one that is missing.
#
# Output seen (a file of 3000 bytes):
#   bytes=10-19: 206, bytes 10-19/3000
#   bytes=2995-: 206, bytes 2995-2999/3000
#   bytes=-5: 206, bytes 0-5/3000
#   bytes=0-0: 206, bytes 0-2999/3000
#
# With Node.js and a network for npm. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
timeout 120 npm install --silent --no-audit --no-fund --ignore-scripts sirv@3.0.2 >/dev/null
mkdir www && head -c 3000 /dev/zero >www/file

cat >ask.js <<'JS'
const http = require('http');
const server = http.createServer(require('sirv')('www', { dev: true }));
server.listen(0, '127.0.0.1', async () => {
    for (const range of ['bytes=10-19', 'bytes=2995-', 'bytes=-5', 'bytes=0-0']) {
        const { port } = server.address();
        await new Promise((done) => {
            http.get({ host: '127.0.0.1', port, path: '/file', headers: { range } }, (answer) => {
                console.log(`${range}: ${answer.statusCode}, ${answer.headers['content-range']}`);
                answer.resume().on('end', done);
            });
        });
    }
    process.exit(0);
});
JS
timeout 60 node ask.js | tee seen
cat >wanted <<'END'
bytes=10-19: 206, bytes 10-19/3000
bytes=2995-: 206, bytes 2995-2999/3000
bytes=-5: 206, bytes 0-5/3000
bytes=0-0: 206, bytes 0-2999/3000
END
diff wanted seen
