/* SPDX-License-Identifier: MIT */
/* Bytes that are kept in a file without a name until they are needed: appended, then read. */
#pragma once

#include <stddef.h>
#include <stdint.h>

struct spool {
	int fd; /* owned */
	uint64_t bytes;
	uint8_t *buffer; /* the last bytes, which are not in the file yet */
	size_t buffered;
};

#define SPOOL_CLOSED ((struct spool){ .fd = -1 })

/* Makes the file in the directory with that path. Returns 0 or a negative errno, as the others do. */
int spool_open(struct spool *spool, const char *directory);
void spool_close(struct spool *spool);

int spool_append(struct spool *spool, const void *data, size_t length);
/* All of [offset, +length) has to be there. */
int spool_read(struct spool *spool, uint64_t offset, void *data, size_t length);
