/* SPDX-License-Identifier: MIT */
#include "image/tar_stream.h"

#include <archive.h>
#include <archive_entry.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "base/fileio.h"

enum { INPUT_BYTES = 1 << 18, RATIO_MAX = 1100 };
#define BYTES_ALWAYS (64ULL << 30)

static int refused(struct tar_stream *stream, const char *what)
{
	const char *text = archive_error_string(stream->archive);

	return error_set(stream->error, -EIO, "%s%s%s", what, text ? ": " : "", text ? text : "");
}

static int add_filters(struct archive *archive)
{
	/* NB: without the library, libarchive would start a program, and warns of that here. */
	return archive_read_support_filter_xz(archive) == ARCHIVE_OK &&
	       archive_read_support_filter_zstd(archive) == ARCHIVE_OK &&
	       archive_read_support_format_raw(archive) == ARCHIVE_OK &&
	       archive_read_support_format_empty(archive) == ARCHIVE_OK;
}

/* libarchive does not look at the checksums of gzip; zlib does. */
static int open_gzip(struct tar_stream *stream)
{
	static const uint8_t magic[] = { 0x1f, 0x8b };
	uint8_t found[sizeof(magic)];

	/* What cannot be read at an offset, as a pipe, is left to libarchive. */
	if (pread_full(stream->fd, found, sizeof(found), 0) || memcmp(found, magic, sizeof(magic)))
		return 0;
	stream->block = malloc(INPUT_BYTES);
	stream->gzip = gzdopen(stream->fd, "rb");
	if (!stream->block || !stream->gzip || gzbuffer(stream->gzip, INPUT_BYTES))
		return error_set(stream->error, -ENOMEM, "no memory for reading a tar");
	return 0;
}

/*
 * How many bytes an honest tar may have uncompressed. Gzip makes at most 1032 bytes of one, and
 * what zstd makes more of is small; with that bound, a bomb is not worth its bytes.
 */
static uint64_t bytes_max_of(int fd)
{
	struct stat stat;
	uint64_t bytes = 0;

	if (fstat(fd, &stat) || !S_ISREG(stat.st_mode))
		return 0;
	if (__builtin_mul_overflow((uint64_t)stat.st_size, RATIO_MAX, &bytes))
		return 0;
	return bytes > BYTES_ALWAYS ? bytes : BYTES_ALWAYS;
}

int tar_stream_open(struct tar_stream *stream, const char *path, uint64_t bytes_max,
		    struct error *error)
{
	struct archive_entry *entry;
	int ret;

	*stream = (struct tar_stream){ .bytes_max = bytes_max, .error = error };
	stream->fd = open(path, O_RDONLY | O_CLOEXEC);
	if (stream->fd < 0)
		return error_set(error, -errno, "opening the tar: %s", strerror(errno));
	if (!bytes_max)
		stream->bytes_max = bytes_max_of(stream->fd);
	stream->digest = EVP_MD_CTX_new();
	if (!stream->digest || !EVP_DigestInit_ex(stream->digest, EVP_sha256(), NULL))
		return error_set(error, -ENOMEM, "no memory for reading a tar");
	ret = open_gzip(stream);
	if (ret || stream->gzip)
		return ret;
	stream->archive = archive_read_new();
	if (!stream->archive)
		return error_set(error, -ENOMEM, "no memory for reading a tar");
	if (!add_filters(stream->archive))
		return refused(stream, "libarchive lacks xz or zstd");
	if (archive_read_open_fd(stream->archive, stream->fd, INPUT_BYTES) != ARCHIVE_OK)
		return refused(stream, "reading the tar");
	ret = archive_read_next_header(stream->archive, &entry);
	stream->is_empty = ret == ARCHIVE_EOF;
	return ret == ARCHIVE_OK || ret == ARCHIVE_EOF ? 0 : refused(stream, "reading the tar");
}

void tar_stream_close(struct tar_stream *stream)
{
	if (stream->archive)
		archive_read_free(stream->archive);
	EVP_MD_CTX_free(stream->digest);
	free(stream->block);
	if (stream->gzip)
		gzclose(stream->gzip);
	else if (stream->fd >= 0)
		close(stream->fd);
}

static void count_zeros(struct tar_stream *stream, const char *data, size_t bytes)
{
	size_t zeros = 0;

	while (zeros < bytes && zeros < 1024 && !data[bytes - 1 - zeros])
		zeros++;
	stream->zeros = zeros == bytes ? stream->zeros + zeros : zeros;
}

static ssize_t read_gzip(struct tar_stream *stream, const void **data)
{
	int got = gzread(stream->gzip, stream->block, INPUT_BYTES), reason;
	const char *text = gzerror(stream->gzip, &reason);

	*data = stream->block;
	/* NB: with what came before the end of a stream that was cut off, there is no -1. */
	if (got >= 0 && (reason == Z_OK || reason == Z_STREAM_END))
		return got;
	return error_set(stream->error, -EIO, "the tar is damaged, or cut off: %s",
			 reason == Z_ERRNO ? strerror(errno) : text);
}

static ssize_t read_archive(struct tar_stream *stream, const void **data)
{
	size_t bytes;
	la_int64_t offset;
	int ret;

	do {
		ret = archive_read_data_block(stream->archive, data, &bytes, &offset);
	} while (ret == ARCHIVE_RETRY || (ret == ARCHIVE_OK && !bytes));
	if (ret == ARCHIVE_EOF)
		return 0;
	return ret == ARCHIVE_OK ? (ssize_t)bytes :
				   refused(stream, "the tar is damaged, or cut off");
}

ssize_t tar_stream_read(struct tar_stream *stream, const void **data)
{
	ssize_t got;

	if (stream->err || stream->is_empty)
		return stream->err;
	got = stream->gzip ? read_gzip(stream, data) : read_archive(stream, data);
	if (got < 0)
		return stream->err = (int)got;
	if (!got)
		return 0;
	stream->bytes += (size_t)got;
	if (stream->bytes_max && stream->bytes > stream->bytes_max) {
		error_set_hint(stream->error,
			       "if that is meant, unpack it, and make an image of the directory");
		return stream->err = error_set(stream->error, -EFBIG,
					       "the tar has more than %llu bytes uncompressed",
					       (unsigned long long)stream->bytes_max);
	}
	count_zeros(stream, *data, (size_t)got);
	if (!EVP_DigestUpdate(stream->digest, *data, (size_t)got))
		return stream->err = error_set(stream->error, -EIO, "computing a SHA-256 failed");
	return got;
}
