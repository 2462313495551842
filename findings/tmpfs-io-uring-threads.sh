#!/usr/bin/env bash
# io_uring reads files on tmpfs by a thread of the kernel, though they are in memory.
#
# Version: Linux 6.18.44; liburing 2.3-3 (Debian 12).
# Why it surprises: what the page cache holds of a file on a disk, io_uring reads at once,
# in the call that submits. A file on tmpfs is in memory and nowhere else, so reading it
# waits for no disk. Yet io_uring gives each read to another thread, iou-wrk, which it
# makes for that, and preadv2() with RWF_NOWAIT, for reads that need not wait, fails.
# A cache that moves from a disk to /dev/shm to be faster adds the switch to that
# thread to each read. The loop device's NOWAIT (Linux 6.19) asks for the same bit.
# Source: mm/shmem.c, shmem_file_open(), does not set FMODE_NOWAIT in the file's mode, as
# btrfs, ext4 and xfs do; io_uring/rw.c, io_file_supports_nowait(), gives reads of files
# without it to io-wq, and fs/read_write.c, kiocb_set_rw_flags(), refuses RWF_NOWAIT.
#
# Output seen:
#   btrfs, all of it in the page cache: RWF_NOWAIT reads 4096; io_uring: 0 threads more
#   tmpfs: RWF_NOWAIT: Operation not supported; io_uring: 1 threads more (number varies)
#
# As root, with a network for apt, and gcc. It fails when that behaviour has changed.
set -euo pipefail
work=$(mktemp -d)
# shellcheck disable=SC2317  # it is reached by the trap
finish() {
    for place in btrfs tmpfs; do
        if mountpoint -q "$work/$place"; then umount "$work/$place"; fi
    done
    rm -rf "$work"
}
trap finish EXIT
cd "$work"
chmod 755 "$work" && if id _apt >/dev/null 2>&1; then chown _apt "$work"; fi
apt-get -qq download liburing-dev=2.3-3 btrfs-progs=6.2-1+deb12u2
for package in ./*.deb; do dpkg-deb -x "$package" root; done

cat >reads.c <<'END'
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>

static char data[4096];

static int threads(void)
{
	DIR *tasks = opendir("/proc/self/task");
	int count = 0;

	for (struct dirent *task; (task = readdir(tasks));)
		count += task->d_name[0] != '.';
	closedir(tasks);
	return count;
}

int main(int argc, char **argv)
{
	struct iovec part = { data, sizeof(data) };
	int file = open(argv[1], O_RDONLY), before = threads();
	struct io_uring ring;
	struct io_uring_cqe *done;

	if (file < 0 || argc != 2 || io_uring_queue_init(16, &ring, 0) ||
	    pread(file, data, sizeof(data), 0) != sizeof(data))
		return 1;
	if (preadv2(file, &part, 1, 0, RWF_NOWAIT) == sizeof(data))
		printf("RWF_NOWAIT reads 4096; ");
	else
		printf("RWF_NOWAIT: %s; ", strerror(errno));
	for (int i = 0; i < 100; i++) {
		io_uring_prep_read(io_uring_get_sqe(&ring), file, data, sizeof(data), 0);
		if (io_uring_submit_and_wait(&ring, 1) < 0 || io_uring_wait_cqe(&ring, &done) ||
		    done->res != sizeof(data))
			return 1;
		io_uring_cqe_seen(&ring, done);
	}
	printf("io_uring: %d threads more\n", threads() - before);
	return 0;
}
END
gcc -O2 -Iroot/usr/include reads.c root/usr/lib/*/liburing.a -o reads

mkdir btrfs tmpfs
truncate -s 256M disk
root/sbin/mkfs.btrfs -q disk >/dev/null
mount -o loop disk btrfs
mount -t tmpfs none tmpfs
uname -r
for place in btrfs tmpfs; do head -c 4096 /dev/urandom >"$place/file" && sync -f "$place"; done
btrfs=$(timeout 60 ./reads btrfs/file)
tmpfs=$(timeout 60 ./reads tmpfs/file)
echo "btrfs, all of it in the page cache: $btrfs"
echo "tmpfs: $tmpfs"
[ "$btrfs" = "RWF_NOWAIT reads 4096; io_uring: 0 threads more" ]
[[ $tmpfs =~ ^"RWF_NOWAIT: Operation not supported; io_uring: "[1-9] ]]
