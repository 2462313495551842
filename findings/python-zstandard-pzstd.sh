#!/usr/bin/env bash
# python-zstandard takes the output of pzstd for an empty file, without an error.
#
# Versions: zstandard (PyPI) 0.25.0 and 0.23.0; pzstd of zstd 1.5.4+dfsg2-5 (Debian 12).
# Why it surprises: pzstd comes with zstd, and `zstd -d` reads what it writes. To let
# threads find their parts it puts a skippable frame before each one. decompressobj() and
# read_to_iter() of python-zstandard stop at the end of the *first frame* of any kind, so
# they give no byte of such a file and report success (eof is True). That decompress()
# does the same is a matter of the version: 0.23.0 returns b"", 0.25.0 raises an error
# about a size that is the skippable frame's. stream_reader() and open() of the same
# library give all. A program that was tested with `zstd` files, and one version, loses
# all data of those that were compressed in parallel.
# Source: python-zstandard, c-ext/decompressor.c: Decompressor_decompress() takes the size
# of the content from the header of the first frame, skippable or not, and
# c-ext/decompressobj.c and decompressoriterator.c end where ZSTD_decompressStream()
# returns 0, unless read_across_frames is set (decompress() does not implement that).
# zstd, contrib/pzstd: SkippableFrame.h says what is written.
#
# Output seen (bytes of 100000):
#   0.23.0: decompress 0, decompressobj 0, read_to_iter 0, stream_reader 100000
#   0.25.0: decompress ZstdError, decompressobj 0, read_to_iter 0, stream_reader 100000
#
# With Python 3.9 to 3.13 and a network for apt and pip. It fails when that changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download zstd=1.5.4+dfsg2-5
dpkg-deb -x ./zstd_*.deb root

head -c 100000 /dev/urandom >data
timeout 60 root/usr/bin/pzstd -q data -o data.zst
timeout 60 root/usr/bin/zstd -qdc data.zst | cmp - data

cat >sizes.py <<'PY'
import zstandard

with open("data.zst", "rb") as file:
    data = file.read()


def size(read):
    try:
        return len(read(zstandard.ZstdDecompressor()))
    except zstandard.ZstdError:
        return "ZstdError"


print(
    f"{zstandard.__version__}:",
    f"decompress {size(lambda d: d.decompress(data))},",
    f"decompressobj {size(lambda d: d.decompressobj().decompress(data))},",
    f"read_to_iter {size(lambda d: b''.join(d.read_to_iter(data)))},",
    f"stream_reader {size(lambda d: d.stream_reader(data).read())}",
)
PY
for version in 0.23.0 0.25.0; do
    timeout 200 python3 -m pip -q install --only-binary :all: --no-deps \
        --disable-pip-version-check --root-user-action ignore \
        --target "$version" "zstandard==$version"
    PYTHONPATH=$version timeout 60 python3 sizes.py | tee -a seen
done
cat >wanted <<'END'
0.23.0: decompress 0, decompressobj 0, read_to_iter 0, stream_reader 100000
0.25.0: decompress ZstdError, decompressobj 0, read_to_iter 0, stream_reader 100000
END
diff wanted seen
