/* SPDX-License-Identifier: MIT */
#include "btrfs/reader.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/fileio.h"
#include "btrfs/super.h"

int reader_fail(struct reader *reader, int error_number, const char *format, ...)
{
	char text[READER_ERROR_BYTES];
	va_list args;

	/* The old reason may be one of the arguments, so format into another buffer. */
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	memcpy(reader->error, text, sizeof(text));
	return error_number;
}

int reader_pread(struct reader *reader, const char *what, void *data, size_t length,
		 uint64_t offset)
{
	int ret;

	if (offset > reader->file_bytes || length > reader->file_bytes - offset)
		return reader_fail(reader, -EIO,
				   "%s: its place, %" PRIu64 " on the device, is beyond the end "
				   "of the image at %" PRIu64,
				   what, offset, reader->file_bytes);
	ret = pread_full(reader->fd, data, length, offset);
	if (ret)
		return reader_fail(reader, ret, "%s: cannot read at %" PRIu64 ": %s", what, offset,
				   strerror(-ret));
	return 0;
}

int reader_open(struct reader *reader, int fd)
{
	off_t end = lseek(fd, 0, SEEK_END);
	int ret;

	*reader = (struct reader){ .fd = fd };
	if (end < 0)
		return reader_fail(reader, -errno, "cannot find out its size: %s", strerror(errno));
	reader->file_bytes = (uint64_t)end;
	ret = reader_read_super(reader);
	if (!ret)
		ret = reader_read_chunks(reader);
	if (ret)
		reader_close(reader);
	return ret;
}

void reader_close(struct reader *reader)
{
	chunk_list_deinit(&reader->chunks);
}

const struct chunk *reader_map(struct reader *reader, uint64_t logical, uint64_t length)
{
	const struct chunk *chunk = chunk_find(&reader->chunks, logical, length);

	if (!chunk)
		reader_fail(reader, -EUCLEAN,
			    "logical address %" PRIu64 " (%" PRIu64 " bytes) is in no chunk",
			    logical, length);
	return chunk;
}
