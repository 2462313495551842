/* SPDX-License-Identifier: MIT */
#include "btrfs/check/check.h"

#include <errno.h>
#include <inttypes.h>

#include "btrfs/check/internal.h"

int check_damage(struct check *check, const char *rule, int error_number)
{
	switch (error_number) {
	case -EUCLEAN:
	case -ENOTSUP:
	case -ENOENT:
	case -EIO:
		report_add(check->report, rule, "%s", check->reader->error);
		return 0;
	default:
		return error_number;
	}
}

static void check_supers(struct check *check)
{
	const struct disk_super *super = &check->reader->super;

	for (unsigned i = 0; i < SUPER_MIRRORS; i++) {
		const struct super_mirror *mirror = &check->reader->mirrors[i];

		if (mirror->state == MIRROR_CUT_OFF)
			report_add(check->report, RULE_MIRROR,
				   "superblock at %" PRIu64
				   ": the image ends before it, at %" PRIu64,
				   mirror->offset, check->reader->file_bytes);
		if (mirror->state == MIRROR_BAD)
			report_add(check->report, RULE_MIRROR, "superblock at %" PRIu64 ": %s",
				   mirror->offset, mirror->problem);
	}
	if (super->log_root)
		report_add(check->report, RULE_LOG_TREE,
			   "superblock: there is a log tree to replay, at %" PRIu64
			   ": it was not unmounted",
			   le64toh(super->log_root));
	if (!(le64toh(super->flags) & SUPER_SEEDING))
		report_add(check->report, RULE_SEEDING,
			   "superblock: not a seed: SEEDING is not set in flags 0x%" PRIx64,
			   le64toh(super->flags));
	if (!(le64toh(super->flags) & SUPER_WRITTEN))
		report_add(check->report, RULE_SUPERBLOCK,
			   "superblock: WRITTEN is not set in flags 0x%" PRIx64,
			   le64toh(super->flags));
	if (le64toh(super->root_dir_objectid) != TREE_ROOT_DIR)
		report_add(check->report, RULE_SUPERBLOCK,
			   "superblock: root_dir_objectid is %" PRIu64 ", not %d",
			   le64toh(super->root_dir_objectid), TREE_ROOT_DIR);
}

/* The kernel refuses chunks whose number of 64 KiB stripes does not fit in 32 bits. */
static void check_chunks(struct check *check)
{
	const struct chunk_list *chunks = &check->reader->chunks;
	const uint64_t most = (uint64_t)UINT32_MAX * STRIPE_LEN;

	for (size_t i = 0; i < chunks->count; i++) {
		if (chunks->chunks[i].length >= most)
			report_add(check->report, RULE_CHUNK_LENGTH,
				   "chunk tree: the chunk at %" PRIu64 " has %" PRIu64
				   " bytes; kernels since 6.4 refuse %" PRIu64 " or more",
				   chunks->chunks[i].logical, chunks->chunks[i].length, most);
	}
}

/* A plain mount shows the default subvolume. */
static void check_default_subvolume(struct check *check)
{
	struct block_expect root;

	if (tree_root_find(check->reader, check->layout->default_subvolume, &root))
		report_add(check->report, RULE_SUBVOLUME,
			   "root tree: the default subvolume is %" PRIu64 ", which does not exist",
			   check->layout->default_subvolume);
}

int check_image(struct reader *reader, struct layout *layout, struct report *report)
{
	struct check check = { .reader = reader, .layout = layout, .report = report };
	int ret = layout_find(reader, layout);

	check_supers(&check);
	check_chunks(&check);
	if (ret) {
		report->note = "the virtual file was not checked, as a tree is damaged";
		ret = check_damage(&check, RULE_TREE, ret);
	} else {
		check_default_subvolume(&check);
		ret = check_virtual_file(&check);
	}
	return ret ?: check_walk_trees(&check);
}
