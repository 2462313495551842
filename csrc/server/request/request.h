/* SPDX-License-Identifier: MIT */
/*
 * What requests to a map have in common. They come over the server's control connection; each is
 * one function, and all run on threads of their own (server/control_pool.h).
 */
#pragma once

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "content/map.h"
#include "content/source.h"
#include "lazy/space.h"
#include "server/control_request.h"

struct map_request {
	struct control_call *call;
	json_t *keys; /* what is left of the message; keys that are left in the end are unknown */
	struct space *space;
	json_t *body; /* of the reply, an object */
	struct error error;
};

/*
 * Calls `run`, which returns 0, or a negative errno with the error filled in. Returns the whole
 * reply.
 */
json_t *map_request_run(struct control_call *call, const char *name,
			int (*run)(struct map_request *request));
/* Whether this server has a map. */
bool map_request_available(void);

#define MAP_REQUEST(symbol, text, run)                                                  \
	static json_t *symbol##_work(struct control_call *call)                         \
	{                                                                               \
		return map_request_run(call, text, run);                                \
	}                                                                               \
	static const struct control_kind symbol = { .name = (text),                     \
						    .available = map_request_available, \
						    .work = symbol##_work };            \
	CONTROL_REQUEST(symbol)

/*
 * Opens the file that came with the request, to be read from its start: a regular file of at most
 * `most_bytes`. Returns 0 and `*file`, which the caller closes, or a negative errno.
 */
int map_request_open_lines(struct map_request *request, uint64_t most_bytes, FILE **file);
/* getline(3). Returns false at the end, or with a negative errno in `*err`. */
bool map_request_next_line(char **line, size_t *room, FILE *file, int *err);
/* Takes `from` and `to` of a request: bytes of virtual data, by default all. */
int map_request_take_range(struct map_request *request, uint64_t *from, uint64_t *to);
struct cache_ranges;
/*
 * Adds units [first, end) of a source to the ranges to make room for, unless they cannot be cached.
 */
int map_request_add_range(const struct map_request *request, struct cache_ranges *ranges,
			  struct source *source, uint64_t first, uint64_t end);
/* When to end a page of a long answer, CLOCK_MONOTONIC. */
uint64_t map_request_page_end_ns(void);

json_t *map_mapping_json(const struct mapping *mapping);
/*
 * Returns the origin of a source's digests: "computed", "given" (with the source) or "pinned" (at
 * the first fetch).
 */
const char *map_digests_of(const struct source *source);
