#!/usr/bin/env bash
# cp copies zeroes out of a file that is filled when it is read, where cat reads the content:
# for SEEK_DATA, which cp asks first, the kernel asks nobody.
#
# Versions: coreutils 9.1-1, tar 1.34+dfsg-1.2+deb12u1 (Debian 12); Linux 6.18.44 (pre-content
# events are there from 6.14 on).
# Why it surprises: with FAN_PRE_ACCESS a server fills a sparse file just before somebody reads
# it, and nothing else is said to be needed. read(), sendfile(), mmap() and reflinks do ask. But
# a file that nobody has read is one hole, and programs that know about holes skip those: cp, also
# with --sparse=never, mv to another file system, and tar -S end with status 0 and a copy of the
# right length, all zeroes. On btrfs and xfs cp is right, as it clones first, and a clone asks for
# the whole file at once. So tests on one file system say nothing about another.
# Source: fs/read_write.c: vfs_llseek() calls the file system alone; the hook is in
# rw_verify_area(), which reads pass. coreutils 9.1, src/copy.c: infer_scantype() takes a file
# with fewer blocks than bytes for sparse, and lseek_copy() then goes from data to data.
#
# Output seen:
#   ext4 cat: right, 1 request or more
#   ext4 cp: zeroes, nobody asked
#   ext4 cp --sparse=never: zeroes, nobody asked
#   ext4 tar -S: zeroes, nobody asked
#   btrfs cp: right, 1 request or more
#   btrfs cp --reflink=never: zeroes, nobody asked
#
# As root, with Python, mkfs.btrfs, and a network for apt. It fails when that has changed.
set -euo pipefail
work=$(mktemp -d)
server=
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if [ -n "$server" ]; then kill "$server" || true; fi
    if mountpoint -q "$work/disk"; then umount "$work/disk"; fi
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download coreutils=9.1-1 tar=1.34+dfsg-1.2+deb12u1
for package in ./*.deb; do dpkg-deb -x "$package" root; done
PATH=$work/root/bin:$PATH

cat >server.py <<'PY'
"""Fill disk/lazy from the file `full` before it is read, and say which range was asked for."""
import ctypes, os, struct

libc = ctypes.CDLL(None, use_errno=True)
pre_content, pre_access, add, here, allow, range_record = 8, 0x100000, 1, -100, 1, 6
group = libc.fanotify_init(pre_content, os.O_RDONLY)
source, target = os.open("full", os.O_RDONLY), os.open("disk/lazy", os.O_RDWR)
if libc.fanotify_mark(group, add, ctypes.c_uint64(pre_access), here, b"disk/lazy"):
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
head -c 1M /dev/urandom >full
mkdir disk

new_disk() {
    if mountpoint -q disk; then umount disk; fi
    rm -f image && truncate -s 256M image
    "mkfs.$1" -q image >/dev/null
    mount -o loop image disk
}

try() {
    local name=$1
    shift
    rm -f disk/lazy disk/copy
    truncate -s 1M disk/lazy
    sync -f disk
    : >log
    python3 server.py >log &
    server=$!
    for _ in $(seq 300); do
        if grep -q ready log; then break; fi
        sleep 0.1
    done
    "$@"
    kill "$server"
    wait "$server" 2>/dev/null || true
    server=
    local content=other asked="nobody asked"
    if cmp -s full disk/copy; then content=right; fi
    if cmp -s disk/copy <(head -c 1M /dev/zero); then content=zeroes; fi
    if grep -q asked log; then asked="1 request or more"; fi
    echo "$name: $content, $asked" | tee -a seen
}

uname -r
new_disk ext4
try "ext4 cat" sh -c 'cat disk/lazy >disk/copy'
try "ext4 cp" cp disk/lazy disk/copy
try "ext4 cp --sparse=never" cp --sparse=never disk/lazy disk/copy
try "ext4 tar -S" sh -c 'tar -S -cf archive disk/lazy && tar -xOf archive >disk/copy'
new_disk btrfs
try "btrfs cp" cp disk/lazy disk/copy
try "btrfs cp --reflink=never" cp --reflink=never disk/lazy disk/copy
cat >wanted <<'TEXT'
ext4 cat: right, 1 request or more
ext4 cp: zeroes, nobody asked
ext4 cp --sparse=never: zeroes, nobody asked
ext4 tar -S: zeroes, nobody asked
btrfs cp: right, 1 request or more
btrfs cp --reflink=never: zeroes, nobody asked
TEXT
diff wanted seen
