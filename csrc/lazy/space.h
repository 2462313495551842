/* SPDX-License-Identifier: MIT */
/*
 * What a server has of one map. It is opened once, however many segments show ranges of it. The
 * control connection adds to it and asks for statistics.
 */
#pragma once

#include <stdint.h>

#include "base/error.h"
#include "content/store.h"
#include "lazy/complete.h"
#include "lazy/trace.h"

struct cache;
struct fetcher;
struct map;

struct space {
	char *map_path;
	char *cache_path;	/* NULL: without a cache */
	struct store_room room; /* the part of the virtual data that segments show */
	struct map *map;
	struct store *store;
	struct cache *cache; /* NULL: without one */
	struct fetcher *fetcher;
	struct trace trace; /* of the reads of this space */
	struct complete_options complete;

	/* Its own. */
	struct space *next;
	unsigned users;
};

/*
 * Opens the space of a map, or finds the one that its first user has opened. To be called before
 * the sandbox is entered. This user shows [start, end) of it. Returns 0, or a negative errno with
 * the error filled in: -EINVAL when another user has another cache, wants another completion, or has
 * another name for the same map.
 */
int space_open(const char *map_path, const char *cache_path,
	       const struct complete_options *complete, uint64_t start, uint64_t end,
	       struct space **space, struct error *error);
/* Lets go of a space. The last user closes it. `space` may be NULL. */
void space_close(struct space *space);

/* The first of all open spaces, or NULL. The list does not change while the server serves. */
struct space *space_first(void);
