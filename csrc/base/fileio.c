/* SPDX-License-Identifier: MIT */
#include "base/fileio.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

/* From linux/memfd.h since 6.3 (105ff5339f49); without it, the kernel warns. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

enum how { READ, WRITE, APPEND };

static ssize_t move(enum how how, int fd, char *data, size_t length, uint64_t offset)
{
	switch (how) {
	case READ:
		return pread(fd, data, length, (off_t)offset);
	case WRITE:
		return pwrite(fd, data, length, (off_t)offset);
	default:
		return write(fd, data, length);
	}
}

static int move_all(enum how how, int fd, char *data, size_t length, uint64_t offset)
{
	for (size_t done = 0; done < length;) {
		ssize_t moved = move(how, fd, data + done, length - done, offset + done);

		if (moved < 0 && errno == EINTR)
			continue;
		if (moved <= 0)
			return moved ? -errno : -EIO;
		done += (size_t)moved;
	}
	return 0;
}

int pread_full(int fd, void *data, size_t length, uint64_t offset)
{
	return move_all(READ, fd, data, length, offset);
}

int pwrite_full(int fd, const void *data, size_t length, uint64_t offset)
{
	return move_all(WRITE, fd, (void *)data, length, offset);
}

int write_full(int fd, const void *data, size_t length)
{
	return move_all(APPEND, fd, (void *)data, length, 0);
}

int memory_file(const char *name)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	return fd < 0 ? -errno : fd;
}
