/* SPDX-License-Identifier: MIT */
/*
 * Mirrors of a source with a codec: a wrapper around their kinds asks for the range of the object
 * that a unit needs, and has a worker decode it. Neither the kinds nor the fetcher know of that.
 */
#pragma once

#include "content/source.h"

struct store;

/* To be called once, for a source with an index. Returns 0 or -ENOMEM. */
int coded_wrap(struct source *source, struct store *store);
