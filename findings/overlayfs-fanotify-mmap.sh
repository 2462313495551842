#!/usr/bin/env bash
# A file that is filled when it is read has its content for a reader through overlayfs, and zeroes
# for one that maps it: mmap() asks on the file itself, and on overlayfs it does not.
#
# Version: Linux 6.18.44 (pre-content events are there from 6.14 on); the content is an image of
# erofs-utils 1.5-1 (Debian 12).
# Why it surprises: overlayfs is how containers see their image, and FAN_PRE_ACCESS is how images
# are to arrive when they are read. read() through overlayfs asks, page by page, so a test with cat
# passes; a copy up asks for the whole file, so a container that writes is right too. But programs
# and libraries are mapped, and for those nobody is asked: the pages are those of the hole. Directly
# on ext4 one mmap() asks at once for all that it maps, also if nobody touches it. Neither
# a loop device on the file asks, nor EROFS for its metadata, so that a mount from the file itself
# says "Invalid argument".
# Source: mm/util.c, vm_mmap_pgoff(): fsnotify_mmap_perm() is told of the file that the caller has
# opened, which is that of overlayfs; ovl_mmap() (fs/overlayfs/file.c) puts the real one in its
# place later. drivers/block/loop.c calls the file's read_iter itself, and
# erofs_bread() (fs/erofs/data.c) takes folios of the file's page cache: both are below the hook.
#
# Output seen:
#   ext4, read: right, asked
#   ext4, mmap: right, asked once, for all
#   overlayfs, read: right, asked
#   overlayfs, mmap: zeroes, not asked
#   overlayfs, mmap after a copy up: right, asked once, for all
#   loop device, read: zeroes, not asked
#   EROFS from the file: Invalid argument, not asked
#
# As root, with Python, on a kernel with CONFIG_EROFS_FS_BACKED_BY_FILE, and a network for
# apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
server=
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if [ -n "$server" ]; then kill "$server" || true; fi
    for place in mnt overlay disk; do
        if mountpoint -q "$work/$place"; then umount "$work/$place"; fi
    done
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download erofs-utils=1.5-1 liblz4-1=1.9.4-1
for package in ./*.deb; do dpkg-deb -x "$package" root; done
export LD_LIBRARY_PATH=$work/root/usr/lib/x86_64-linux-gnu

mkdir tree disk overlay mnt
head -c 1M /dev/urandom >tree/file
root/usr/bin/mkfs.erofs full tree >/dev/null
size=$(stat -c %s full)
truncate -s 256M ext4 && mkfs.ext4 -q ext4
mount -o loop ext4 disk
mkdir disk/lower disk/upper disk/work

cat >server.py <<'PY'
"""Fill disk/lower/lazy from the file `full` before it is read, and say which range was asked for."""
import ctypes, os, struct

libc = ctypes.CDLL(None, use_errno=True)
pre_content, pre_access, add, here, allow, range_record = 8, 0x100000, 1, -100, 1, 6
group = libc.fanotify_init(pre_content, os.O_RDONLY)
source, target = os.open("full", os.O_RDONLY), os.open("disk/lower/lazy", os.O_RDWR)
if libc.fanotify_mark(group, add, ctypes.c_uint64(pre_access), here, b"disk/lower/lazy"):
    raise SystemExit(os.strerror(ctypes.get_errno()))
print("ready", flush=True)
size = os.fstat(source).st_size
while True:
    events = os.read(group, 4096)
    while events:
        length, _, _, header, _, file, _ = struct.unpack_from("=IBBHQii", events)
        kind, _, _, _, offset, count = struct.unpack_from("=BBHIQQ", events, header)
        if kind == range_record:
            print("asked", offset, count, flush=True)
        end = min(offset + count, size) if count else size
        times = os.fstat(target)
        os.pwrite(target, os.pread(source, max(end - offset, 0), offset), offset)
        os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
        os.write(group, struct.pack("=iI", file, allow))
        os.close(file)
        events = events[length:]
PY
cat >look.py <<'PY'
"""Say what read(), mmap(), or a mount of EROFS sees of a file."""
import ctypes, mmap, os, sys

way, path = sys.argv[1:]
full = open("full", "rb").read()
if way == "erofs":
    libc = ctypes.CDLL(None, use_errno=True)
    read_only = 1
    if libc.mount(path.encode(), b"mnt", b"erofs", read_only, None):
        sys.exit(print(os.strerror(ctypes.get_errno())))
    path, full = "mnt/file", open("tree/file", "rb").read()
with open(path, "rb") as file:
    if way == "mmap":
        seen = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)[:]
    else:
        seen = file.read()
print("right" if seen == full else "other" if any(seen) else "zeroes")
PY

try() {
    local name=$1 way=$2 path=$3
    rm -rf disk/upper/* disk/lower/lazy
    truncate -s "$size" disk/lower/lazy
    sync -f disk
    mount -t overlay -o "lowerdir=disk/lower,upperdir=disk/upper,workdir=disk/work" overlay overlay
    : >log
    python3 server.py >log &
    server=$!
    for _ in $(seq 300); do
        if grep -q ready log; then break; fi
        sleep 0.1
    done
    if [ "$path" = copied-up ]; then
        touch overlay/lazy
        path=overlay/lazy
    elif [ "$path" = loop ]; then
        path=$(losetup -rf --show disk/lower/lazy)
    fi
    local content asked="not asked"
    content=$(timeout 60 python3 look.py "$way" "$path")
    case $path in /dev/*) losetup -d "$path" ;; esac
    if mountpoint -q mnt; then umount mnt; fi
    umount overlay
    kill "$server"
    wait "$server" 2>/dev/null || true
    server=
    if [ "$(grep asked log)" = "asked 0 $size" ]; then
        asked="asked once, for all"
    elif grep -q asked log; then
        asked=asked
    fi
    echo "$name: $content, $asked" | tee -a seen
}

uname -r
try "ext4, read" read disk/lower/lazy
try "ext4, mmap" mmap disk/lower/lazy
try "overlayfs, read" read overlay/lazy
try "overlayfs, mmap" mmap overlay/lazy
try "overlayfs, mmap after a copy up" mmap copied-up
try "loop device, read" read loop
try "EROFS from the file" erofs disk/lower/lazy
cat >wanted <<'TEXT'
ext4, read: right, asked
ext4, mmap: right, asked once, for all
overlayfs, read: right, asked
overlayfs, mmap: zeroes, not asked
overlayfs, mmap after a copy up: right, asked once, for all
loop device, read: zeroes, not asked
EROFS from the file: Invalid argument, not asked
TEXT
diff wanted seen
