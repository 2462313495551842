/* SPDX-License-Identifier: MIT */
/*
 * The FUSE front end: the address space as one file, for kernels without ublk. The owner puts a loop
 * device on it. The file is in a mount that is attached to no directory (fuse_mount.h) and is opened
 * through /proc/PID/fd of this process, which only its owner may do.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/message.h"
#include "base/size.h"
#include "server/frontend/frontend.h"
#include "server/frontend/fuse_mount.h"
#include "server/frontend/fuse_queue.h"
#include "server/frontend/fuse_session.h"

enum {
	MAX_IO_BYTES = 1 << 20, /* 256 pages: FUSE_MAX_MAX_PAGES */
};

static const char fuse_device[] = "/dev/fuse";

struct fuse {
	struct fuse_export export;
	struct fuse_session *session;
	struct fuse_queue *queues;
	unsigned opened;   /* queues that have a descriptor */
	unsigned serving;  /* queues that were started and not yet stopped */
	bool stopping;	   /* atomic */
	int connection_fd; /* until the session has it */
	int mount_fd;
	int ended_fd;
};

static void ignore_signal(int number)
{
	(void)number;
}

static int open_device(void)
{
	int fd = open(fuse_device, O_RDWR | O_CLOEXEC);
	int err = -errno;

	if (fd >= 0)
		return fd;
	msg_error("cannot open %s: %s", fuse_device, strerror(-err));
	if (err == -ENOENT || err == -ENODEV)
		msg_hint("modprobe fuse");
	return err;
}

static int check_options(const struct frontend *frontend)
{
	if (frontend->max_io_bytes > MAX_IO_BYTES) {
		msg_error("FUSE requests have at most %u bytes, not %u", MAX_IO_BYTES,
			  frontend->max_io_bytes);
		return -EINVAL;
	}
	if (frontend->wanted_id >= 0) {
		msg_error("a FUSE file has no device number: --id %d makes no sense",
			  frontend->wanted_id);
		return -EINVAL;
	}
	return 0;
}

static int fuse_open(struct frontend *frontend)
{
	struct fuse *fuse = calloc(1, sizeof(*fuse));
	int err;

	if (!fuse)
		return -ENOMEM;
	fuse->connection_fd = -1;
	fuse->mount_fd = -1;
	frontend->private = fuse;
	fuse->ended_fd = eventfd(0, EFD_CLOEXEC);
	if (fuse->ended_fd < 0)
		return -errno;
	err = check_options(frontend);
	if (err)
		return err;
	fuse->export.engine = frontend->engine;
	fuse->export.max_io_bytes = frontend->max_io_bytes;
	clock_gettime(CLOCK_REALTIME, &fuse->export.time);
	snprintf(fuse->export.name, sizeof(fuse->export.name), "btrfs-ublk-%016llx",
		 (unsigned long long)frontend->tag);
	fuse->queues = calloc(frontend->queues, sizeof(*fuse->queues));
	if (!fuse->queues)
		return -ENOMEM;
	fuse->connection_fd = open_device();
	if (fuse->connection_fd < 0)
		return fuse->connection_fd;
	for (; fuse->opened < frontend->queues; fuse->opened++) {
		err = open_device();
		if (err < 0)
			return err;
		fuse->queues[fuse->opened].device_fd = err;
	}
	return 0;
}

static int mount_it(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	uint32_t connection = (uint32_t)fuse->connection_fd;

	fuse->mount_fd = fuse_mount_detached(fuse->connection_fd, frontend->max_io_bytes);
	if (fuse->mount_fd < 0)
		return fuse->mount_fd;
	for (unsigned i = 0; i < frontend->queues; i++) {
		if (ioctl(fuse->queues[i].device_fd, FUSE_DEV_IOC_CLONE, &connection)) {
			int err = -errno;

			msg_error("cannot clone the FUSE connection: %s", strerror(-err));
			return err;
		}
	}
	fuse->session = fuse_export_session(&fuse->export, fuse->connection_fd);
	fuse->connection_fd = -1;
	return fuse->session ? 0 : -ENOMEM;
}

static int start_queues(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;

	for (unsigned i = 0; i < frontend->queues; i++) {
		struct fuse_queue *queue = &fuse->queues[i];
		int err;

		queue->index = i;
		queue->depth = frontend->depth;
		queue->buffer_bytes = frontend->max_io_bytes;
		queue->thread.ended_fd = fuse->ended_fd;
		queue->stopping = &fuse->stopping;
		queue->session = fuse->session;
		queue->worker = &frontend->engine->workers[i];
		err = fuse_queue_start(queue);
		if (err) {
			msg_error("cannot start thread %u: %s", i, strerror(-err));
			return err;
		}
		fuse->serving++;
	}
	return 0;
}

/* The threads answer this one: after it, the connection is known to work. */
static int check_file(const struct fuse *fuse)
{
	struct stat status;

	if (fstatat(fuse->mount_fd, fuse->export.name, &status, AT_SYMLINK_NOFOLLOW)) {
		int err = -errno;

		msg_error("the kernel did not take the FUSE connection: %s", strerror(-err));
		return err;
	}
	if ((uint64_t)status.st_size != fuse->export.engine->size) {
		msg_error("the kernel shows %lld bytes instead of %llu", (long long)status.st_size,
			  (unsigned long long)fuse->export.engine->size);
		return -EPROTO;
	}
	return 0;
}

static int fuse_stop(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;

	__atomic_store_n(&fuse->stopping, true, __ATOMIC_RELEASE);
	/* The mount goes now, unless somebody still has the file open. */
	if (fuse->mount_fd >= 0)
		close(fuse->mount_fd);
	fuse->mount_fd = -1;
	while (fuse->serving)
		fuse_queue_stop(&fuse->queues[--fuse->serving]);
	return 0;
}

static int fuse_start(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	/* Without SA_RESTART: it is to end a read(2). */
	struct sigaction action = { .sa_handler = ignore_signal };
	int err = sigaction(FUSE_QUEUE_SIGNAL, &action, NULL) ? -errno : mount_it(frontend);

	if (!err)
		err = start_queues(frontend);
	if (!err)
		err = check_file(fuse);
	if (err)
		fuse_stop(frontend);
	return err;
}

static int fuse_describe(const struct frontend *frontend, json_t *ready)
{
	const struct fuse *fuse = frontend->private;
	char path[96];

	snprintf(path, sizeof(path), "/proc/%d/fd/%d/%s", getpid(), fuse->mount_fd,
		 fuse->export.name);
	if (json_object_set_new(ready, "file", json_string(path)) ||
	    json_object_set_new(ready, "queues", json_integer(frontend->queues)) ||
	    json_object_set_new(ready, "depth", json_integer(frontend->depth)) ||
	    json_object_set_new(ready, "max_io_bytes", json_integer(frontend->max_io_bytes)))
		return -ENOMEM;
	return 0;
}

static bool fuse_in_use(const struct frontend *frontend)
{
	const struct fuse *fuse = frontend->private;

	return __atomic_load_n(&fuse->export.opened, __ATOMIC_RELAXED) != 0;
}

static int fuse_ended_fd(const struct frontend *frontend)
{
	const struct fuse *fuse = frontend->private;

	return fuse->ended_fd;
}

static void fuse_close(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;

	if (!fuse)
		return;
	/* With the last of these descriptors, what still waits for an answer fails. */
	for (unsigned i = 0; i < fuse->opened; i++)
		close(fuse->queues[i].device_fd);
	if (fuse->session)
		fuse_session_destroy(fuse->session);
	if (fuse->connection_fd >= 0)
		close(fuse->connection_fd);
	if (fuse->ended_fd >= 0)
		close(fuse->ended_fd);
	free(fuse->queues);
	free(fuse);
	frontend->private = NULL;
}

const struct frontend_ops fuse_frontend = {
	.name = "fuse",
	.kernel_device = fuse_device,
	.default_depth = 16,
	.default_max_io_bytes = MAX_IO_BYTES,
	.open = fuse_open,
	.start = fuse_start,
	.describe = fuse_describe,
	.ended_fd = fuse_ended_fd,
	.in_use = fuse_in_use,
	.stop = fuse_stop,
	.close = fuse_close,
};
