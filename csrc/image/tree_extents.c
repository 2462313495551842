/* SPDX-License-Identifier: MIT */
#include "image/tree_extents.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "base/list.h"
#include "image/tree_list.h"

static struct extent_lister *lister_of(struct tree_visitor *visitor)
{
	return container_of(visitor, struct extent_lister, visitor);
}

static int write_failed(struct extent_lister *lister)
{
	return error_set(lister->error, -EIO, "cannot write the list: %s", strerror(errno));
}

static int visit_entry(struct tree_visitor *visitor, const struct tree_entry *entry)
{
	struct extent_lister *lister = lister_of(visitor);

	if (!S_ISREG(entry->mode) || !entry->first)
		return 0;
	tree_put_text(lister->out, entry->path);
	putc('\t', lister->out);
	tree_put_text(lister->out, entry->first);
	putc('\n', lister->out);
	return ferror(lister->out) ? write_failed(lister) : 0;
}

static int visit_extent(struct tree_visitor *visitor, const struct tree_entry *entry,
			const struct tree_extent *extent)
{
	struct extent_lister *lister = lister_of(visitor);

	tree_put_text(lister->out, entry->path);
	fprintf(lister->out, "\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu64 "\t%" PRIu64 "\n",
		extent->offset, extent->bytes, extent->logical, extent->stored_bytes);
	return ferror(lister->out) ? write_failed(lister) : 0;
}

static int visit_end(struct tree_visitor *visitor, const struct tree_entry *entry)
{
	return 0;
}

void extent_lister_init(struct extent_lister *lister, FILE *out, struct error *error)
{
	*lister = (struct extent_lister){
		.visitor = { .entry = visit_entry, .extent = visit_extent, .end = visit_end },
		.out = out,
		.error = error,
	};
}

int extent_lister_finish(struct extent_lister *lister)
{
	return fflush(lister->out) ? write_failed(lister) : 0;
}
