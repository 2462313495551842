/* SPDX-License-Identifier: MIT */
/*
 * fetch-shell: the fetcher by itself, without map and cache, so that tests reach mirrors without a
 * block device. Each line of standard input is a JSON object; lines may come while reads are under way:
 *
 *   {"source": {"size": ..., "mirrors": [...]}}      sources are numbered from 0; answered at once:
 *       {"source": 0} or {"error": TEXT, "hint": TEXT}
 *   {"read": ID, "source": 0, "offset": 0, "length": 4096, "deadline_ms": 30000}
 *       ID is any number; without a deadline it waits for ever. Answered at its end, in any order:
 *       {"read": ID, "result": 0, "ms": 1.5, "bytes": N}, followed by N raw bytes; or
 *       {"read": ID, "result": -5, "ms": 1.5, "bytes": 0}
 *   {"prefetch": ID, "source": 0, "offset": 0, "length": 1048576}     not answered
 *   {"probe": ID, "source": 0, "mirror": 0, "timeout_ms": 5000}       waits; answered with
 *       {"probe": ID, "result": 0, "size": N, "identity": TEXT or null} or
 *       {"probe": ID, "result": -2, "error": TEXT}
 *   {"identity": ID, "source": 0, "mirror": 0, "text": TEXT}   pin it; before the source is read
 *   {"stats": ID}      {"stats": ID, "fetcher": {...}}
 *   {"wait": ID}       {"wait": ID} once no read is under way
 *
 * At the end of input, reads are given up (-5), and all memory is freed. Arguments are options for
 * the fetcher: workers=N transfers=N buffer=BYTES run=BYTES changed=MS unhealthy=MS
 * silent=MS; and process=PROGRAM, which servers are then asked by.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/keys.h"
#include "base/message.h"
#include "content/source.h"
#include "fetch/inquiry.h"
#include "fetch/process/front.h"
#include "lazy/fetcher.h"
#include "lazy/read.h"

struct shell_read {
	struct lazy_read read;
	json_int_t id;
	uint64_t started_ns;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* protects stdout and `under_way` */
static pthread_cond_t none_left = PTHREAD_COND_INITIALIZER;
static unsigned under_way;
static struct source *sources[4096];
static unsigned source_count;

/* Prints the answer and the bytes that follow it, without anything in between. */
static void say(json_t *answer, const void *data, size_t bytes)
{
	pthread_mutex_lock(&lock);
	json_dumpf(answer, stdout, JSON_COMPACT);
	putchar('\n');
	if (bytes)
		fwrite(data, 1, bytes, stdout);
	fflush(stdout);
	pthread_mutex_unlock(&lock);
	json_decref(answer);
}

static void read_done(struct lazy_read *read, int result)
{
	struct shell_read *of_shell = container_of(read, struct shell_read, read);
	size_t bytes = result ? 0 : read->length;

	say(json_pack("{s:I, s:i, s:f, s:I}", "read", of_shell->id, "result", result, "ms",
		      (double)(clock_now_ns() - of_shell->started_ns) / 1e6, "bytes",
		      (json_int_t)bytes),
	    read->data, bytes);
	free(read->data);
	free(of_shell);
	pthread_mutex_lock(&lock);
	under_way--;
	pthread_cond_signal(&none_left);
	pthread_mutex_unlock(&lock);
}

static void wait_for_all(void)
{
	pthread_mutex_lock(&lock);
	while (under_way)
		pthread_cond_wait(&none_left, &lock);
	pthread_mutex_unlock(&lock);
}

static int take_source(json_t *line, struct source **source, struct error *error)
{
	uint64_t number = 0;
	int err = keys_take_u64(line, "source", true, &number, error);

	if (err)
		return err;
	if (number >= source_count)
		return error_set(error, -EINVAL, "there is no source %llu",
				 (unsigned long long)number);
	*source = sources[number];
	return 0;
}

static int take_mirror(json_t *line, struct mirror **mirror, struct error *error)
{
	struct source *source = NULL;
	uint64_t number = 0;
	int err = take_source(line, &source, error);

	if (!err)
		err = keys_take_u64(line, "mirror", false, &number, error);
	if (err)
		return err;
	if (number >= source->mirror_count)
		return error_set(error, -EINVAL, "there is no mirror %llu",
				 (unsigned long long)number);
	*mirror = &source->mirrors[number];
	return 0;
}

static int add_source(json_t *line, struct error *error)
{
	int err;

	if (source_count == sizeof(sources) / sizeof(*sources))
		return error_set(error, -ENOSPC, "too many sources");
	err = source_parse(json_object_get(line, "source"), &sources[source_count], error);
	if (err)
		return err;
	sources[source_count]->id = source_count;
	say(json_pack("{s:I}", "source", (json_int_t)source_count++), NULL, 0);
	return 0;
}

static int begin_read(struct fetcher *fetcher, json_t *line, struct error *error)
{
	struct shell_read *of_shell;
	struct source *source = NULL;
	uint64_t offset = 0, length = 0, deadline_ms = 0;
	int64_t id = 0;
	int err = keys_take_i64(line, "read", true, &id, error);

	if (!err)
		err = take_source(line, &source, error);
	if (!err)
		err = keys_take_u64(line, "offset", true, &offset, error);
	if (!err)
		err = keys_take_u64(line, "length", true, &length, error);
	if (!err)
		err = keys_take_u64(line, "deadline_ms", false, &deadline_ms, error);
	if (err)
		return err;
	if (offset >= source->size || !length || length > 1 << 30 ||
	    offset + length > (source->size + 4095) / 4096 * 4096)
		return error_set(error, -EINVAL, "that is not in the source");
	of_shell = calloc(1, sizeof(*of_shell));
	if (of_shell)
		of_shell->read.data = malloc(length);
	if (!of_shell || !of_shell->read.data)
		abort();
	of_shell->id = id;
	of_shell->started_ns = clock_now_ns();
	of_shell->read.source = source;
	of_shell->read.offset = offset;
	of_shell->read.length = (uint32_t)length;
	of_shell->read.deadline_ns = deadline_ms ? of_shell->started_ns + deadline_ms * NS_PER_MS :
						   FETCHER_NO_DEADLINE;
	of_shell->read.done = read_done;
	pthread_mutex_lock(&lock);
	under_way++;
	pthread_mutex_unlock(&lock);
	fetcher_read(fetcher, &of_shell->read);
	return 0;
}

static int prefetch(struct fetcher *fetcher, json_t *line, struct error *error)
{
	struct source *source = NULL;
	uint64_t offset = 0, length = 0;
	int err = take_source(line, &source, error);

	if (!err)
		err = keys_take_u64(line, "offset", true, &offset, error);
	if (!err)
		err = keys_take_u64(line, "length", true, &length, error);
	if (!err)
		fetcher_read_ahead(fetcher, source, offset, length);
	return err;
}

static int probe(struct fetcher *fetcher, json_t *line, struct error *error)
{
	struct mirror_probe found = {};
	struct error why = {};
	struct mirror *mirror = NULL;
	uint64_t timeout_ms = 5000;
	int64_t id = 0;
	int err = keys_take_i64(line, "probe", true, &id, error);

	if (!err)
		err = keys_take_u64(line, "timeout_ms", false, &timeout_ms, error);
	if (!err)
		err = take_mirror(line, &mirror, error);
	if (err)
		return err;
	if (!mirror->ops->probe && !mirror->ops->inquire)
		return error_set(error, -EINVAL, "this kind cannot be probed");
	err = mirror_probe(fetcher, mirror, (uint32_t)timeout_ms, &found, &why);
	if (err)
		say(json_pack("{s:I, s:i, s:s}", "probe", id, "result", err, "error", why.text),
		    NULL, 0);
	else
		say(json_pack("{s:I, s:i, s:I, s:s?}", "probe", id, "result", 0, "size",
			      (json_int_t)found.size, "identity", found.identity),
		    NULL, 0);
	free(found.identity);
	return 0;
}

static int pin(json_t *line, struct error *error)
{
	struct mirror *mirror = NULL;
	int err = take_mirror(line, &mirror, error);

	if (!err)
		err = keys_take_string(line, "text", true, &mirror->identity, error);
	return err;
}

static int handle(struct fetcher *fetcher, json_t *line, struct error *error)
{
	if (json_object_get(line, "read"))
		return begin_read(fetcher, line, error);
	if (json_object_get(line, "prefetch"))
		return prefetch(fetcher, line, error);
	if (json_object_get(line, "probe"))
		return probe(fetcher, line, error);
	if (json_object_get(line, "identity"))
		return pin(line, error);
	if (json_object_get(line, "source"))
		return add_source(line, error);
	if (json_object_get(line, "stats")) {
		say(json_pack("{s:O, s:o}", "stats", json_object_get(line, "stats"), "fetcher",
			      fetcher_stats_json(fetcher)),
		    NULL, 0);
		return 0;
	}
	if (json_object_get(line, "wait")) {
		wait_for_all();
		say(json_incref(line), NULL, 0);
		return 0;
	}
	return error_set(error, -EINVAL, "not a request");
}

static void handle_line(struct fetcher *fetcher, const char *text)
{
	struct error error = {};
	json_error_t json_error;
	json_t *line = json_loads(text, JSON_REJECT_DUPLICATES, &json_error);
	int err;

	err = line ? handle(fetcher, line, &error) :
		     error_set(&error, -EINVAL, "not JSON: %s", json_error.text);
	if (err)
		say(json_pack("{s:s, s:s}", "error", error.text, "hint", error.hint), NULL, 0);
	json_decref(line);
}

static int parse_option(const char *text, struct fetcher_options *options)
{
	unsigned long long bytes;

	if (!strncmp(text, "process=", 8)) {
		options->spawns = true;
		front_use(text + 8, 0);
		return 0;
	}
	if (sscanf(text, "workers=%u", &options->workers) == 1 ||
	    sscanf(text, "transfers=%u", &options->max_transfers) == 1 ||
	    sscanf(text, "changed=%u", &options->changed_ms) == 1 ||
	    sscanf(text, "unhealthy=%u", &options->unhealthy_ms) == 1 ||
	    sscanf(text, "silent=%u", &options->silent_ms) == 1)
		return 0;
	if (sscanf(text, "run=%llu", &bytes) == 1) {
		options->run_bytes = bytes;
		return 0;
	}
	if (sscanf(text, "buffer=%llu", &bytes) != 1)
		return -EINVAL;
	options->max_buffer_bytes = bytes;
	return 0;
}

int main(int argc, char **argv)
{
	struct fetcher_options options = {};
	struct fetcher *fetcher = NULL;
	char *line = NULL;
	size_t bytes = 0;
	int err;

	message_init("fetch-shell");
	for (int i = 1; i < argc; i++) {
		if (parse_option(argv[i], &options)) {
			msg_error("not an option: %s", argv[i]);
			return EXIT_USAGE;
		}
	}
	err = fetcher_start(&options, NULL, NULL, &fetcher);
	if (err) {
		msg_error("cannot start the fetcher: %s", strerror(-err));
		return EXIT_FAILED;
	}
	while (getline(&line, &bytes, stdin) > 0)
		handle_line(fetcher, line);
	free(line);
	err = fetcher_stop(fetcher);
	if (err) {
		msg_error("cannot stop the fetcher: %s", strerror(-err));
		return EXIT_FAILED;
	}
	for (unsigned i = 0; i < source_count; i++)
		source_free(sources[i]);
	return EXIT_OK;
}
