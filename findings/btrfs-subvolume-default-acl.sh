#!/usr/bin/env bash
# A btrfs subvolume inherits neither the default ACL nor the set-group-ID group of the
# directory it is made in; a plain directory in the same place inherits both.
#
# Versions: btrfs-progs 6.2-1+deb12u2, acl 2.3.1-3 (Debian 12); seen on Linux 6.18.44.
# Why it surprises: `mkdir` and `btrfs subvolume create` look like two ways to make an
# empty directory, and acl(5) speaks of all new objects. A tool that puts a subvolume
# where a directory was (snapshots, stores of containers) drops access that users were
# granted, and their group, without a word.
# Source: fs/btrfs/inode.c. btrfs_create_new_inode() leaves btrfs_init_inode_security()
# out for subvolumes, which its authors note may be wrong, and btrfs_new_subvol_inode()
# gives inode_init_owner() no directory to take the group from.
#
# Output seen:
#   subvolume: group 0, ACL entries inherited: 0
#   directory: group 4, ACL entries inherited: 1
#
# As root, with a network for apt. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
loop=
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    if mountpoint -q "$work/mnt"; then umount "$work/mnt"; fi
    if [ -n "$loop" ]; then losetup --detach "$loop"; fi
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download btrfs-progs=6.2-1+deb12u2 acl=2.3.1-3
for package in ./*.deb; do dpkg-deb -x "$package" root; done
progs=$work/root/bin:$work/root/sbin:$work/root/usr/bin:$work/root/usr/sbin
run() { PATH=$progs:$PATH "$@"; }

truncate -s 256M disk && mkdir mnt
run mkfs.btrfs -q disk
loop=$(losetup --find --show disk)
mount "$loop" mnt
mkdir mnt/shared
chown 0:4 mnt/shared && chmod 2770 mnt/shared
run setfacl --default --modify user:1000:rwx mnt/shared
run btrfs -q subvolume create mnt/shared/subvolume
mkdir mnt/shared/directory

failed=0
check() { # NAME GROUP ENTRIES
    local group entries
    group=$(stat -c %g "mnt/shared/$1")
    entries=$(run getfacl --omit-header --numeric --access "mnt/shared/$1" | grep -c '^user:1000:' || true)
    echo "$1: group $group, ACL entries inherited: $entries"
    [ "$group/$entries" = "$2/$3" ] || failed=1
}
uname -r
check subvolume 0 0
check directory 4 1
exit "$failed"
