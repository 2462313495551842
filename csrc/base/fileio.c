/* SPDX-License-Identifier: MIT */
#include "base/fileio.h"

#include <errno.h>
#include <unistd.h>

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
