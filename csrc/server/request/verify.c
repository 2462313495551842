/* SPDX-License-Identifier: MIT */
/*
 * map-verify checks whether the file is intact and its digests match their roots, and with `"ask":
 * true` whether each mirror still has the object, by its size and identity. It begins with source
 * `"source"` (only the first page checks the file), and returns a page at a time: `"problems"`, each
 * with `"text"` and perhaps `"source"` and `"hint"`, and `"next"`, or null.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/keys.h"
#include "base/utf8.h"
#include "content/identity.h"
#include "fetch/inquiry.h"
#include "server/request/request.h"

enum { PROBE_MS = 10 * 1000 };

static int add_problem(const struct map_request *request, uint64_t source, const char *text,
		       const char *hint)
{
	json_t *problem = json_pack("{s:o}", "text", utf8_json(text));

	if ((source && json_object_set_new(problem, "source", json_integer((json_int_t)source))) ||
	    (*hint && json_object_set_new(problem, "hint", utf8_json(hint)))) {
		json_decref(problem);
		return -ENOMEM;
	}
	return json_array_append_new(json_object_get(request->body, "problems"), problem);
}

static int ask_mirror(const struct map_request *request, const struct source *source,
		      struct mirror *mirror)
{
	_cleanup_free_ char *identity = NULL;
	struct mirror_probe probe = {};
	struct error why = {};
	char text[600];
	int err = store_identity(request->space->store, source, mirror->index, &identity);

	if (err < 0 || (!mirror->ops->probe && !mirror->ops->inquire))
		return err < 0 ? err : 0;
	err = mirror_probe(request->space->fetcher, mirror, PROBE_MS, &probe, &why);
	if (err == -ENOMEM)
		return err;
	if (err)
		snprintf(text, sizeof(text), "mirror %u (%s): %s", mirror->index, mirror->ops->name,
			 *why.text ? why.text : strerror(-err));
	else if (probe.size != source->object_bytes)
		snprintf(text, sizeof(text), "mirror %u (%s) has %llu bytes, the source %llu",
			 mirror->index, mirror->ops->name, (unsigned long long)probe.size,
			 (unsigned long long)source->object_bytes);
	else if (identity && probe.identity && !identity_is_same(identity, probe.identity) &&
		 mirror_is_pinned(&source->mirrors[mirror->index]))
		snprintf(text, sizeof(text), "mirror %u (%s) has another object: %s, not %s",
			 mirror->index, mirror->ops->name, probe.identity, identity);
	else
		*text = '\0';
	free(probe.identity);
	return *text ? add_problem(request, source->id, text, why.hint) : 0;
}

/* Uses mirrors of our own, because those of the source belong to the fetcher. */
static int ask_mirrors(struct map_request *request, const struct source *source)
{
	json_t *text = store_source_json(request->space->store, source);
	struct source *copy = NULL;
	int err;

	err = store_parse_source(text, &copy, &request->error);
	json_decref(text);
	for (unsigned i = 0; !err && i < copy->mirror_count; i++) {
		if (control_call_is_over(request->call))
			break;
		err = ask_mirror(request, source, &copy->mirrors[i]);
	}
	source_free(copy);
	return err;
}

static int verify_source(struct map_request *request, const struct source *source, bool ask)
{
	int err = 0;

	if (source->has_digests)
		err = store_check_digests(request->space->store, source);
	if (err == -EUCLEAN)
		err = add_problem(request, source->id,
				  "its digests in the map are damaged: they do not have its root",
				  "");
	if (!err)
		err = store_check_index(request->space->store, source);
	if (err == -EUCLEAN)
		err = add_problem(
			request, source->id,
			"its index in the map is damaged: it is not the one that was added", "");
	return !err && ask && !source->computed ? ask_mirrors(request, source) : err;
}

static int verify_from(struct map_request *request, uint64_t id, bool ask)
{
	struct store *store = request->space->store;
	uint64_t end_ns = map_request_page_end_ns(), count = store_source_count(store);
	struct error of_file = {};
	json_t *next;
	int err = 0;

	if (!id)
		err = store_check(store, &of_file);
	/* Want of memory is no problem of the map. */
	if (err && err != -ENOMEM)
		err = add_problem(request, 0, of_file.text, of_file.hint);
	for (id = id ?: 1; !err && id <= count; id++) {
		if (clock_now_ns() > end_ns || control_call_is_over(request->call))
			break;
		err = verify_source(request, store_source(store, id), ask);
	}
	next = id <= count ? json_integer((json_int_t)id) : json_null();
	return json_object_set_new(request->body, "next", next) ? -ENOMEM : err;
}

static int verify(struct map_request *request)
{
	uint64_t id = 0;
	bool ask = false;
	int err = keys_take_u64(request->keys, "source", false, &id, &request->error);

	if (!err)
		err = keys_take_bool(request->keys, "ask", &ask, &request->error);
	if (!err)
		err = keys_refuse_unknown(request->keys, &request->error);
	if (!err && json_object_set_new(request->body, "problems", json_array()))
		err = -ENOMEM;
	return err ?: verify_from(request, id, ask);
}

MAP_REQUEST(map_verify_kind, "map-verify", verify);
