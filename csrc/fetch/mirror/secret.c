/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/secret.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <linux/capability.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/message.h"
#include "fetch/mirror/hint.h"

enum { SECRET_MAX_BYTES = 1 << 20 };

static int check_file(int fd, const char *path, bool owner_only, struct stat *status,
		      struct error *error)
{
	if (fstat(fd, status))
		return error_set(error, -errno, "cannot examine '%s': %s", path, strerror(errno));
	if (!S_ISREG(status->st_mode))
		return error_set(error, -EINVAL, "'%s' is no regular file", path);
	/* None of these files may be empty, but one that is being rewritten can be. */
	if (!status->st_size)
		return error_set(error, -EINVAL, "'%s' is empty", path);
	if (status->st_size > SECRET_MAX_BYTES)
		return error_set(error, -EFBIG, "'%s' has %lld bytes; the limit is %d", path,
				 (long long)status->st_size, SECRET_MAX_BYTES);
	if (!owner_only)
		return 0;
	if (status->st_uid != 0 && status->st_uid != geteuid())
		return error_set(error, -EACCES,
				 "'%s' belongs to user %u, who can read and change it", path,
				 status->st_uid);
	if (status->st_mode & (S_IRWXG | S_IRWXO)) {
		error_set_hint(error, "chmod 600 '%s'", path);
		return error_set(error, -EACCES, "'%s' is open to others (mode %03o)", path,
				 status->st_mode & 0777);
	}
	return 0;
}

int secret_read(const char *path, bool owner_only, struct secret *secret, struct error *error)
{
	struct secret read = {};
	_cleanup_close_ int fd = -1;
	struct stat status;
	const char *hint;
	int err;

	/* O_NONBLOCK: opening a FIFO must not hang; it does not affect regular files. */
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0) {
		err = -errno;
		hint = owner_only ? hint_for_secret_file(err) : hint_for_source_file(err);
		if (hint)
			error_set_hint(error, "%s", hint);
		return error_set(error, err, "cannot open '%s': %s", path, strerror(-err));
	}
	err = check_file(fd, path, owner_only, &status, error);
	if (err)
		return err;
	read.length = (size_t)status.st_size;
	read.text = malloc(read.length + 1);
	if (!read.text)
		return error_set(error, -ENOMEM, "no memory for '%s'", path);
	err = pread_full(fd, read.text, read.length, 0);
	if (err) {
		secret_clear(&read);
		return error_set(error, err, "cannot read '%s': %s", path, strerror(-err));
	}
	read.text[read.length] = 0;
	*secret = read;
	return 0;
}

void secret_clear(struct secret *secret)
{
	if (secret->text)
		explicit_bzero(secret->text, secret->length);
	free(secret->text);
	*secret = (struct secret){};
}

void secret_free(char *text)
{
	if (text)
		explicit_bzero(text, strlen(text));
	free(text);
}

int secret_line(const char *path, const struct secret *secret, char **line, struct error *error)
{
	const char *start = secret->text + strspn(secret->text, " \t\r\n");
	size_t length = strcspn(start, "\r\n");

	while (length && (start[length - 1] == ' ' || start[length - 1] == '\t'))
		length--;
	if (!length)
		return error_set(error, -EINVAL, "'%s' is empty", path);
	for (size_t i = 0; i < length; i++) {
		if ((unsigned char)start[i] < 0x20 || start[i] == 0x7f)
			return error_set(error, -EINVAL,
					 "'%s' has a control character in its first line", path);
	}
	*line = strndup(start, length);
	return *line ? 0 : error_set(error, -ENOMEM, "no memory for '%s'", path);
}

/* Whether root may read other processes' memory, which is not so in many containers. */
static bool may_trace(void)
{
	/* Ask about the first thread, because the others have dropped their capabilities. */
	struct __user_cap_header_struct header = {
		.version = _LINUX_CAPABILITY_VERSION_3,
		.pid = getpid(),
	};
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};

	if (syscall(SYS_capget, &header, data))
		return false;
	return data[CAP_TO_INDEX(CAP_SYS_PTRACE)].effective & CAP_TO_MASK(CAP_SYS_PTRACE);
}

static void guard_once(void)
{
	struct rlimit limit;

	/*
	 * A limit of 0 only keeps the kernel from writing a file. Where core_pattern names a
	 * program, a limit of 1 prevents the dump (do_coredump(), fs/coredump.c), and no core fits
	 * into one byte either.
	 */
	if (!getrlimit(RLIMIT_CORE, &limit)) {
		limit.rlim_cur = limit.rlim_max < 1 ? limit.rlim_max : 1;
		setrlimit(RLIMIT_CORE, &limit);
	}
	/*
	 * The owner of a FUSE front end opens /proc/PID/fd of this process. If the process is not
	 * dumpable, that takes CAP_SYS_PTRACE, which the owner has if we have it. Otherwise the
	 * limits above have to do.
	 */
	if (may_trace())
		prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
}

void secret_guard_process(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, guard_once);
}

static void overwrite_and_free(void *data)
{
	if (data)
		explicit_bzero(data, malloc_usable_size(data));
	free(data);
}

void secret_guard_json(void)
{
	json_malloc_t allocate;
	json_free_t unused;

	/* Allocations stay those of json_text.h, which are counted. */
	json_get_alloc_funcs(&allocate, &unused);
	json_set_alloc_funcs(allocate, overwrite_and_free);
}
