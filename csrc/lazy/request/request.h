/* SPDX-License-Identifier: MIT */
/*
 * Requests to a map, over the server's control connection: what they have in common. Each is one
 * function here; all run on threads of their own (server/control_hands.h).
 */
#ifndef LAZY_REQUEST_H
#define LAZY_REQUEST_H

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

#include "base/clock.h"
#include "lazy/complaint.h"
#include "lazy/map.h"
#include "lazy/source.h"
#include "lazy/space.h"
#include "server/control_request.h"

struct map_request {
	struct control_call *call;
	json_t *keys; /* what is left of the message; what is left in the end is unknown */
	struct space *space;
	json_t *body; /* the reply's, an object */
	struct complaint complaint;
};

/* `run` returns 0, or a negative errno with the complaint filled in. Gives the whole reply. */
json_t *map_request_run(struct control_call *call, const char *name,
			int (*run)(struct map_request *request));
/* There is a map to be asked. */
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
 * What came along with the request, to be read from its start: a regular file of `most_bytes` at most.
 * Returns 0 and `*file`, which is the caller's, or a negative errno.
 */
int map_request_open_lines(struct map_request *request, uint64_t most_bytes, FILE **file);
/* Bytes of virtual data: `from` and `to` of a request, by default all. */
int map_request_take_range(struct map_request *request, uint64_t *from, uint64_t *to);
/* When a page of a long answer should end: some of its time is over. CLOCK_MONOTONIC. */
uint64_t map_request_page_end_ns(void);

json_t *map_mapping_json(const struct mapping *mapping);
/* "computed", "given" (with the source) or "pinned" (at first fetch): what its digests are. */
const char *map_digests_of(const struct source *source);

#endif
