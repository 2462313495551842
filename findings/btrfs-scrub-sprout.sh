#!/usr/bin/env bash
# A read-only scrub of a sprouted btrfs counts healthy blocks of its seed as uncorrectable.
#
# Version: btrfs-progs 6.2-1+deb12u2 (Debian 12); seen on Linux 6.18.44.
# Why it surprises: a seed with a second, writable device is what `btrfs device add` makes
# of it, and everything on it can be read. `btrfs scrub start MOUNT` ends with "Read-only
# file system" and "aborted", though it has scrubbed the writable device. What looks like
# the remedy, `-r`, ends with status 3: it counts the super blocks and the tree blocks of
# the seed as errors that nothing can correct. None of them is bad. A monitor that reads
# this status reports a broken disk. The scrub of the writable device alone has status 0.
# Source: fs/btrfs/scrub.c: btrfs_scrub_dev() refuses a device that is not writable;
# scrub_verify_one_metadata() and, by way of btrfs_validate_super(), scrub_one_super()
# compare the fsid of each block with that of the sprout, but the seed wrote these.
# disk-io.c, check_tree_block_fsid(), which serves other reads, looks at the seeds too.
#
# Output seen:
#   scrub of the mount: status 1, aborted
#   read-only scrub of the mount: status 3, super=2 verify=40 (numbers vary)
#   scrub of the writable device: status 0
#   all files, read afterwards past the page cache: the same
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

mkdir mnt tree
for number in $(seq 100); do head -c 1000 /dev/urandom >"tree/$number"; done
truncate -s 1G seed new
mkfs.btrfs -q --rootdir tree seed >/dev/null 2>&1
btrfstune -f -S 1 seed
loops+=("$(losetup --find --show --read-only seed)")
loops+=("$(losetup --find --show new)")
mount -o ro "${loops[0]}" mnt
btrfs device add -f "${loops[1]}" mnt >/dev/null 2>&1
mount -o remount,rw mnt

scrub() {
    status=0
    timeout 120 btrfs scrub start -B "$@" >out 2>&1 || status=$?
}
uname -r
scrub mnt
echo "scrub of the mount: status $status"
first=$status
grep -q 'Status: *aborted' out
scrub -r mnt
echo "read-only scrub of the mount: status $status, $(sed -n 's/^Error summary: *//p' out)"
first=$first/$status
grep -q 'Error summary: *super=[1-9].* verify=[1-9]' out
scrub "${loops[1]}"
echo "scrub of the writable device: status $status"
umount mnt
mount "${loops[1]}" mnt
diff -r tree mnt
echo "all files, read afterwards past the page cache: the same"
[ "$first/$status" = 1/3/0 ]
