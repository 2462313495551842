/* SPDX-License-Identifier: MIT */
#include "lazy/request/request.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "lazy/keys.h"

/* Long enough to be worth asking, short enough for whoever waits to go away. */
enum { PAGE_MS = 1000 };

bool map_request_available(void)
{
	return space_first() != NULL;
}

static int choose_space(struct map_request *request)
{
	struct space *space = space_first();
	char *path = NULL;
	int err = keys_take_string(request->keys, "map", false, &path, &request->complaint);

	if (err)
		return err;
	if (!path && space->next) {
		complaint_hint(&request->complaint, "one of them is %s", space->map_path);
		return complain(&request->complaint, -EINVAL,
				"the device has several maps: say which one, in \"map\"");
	}
	while (path && space && strcmp(space->map_path, path) != 0)
		space = space->next;
	request->space = space;
	if (!space) {
		complaint_hint(&request->complaint, "it has %s", space_first()->map_path);
		err = complain(&request->complaint, -ENOENT, "the device has no map '%s'", path);
	}
	free(path);
	return err;
}

static json_t *failure(const char *name, int err, const struct complaint *complaint)
{
	return json_pack("{s:s, s:s, s:s, s:s}", "failed", name, "error",
			 *complaint->text ? complaint->text : strerror(-err), "hint",
			 complaint->hint, "errno", strerrorname_np(-err) ?: "EIO");
}

json_t *map_request_run(struct control_call *call, const char *name,
			int (*run)(struct map_request *request))
{
	struct map_request request = {
		.call = call,
		.keys = call->message,
		.body = json_object(),
	};
	int err;

	json_object_del(request.keys, "request");
	json_object_del(request.keys, "protocol");
	err = request.body ? choose_space(&request) : -ENOMEM;
	if (!err)
		err = run(&request);
	if (err) {
		json_decref(request.body);
		return failure(name, err, &request.complaint);
	}
	return json_pack("{s:s, s:o}", "reply", name, name, request.body);
}

int map_request_open_lines(struct map_request *request, uint64_t most_bytes, FILE **file)
{
	struct complaint *complaint = &request->complaint;
	_cleanup_close_ int copy = -1;
	struct stat status;
	int err;

	if (request->call->fd < 0)
		return complain(complaint, -EBADF, "\"in_file\", but no descriptor came along");
	if (fstat(request->call->fd, &status) || !S_ISREG(status.st_mode))
		return complain(complaint, -EINVAL, "what came along is no regular file");
	if ((uint64_t)status.st_size > most_bytes)
		return complain(complaint, -E2BIG,
				"%lld bytes are too many at once; the limit is %llu",
				(long long)status.st_size, (unsigned long long)most_bytes);
	copy = dup(request->call->fd);
	*file = copy < 0 ? NULL : fdopen(copy, "r");
	if (!*file) {
		err = -errno;
		complaint_hint(complaint, "open it for reading");
		return complain(complaint, err, "what came along cannot be read: %s",
				strerror(-err));
	}
	take_fd(&copy);
	rewind(*file);
	return 0;
}

int map_request_take_range(struct map_request *request, uint64_t *from, uint64_t *to)
{
	int err;

	*from = 0;
	*to = INT64_MAX;
	err = keys_take_u64(request->keys, "from", false, from, &request->complaint);
	if (!err)
		err = keys_take_u64(request->keys, "to", false, to, &request->complaint);
	if (!err && *from > *to)
		err = complain(&request->complaint, -EINVAL,
			       "\"from\" is %llu, behind \"to\", which is %llu",
			       (unsigned long long)*from, (unsigned long long)*to);
	return err;
}

uint64_t map_request_page_end_ns(void)
{
	return clock_now_ns() + (uint64_t)PAGE_MS * 1000000;
}

json_t *map_mapping_json(const struct mapping *mapping)
{
	return json_pack("{s:I, s:I, s:I, s:I, s:s}", "offset", (json_int_t)mapping->offset,
			 "length", (json_int_t)mapping->length, "source",
			 (json_int_t)mapping->source->id, "source_offset",
			 (json_int_t)mapping->source_offset, "digests",
			 map_digests_of(mapping->source));
}

const char *map_digests_of(const struct source *source)
{
	if (source->computed)
		return "computed";
	return source->has_digests ? "given" : "pinned";
}
