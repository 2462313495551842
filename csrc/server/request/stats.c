/* SPDX-License-Identifier: MIT */
/* map-stats returns what the map has, and what its fetcher and its cache have done. */
#include <errno.h>

#include "base/keys.h"
#include "content/cache.h"
#include "lazy/complete.h"
#include "lazy/fetcher.h"
#include "lazy/prefetch.h"
#include "server/request/request.h"

/* Bytes of mappings, by the origin of their digests. */
struct sums {
	uint64_t computed, given, pinned;
};

static struct sums sum_up(const struct map *map)
{
	const struct mapping *mapping = map_next(map, 0);
	struct sums sums = {};

	for (; mapping; mapping = map_next(map, mapping->offset + mapping->length)) {
		if (mapping->source->computed)
			sums.computed += mapping->length;
		else if (mapping->source->has_digests)
			sums.given += mapping->length;
		else
			sums.pinned += mapping->length;
	}
	return sums;
}

static int stats(struct map_request *request)
{
	const struct space *space = request->space;
	struct sums sums;
	json_t *more;
	int err = keys_refuse_unknown(request->keys, &request->error);

	if (err)
		return err;
	sums = sum_up(space->map);
	more = json_pack("{s:s, s:s?, s:I, s:I, s:I, s:I, s:{s:I, s:I, s:I}, s:o, s:o, s:o, s:o?}",
			 "map", space->map_path, "cache_directory", space->cache_path, "start",
			 (json_int_t)space->room.start, "end", (json_int_t)space->room.end,
			 "mappings", (json_int_t)map_count(space->map), "sources",
			 (json_int_t)store_source_count(space->store), "bytes", "computed",
			 (json_int_t)sums.computed, "given", (json_int_t)sums.given, "pinned",
			 (json_int_t)sums.pinned, "fetcher", fetcher_stats_json(space->fetcher),
			 "prefetch", prefetch_json(fetcher_prefetch(space->fetcher)), "complete",
			 complete_json(fetcher_complete(space->fetcher)), "cache",
			 space->cache ? cache_stats_json(space->cache) : NULL);
	err = more ? json_object_update(request->body, more) : -1;
	json_decref(more);
	return err ? -ENOMEM : 0;
}

MAP_REQUEST(map_stats_kind, "map-stats", stats);
