/* SPDX-License-Identifier: MIT */
#include "image/spool.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "btrfs/outfile.h"

enum { BUFFER_BYTES = 1 << 18 };

/* Where a file system has no files without a name, this one has a name for a moment. */
static int open_nameless(const char *directory)
{
	_cleanup_free_ char *path = NULL;
	struct outfile file;
	int ret, fd;

	if (asprintf(&path, "%s/spool", directory) < 0)
		return -ENOMEM;
	ret = outfile_open(&file, path, false);
	fd = take_fd(&file.fd);
	outfile_close(&file);
	return ret ?: fd;
}

int spool_open(struct spool *spool, const char *directory)
{
	int fd;

	*spool = SPOOL_CLOSED;
	spool->buffer = malloc(BUFFER_BYTES);
	if (!spool->buffer)
		return -ENOMEM;
	fd = open_nameless(directory);
	if (fd < 0)
		return fd;
	spool->fd = fd;
	return 0;
}

void spool_close(struct spool *spool)
{
	cleanup_close(&spool->fd);
	free(spool->buffer);
	*spool = SPOOL_CLOSED;
}

/* Writes what is only in memory. */
static int flush(struct spool *spool)
{
	int ret;

	if (!spool->buffered)
		return 0;
	ret = pwrite_full(spool->fd, spool->buffer, spool->buffered,
			  spool->bytes - spool->buffered);
	spool->buffered = 0;
	return ret;
}

int spool_append(struct spool *spool, const void *data, size_t length)
{
	int ret;

	if (length > BUFFER_BYTES - spool->buffered) {
		ret = flush(spool);
		if (ret)
			return ret;
	}
	if (length > BUFFER_BYTES) {
		ret = pwrite_full(spool->fd, data, length, spool->bytes);
		if (ret)
			return ret;
	} else {
		memcpy(spool->buffer + spool->buffered, data, length);
		spool->buffered += length;
	}
	spool->bytes += length;
	return 0;
}

int spool_read(struct spool *spool, uint64_t offset, void *data, size_t length)
{
	if (offset + length > spool->bytes - spool->buffered) {
		int ret = flush(spool);

		if (ret)
			return ret;
	}
	return pread_full(spool->fd, data, length, offset);
}
