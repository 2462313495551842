#!/usr/bin/env bash
# `btrfs filesystem usage` of a sprouted btrfs has less than nothing unallocated.
#
# Version: btrfs-progs 6.2-1+deb12u2 (Debian 12); seen on Linux 6.18.44.
# Why it surprises: the file system is healthy, df and `btrfs filesystem show` are right,
# and the command whose numbers people trust before they add a disk prints a device size
# without the seed, an allocation with it, and the difference: negative, or, where a
# program reads it as unsigned, 16 EiB of free space. Its lists leave the seed out too.
# Source: btrfs-progs, cmds/filesystem-usage.c: load_device_info() leaves out devices with
# another fsid, which the seed has; load_chunk_info() takes the chunks of all devices.
#
# Output seen (a seed of 2 GiB with 1.5 GiB of data, 1 GiB added):
#   device size 1073741824, allocated 2431647744, unallocated -1357905920
#   `btrfs filesystem show`: 2 devices, together 3221225472
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
truncate -s 2G seed && truncate -s 1G new
mkfs.btrfs -q seed >/dev/null
loops+=("$(losetup --find --show seed)")
mount "${loops[0]}" mnt
fallocate -l 1536M mnt/file
umount mnt
btrfstune -f -S 1 "${loops[0]}"
loops+=("$(losetup --find --show new)")
mount -o ro "${loops[0]}" mnt
btrfs device add -f "${loops[1]}" mnt >/dev/null 2>&1
mount -o remount,rw mnt

uname -r
btrfs filesystem usage --raw mnt | sed -n 2,8p | tee seen
number() { awk -v name="$1" -F: '$1 ~ name { print $2 + 0 }' seen; }
[ "$(number 'Device size')" = 1073741824 ]
awk -v a="$(number 'Device allocated')" 'BEGIN { exit !(a > 1073741824) }'
awk -v u="$(number 'Device unallocated')" 'BEGIN { exit !(u < 0 || u > 2 ^ 63) }'
btrfs filesystem show --raw mnt | tee shown
[ "$(awk '/devid/ { sum += $4 } END { printf "%.0f", sum }' shown)" = 3221225472 ]
