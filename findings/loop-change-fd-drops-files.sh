#!/usr/bin/env bash
# LOOP_CHANGE_FD below the seed of a btrfs empties files that were just written elsewhere.
#
# Version: btrfs-progs 6.2-1+deb12u2 (Debian 12), seen on Linux 6.18.44. Kernels before 6.17
# and from 7.2 on behave differently, by reading.
# Why it surprises: the ioctl replaces the file behind a *read-only* loop device by an
# equal one, and is meant for use below a mounted file system (installers do so). Here the
# device is a btrfs seed: nothing is ever written to it. All writes go to a second device,
# which is healthy. Yet files that were written and closed have size 0 afterwards, unless
# they were synced, and a later sync returns 0. Nothing is logged.
# Source: drivers/block/loop.c, loop_change_fd(), calls disk_force_media_change(), which
# calls bdev_mark_dead() as for a surprise removal; block/bdev.c and fs/super.c,
# fs_bdev_mark_dead(), then skips sync_filesystem() and evicts all inodes of the file
# system that holds the device, dirty ones as well.
#
# Output seen (50 files of some bytes each):
#   synced before: 0 files are empty
#   not synced: 50 files are empty, sync: status 0
#
# As root, with a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
loops=()
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if mountpoint -q "$work/mnt"; then umount "$work/mnt"; fi
    for loop in "${loops[@]}"; do losetup --detach "$loop"; done
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download btrfs-progs=6.2-1+deb12u2
dpkg-deb -x ./btrfs-progs_*.deb root
export PATH=$work/root/bin:$work/root/sbin:$PATH

mkdir mnt
truncate -s 1G seed new
mkfs.btrfs -q seed >/dev/null
btrfstune -f -S 1 seed
cp --sparse=always seed equal
loops+=("$(losetup --find --show --read-only seed)")
loops+=("$(losetup --find --show new)")
mount -o ro "${loops[0]}" mnt
btrfs device add -f "${loops[1]}" mnt >/dev/null 2>&1
mount -o remount,rw mnt

# The number of LOOP_CHANGE_FD is in linux/loop.h; no command has it.
change_file() {
    python3 -c 'import fcntl, sys
with open(sys.argv[1]) as device, open(sys.argv[2]) as file:
    fcntl.ioctl(device, 0x4C06, file.fileno())' "${loops[0]}" "$1"
}
uname -r
for number in $(seq 50); do echo "content of file $number" >"mnt/$number"; done
sync -f mnt
change_file equal
kept=$(find mnt -type f -empty | wc -l)
echo "synced before: $kept files are empty"
for number in $(seq 51 100); do echo "content of file $number" >"mnt/$number"; done
change_file seed
lost=$(find mnt -type f -empty | wc -l)
sync -f mnt
echo "not synced: $lost files are empty, sync: status $?"
[ "$kept/$lost" = 0/50 ]
