/* SPDX-License-Identifier: MIT */
#include "btrfs/super.h"

#include "base/fileio.h"

static const uint64_t mirror_offsets[SUPER_MIRRORS] = { 64ull << 10, 64ull << 20, 256ull << 30 };

uint64_t super_mirror_offset(unsigned index)
{
	return mirror_offsets[index];
}

unsigned super_mirror_count(uint64_t device_bytes)
{
	unsigned count = 0;

	while (count < SUPER_MIRRORS && mirror_offsets[count] + SUPER_BYTES <= device_bytes)
		count++;
	return count;
}

int super_write(int fd, const struct disk_super *super, const struct csum_kind *csum)
{
	unsigned count = super_mirror_count(le64toh(super->total_bytes));

	for (unsigned i = 0; i < count; i++) {
		struct disk_super copy = *super;
		int ret;

		copy.bytenr = htole64(mirror_offsets[i]);
		csum_block_set(csum, &copy, sizeof(copy));
		ret = pwrite_full(fd, &copy, sizeof(copy), mirror_offsets[i]);
		if (ret)
			return ret;
	}
	return 0;
}
