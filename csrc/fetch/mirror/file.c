/* SPDX-License-Identifier: MIT */
/*
 * A regular file of this machine: `"path"` (absolute) and `"file_offset"` (bytes, default 0). Its
 * identity is inode, size and time of change; not the device, whose number may be another one after
 * a reboot: btrfs and overlayfs take the next that is free. Of a source with digests, another file
 * does as well, such as one from a backup. It is opened for each run, in the host's mount namespace.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/fnv.h"
#include "base/keys.h"
#include "content/source.h"
#include "fetch/dependence.h"
#include "fetch/fetcher_ops.h"
#include "fetch/mirror/hint.h"
#include "fetch/run.h"

enum { IDENTITY_BYTES = 128 };

struct file_mirror {
	char *path;
	uint64_t file_offset;
	dev_t device; /* when it was opened last; 0: not yet */
};

/* The job of a run, on a worker. It may hang for longer than the run lasts. */
struct file_run {
	struct pool_job job;
	struct run *run; /* only for the fetcher's thread; NULL: the run was given up */
	const struct mirror *mirror;
	uint64_t offset;
	uint32_t length;
	uint8_t *data;
	char *expected; /* the identity, or NULL */
	char found[IDENTITY_BYTES];
	int err;
	enum fetch_failure failure;
	struct error error;
};

static int file_parse(struct mirror *mirror, json_t *keys, struct error *error)
{
	struct file_mirror *file = mirror->private;
	int err = keys_take_string(keys, "path", true, &file->path, error);

	if (!err)
		err = keys_take_u64(keys, "file_offset", false, &file->file_offset, error);
	if (err)
		return err;
	if (*file->path != '/')
		return error_set(error, -EINVAL, "\"path\" is '%.200s', it must begin with /",
				 file->path);
	if (file->file_offset > INT64_MAX - mirror->source->size)
		return error_set(error, -EINVAL,
				 "\"file_offset\" %llu reaches beyond what a file can hold",
				 (unsigned long long)file->file_offset);
	return 0;
}

static void file_close(struct mirror *mirror)
{
	struct file_mirror *file = mirror->private;

	free(file->path);
}

static void identify(const struct stat *status, char identity[static IDENTITY_BYTES])
{
	snprintf(identity, IDENTITY_BYTES, "inode %llu size %lld mtime %lld.%09ld",
		 (unsigned long long)status->st_ino, (long long)status->st_size,
		 (long long)status->st_mtim.tv_sec, status->st_mtim.tv_nsec);
}

static enum fetch_failure failure_of(int err)
{
	switch (err) {
	case -ENOENT:
	case -ENOTDIR:
		return FETCH_GONE;
	case -EACCES:
	case -EPERM:
	case -EDEADLK:
	case -ELOOP:
		return FETCH_DENIED;
	default:
		return FETCH_TRANSIENT;
	}
}

/* Returns a descriptor, or a negative errno. */
static int open_file(struct file_mirror *file, struct stat *status, struct error *error)
{
	/* O_NONBLOCK: opening a FIFO must not hang; it does not affect regular files. */
	_cleanup_close_ int fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);

	int err;

	if (fd < 0 || fstat(fd, status)) {
		err = -errno;
		if (hint_for_source_file(err))
			error_set_hint(error, "%s", hint_for_source_file(err));
		return error_set(error, err, "cannot open '%.200s': %s", file->path,
				 strerror(-err));
	}
	if (S_ISDIR(status->st_mode)) {
		error_set_hint(error, "%s", hint_for_source_file(-EISDIR));
		return error_set(error, -EMEDIUMTYPE, "'%.200s' is a directory", file->path);
	}
	if (!S_ISREG(status->st_mode))
		return error_set(error, -EMEDIUMTYPE, "'%.200s' is not a regular file", file->path);
	__atomic_store_n(&file->device, status->st_dev, __ATOMIC_RELAXED);
	err = dependence_check(fd, file->path, error);
	return err ?: take_fd(&fd);
}

static int file_probe(struct mirror *mirror, struct mirror_probe *probe, struct error *error)
{
	struct file_mirror *file = mirror->private;
	_cleanup_close_ int fd = -1;
	char identity[IDENTITY_BYTES];
	struct stat status = {};

	fd = open_file(file, &status, error);
	if (fd < 0)
		return fd;
	if ((uint64_t)status.st_size < file->file_offset)
		return error_set(error, -EINVAL, "'%.200s' has %lld bytes, \"file_offset\" is %llu",
				 file->path, (long long)status.st_size,
				 (unsigned long long)file->file_offset);
	identify(&status, identity);
	probe->identity = strdup(identity);
	if (!probe->identity)
		return error_set(error, -ENOMEM, "no memory");
	probe->size = (uint64_t)status.st_size - file->file_offset;
	return 0;
}

static int refuse(struct file_run *job, enum fetch_failure failure, int err)
{
	job->failure = failure;
	return err;
}

/* Checks that the file has its identity, before and after it is read. */
static int check_identity(struct file_run *job, int fd, const char *expected)
{
	const struct file_mirror *file = job->mirror->private;
	struct stat status = {};

	if (fstat(fd, &status))
		return refuse(job, FETCH_TRANSIENT, -errno);
	identify(&status, job->found);
	if (!expected || !strcmp(expected, job->found))
		return 0;
	error_set_text(&job->error, "'%.120s' has changed: %s, before: %.120s", file->path,
		       job->found, expected);
	return refuse(job, FETCH_CHANGED, -ESTALE);
}

static int read_file(struct file_run *job)
{
	struct file_mirror *file = job->mirror->private;
	uint64_t needed = file->file_offset + job->mirror->source->object_bytes;
	char before[IDENTITY_BYTES];
	_cleanup_close_ int fd = -1;
	struct stat status = {};
	int err;

	fd = open_file(file, &status, &job->error);
	if (fd == -EMEDIUMTYPE)
		return refuse(job, FETCH_WRONG, fd);
	if (fd < 0)
		return refuse(job, failure_of(fd), fd);
	err = check_identity(job, fd, job->expected);
	if (err)
		return err;
	if ((uint64_t)status.st_size < needed) {
		error_set_text(&job->error, "'%.200s' has %lld bytes, the source needs %llu",
			       file->path, (long long)status.st_size, (unsigned long long)needed);
		return refuse(job, FETCH_WRONG, -EIO);
	}
	memcpy(before, job->found, sizeof(before));
	job->data = malloc(job->length);
	if (!job->data)
		return refuse(job, FETCH_TRANSIENT, -ENOMEM);
	err = pread_full(fd, job->data, job->length, file->file_offset + job->offset);
	if (err) {
		error_set_text(&job->error, "cannot read '%.200s': %s", file->path, strerror(-err));
		return refuse(job, FETCH_TRANSIENT, err);
	}
	return check_identity(job, fd, before);
}

static void file_work(struct pool_job *done)
{
	struct file_run *job = (struct file_run *)done; /* the job is its first member */

	job->err = read_file(job);
}

static void free_job(struct file_run *job)
{
	free(job->expected);
	free(job->data);
	free(job);
}

static void file_done(struct pool_job *done)
{
	struct file_run *job = (struct file_run *)done;
	struct run *run = job->run;

	if (run) {
		run->result = job->err;
		run->failure = job->failure;
		run->error = job->error;
		run->private = NULL;
		if (!job->err && !job->expected && mirror_is_pinned(run->mirror))
			run->identity = strdup(job->found);
		/* NB: swap the buffers. Copying would take the thread that all units wait for. */
		if (!job->err)
			job->data = run->sink->take_all(run, job->data);
	}
	free_job(job);
	if (run)
		run->sink->over(run);
}

/*
 * Writes the name of what may hang as a whole: the file system, as far as it is known without
 * touching it, or else the directory.
 */
static void write_place(const struct mirror *mirror, char *text, size_t bytes)
{
	const struct file_mirror *file = mirror->private;
	dev_t device = __atomic_load_n(&file->device, __ATOMIC_RELAXED);
	const char *end = strrchr(file->path, '/');
	int length = end == file->path ? 1 : (int)(end - file->path);

	if (device)
		snprintf(text, bytes, "device %u:%u", major(device), minor(device));
	else
		snprintf(text, bytes, "%.*s", length, file->path);
}

/* Returns a hash that is never 0. */
static uint64_t place_of(const struct mirror *mirror)
{
	char text[PATH_MAX];

	write_place(mirror, text, sizeof(text));
	return fnv_add(FNV_BEGIN, text, strlen(text)) | 1;
}

static void file_start(struct run *run)
{
	struct file_run *job = calloc(1, sizeof(*job));
	const char *pinned = mirror_is_pinned(run->mirror) ? run->mirror->identity : NULL;

	if (job && pinned)
		job->expected = strdup(pinned);
	if (!job || (pinned && !job->expected)) {
		free(job);
		run_lacks_memory(run);
		return;
	}
	job->run = run;
	job->mirror = run->mirror;
	job->offset = run->offset;
	job->length = run->length;
	job->job.work = file_work;
	job->job.done = file_done;
	job->job.place = place_of(run->mirror);
	run->private = job;
	run->fetcher->ops->submit(run->fetcher, &job->job);
}

static void file_cancel(struct run *run)
{
	const struct file_mirror *file = run->mirror->private;
	struct file_run *job = run->private;

	job->run = NULL;
	run->private = NULL;
	if (run->fetcher->ops->cancel(run->fetcher, &job->job))
		free_job(job);
	run_failed(run, FETCH_TRANSIENT,
		   error_set(&run->error, -ECANCELED,
			     "given up, '%.200s' could not be read in time", file->path));
}

static const char *file_host(const struct mirror *mirror, char *text, size_t bytes)
{
	write_place(mirror, text, bytes);
	return text;
}

static const struct mirror_ops file_ops = {
	.name = "file",
	.private_bytes = sizeof(struct file_mirror),
	.parse = file_parse,
	.close = file_close,
	.probe = file_probe,
	.start = file_start,
	.cancel = file_cancel,
	.blocking = true,
	.replaceable = true,
	.host = file_host,
};
MIRROR_KIND(file_ops);
