/* SPDX-License-Identifier: MIT */
#include "btrfs/csum.h"

#include <blake2.h>
#include <isa-l.h>
#include <limits.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

uint32_t crc32c_raw(uint32_t seed, const void *data, size_t length)
{
	const unsigned char *bytes = data;

	/* The library takes its length as an int. */
	while (length) {
		size_t part = length < INT_MAX ? length : INT_MAX;

		seed = crc32_iscsi((unsigned char *)bytes, (int)part, seed);
		bytes += part;
		length -= part;
	}
	return seed;
}

static void compute_crc32c(const void *data, size_t length, uint8_t csum[CSUM_BYTES])
{
	le32 value = htole32(~crc32c_raw(~0u, data, length));

	memset(csum, 0, CSUM_BYTES);
	memcpy(csum, &value, sizeof(value));
}

static void compute_xxhash64(const void *data, size_t length, uint8_t csum[CSUM_BYTES])
{
	le64 value = htole64(XXH64(data, length, 0));

	memset(csum, 0, CSUM_BYTES);
	memcpy(csum, &value, sizeof(value));
}

static void compute_sha256(const void *data, size_t length, uint8_t csum[CSUM_BYTES])
{
	static_assert(SHA256_DIGEST_LENGTH == CSUM_BYTES, "sha256");
	/* It only fails without memory, and then so does all else. */
	if (!EVP_Digest(data, length, csum, NULL, EVP_sha256(), NULL))
		abort();
}

/* NB: a shorter digest is not the beginning of BLAKE2b-512, which is all OpenSSL 3.0 has. */
static void compute_blake2b(const void *data, size_t length, uint8_t csum[CSUM_BYTES])
{
	if (blake2b(csum, data, NULL, CSUM_BYTES, length, 0))
		abort();
}

static const struct csum_kind csum_kinds[] = {
	{ .name = "crc32c", .id = CSUM_TYPE_CRC32C, .bytes = 4, .compute = compute_crc32c },
	{ .name = "xxhash64", .id = CSUM_TYPE_XXHASH64, .bytes = 8, .compute = compute_xxhash64 },
	{ .name = "sha256", .id = CSUM_TYPE_SHA256, .bytes = 32, .compute = compute_sha256 },
	{ .name = "blake2b", .id = CSUM_TYPE_BLAKE2B, .bytes = 32, .compute = compute_blake2b },
};

const struct csum_kind *csum_kind_by_id(uint16_t id)
{
	for (size_t i = 0; i < sizeof(csum_kinds) / sizeof(csum_kinds[0]); i++) {
		if (csum_kinds[i].id == id)
			return &csum_kinds[i];
	}
	return NULL;
}

const struct csum_kind *csum_kind_by_name(const char *name)
{
	for (size_t i = 0; i < sizeof(csum_kinds) / sizeof(csum_kinds[0]); i++) {
		if (!strcmp(csum_kinds[i].name, name))
			return &csum_kinds[i];
	}
	return NULL;
}

void csum_block_set(const struct csum_kind *kind, void *block, size_t length)
{
	kind->compute((uint8_t *)block + CSUM_BYTES, length - CSUM_BYTES, block);
}

bool csum_block_matches(const struct csum_kind *kind, const void *block, size_t length)
{
	uint8_t csum[CSUM_BYTES];

	kind->compute((const uint8_t *)block + CSUM_BYTES, length - CSUM_BYTES, csum);
	return memcmp(csum, block, kind->bytes) == 0;
}
