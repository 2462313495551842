/* SPDX-License-Identifier: MIT */
/*
 * Mirrors of a source with a codec: a wrapper around their kinds asks for the range of the object
 * that a unit needs, and has a worker decode it. Neither the kinds nor the fetcher know of that.
 */
#pragma once

#include "content/source.h"

struct codec_part;
struct store;

/* What decoding needs of a store: store_window() and store_selected(). */
struct coded_reads {
	int (*window)(struct store *store, const struct source *source, uint64_t point,
		      uint8_t *window, uint32_t *bytes);
	int (*selected)(struct store *store, const struct source *source, uint64_t unit,
			uint32_t gap, uint8_t *data, struct codec_part *parts);
};

/* To be called once, for a source with an index. Returns 0 or -ENOMEM. */
int coded_wrap(struct source *source, struct store *store, const struct coded_reads *reads);
