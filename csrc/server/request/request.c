/* SPDX-License-Identifier: MIT */
#include "server/request/request.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/keys.h"
#include "content/cache.h"

/* Long enough to be worth a request, and short enough for a client that wants to stop. */
enum { PAGE_MS = 1000 };

bool map_request_available(void)
{
	return space_first() != NULL;
}

static int choose_space(struct map_request *request)
{
	struct space *space = space_first();
	char *path = NULL;
	int err = keys_take_string(request->keys, "map", false, &path, &request->error);

	if (err)
		return err;
	if (!path && space->next) {
		error_set_hint(&request->error, "one of them is %s", space->map_path);
		return error_set(&request->error, -EINVAL,
				 "the device has several maps: say which one, in \"map\"");
	}
	while (path && space && strcmp(space->map_path, path) != 0)
		space = space->next;
	request->space = space;
	if (!space) {
		error_set_hint(&request->error, "it has %s", space_first()->map_path);
		err = error_set(&request->error, -ENOENT, "the device has no map '%s'", path);
	}
	free(path);
	return err;
}

static json_t *failure(const char *name, int err, const struct error *error)
{
	json_t *reply = json_pack("{s:s, s:s, s:s, s:s}", "failed", name, "error",
				  *error->text ? error->text : strerror(-err), "hint", error->hint,
				  "errno", strerrorname_np(-err) ?: "EIO");

	if (error->of &&
	    json_object_set_new(reply, error->of, json_integer((json_int_t)error->number))) {
		json_decref(reply);
		return NULL;
	}
	return reply;
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
		return failure(name, err, &request.error);
	}
	return json_pack("{s:s, s:o}", "reply", name, name, request.body);
}

int map_request_open_lines(struct map_request *request, uint64_t most_bytes, FILE **file)
{
	struct error *error = &request->error;
	_cleanup_close_ int copy = -1;
	struct stat status;
	int err;

	if (request->call->fd < 0)
		return error_set(error, -EBADF,
				 "\"in_file\", but no descriptor came with the request");
	if (fstat(request->call->fd, &status) || !S_ISREG(status.st_mode))
		return error_set(error, -EINVAL,
				 "the descriptor that came with the request is no regular file");
	if ((uint64_t)status.st_size > most_bytes)
		return error_set(error, -E2BIG,
				 "%lld bytes are too many at once; the limit is %llu",
				 (long long)status.st_size, (unsigned long long)most_bytes);
	copy = dup(request->call->fd);
	*file = copy < 0 ? NULL : fdopen(copy, "r");
	if (!*file) {
		err = -errno;
		error_set_hint(error, "open it for reading");
		return error_set(error, err,
				 "the file that came with the request cannot be read: %s",
				 strerror(-err));
	}
	take_fd(&copy);
	rewind(*file);
	return 0;
}

bool map_request_next_line(char **line, size_t *room, FILE *file, int *err)
{
	errno = 0;
	if (getline(line, room, file) > 0)
		return true;
	/* Also where there is no memory for the line, which ferror(3) does not say. */
	if (!feof(file))
		*err = -errno ?: -EIO;
	return false;
}

int map_request_take_range(struct map_request *request, uint64_t *from, uint64_t *to)
{
	int err;

	*from = 0;
	*to = INT64_MAX;
	err = keys_take_u64(request->keys, "from", false, from, &request->error);
	if (!err)
		err = keys_take_u64(request->keys, "to", false, to, &request->error);
	if (!err && *from > *to)
		err = error_set(&request->error, -EINVAL,
				"\"from\" is %llu, behind \"to\", which is %llu",
				(unsigned long long)*from, (unsigned long long)*to);
	return err;
}

int map_request_add_range(const struct map_request *request, struct cache_ranges *ranges,
			  struct source *source, uint64_t first, uint64_t end)
{
	struct cache_object *object;

	if (cache_object_open(request->space->cache, source, &object))
		return 0;
	return cache_ranges_add(ranges, object, first, end);
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
