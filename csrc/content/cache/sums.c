/* SPDX-License-Identifier: MIT */
/*
 * A crc32c of each block of 4 KiB, behind the content. It is written with the data and before the
 * bit, and checked by every read. So data that a disk, a repair or a hole punch has changed are not
 * used.
 */
#include <errno.h>
#include <isa-l.h>
#include <string.h>
#include <sys/mman.h>

#include "base/fileio.h"
#include "content/cache/internal.h"

enum { CHECK_BYTES = 16 << 10 };

static uint32_t block_sum(const uint8_t *data, uint32_t length)
{
	uint8_t block[BLOCK_BYTES];

	if (length < BLOCK_BYTES) {
		memcpy(block, data, length);
		memset(block + length, 0, sizeof(block) - length);
		data = block;
	}
	/*
	 * NB: the checksum of zeroes is not 0, so a hole in both does not match. The library does
	 * not write to its input.
	 */
	return crc32_iscsi((unsigned char *)data, BLOCK_BYTES, ~0u);
}

int sums_map(struct cache_object *object)
{
	uint64_t bytes = cache_sums_bytes(object->size);
	void *mapped;
	int err;

	/* Not locked in memory, like bits that are too many (map_bits()). */
	mapped = mmap(NULL, bytes, PROT_READ, MAP_SHARED, object->data_fd,
		      (off_t)cache_sums_at(object->size));
	if (mapped == MAP_FAILED)
		return -errno;
	err = munlock(mapped, bytes) ? -errno : guard_add(mapped, bytes, &object->damaged);
	if (err) {
		munmap(mapped, bytes);
		return err;
	}
	object->sums = mapped;
	return 0;
}

void sums_unmap(struct cache_object *object)
{
	if (!object->sums)
		return;
	guard_remove(object->sums);
	munmap((void *)object->sums, cache_sums_bytes(object->size));
}

int sums_write(const struct cache_object *object, uint64_t unit, const uint8_t *data,
	       uint32_t length)
{
	le_sum sums[SOURCE_UNIT_MAX_BYTES / BLOCK_BYTES];
	uint64_t first = object_place(object, unit) / BLOCK_BYTES;
	unsigned count = 0;

	for (uint32_t at = 0; at < length; at += BLOCK_BYTES) {
		uint32_t rest = length - at;

		sums[count++] =
			htole32(block_sum(data + at, rest < BLOCK_BYTES ? rest : BLOCK_BYTES));
	}
	return pwrite_full(object->data_fd, sums, count * sizeof(*sums),
			   cache_sums_at(object->size) + first * sizeof(*sums));
}

bool cache_verify(const struct cache_object *object, uint64_t offset, const uint8_t *data,
		  uint32_t length)
{
	const le_sum *sum = object->sums + offset / BLOCK_BYTES;

	if (offset % BLOCK_BYTES || length > cache_data_bytes(object->size) - offset)
		return false;
	while (length) {
		uint32_t part = length < BLOCK_BYTES ? length : BLOCK_BYTES;

		/* Less than a block can only be checked at the end of the source. */
		if (part < BLOCK_BYTES && offset + part != object->size)
			return false;
		if (block_sum(data, part) != le32toh(__atomic_load_n(sum++, __ATOMIC_RELAXED)))
			return false;
		data += part;
		offset += part;
		length -= part;
	}
	/* Where the file was truncated, the checksums were zeroes. */
	return !object_is_damaged(object);
}

bool sums_match_file(const struct cache_object *object, uint64_t unit)
{
	uint64_t at = object_place(object, unit), end = at + object_unit_bytes(object, unit);
	uint8_t buffer[CHECK_BYTES];

	while (at < end) {
		uint32_t part = end - at < sizeof(buffer) ? (uint32_t)(end - at) : sizeof(buffer);

		if (pread_full(object->data_fd, buffer, part, at) ||
		    !cache_verify(object, at, buffer, part))
			return false;
		at += part;
	}
	return true;
}
