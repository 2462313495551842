/* SPDX-License-Identifier: MIT */
/*
 * store-shell FILE: opens a map, prints whether that worked, and takes commands as JSON, one per
 * line. Each is answered by a line of JSON:
 *
 *   {"add": [[OFFSET or null, LENGTH, SOURCE, SOURCE_OFFSET], ...], "sources": [...],
 *    "room": [START, END, ALIGNMENT]}
 *   {"list": true} | {"source": ID} | {"check": true} | {"check_digests": ID} | {"pins": ID}
 *   {"digest": [SOURCE, UNIT]} | {"pin": [SOURCE, UNIT, HEX], "threads": N}
 *   {"identity": [SOURCE, MIRROR, TEXT]}
 *   {"random": [COUNT, SOURCE]}   adds COUNT mappings in one go
 *   {"checkpoint": true}          as happens by itself when the log is long
 *   {"reopen": FILE}              closes this map and opens another one
 *
 * STORE_SLICE_BYTES=N in the environment: how much of a request is written at a time.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "content/map.h"
#include "content/store.h"
#include "content/store/internal.h"
#include "content/store/sql.h"
#include "fetch/coded.h"
#include "fetch/inquiry.h"
#include "lazy/fetcher.h"

enum { THREADS_MAX = 64 };

struct shell {
	struct map *map;
	struct store *store;
	struct fetcher *fetcher; /* of additions, which may ask servers for sizes */
};

static json_t *failure(int err, const struct error *error)
{
	json_t *reply = json_pack("{s:s, s:s, s:s}", "error", strerrorname_np(-err), "text",
				  error->text, "hint", error->hint);

	if (error->of) {
		json_object_set_new(reply, "of", json_string(error->of));
		json_object_set_new(reply, "number", json_integer((json_int_t)error->number));
	}
	return reply;
}

static json_t *plain(int err)
{
	const struct error none = {};

	return err ? failure(err, &none) : json_pack("{s:b}", "ok", 1);
}

static uint64_t number_at(const json_t *list, size_t index)
{
	const json_t *number = json_array_get(list, index);

	return json_is_null(number) ? STORE_ANYWHERE : (uint64_t)json_integer_value(number);
}

static json_t *additions_json(const struct store_addition *additions, size_t count)
{
	json_t *list = json_array();

	for (size_t i = 0; i < count; i++)
		json_array_append_new(list, json_pack("[I, b]", (json_int_t)additions[i].offset,
						      (int)additions[i].existed));
	return json_pack("{s:o}", "added", list);
}

static int start_fetcher(struct shell *shell)
{
	const struct fetcher_options options = { .workers = 1 };
	int err = shell->fetcher ? 0 : fetcher_start(&options, NULL, NULL, &shell->fetcher);

	if (!err)
		store_use_fetcher(shell->store, shell->fetcher);
	return err;
}

static json_t *add(struct shell *shell, const json_t *command)
{
	const json_t *list = json_object_get(command, "add");
	const json_t *place = json_object_get(command, "room");
	const struct store_room room = {
		.start = number_at(place, 0),
		.end = number_at(place, 1),
		.alignment = number_at(place, 2),
		.shown_end = INT64_MAX,
	};
	size_t count = json_array_size(list);
	_cleanup_free_ struct store_addition *additions = calloc(count + 1, sizeof(*additions));
	struct error error = {};
	int err;

	for (size_t i = 0; additions && i < count; i++) {
		const json_t *row = json_array_get(list, i);

		additions[i] = (struct store_addition){
			.offset = number_at(row, 0),
			.length = number_at(row, 1),
			.source = (unsigned)number_at(row, 2),
			.source_offset = number_at(row, 3),
		};
	}
	err = start_fetcher(shell);
	if (err)
		return plain(err);
	err = store_add(shell->store, json_object_get(command, "sources"), additions, count,
			place ? &room : NULL, NULL, &error);
	return err ? failure(err, &error) : additions_json(additions, count);
}

static json_t *add_many(struct shell *shell, const json_t *command)
{
	const json_t *many = json_object_get(command, "random");
	size_t count = number_at(many, 0);
	_cleanup_free_ struct store_addition *additions = calloc(count, sizeof(*additions));
	json_t *sources = json_pack("[O]", json_array_get(many, 1));
	struct error error = {};
	int err;

	for (size_t i = 0; additions && i < count; i++)
		additions[i] = (struct store_addition){
			.offset = 8192 * i,
			.length = 4096,
		};
	err = store_add(shell->store, sources, additions, count, NULL, NULL, &error);
	json_decref(sources);
	return err ? failure(err, &error) : plain(0);
}

static json_t *list(const struct shell *shell)
{
	const struct mapping *mapping = map_next(shell->map, 0);
	json_t *mappings = json_array();

	for (; mapping; mapping = map_next(shell->map, mapping->offset + mapping->length))
		json_array_append_new(mappings,
				      json_pack("[I, I, I, I]", (json_int_t)mapping->offset,
						(json_int_t)mapping->length,
						(json_int_t)mapping->source->id,
						(json_int_t)mapping->source_offset));
	return json_pack("{s:o}", "mappings", mappings);
}

static json_t *hex_json(const uint8_t *bytes, size_t count)
{
	char hex[2 * SOURCE_KEY_BYTES + 1] = "";

	for (size_t i = 0; i < count; i++)
		snprintf(hex + 2 * i, 3, "%02x", bytes[i]);
	return json_string(hex);
}

static json_t *show(struct shell *shell, const struct source *source)
{
	json_t *identities = json_array();

	for (unsigned i = 0; i < source->mirror_count; i++)
		json_array_append_new(identities, source->mirrors[i].identity ?
							  json_string(source->mirrors[i].identity) :
							  json_null());
	return json_pack("{s:o, s:o, s:I, s:b, s:o}", "source",
			 store_source_json(shell->store, source), "key",
			 hex_json(source->key, SOURCE_KEY_BYTES), "size", (json_int_t)source->size,
			 "has_digests", (int)source->has_digests, "identities", identities);
}

static json_t *digest(struct shell *shell, const struct source *source, const json_t *which)
{
	uint8_t found[SOURCE_DIGEST_BYTES];
	int err = store_digest(shell->store, source, number_at(which, 1), found);

	if (err < 0)
		return plain(err);
	return json_pack("{s:o}", "digest", err ? hex_json(found, sizeof(found)) : json_null());
}

struct pinner {
	struct shell *shell;
	const struct source *source;
	uint64_t unit;
	uint8_t digest[SOURCE_DIGEST_BYTES];
	int err;
};

static void *pin_main(void *argument)
{
	struct pinner *pinner = argument;

	pinner->err = store_pin_digest(pinner->shell->store, pinner->source, pinner->unit,
				       pinner->digest);
	return NULL;
}

/* Pins units from UNIT on, each in a thread of its own. */
static json_t *pin(struct shell *shell, const struct source *source, const json_t *command)
{
	const json_t *what = json_object_get(command, "pin");
	unsigned threads = (unsigned)json_integer_value(json_object_get(command, "threads")) ?: 1;
	const char *hex = json_string_value(json_array_get(what, 2));
	struct pinner pinners[THREADS_MAX];
	pthread_t ids[THREADS_MAX];
	int err = 0;

	if (threads > THREADS_MAX || !hex || strlen(hex) != 2 * SOURCE_DIGEST_BYTES)
		return plain(-EINVAL);
	for (unsigned i = 0; i < threads; i++) {
		pinners[i] = (struct pinner){ shell, source, number_at(what, 1) + i, {}, 0 };
		for (unsigned byte = 0; byte < SOURCE_DIGEST_BYTES; byte++) {
			const char digits[] = { hex[2 * byte], hex[2 * byte + 1], '\0' };

			pinners[i].digest[byte] = (uint8_t)strtoul(digits, NULL, 16);
		}
		pthread_create(&ids[i], NULL, pin_main, &pinners[i]);
	}
	for (unsigned i = 0; i < threads; i++) {
		pthread_join(ids[i], NULL);
		err = err ?: pinners[i].err;
	}
	return plain(err);
}

static json_t *pin_identity(struct shell *shell, const struct source *source, const json_t *what)
{
	unsigned mirror = (unsigned)number_at(what, 1);

	if (mirror >= source->mirror_count)
		return plain(-EINVAL);
	return plain(store_pin_identity(shell->store, &source->mirrors[mirror],
					json_string_value(json_array_get(what, 2)) ?: ""));
}

static json_t *about_source(struct shell *shell, const json_t *command)
{
	static const char *const names[] = { "source", "check_digests", "pins",
					     "digest", "pin",		"identity" };
	const struct source *source = NULL;
	const json_t *argument = NULL;
	unsigned which = 0;

	for (; !argument && which < 6; which++)
		argument = json_object_get(command, names[which]);
	if (argument)
		source = store_source(shell->store, json_is_array(argument) ?
							    number_at(argument, 0) :
							    (uint64_t)json_integer_value(argument));
	if (!source)
		return plain(-ENOENT);
	switch (which - 1) {
	case 0:
		return show(shell, source);
	case 1:
		return plain(store_check_digests(shell->store, source));
	case 2:
		return json_pack("{s:I}", "pins",
				 (json_int_t)store_pin_count(shell->store, source));
	case 3:
		return digest(shell, source, argument);
	case 4:
		return pin(shell, source, command);
	default:
		return pin_identity(shell, source, argument);
	}
}

static json_t *open_store(struct shell *shell, const char *path)
{
	static const struct store_fetch_ops ops = { coded_wrap, mirror_probe };
	const char *slice_bytes = getenv("STORE_SLICE_BYTES");
	struct error error = {};
	int err;

	shell->map = map_new();
	err = shell->map ? store_open(path, shell->map, &ops, &shell->store, &error) : -ENOMEM;
	if (err)
		return failure(err, &error);
	if (slice_bytes)
		shell->store->slices.most_bytes = strtoull(slice_bytes, NULL, 10);
	return json_pack("{s:I, s:s, s:I}", "mappings", (json_int_t)map_count(shell->map), "path",
			 store_path(shell->store), "sources",
			 (json_int_t)store_source_count(shell->store));
}

static void close_store(struct shell *shell)
{
	if (shell->fetcher)
		fetcher_stop(shell->fetcher);
	store_close(shell->store);
	map_free(shell->map);
	*shell = (struct shell){};
}

static json_t *checkpoint(const struct shell *shell)
{
	return plain(sqlite3_wal_checkpoint_v2(shell->store->writer, NULL,
					       SQLITE_CHECKPOINT_PASSIVE, NULL, NULL) ?
			     -EIO :
			     0);
}

/* What SQLite may keep of the file, as a number of its own. */
static json_t *cache_size(const struct shell *shell)
{
	sqlite3_int64 size = 0;

	(void)sql_number(shell->store->writer, "PRAGMA cache_size", &size);
	return json_pack("{s:I}", "cache_size", (json_int_t)size);
}

static json_t *answer(struct shell *shell, const json_t *command)
{
	const char *path = json_string_value(json_object_get(command, "reopen"));
	struct error error = {};
	int err;

	if (path) {
		close_store(shell);
		return open_store(shell, path);
	}
	if (!shell->store)
		return plain(-EBADF);
	if (json_object_get(command, "checkpoint"))
		return checkpoint(shell);
	if (json_object_get(command, "cache_size"))
		return cache_size(shell);
	if (json_object_get(command, "add"))
		return add(shell, command);
	if (json_object_get(command, "random"))
		return add_many(shell, command);
	if (json_object_get(command, "list"))
		return list(shell);
	if (!json_object_get(command, "check"))
		return about_source(shell, command);
	err = store_check(shell->store, &error);
	return err ? failure(err, &error) : plain(0);
}

static void print(json_t *line)
{
	json_dumpf(line, stdout, JSON_COMPACT);
	json_decref(line);
	putchar('\n');
	fflush(stdout);
}

static int run(struct shell *shell, const char *path)
{
	_cleanup_free_ char *line = NULL;
	size_t room = 0;

	print(open_store(shell, path));
	if (!shell->store)
		return EXIT_FAILED;
	while (getline(&line, &room, stdin) > 0) {
		json_t *command = json_loads(line, 0, NULL);

		print(answer(shell, command));
		json_decref(command);
	}
	return EXIT_OK;
}

int main(int argc, char **argv)
{
	struct shell shell = {};
	int status;

	message_init("store-shell");
	if (argc != 2) {
		msg_error("usage: store-shell FILE");
		return EXIT_USAGE;
	}
	status = run(&shell, argv[1]);
	close_store(&shell);
	return status;
}
