/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/token.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/clock.h"
#include "base/fnv.h"
#include "base/json_text.h"
#include "base/utf8.h"
#include "fetch/fetcher_ops.h"
#include "fetch/mirror/secret.h"

enum {
	ASKING_MS = 10000, /* the process that asks may have died */
	FAILED_MS = 1000,
	LOOK_MS = 20,
	MOST_MS = 86400000, /* of a token: see oci.c */
	TRIES = 100,	    /* for the lock of a file, which is held for less than LOOK_MS */
	WHY_MAX_BYTES = 300,
	RECORD_MAX_BYTES = TOKEN_TEXT_MAX_BYTES + 4096,
};

struct record {
	char *token, *why; /* NULL: none */
	uint64_t until_ns, asking_ns, failed_ns;
	bool refused; /* it has refused these credentials, else it could not answer */
};

/* What has been told, until it is written. A lack of memory costs others a request. */
struct told {
	struct told *next;
	struct record record;
	char key[TOKEN_KEY_BYTES];
};

static pthread_mutex_t told_lock = PTHREAD_MUTEX_INITIALIZER;
static struct told *all_told;

void token_key(const char *const texts[], char key[static TOKEN_KEY_BYTES])
{
	EVP_MD_CTX *context = EVP_MD_CTX_new();
	unsigned char digest[EVP_MAX_MD_SIZE];
	unsigned bytes = 0;

	*key = 0;
	if (context && EVP_DigestInit_ex(context, EVP_sha256(), NULL)) {
		for (; *texts; texts++)
			EVP_DigestUpdate(context, *texts, strlen(*texts) + 1);
		EVP_DigestFinal_ex(context, digest, &bytes);
	}
	EVP_MD_CTX_free(context);
	for (unsigned i = 0; i < bytes; i++)
		sprintf(key + 2 * i, "%02x", digest[i]);
}

uint64_t token_number(const char *token)
{
	return fnv_add(FNV_BEGIN, token, strlen(token)) ?: 1;
}

/* Returns the locked file, -EAGAIN while another process has it, or another negative errno. */
static int open_record(const char *key, bool make)
{
	const char *run = getenv("BTRFS_UBLK_RUN_DIR");
	_cleanup_close_ int directory = -1, fd = -1;
	char path[4096];
	struct stat stat;

	snprintf(path, sizeof(path), "%s/tokens", run && *run == '/' ? run : "/run/btrfs-ublk");
	if (make)
		mkdir(path, 0700);
	directory = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (directory < 0 || fstat(directory, &stat))
		return -errno;
	if (stat.st_uid != geteuid() || stat.st_mode & 077)
		return -EPERM;
	fd = openat(directory, key, O_RDWR | O_NOFOLLOW | O_CLOEXEC | (make ? O_CREAT : 0), 0600);
	if (fd < 0)
		return -errno;
	if (flock(fd, LOCK_EX | LOCK_NB))
		return errno == EWOULDBLOCK ? -EAGAIN : -errno;
	if (fstat(fd, &stat))
		return -errno;
	if (!stat.st_nlink)
		return -EAGAIN; /* `device gc` has removed it meanwhile */
	return take_fd(&fd);
}

static char *text_of(const json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	return text ? strdup(text) : NULL;
}

static void clear_record(struct record *record)
{
	secret_free(record->token);
	free(record->why);
}

/* A time that is further ahead than `most_ms` is of before a boot, after which the clock begins anew. */
static uint64_t time_of(const json_t *object, const char *key, uint64_t most_ms)
{
	uint64_t time_ns = (uint64_t)json_integer_value(json_object_get(object, key));

	return time_ns > clock_now_ns() + most_ms * NS_PER_MS ? 0 : time_ns;
}

/* What makes no sense, as of one that was killed while it wrote, is as good as nothing. */
static void read_record(int fd, struct record *record)
{
	_cleanup_free_ char *text = malloc(RECORD_MAX_BYTES);
	ssize_t bytes = text ? pread(fd, text, RECORD_MAX_BYTES, 0) : 0;
	json_t *object = bytes > 0 ? json_text_parse(text, (size_t)bytes, 0, NULL) : NULL;

	*record = (struct record){
		.token = text_of(object, "token"),
		.why = text_of(object, "why"),
		.until_ns = time_of(object, "until_ns", MOST_MS),
		.asking_ns = time_of(object, "asking_ns", ASKING_MS),
		.failed_ns = time_of(object, "failed_ns", FAILED_MS),
		.refused = json_is_true(json_object_get(object, "refused")),
	};
	json_decref(object);
	if (text)
		explicit_bzero(text, RECORD_MAX_BYTES);
}

static void write_record(int fd, const struct record *record)
{
	json_t *object = json_pack("{s:s*, s:s*, s:I, s:I, s:I, s:b}", "token", record->token,
				   "why", record->why, "until_ns", (json_int_t)record->until_ns,
				   "asking_ns", (json_int_t)record->asking_ns, "failed_ns",
				   (json_int_t)record->failed_ns, "refused", record->refused);
	char *text = object ? json_text_dump(object, JSON_COMPACT) : NULL;

	if (!text || ftruncate(fd, 0) || pwrite(fd, text, strlen(text), 0) < 0)
		(void)!ftruncate(fd, 0);
	secret_free(text);
	json_decref(object);
}

/*
 * A failure removes no token that another process has got meanwhile: TOKEN_ASK has removed a bad
 * one.
 */
static void update_record(int fd, const struct told *told)
{
	struct record record = {};

	if (!told->record.token)
		read_record(fd, &record);
	if (!record.token || record.until_ns <= clock_now_ns())
		write_record(fd, &told->record);
	clear_record(&record);
}

static void write_told(const struct told *told)
{
	const struct timespec pause = { .tv_nsec = LOOK_MS * 1000000 };

	for (unsigned i = 0; i < TRIES; i++) {
		int fd = open_record(told->key, true);

		if (fd >= 0) {
			update_record(fd, told);
			close(fd);
		}
		if (fd != -EAGAIN)
			break;
		nanosleep(&pause, NULL);
	}
}

static void write_all_told(void)
{
	struct told *told;

	pthread_mutex_lock(&told_lock);
	told = all_told;
	all_told = NULL;
	pthread_mutex_unlock(&told_lock);
	while (told) {
		struct told *next = told->next;

		write_told(told);
		clear_record(&told->record);
		free(told);
		told = next;
	}
}

static enum token_state look(int fd, bool wanted, uint64_t refused, char **text, uint64_t *until_ns)
{
	enum token_state state = TOKEN_NONE;
	uint64_t now_ns = clock_now_ns();
	struct record record;

	read_record(fd, &record);
	if (record.token && record.until_ns > now_ns && token_number(record.token) != refused) {
		*text = record.token;
		*until_ns = record.until_ns;
		free(record.why);
		return TOKEN_THERE;
	}
	if (wanted && record.failed_ns > now_ns) {
		state = record.refused ? TOKEN_REFUSED : TOKEN_FAILED;
		*text = record.why;
		record.why = NULL;
	} else if (wanted && record.asking_ns <= now_ns) {
		state = TOKEN_ASK;
		secret_free(record.token);
		record.token = NULL;
		record.asking_ns = now_ns + ASKING_MS * NS_PER_MS;
		write_record(fd, &record);
	}
	clear_record(&record);
	return state;
}

/* -EAGAIN: look again; a state; or another negative errno: nothing is shared. */
static int look_once(const char *key, bool wanted, uint64_t refused, char **text,
		     uint64_t *until_ns)
{
	_cleanup_close_ int fd = open_record(key, wanted);
	enum token_state state;

	if (fd < 0)
		return fd;
	state = look(fd, wanted, refused, text, until_ns);
	return wanted && state == TOKEN_NONE ? -EAGAIN : (int)state;
}

enum token_state token_find(const char *key, bool wanted, uint64_t refused, char **text,
			    uint64_t *until_ns)
{
	const struct timespec pause = { .tv_nsec = LOOK_MS * 1000000 };
	uint64_t late_ns = clock_now_ns() + ASKING_MS * NS_PER_MS;
	int found;

	do {
		/* NB: all workers may be here, and none left to write. */
		write_all_told();
		found = look_once(key, wanted, refused, text, until_ns);
		if (found >= 0)
			return (enum token_state)found;
		if (found != -EAGAIN)
			break;
		nanosleep(&pause, NULL);
	} while (clock_now_ns() < late_ns);
	return wanted ? TOKEN_ASK : TOKEN_NONE;
}

static void work(struct pool_job *job)
{
	(void)job;
	write_all_told();
}

static void done(struct pool_job *job)
{
	free(job);
}

void token_tell(struct fetcher *fetcher, const char *key, const char *text, const char *why,
		bool refused, uint64_t until_ns)
{
	struct told *told = calloc(1, sizeof(*told));
	struct pool_job *job = calloc(1, sizeof(*job));

	if (!told || !job) {
		free(told);
		free(job);
		return;
	}
	snprintf(told->key, sizeof(told->key), "%s", key);
	if (text && strlen(text) <= TOKEN_TEXT_MAX_BYTES)
		told->record.token = strdup(text);
	told->record.until_ns = until_ns;
	told->record.refused = refused;
	if (why) {
		told->record.why = strndup(why, WHY_MAX_BYTES);
		told->record.failed_ns = clock_now_ns() + FAILED_MS * NS_PER_MS;
	}
	/* It is shown to users, on terminals too, and goes into JSON. */
	if (told->record.why) {
		text_make_plain(told->record.why);
		utf8_repair(told->record.why);
	}
	pthread_mutex_lock(&told_lock);
	told->next = all_told;
	all_told = told;
	pthread_mutex_unlock(&told_lock);
	job->work = work;
	job->done = done;
	fetcher->ops->submit(fetcher, job);
}
