/* SPDX-License-Identifier: MIT */
/* A computed source whose bytes are all the same: `"byte": 0..255`. */
#include <errno.h>
#include <string.h>

#include "base/keys.h"
#include "content/source.h"

struct memset_mirror {
	uint8_t byte;
};

static int memset_parse(struct mirror *mirror, json_t *keys, struct error *error)
{
	struct memset_mirror *memset_mirror = mirror->private;
	uint64_t byte = 0;
	int err = keys_take_u64(keys, "byte", true, &byte, error);

	if (err)
		return err;
	if (byte > 255)
		return error_set(error, -EINVAL, "\"byte\" is %llu, it must be 0 to 255",
				 (unsigned long long)byte);
	memset_mirror->byte = (uint8_t)byte;
	return 0;
}

static void memset_compute(const struct mirror *mirror, uint64_t offset, uint32_t length,
			   uint8_t *data)
{
	const struct memset_mirror *memset_mirror = mirror->private;

	memset(data, memset_mirror->byte, length);
}

static const struct mirror_ops memset_ops = {
	.name = "memset",
	.private_bytes = sizeof(struct memset_mirror),
	.parse = memset_parse,
	.compute = memset_compute,
};
MIRROR_KIND(memset_ops);
