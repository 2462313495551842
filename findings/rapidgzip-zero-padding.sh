#!/usr/bin/env bash
# rapidgzip raises an error at zeroes behind a gzip file, and keeps back what it had read.
#
# Version: rapidgzip 0.16.2 (PyPI).
# Why it surprises: zeroes behind the last member are allowed. Tapes and block devices put
# them there, gzip's manual speaks of it, and gzip, pigz, Python's gzip, indexed_gzip,
# libarchive and ISA-L's igzip pass over them. rapidgzip, made as a faster one of these,
# takes them for a broken header. As it works by chunks, more is lost than the end: the
# chunk in which the error comes is never handed out, so of a small file not one byte is
# read, and of 30 MB of random bytes the last 0.6 were missing. Who wants to cut the
# zeroes off has to know where the last member ends, as it can end in zeroes itself.
# Source: rapidgzip, isal.hpp, IsalInflateWrapper::readIsalHeader(): after the footer of
# a member, whatever is not the end of the file has to be a header. gzip 1.12, gzip.c,
# get_method(): bytes that are all zero are no error; -v says "trailing zero bytes ignored".
#
# Output seen (of 100000 bytes):
#   as gzip made it: gzip 100000, Python 100000, rapidgzip 100000
#   padded to 10240: gzip 100000, Python 100000, rapidgzip 0 (ValueError)
#
# With Python 3.9 or later, gzip and a network for pip. It fails when that has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
timeout 200 python3 -m pip -q install --only-binary :all: --no-deps \
    --disable-pip-version-check --root-user-action ignore --target lib rapidgzip==0.16.2

head -c 100000 /dev/urandom | gzip >data.gz
cp data.gz padded.gz
truncate --size %10240 padded.gz

cat >sizes.py <<'PY'
import gzip, subprocess

import rapidgzip

for name, words in (("data.gz", "as gzip made it"), ("padded.gz", "padded to 10240")):
    with open(name, "rb") as file:
        run = subprocess.run(["gzip", "-dc"], stdin=file, stdout=subprocess.PIPE, check=True)
    with gzip.open(name) as file:
        read = file.read()
    got, error = 0, ""
    try:
        with rapidgzip.open(name, parallelization=1) as file:
            while chunk := file.read(10000):
                got += len(chunk)
    except ValueError:
        error = " (ValueError)"
    print(f"{words}: gzip {len(run.stdout)}, Python {len(read)}, rapidgzip {got}{error}")
PY
PYTHONPATH=lib timeout 60 python3 sizes.py | tee seen
cat >wanted <<'END'
as gzip made it: gzip 100000, Python 100000, rapidgzip 100000
padded to 10240: gzip 100000, Python 100000, rapidgzip 0 (ValueError)
END
diff wanted seen
