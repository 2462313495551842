#!/usr/bin/env bash
# EROFS that is mounted from a file keeps all that is read twice in memory, and refuses O_DIRECT; on
# a loop device with direct I/O it does neither.
#
# Versions: Linux 6.18.44 (mounts from a file are there from 6.12 on); erofs-utils 1.5-1 makes the
# image, fincore of util-linux-extra 2.38.1-5+deb12u3 counts (Debian 12).
# Why it surprises: such mounts replace loop devices for container images, as the lighter way. But data
# are cached once as pages of the file in EROFS, and once as pages of the image below, so that
# containers of an image cost twice what they read. A program that opens its files with O_DIRECT, such
# as a database with a seed of data in its image, gets EINVAL where it ran from the same image on
# a loop device. The mount option "directio" stops the second copy, not the EINVAL; it is off.
# Source: fs/erofs/fileio.c reads the image with IOCB_DIRECT only if the mount has the option;
# fs/erofs/data.c allows direct I/O only where the super block has a block device.
#
# Output seen (pages of 4 KiB in memory, of a file of 256 pages and of its image):
#   from the file: 256 and 257, O_DIRECT: Invalid argument
#   from the file, directio: 256 and 1, O_DIRECT: Invalid argument
#   loop device with direct I/O: 256 and 0, O_DIRECT: 0 and 0
#
# As root, with Python, on a kernel with CONFIG_EROFS_FS_BACKED_BY_FILE, and a network for
# apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
loop=
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    for place in mnt disk; do
        if mountpoint -q "$work/$place"; then umount "$work/$place"; fi
        if [ "$place" = mnt ] && [ -n "$loop" ]; then losetup -d "$loop"; fi
    done
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download erofs-utils=1.5-1 liblz4-1=1.9.4-1 util-linux-extra=2.38.1-5+deb12u3
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu

mkdir tree mnt disk
head -c 1M /dev/urandom >tree/file
truncate -s 64M ext4 && mkfs.ext4 -q ext4
mount -o loop ext4 disk
root/usr/bin/mkfs.erofs disk/image tree >/dev/null
sync -f disk

cat >look.py <<'PY'
"""Mount an image, read the file in it, and drop what the page cache had of both before."""
import ctypes, mmap, os, sys

source, options, way = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
read_only = 1
if libc.mount(source.encode(), b"mnt", b"erofs", read_only, options.encode() or None):
    sys.exit(os.strerror(ctypes.get_errno()))
image = os.open("disk/image", os.O_RDONLY)
os.posix_fadvise(image, 0, 0, os.POSIX_FADV_DONTNEED)
try:
    file = os.open("mnt/file", os.O_RDONLY | (os.O_DIRECT if way == "direct" else 0))
except OSError as error:
    sys.exit(print(error.strerror))
os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
page = mmap.mmap(-1, 4096)
for offset in range(0, os.fstat(file).st_size, 4096):
    os.preadv(file, [page], offset)
PY
pages() {
    local said
    said=$(python3 look.py "$1" "$2" "$3")
    if [ -z "$said" ]; then
        said=$(root/usr/bin/fincore -nro PAGES mnt/file disk/image | paste -sd ' ' | sed 's/ / and /')
    fi
    umount mnt
    echo "$said"
}
try() {
    echo "$1: $(pages "$2" "$3" read), O_DIRECT: $(pages "$2" "$3" direct)" | tee -a seen
}
uname -r
try "from the file" disk/image ""
try "from the file, directio" disk/image directio
loop=$(losetup -rf --show --direct-io=on disk/image)
try "loop device with direct I/O" "$loop" ""
cat >wanted <<'TEXT'
from the file: 256 and 257, O_DIRECT: Invalid argument
from the file, directio: 256 and 1, O_DIRECT: Invalid argument
loop device with direct I/O: 256 and 0, O_DIRECT: 0 and 0
TEXT
diff wanted seen
