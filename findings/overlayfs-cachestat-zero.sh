#!/usr/bin/env bash
# For a file on overlayfs cachestat() counts no page in memory, where mincore(), and so fincore of
# util-linux 2.38, counts them all.
#
# Versions: Linux 6.18.44 (cachestat is there from 6.5 on); fincore of util-linux-extra
# 2.38.1-5+deb12u3 (Debian 12), whose versions from 2.40 on ask cachestat() first.
# Why it surprises: cachestat() was made because mincore() needs a mapping and a byte for each page;
# it takes any file descriptor and ends well. In a container each file is on overlayfs, so a tool
# that says what is cached says "nothing" there, for a file that was just read, and an update of
# the tool changes the answer. On the lower file system, or a volume, it is right. A program that asks
# before it decides whether to read something itself or to leave it decides wrongly, silently.
# Source: mm/filemap.c, cachestat(): it looks into f_mapping of the file that was opened. Pages of
# overlayfs are those of the real file (fs/overlayfs/file.c), its own mapping stays empty; mmap()
# puts the real file in its place, which is what mincore() sees.
#
# Output seen (pages of 4 KiB, after reading 1 MiB through each path):
#   ext4: cachestat 256, fincore 256
#   overlayfs: cachestat 0, fincore 256
#   overlayfs, after a copy up: cachestat 0, fincore 256
#
# As root, on x86-64 or arm64, with Python and a network for apt. It fails when that has changed.
set -euo pipefail
work=$(mktemp -d)
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    for place in overlay disk; do
        if mountpoint -q "$work/$place"; then umount "$work/$place"; fi
    done
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download util-linux-extra=2.38.1-5+deb12u3
dpkg-deb -x ./util-linux-extra_*.deb root

mkdir disk overlay
truncate -s 64M image && mkfs.ext4 -q image
mount -o loop image disk
mkdir disk/lower disk/upper disk/work
head -c 1M /dev/urandom >disk/lower/file
mount -t overlay -o lowerdir=disk/lower,upperdir=disk/upper,workdir=disk/work overlay overlay
cat >count.py <<'PY'
import ctypes, os, struct, sys

libc = ctypes.CDLL(None, use_errno=True)
cachestat, whole, counts = 451, struct.pack("=QQ", 0, 0), ctypes.create_string_buffer(40)
file = os.open(sys.argv[1], os.O_RDONLY)
while os.read(file, 1 << 20):
    pass
if libc.syscall(cachestat, file, whole, counts, 0):
    sys.exit(os.strerror(ctypes.get_errno()))
print(struct.unpack_from("=Q", counts.raw)[0])
PY
count() {
    echo "$1: cachestat $(python3 count.py "$2"), fincore $(root/usr/bin/fincore -nro PAGES "$2")"
}
uname -r
{
    count ext4 disk/lower/file
    count overlayfs overlay/file
    touch overlay/file
    count "overlayfs, after a copy up" overlay/file
} | tee seen
cat >wanted <<'TEXT'
ext4: cachestat 256, fincore 256
overlayfs: cachestat 0, fincore 256
overlayfs, after a copy up: cachestat 0, fincore 256
TEXT
diff wanted seen
