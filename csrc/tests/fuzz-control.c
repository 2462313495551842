/* SPDX-License-Identifier: MIT */
/*
 * fuzz-control: what clients send to a server's control socket, to a device with a map and a cache.
 * The input has the content of the file that comes with the first request, or none, and then lines.
 * Each line gets one answer, which is a JSON object. Nobody is asked over the network.
 */
#include <errno.h>
#include <ftw.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/fileio.h"
#include "content/map.h"
#include "content/store.h"
#include "fetch/fetcher_ops.h"
#include "fetch/inquiry.h"
#include "lazy/fetcher.h"
#include "lazy/read.h"
#include "lazy/space.h"
#include "server/control_connection.h"
#include "server/description.h"
#include "server/frontend/frontend.h"
#include "tests/fuzz.h"
#include "tests/passing.h"
#include "tests/quiet.h"

/* The pool as it is, but that a job is done where it is given. */
#define control_pool_submit submit_to_threads
#include "server/control_pool.c" /* NOLINT(bugprone-suspicious-include): to call its work() */
#undef control_pool_submit

bool control_pool_submit(struct control_pool *pool, struct control_job *job);

enum { SOURCES_MAX = 64, MAPPINGS_MAX = 256, SLEEPS_MAX = 3, STEPS_MAX = 5000 };

static struct control_pool *const no_threads = (struct control_pool *)&(char){ 0 };
static struct control_job *current;
static unsigned sleeps;

bool control_pool_submit(struct control_pool *pool, struct control_job *job)
{
	(void)pool;
	current = job;
	sleeps = 0;
	work(&job->job);
	return true;
}

/* A request that waits has a client that leaves. */
int __wrap_nanosleep(const struct timespec *wanted, struct timespec *left);
int __real_nanosleep(const struct timespec *wanted, struct timespec *left);

int __wrap_nanosleep(const struct timespec *wanted, struct timespec *left)
{
	const struct timespec little = { .tv_nsec = 10000 };

	(void)wanted, (void)left;
	if (current && sleeps++ >= SLEEPS_MAX)
		__atomic_store_n(&current->call.over, true, __ATOMIC_RELAXED);
	return __real_nanosleep(&little, NULL);
}

/* Nobody answers, so nothing is waited for that long. */
void __wrap_fetcher_read(struct fetcher *fetcher, struct lazy_read *read);
void __real_fetcher_read(struct fetcher *fetcher, struct lazy_read *read);

void __wrap_fetcher_read(struct fetcher *fetcher, struct lazy_read *read)
{
	read->deadline_ns = clock_now_ns() + NS_PER_MS;
	__real_fetcher_read(fetcher, read);
}

static const struct fetcher_ops *usual_ops;

static void inquire(struct fetcher *fetcher, struct inquiry *inquiry)
{
	inquiry->deadline_ns = clock_now_ns() + NS_PER_MS;
	usual_ops->inquire(fetcher, inquiry);
}

static void make_impatient(struct fetcher *fetcher)
{
	static struct fetcher_ops ops;

	usual_ops = fetcher->ops;
	ops = *usual_ops;
	ops.inquire = inquire;
	fetcher->ops = &ops;
}

int connect(int fd, const struct sockaddr *address, socklen_t bytes);

int connect(int fd, const struct sockaddr *address, socklen_t bytes)
{
	(void)fd, (void)address, (void)bytes;
	errno = ECONNREFUSED;
	return -1;
}

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
		struct addrinfo **found)
{
	(void)host, (void)service, (void)hints, (void)found;
	return EAI_NONAME;
}

static char directory[FUZZ_DIRECTORY_BYTES];
static struct engine engine;
static bool is_open;
static const struct frontend_ops no_ops = { .name = "none" };
static struct frontend frontend = { .ops = &no_ops, .engine = &engine };
static struct control_subject subject = { .frontend = &frontend };

static void must(int err, const char *what)
{
	if (!err)
		return;
	fprintf(stderr, "fuzz-control: %s: %s\n", what, strerror(-err));
	abort();
}

/* A map with a source that is computed, and one that is read. */
static void fill_map(void)
{
	struct store_addition additions[] = {
		{ .offset = 0, .length = 65536 },
		{ .offset = 1 << 20, .length = 8192, .source_offset = 4096, .source = 1 },
	};
	json_t *sources = json_pack("[{s:s, s:i, s:i}, {s:s, s:s, s:i, s:i}]", "kind", "memset",
				    "byte", 7, "size", 1 << 20, "kind", "file", "path",
				    "/proc/self/exe", "size", 65536, "unit", 4096);
	struct error error = {};
	int err;

	err = store_add(space_first()->store, sources, additions, 2, NULL, NULL, &error);
	json_decref(sources);
	must(err, error.text);
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *place)
{
	(void)status, (void)kind, (void)place;
	return remove(path);
}

static void close_device(void)
{
	if (!is_open)
		return;
	engine_close(&engine);
	is_open = false;
	nftw(directory, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static void open_device(void)
{
	char text[2048];
	FILE *file;

	fuzz_directory(directory);
	snprintf(text, sizeof(text),
		 "{\"version\": 1, \"size\": 8388608, \"read_only\": true, \"segments\": ["
		 "{\"kind\": \"lazy\", \"offset\": 0, \"length\": 8388608, \"map\": \"%s/map\","
		 " \"cache\": \"%s/cache\"}]}",
		 directory, directory);
	file = fmemopen(text, strlen(text), "r");
	must(file ? description_load(file, "it", &engine) : -ENOMEM, "description");
	fclose(file);
	must(engine_open(&engine, 1), "device");
	make_impatient(space_first()->fetcher);
	is_open = true;
	fill_map();
}

/* Some of what requests add may stay, which makes no difference, and not all of it. */
static void forget_additions(void)
{
	const struct space *space = space_first();

	if (store_source_count(space->store) < SOURCES_MAX && map_count(space->map) < MAPPINGS_MAX)
		return;
	close_device();
	open_device();
}

/* Of an answer that has come in part: more may come, unless the connection is broken. */
static char text[1 << 20];
static size_t used;

static unsigned count_answers(int fd)
{
	unsigned count = 0;
	ssize_t got;
	char *end;

	while ((got = recv(fd, text + used, sizeof(text) - used, MSG_DONTWAIT)) > 0) {
		used += (size_t)got;
		while ((end = memchr(text, '\n', used))) {
			json_t *reply = json_loadb(text, (size_t)(end - text), 0, NULL);

			fuzz_require(json_is_object(reply), "no object as an answer");
			json_decref(reply);
			used -= (size_t)(end + 1 - text);
			memmove(text, end + 1, used);
			count++;
		}
		fuzz_require(used < sizeof(text), "an answer of a MiB");
	}
	return count;
}

static void say(int fd, const uint8_t *data, size_t length, int passed_fd)
{
	if (length)
		fuzz_require(send_with_file(fd, data, length, passed_fd) == (ssize_t)length,
			     "not sent");
}

static int take_file(struct fuzz_input *input)
{
	size_t bytes = fuzz_take(input, 2);
	int fd = memfd_create("lines", MFD_CLOEXEC);

	if (bytes > input->length)
		bytes = input->length;
	if (fd < 0 || pwrite_full(fd, input->data, bytes, 0))
		abort();
	input->data += bytes;
	input->length -= bytes;
	return fd;
}

static void talk(int client, struct control_connection *connection, struct fuzz_input *input)
{
	enum control_action action = CONTROL_GO_ON;
	unsigned answers = 0, lines = 0;

	for (size_t i = 0; i < input->length; i++)
		lines += input->data[i] == '\n';
	for (unsigned i = 0; i < STEPS_MAX && action != CONTROL_GONE; i++) {
		action = control_receive(connection, &subject);
		while (connection->job && !connection->broken) {
			current = NULL;
			action = control_finish(connection, &subject);
			answers += count_answers(client);
		}
		answers += count_answers(client);
		if (connection->broken)
			break;
	}
	fuzz_require(answers <= lines, "more answers than requests");
}

static void run(const uint8_t *data, size_t length)
{
	struct fuzz_input input = { data, length };
	uint64_t how = fuzz_take(&input, 1);
	struct control_connection connection;
	int passed_fd = how & 1 ? take_file(&input) : -1;
	int ends[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
		abort();
	must(control_init(&connection, ends[0], how & 2 ? NULL : no_threads, 0), "connection");
	used = 0;
	say(ends[1], input.data, input.length, passed_fd);
	if (passed_fd >= 0)
		close(passed_fd);
	shutdown(ends[1], SHUT_WR);
	talk(ends[1], &connection, &input);
	if (connection.job)
		control_job_free(connection.job);
	connection.job = NULL;
	current = NULL;
	control_deinit(&connection);
	close(ends[1]);
	forget_additions();
}

static void begin(const char *path)
{
	(void)path;
	setenv("BTRFS_UBLK_FETCH", "in-process", 1);
	subject.ready = json_pack("{s:s}", "event", "ready");
	open_device();
}

static void end(void)
{
	json_decref(subject.ready);
	close_device();
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-control",
	.input_bytes = FUZZ_INPUT_BYTES_MAX,
	.begin = begin,
	.run = run,
	.end = end,
};
FUZZ_PROGRAM(fuzzer)
