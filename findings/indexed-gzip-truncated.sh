#!/usr/bin/env bash
# indexed_gzip reads a gzip file that was cut off as if it were whole: no error, and a complete
# index that says so too.
#
# Version: indexed_gzip 1.10.3 (PyPI), with its defaults; Python's gzip beside it.
# Why it surprises: it is made to stand in for Python's gzip.GzipFile, checks CRC and length
# of each stream, and raises CrcError where one bit of them is wrong. Of a file that ends in
# the middle, which is what a broken download or a full disk leaves, it gives what it could
# decompress, and then b"", which means the end. seek() beyond that stops there. Its
# build_full_index() returns, and the index that it exports opens with the half file ever
# after. Python's gzip raises EOFError. Programs that read archives and images through
# it (ratarmount, nibabel) take the half for all there is.
# Source: indexed_gzip/zran.c, _zran_inflate(): the end of the file is ZRAN_INFLATE_EOF whether
# the stream has ended or not, and zran_read() and zran_build_index() take that for the end
# of the data; only _zran_validate_stream(), at the end of a stream, checks anything.
#
# Output seen (3000000 bytes; the gzip file cut in half):
#   gzip: EOFError
#   indexed_gzip: 1499999 bytes, then 0
#   build_full_index: no error; reopened with its index: 1499999 bytes
#   one bit of the CRC wrong: CrcError
#
# With Python 3.11, pip and a network for it. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
timeout 120 python3 -m venv --without-pip lib 2>/dev/null
timeout 120 python3 -m pip --python lib/bin/python install -q indexed_gzip==1.10.3

cat >read.py <<'PY'
import gzip, random
from indexed_gzip import IndexedGzipFile
from indexed_gzip.indexed_gzip import CrcError

whole = bytearray(gzip.compress(random.Random(1).randbytes(3_000_000), mtime=0))
with open("half.gz", "wb") as file:
    file.write(whole[: len(whole) // 2])
whole[-8] ^= 1
with open("wrong.gz", "wb") as file:
    file.write(whole)
try:
    gzip.open("half.gz").read()
except EOFError:
    print("gzip: EOFError")
file = IndexedGzipFile("half.gz")
print(f"indexed_gzip: {len(file.read())} bytes, then {len(file.read(1))}")
file = IndexedGzipFile("half.gz")
file.build_full_index()
file.export_index("index")
again = IndexedGzipFile("half.gz", index_file="index")
print(f"build_full_index: no error; reopened with its index: {len(again.read())} bytes")
try:
    IndexedGzipFile("wrong.gz").read()
except CrcError:
    print("one bit of the CRC wrong: CrcError")
PY
timeout 60 lib/bin/python read.py | tee seen
cat >wanted <<'END'
gzip: EOFError
indexed_gzip: 1499999 bytes, then 0
build_full_index: no error; reopened with its index: 1499999 bytes
one bit of the CRC wrong: CrcError
END
diff wanted seen
