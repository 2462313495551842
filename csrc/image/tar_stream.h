/* SPDX-License-Identifier: MIT */
/* The bytes of a tar, uncompressed, while their SHA-256 and number are found out. */
#pragma once

#include <openssl/evp.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/error.h"

struct tar_stream {
	/* One of the two, which has one file without a name: the tar. */
	struct archive *archive;
	struct gzFile_s *gzip;
	void *block; /* of gzip */
	EVP_MD_CTX *digest;
	uint64_t bytes, bytes_max;
	uint64_t zeros; /* at its end, as far as it was read */
	struct error *error;
	int fd;
	int err;       /* what tar_stream_read() failed with */
	bool is_empty; /* a file of no bytes, which libarchive does not read */
};

int tar_stream_open(struct tar_stream *stream, const char *path, uint64_t bytes_max,
		    struct error *error);
void tar_stream_close(struct tar_stream *stream);

/* Returns how many bytes are at `*data` until the next call, 0 at the end, or a negative errno. */
ssize_t tar_stream_read(struct tar_stream *stream, const void **data);
