/* SPDX-License-Identifier: MIT */
/*
 * What a server has of one map: opened once, however many segments show ranges of it. The control
 * connection adds to it and asks for statistics.
 */
#ifndef LAZY_SPACE_H
#define LAZY_SPACE_H

#include <stdint.h>

#include "lazy/complaint.h"
#include "lazy/store.h"
#include "lazy/trace.h"

struct cache;
struct fetcher;
struct map;

struct space {
	char *map_path;
	char *cache_path;	/* NULL: without a cache */
	struct store_room room; /* of the virtual data: what the segments show */
	struct map *map;
	struct store *store;
	struct cache *cache; /* NULL: without one */
	struct fetcher *fetcher;
	struct trace trace; /* of what is read here */

	/* Its own. */
	struct space *next;
	unsigned users;
};

/*
 * The space of a map, opened by its first user, before the sandbox. [start, end) is what this user
 * shows of it. Returns 0 or a negative errno with the complaint filled in; -EINVAL: another user has
 * another cache, or another name for the same map.
 */
int space_open(const char *map_path, const char *cache_path, uint64_t start, uint64_t end,
	       struct space **space, struct complaint *complaint);
/* The last user closes it. NULL: nothing happens. */
void space_close(struct space *space);

/* All that are open; none comes or goes while the server serves. NULL: there is none. */
struct space *space_first(void);

#endif
