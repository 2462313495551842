#!/usr/bin/env bash
# A loop device reads zeroes out of a file that is filled when it is read: it asks nobody,
# where read(), sendfile() and read-ahead of the file ask.
#
# Version: util-linux 2.38.1-5+deb12u3 (Debian 12); seen on Linux 6.18.44. Files that are
# filled on demand (FAN_PRE_ACCESS of fanotify) came with Linux 6.14.
# Why it surprises: what is mostly meant to be filled so are disk images, and a loop device
# is how a disk image is used. fanotify(7) says that the event comes when a file is about to
# be read. The reads of the device, with or without direct I/O, are reads of the file by
# the kernel, and get what lies there: zeroes, without an error.
# Source: drivers/block/loop.c, lo_rw_aio(), calls read_iter() of the backing file itself. The
# question is in rw_verify_area(), which vfs_iter_read() calls (fsnotify_file_area_perm()).
#
# Output seen:
#   cat of the file: right, asked
#   loop device: zeroes, nobody asked
#   loop device with direct I/O: zeroes, nobody asked
#   cat of the file again: right, asked
#
# As root, with Python, and a network for apt. It fails when that has changed.
set -euo pipefail
work=$(mktemp -d)
server=
loop=
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if [ -n "$server" ]; then kill "$server" || true; fi
    if [ -n "$loop" ]; then losetup --detach "$loop" || true; fi
    if mountpoint -q "$work/disk"; then umount "$work/disk"; fi
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download mount=2.38.1-5+deb12u3
for package in ./*.deb; do dpkg-deb -x "$package" root; done
PATH=$work/root/sbin:$PATH

cat >server.py <<'PY'
"""Fill disk/lazy from the file `full` when it is read."""
import ctypes, os, struct

libc = ctypes.CDLL(None, use_errno=True)
pre_content, pre_access, add, here, allow = 8, 0x100000, 1, -100, 1
group = libc.fanotify_init(pre_content, os.O_RDONLY)
target = os.open("disk/lazy", os.O_RDWR)
if libc.fanotify_mark(group, add, ctypes.c_uint64(pre_access), here, b"disk/lazy"):
    raise SystemExit(os.strerror(ctypes.get_errno()))
print("ready", flush=True)
while True:
    events = os.read(group, 4096)
    while events:
        length, _, _, _, _, file, _ = struct.unpack_from("=IBBHQii", events)
        print("asked", flush=True)
        with open("full", "rb") as source:
            os.pwrite(target, source.read(), 0)
        os.write(group, struct.pack("=iI", file, allow))
        os.close(file)
        events = events[length:]
PY
head -c 1M /dev/urandom >full
mkdir disk
truncate -s 64M image
mkfs.ext4 -q image
mount -o loop image disk

read_loop() {
    loop=$(losetup --find --show --read-only "$@" disk/lazy)
    cat "$loop" >copy
    losetup --detach "$loop"
    loop=
}

try() {
    local name=$1
    shift
    rm -f disk/lazy copy
    truncate -s 1M disk/lazy
    sync -f disk
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
    if cmp -s full copy; then content=right; fi
    if cmp -s copy <(head -c 1M /dev/zero); then content=zeroes; fi
    if grep -q asked log; then asked=asked; fi
    echo "$name: $content, $asked" | tee -a seen
}

uname -r
try "cat of the file" sh -c 'cat disk/lazy >copy'
try "loop device" read_loop
try "loop device with direct I/O" read_loop --direct-io=on
try "cat of the file again" sh -c 'cat disk/lazy >copy'
cat >wanted <<'TEXT'
cat of the file: right, asked
loop device: zeroes, nobody asked
loop device with direct I/O: zeroes, nobody asked
cat of the file again: right, asked
TEXT
diff wanted seen
