/* SPDX-License-Identifier: MIT */
/* Compares the back references in the extent tree with the pointers in all trees. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "btrfs/check/internal.h"
#include "btrfs/super.h"

enum { REF_TEXT_BYTES = 160 };

static int compare_u64(uint64_t a, uint64_t b)
{
	return (a > b) - (a < b);
}

static int compare_refs(const void *left, const void *right)
{
	const struct ref *a = left, *b = right;
	int order = compare_u64(a->start, b->start);

	if (!order)
		order = compare_u64(a->type, b->type);
	if (!order)
		order = compare_u64(a->origin, b->origin);
	if (!order)
		order = compare_u64(a->objectid, b->objectid);
	if (!order)
		order = compare_u64(a->offset, b->offset);
	return order;
}

static const char *ref_text(const struct ref *ref, char text[static REF_TEXT_BYTES])
{
	char name[TREE_NAME_BYTES];

	switch (ref->type) {
	case KEY_TREE_BLOCK_REF:
		snprintf(text, REF_TEXT_BYTES, "the %s", tree_name(ref->origin, name));
		break;
	case KEY_EXTENT_DATA_REF:
		snprintf(text, REF_TEXT_BYTES,
			 "inode %" PRIu64 " at file offset %" PRIu64 " in the %s", ref->objectid,
			 ref->offset, tree_name(ref->origin, name));
		break;
	default:
		snprintf(text, REF_TEXT_BYTES, "the block at %" PRIu64, ref->origin);
		break;
	}
	return text;
}

/* Sorts the list, and joins equal references to one, whose count is the sum of theirs. */
static void ref_list_settle(struct ref_list *list)
{
	size_t kept = 0;

	if (!list->count)
		return;
	qsort(list->refs, list->count, sizeof(*list->refs), compare_refs);
	for (size_t i = 1; i < list->count; i++) {
		if (compare_refs(&list->refs[kept], &list->refs[i]) == 0)
			list->refs[kept].count += list->refs[i].count;
		else
			list->refs[++kept] = list->refs[i];
	}
	list->count = kept + 1;
}

/* Checks that a pointer agrees with its extent on length and level. */
static void check_made(struct check *check, const struct ref *ref)
{
	const struct used *used = check_find_used(check, ref->start);
	bool is_data = ref->type == KEY_EXTENT_DATA_REF || ref->type == KEY_SHARED_DATA_REF;
	char text[REF_TEXT_BYTES];

	if (!used)
		report_add(check->report, RULE_REFERENCE,
			   "extent tree: there is no extent at %" PRIu64 ", which %s refers to",
			   ref->start, ref_text(ref, text));
	else if (used->length != ref->length)
		report_add(check->report, RULE_REFERENCE,
			   "extent tree: the extent at %" PRIu64 " has %" PRIu64
			   " bytes, but %" PRIu64 " for %s",
			   ref->start, used->length, ref->length, ref_text(ref, text));
	else if (!is_data && used->level != ref->level)
		report_add(check->report, RULE_REFERENCE,
			   "extent tree: the block at %" PRIu64 " has level %u, but %u in %s",
			   ref->start, used->level, ref->level, ref_text(ref, text));
}

static void compare_lists(struct check *check)
{
	const struct ref_list *told = &check->told, *made = &check->made;
	size_t t = 0, m = 0;

	while (t < told->count || m < made->count) {
		const struct ref *a = t < told->count ? &told->refs[t] : NULL;
		const struct ref *b = m < made->count ? &made->refs[m] : NULL;
		int order = a && b ? compare_refs(a, b) : a ? -1 : 1;
		char text[REF_TEXT_BYTES];

		if (a && order < 0) {
			report_add(check->report, RULE_REFERENCE,
				   "extent tree: the extent at %" PRIu64
				   " has a reference from %s, which does not refer to it",
				   a->start, ref_text(a, text));
		} else if (b && order > 0) {
			/* check_made() has reported a missing extent. */
			if (check_find_used(check, b->start))
				report_add(check->report, RULE_REFERENCE,
					   "extent tree: the extent at %" PRIu64
					   " has no reference from %s, which refers to it",
					   b->start, ref_text(b, text));
		} else if (a && b && a->count != b->count) {
			report_add(check->report, RULE_REFERENCE,
				   "extent tree: the extent at %" PRIu64 " has %" PRIu64
				   " references from %s, which makes %" PRIu64,
				   a->start, a->count, ref_text(a, text), b->count);
		}
		t += order <= 0;
		m += order >= 0;
	}
}

/* Checks that each extent's count is the sum of its references; `told` must be settled. */
static void check_counts(struct check *check)
{
	size_t t = 0;

	for (size_t i = 0; i < check->used_count; i++) {
		const struct used *used = &check->used[i];
		uint64_t sum = 0;

		while (t < check->told.count && check->told.refs[t].start < used->start)
			t++;
		for (; t < check->told.count && check->told.refs[t].start == used->start; t++)
			sum += check->told.refs[t].count;
		if (sum != used->refs)
			report_add(check->report, RULE_REFERENCE,
				   "extent tree: the extent at %" PRIu64 " has %" PRIu64
				   " references, but says %" PRIu64,
				   used->start, sum, used->refs);
	}
}

/* Checks that no extent is in the 64 KiB from a superblock mirror on, which must stay free. */
static void check_mirrors(struct check *check)
{
	const struct chunk_list *chunks = &check->reader->chunks;

	for (size_t i = 0; i < check->used_count; i++) {
		const struct used *used = &check->used[i];
		const struct chunk *chunk = chunk_find(chunks, used->start, used->length);

		for (unsigned s = 0; chunk && s < chunk->stripe_count; s++) {
			uint64_t start = chunk->stripes[s] + (used->start - chunk->logical);

			for (unsigned m = 0; m < SUPER_MIRRORS; m++) {
				uint64_t mirror = super_mirror_offset(m);

				if (start < mirror + SUPER_RESERVED_BYTES &&
				    start + used->length > mirror)
					report_add(check->report, RULE_SUPER_OVERLAP,
						   "extent tree: the extent at %" PRIu64
						   ", %" PRIu64 " on the device, is in the "
						   "place of the superblock at %" PRIu64,
						   used->start, start, mirror);
			}
		}
	}
}

int check_references(struct check *check)
{
	if (check->used_known) {
		for (size_t i = 0; i < check->made.count; i++)
			check_made(check, &check->made.refs[i]);
	}
	ref_list_settle(&check->told);
	ref_list_settle(&check->made);
	check_counts(check);
	check_mirrors(check);
	if (!check->used_known) {
		report_note(check->report,
			    "references were not compared, as the extent tree is damaged");
		return 0;
	}
	if (check->refs_known)
		compare_lists(check);
	else
		report_note(check->report,
			    "back references were not compared, as not all trees were read");
	return 0;
}
