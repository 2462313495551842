#!/usr/bin/env bash
# `btrfs balance start -dusage=100` leaves out the block groups that are 100 % full.
#
# Version: btrfs-progs 6.2-1+deb12u2 (Debian 12); seen on Linux 6.18.44.
# Why it surprises: people write usage=100 for "all", as the end of a series (10, 50, 100)
# or to spread a full file system over a disk that they have just added. The filter takes
# what is *below* the number, and 101 is "invalid usage argument". So no number
# takes the full ones, and they are what should move: nothing goes to the new disk, and
# the balance says "Done" with status 0. Just `-d`, without a filter, moves them.
# Source: fs/btrfs/volumes.c, chunk_usage_filter(): the threshold for 100 is the length of
# the block group, and "used" has to be less than it. btrfs-progs, cmds/balance.c,
# parse_filters(): numbers above 100 are refused.
#
# Output seen (and what balance says, "had to relocate 0 out of 12 chunks" and so on):
#   -dusage=100: status 0, data on the new disk: 0 MiB
#   -dusage=101: status 1
#   -d: status 0, data on the new disk: more than 300 MiB
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
truncate -s 1G old && truncate -s 2G new
mkfs.btrfs -q old >/dev/null
loops+=("$(losetup --find --show old)")
loops+=("$(losetup --find --show new)")
mount "${loops[0]}" mnt
# Space is reserved, not written, until no data block group has room.
number=0
for size in 4M 256K 4K; do
    while fallocate -l "$size" "mnt/$number" 2>/dev/null; do number=$((number + 1)); done
    rm -f "mnt/$number"
done
sync -f mnt
btrfs device add "${loops[1]}" mnt >/dev/null

moved() { # MiB of data on the new disk
    btrfs filesystem usage --raw mnt | awk -v disk="${loops[1]}" '
        /^[A-Z][a-z]*,/ { data = /^Data/ }
        data && $1 == disk { sum += $2 }
        END { printf "%d\n", sum / 1048576 }'
}
uname -r
balance() {
    status=0
    timeout 120 btrfs balance start "$1" mnt >out 2>&1 || status=$?
    sed 's|^|  |' out
}
balance -dusage=100
first="$status/$(moved)"
echo "-dusage=100: status $status, data on the new disk: $(moved) MiB"
balance -dusage=101
first="$first/$status"
echo "-dusage=101: status $status"
balance -d
echo "-d: status $status, data on the new disk: $(moved) MiB"
[ "$first/$status" = 0/0/1/0 ] && [ "$(moved)" -gt 300 ]
