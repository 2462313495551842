/* SPDX-License-Identifier: MIT */
#include "btrfs/check/check.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

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

static int run(struct check *check)
{
	int ret = layout_find(check->reader, check->layout);

	check_supers(check);
	if (ret) {
		report_note(check->report,
			    "the virtual file was not checked, as a tree is damaged");
		ret = check_damage(check, RULE_TREE, ret);
	} else {
		ret = check_virtual_file(check);
		if (!ret)
			ret = check_subvolumes(check);
	}
	if (!ret)
		ret = check_read_extents(check);
	if (!ret)
		ret = check_walk_trees(check);
	if (!ret)
		ret = check_references(check);
	if (!ret)
		ret = check_space(check);
	if (!ret)
		ret = check_free_space(check);
	return ret;
}

int check_image(struct reader *reader, struct layout *layout, struct report *report)
{
	struct check check = { .reader = reader, .layout = layout, .report = report };
	int ret = run(&check);

	report->tree_blocks = check.blocks.count;
	report->extents = check.used_count;
	report->references = check.told.count;
	free(check.used);
	free(check.told.refs);
	free(check.made.refs);
	block_set_deinit(&check.blocks);
	return ret;
}
