/* SPDX-License-Identifier: MIT */
#include "base/fileio.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

/* From linux/memfd.h since 6.3 (105ff5339f49); without it, the kernel warns. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

int pread_full(int fd, void *data, size_t length, uint64_t offset)
{
	while (length) {
		ssize_t got = pread(fd, data, length, (off_t)offset);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -errno;
		if (got == 0)
			return -EIO;
		data = (char *)data + got;
		length -= (size_t)got;
		offset += (uint64_t)got;
	}
	return 0;
}

int pwrite_full(int fd, const void *data, size_t length, uint64_t offset)
{
	while (length) {
		ssize_t put = pwrite(fd, data, length, (off_t)offset);

		if (put < 0 && errno == EINTR)
			continue;
		if (put < 0)
			return -errno;
		if (put == 0)
			return -EIO;
		data = (const char *)data + put;
		length -= (size_t)put;
		offset += (uint64_t)put;
	}
	return 0;
}

int write_full(int fd, const void *data, size_t length)
{
	while (length) {
		ssize_t put = write(fd, data, length);

		if (put < 0 && errno == EINTR)
			continue;
		if (put < 0)
			return -errno;
		if (put == 0)
			return -EIO;
		data = (const char *)data + put;
		length -= (size_t)put;
	}
	return 0;
}

int memory_file(const char *name)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	return fd < 0 ? -errno : fd;
}
