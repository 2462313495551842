/* SPDX-License-Identifier: MIT */
/*
 * The FUSE front end: the address space as one file, for kernels without ublk. The owner puts a
 * loop device on the file. Its mount is attached to no directory (fuse_mount.h), so it is opened
 * through /proc/PID/fd of this process, which only the owner may do.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "server/frontend/frontend.h"
#include "server/frontend/fuse_allocator.h"
#include "server/frontend/fuse_features.h"
#include "server/frontend/fuse_journal.h"
#include "server/frontend/fuse_mount.h"
#include "server/frontend/fuse_queue.h"
#include "server/frontend/fuse_session.h"
#include "server/frontend/fuse_takeover.h"

enum {
	MAX_IO_BYTES = 1 << 20, /* 256 pages: FUSE_MAX_MAX_PAGES */
	INTRODUCTION_WAIT_MS = 10000,
	STOP_RETRY_MS = 10,
	DRAIN_WAIT_MS = 5000, /* for all threads, until no more requests come */
};

static const char fuse_device[] = "/dev/fuse";

struct fuse {
	struct fuse_export export;
	struct fuse_session *session;
	struct fuse_journal journal;
	struct fuse_threads threads;
	struct fuse_allocator allocator;
	struct fuse_queue *queues;
	enum recovery_mode recovery; /* not RECOVERY_AUTO */
	unsigned opened;	     /* number of queues that have a descriptor */
	unsigned serving;	     /* number of queues that were started and not yet stopped */
	enum fuse_phase phase;	     /* atomic */
	int connection_fd;	     /* until the session owns it */
	bool grown;   /* it was taken over, and the kernel does not know its new size */
	int place_fd; /* O_PATH; keeps the mount: its root, or the file after a takeover */
	int ended_fd;
};

static void ignore_signal(int number)
{
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

/* Whether the connection is that of a server that is gone. */
static bool is_takeover(const struct frontend *frontend)
{
	return frontend->recover_fd_count != 0;
}

static int check_recovery(const struct frontend *frontend)
{
	enum recovery_mode recovery = frontend->recovery;

	if (recovery == RECOVERY_QUEUE || recovery == RECOVERY_FAIL_IO)
		return msg_fail(-EINVAL, "--recovery %s is for ublk only; fuse has reissue",
				recovery_name(recovery));
	return 0;
}

static int check_options(const struct frontend *frontend)
{
	if (frontend->max_io_bytes > MAX_IO_BYTES)
		return msg_fail(-EINVAL, "FUSE requests have at most %u bytes, not %u",
				MAX_IO_BYTES, frontend->max_io_bytes);
	if (frontend->wanted_id >= 0)
		return msg_fail(-EINVAL,
				"--id %d is for ublk only: a FUSE file has no device number",
				frontend->wanted_id);
	if (frontend->features)
		return msg_fail(-EINVAL, "--feature is for the ublk driver");
	if (frontend->recover_id >= 0)
		return msg_fail(-EINVAL,
				"--recover is for ublk devices; a FUSE connection is taken over by "
				"--recover-fds");
	return check_recovery(frontend);
}

static int open_devices(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	int fd = open_device(), err;

	if (fd < 0)
		return fd;
	fuse->connection_fd = fd;
	for (; fuse->opened < frontend->queues; fuse->opened++) {
		fd = open_device();
		if (fd < 0)
			return fd;
		fuse->queues[fuse->opened].device_fd = fd;
	}
	fuse->journal = (struct fuse_journal){ .queues = frontend->queues,
					       .depth = frontend->depth,
					       .buffer_bytes = frontend->max_io_bytes };
	err = fuse_journal_create(&fuse->journal);
	if (err)
		return msg_fail(err, "cannot make memory to be shared with the next server: %s",
				strerror(-err));
	return err;
}

static int take_kept_devices(struct frontend *frontend)
{
	const int *fds = frontend->recover_fds;
	unsigned last = frontend->recover_fd_count - 1;
	struct fuse *fuse = frontend->private;
	int err;

	for (unsigned i = 0; i < last; i++) {
		err = fuse_take_kept_fd(fds[i], i ? FUSE_KEPT_DEVICE : FUSE_KEPT_FILE);
		if (err)
			return msg_fail(err, "--recover-fds: %d is not %s: %s", fds[i],
					i ? fuse_device : "a file", strerror(-err));
	}
	fuse->place_fd = fds[0];
	fuse->connection_fd = fds[1];
	for (; fuse->opened < frontend->queues; fuse->opened++)
		fuse->queues[fuse->opened].device_fd = fds[2 + fuse->opened];
	err = fuse_journal_open(&fuse->journal, fds[last], frontend->queues);
	if (err)
		return msg_fail(
			err, "--recover-fds: %d is not the journal of a server with %u queues: %s",
			fds[last], frontend->queues, strerror(-err));
	frontend->depth = fuse->journal.depth;
	frontend->max_io_bytes = fuse->journal.buffer_bytes;
	return 0;
}

static int fuse_open(struct frontend *frontend)
{
	struct fuse *fuse = calloc(1, sizeof(*fuse));
	int err;

	if (!fuse)
		return -ENOMEM;
	fuse->connection_fd = -1;
	fuse->place_fd = -1;
	fuse->journal.fd = -1;
	frontend->private = fuse;
	fuse->threads.leader = FUSE_NO_LEADER;
	sem_init(&fuse->threads.calls, 0, 0);
	fuse->export.introduced_fd = -1;
	fuse->allocator.wake_fd = -1;
	fuse->ended_fd = eventfd(0, EFD_CLOEXEC);
	if (fuse->ended_fd < 0)
		return -errno;
	fuse->export.introduced_fd = eventfd(0, EFD_CLOEXEC);
	if (fuse->export.introduced_fd < 0)
		return -errno;
	fuse->allocator.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (fuse->allocator.wake_fd < 0)
		return -errno;
	err = check_options(frontend);
	if (err)
		return err;
	fuse->recovery = frontend->recovery;
	if (fuse->recovery == RECOVERY_AUTO)
		fuse->recovery = RECOVERY_REISSUE;
	fuse->export.engine = frontend->engine;
	clock_gettime(CLOCK_REALTIME, &fuse->export.time);
	snprintf(fuse->export.name, sizeof(fuse->export.name), "btrfs-ublk-%016llx",
		 (unsigned long long)frontend->tag);
	fuse->queues = calloc(frontend->queues, sizeof(*fuse->queues));
	if (!fuse->queues)
		return -ENOMEM;
	fuse->allocator.queues = fuse->queues;
	for (; fuse->allocator.count < frontend->queues; fuse->allocator.count++) {
		int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

		if (fd < 0)
			return -errno;
		fuse->queues[fuse->allocator.count].filled_fd = fd;
	}
	err = is_takeover(frontend) ? take_kept_devices(frontend) : open_devices(frontend);
	fuse->export.max_io_bytes = frontend->max_io_bytes;
	return err;
}

static int make_session(struct fuse *fuse)
{
	fuse->session = fuse_export_session(&fuse->export, fuse->connection_fd);
	fuse->connection_fd = -1;
	return fuse->session ? 0 : -ENOMEM;
}

static int mount_it(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	uint32_t connection = (uint32_t)fuse->connection_fd;

	fuse->place_fd = fuse_mount_detached(fuse->connection_fd, frontend->max_io_bytes);
	if (fuse->place_fd < 0)
		return fuse->place_fd;
	for (unsigned i = 0; i < frontend->queues; i++) {
		if (ioctl(fuse->queues[i].device_fd, FUSE_DEV_IOC_CLONE, &connection)) {
			int err = -errno;

			return msg_fail(err, "cannot clone the FUSE connection: %s",
					strerror(-err));
		}
	}
	return make_session(fuse);
}

/* Ask the kernel's cache only (DONT_SYNC): nobody could answer a request now. */
static int check_kept_file(const struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	uint64_t wanted = frontend->engine->size;
	struct pollfd connection = { .fd = fuse->queues[0].device_fd };
	struct statx status;
	int err;

	if (statx(fuse->place_fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_SIZE, &status)) {
		err = -errno;
		return msg_fail(err, "--recover-fds: the file: %s", strerror(-err));
	}
	fuse->grown = frontend->grow && status.stx_size < wanted;
	if (status.stx_size != wanted && !fuse->grown)
		return msg_fail(
			-EINVAL,
			"the file has %llu bytes, the description %llu: they are not of the "
			"same device",
			(unsigned long long)status.stx_size, (unsigned long long)wanted);
	if (poll(&connection, 1, 0) < 0)
		return -errno;
	if (connection.revents & POLLERR) {
		msg_error("the FUSE connection has ended");
		msg_hint("unmount the device, and make it again");
		return -ENOTCONN;
	}
	return 0;
}

/*
 * Takes the connection over: it is mounted and initialized, and processes may have the file open.
 * The queues begin with the requests in the journal.
 */
static int take_over(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	int err = make_session(fuse);

	if (err)
		return err;
	fuse_introduce(fuse->session);
	fuse->export.minor = 0; /* it was not the kernel's */
	fuse->export.opened = 1;
	return check_kept_file(frontend);
}

static int start_queues(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	int err;

	for (unsigned i = 0; i < frontend->queues; i++) {
		struct fuse_queue *queue = &fuse->queues[i];

		queue->index = (int)i;
		queue->journal = &fuse->journal;
		queue->allocator_fd = fuse->allocator.wake_fd;
		queue->thread.ended_fd = fuse->ended_fd;
		queue->phase = &fuse->phase;
		queue->session = fuse->session;
		queue->threads = &fuse->threads;
		queue->worker = &frontend->engine->workers[i];
		err = fuse_queue_start(queue);
		if (err)
			return msg_fail(err, "cannot start thread %u: %s", i, strerror(-err));
		fuse->serving++;
	}
	err = fuse_allocator_start(&fuse->allocator);
	if (err)
		return msg_fail(err, "cannot start the thread that gets memory: %s",
				strerror(-err));
	return err;
}

/*
 * Waits for the kernel's INIT request, which comes as soon as the threads read. NB: stat() of the
 * file would be a better proof, but a process must not wait for itself: if it was killed then,
 * neither it nor its connection would ever end.
 */
static int wait_for_kernel(const struct fuse *fuse)
{
	struct pollfd fds[] = {
		{ .fd = fuse->export.introduced_fd, .events = POLLIN },
		{ .fd = fuse->ended_fd, .events = POLLIN },
	};
	int ready;

	do
		ready = poll(fds, 2, INTRODUCTION_WAIT_MS);
	while (ready < 0 && errno == EINTR);
	if (fds[0].revents)
		return 0;
	msg_error("the kernel does not answer on the FUSE connection");
	return ready ? -ENOTCONN : -ETIMEDOUT;
}

static bool stop_queues_within(struct fuse *fuse, unsigned wait_ms)
{
	unsigned waited_ms = 0;

	while (fuse->serving && waited_ms < wait_ms) {
		if (fuse_queue_stop_within(&fuse->queues[fuse->serving - 1], STOP_RETRY_MS))
			fuse->serving--;
		else
			waited_ms += STOP_RETRY_MS;
	}
	return !fuse->serving;
}

/* Answers the requests that the threads have received, and no more. */
static void leave_requests(struct fuse *fuse)
{
	fuse_allocator_stop(&fuse->allocator);
	__atomic_store_n(&fuse->phase, FUSE_LEAVE, __ATOMIC_RELEASE);
	while (!stop_queues_within(fuse, DRAIN_WAIT_MS))
		;
}

static int fuse_stop(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;

	fuse_allocator_stop(&fuse->allocator);
	__atomic_store_n(&fuse->phase, FUSE_DRAIN, __ATOMIC_RELEASE);
	/* The mount goes now, unless a process still has the file open. */
	cleanup_close(&fuse->place_fd);
	fuse->place_fd = -1;
	/* NB: several readers can keep sending requests until these fail. */
	if (!stop_queues_within(fuse, DRAIN_WAIT_MS)) {
		msg_warning("the file is still in use: requests without an answer fail");
		leave_requests(fuse);
	}
	return 0;
}

static int fuse_start(struct frontend *frontend)
{
	/* Without SA_RESTART, the signal ends a read(2). */
	struct sigaction action = { .sa_handler = ignore_signal };
	struct fuse *fuse = frontend->private;
	int err = sigaction(FUSE_QUEUE_SIGNAL, &action, NULL) ? -errno : 0;

	if (!err)
		err = is_takeover(frontend) ? take_over(frontend) : mount_it(frontend);
	if (!err)
		err = start_queues(frontend);
	if (!err && !is_takeover(frontend))
		err = wait_for_kernel(frontend->private);
	if (!err && fuse->grown)
		err = fuse_forget_size(fuse->queues[0].device_fd, FUSE_FILE_INODE);
	if (err)
		fuse_stop(frontend);
	return err;
}

/*
 * Returns the numbers of the descriptors that the next server needs, for an owner that keeps them
 * too (pidfd_getfd(2)).
 */
static json_t *list_kept_fds(const struct frontend *frontend)
{
	const struct fuse *fuse = frontend->private;
	json_t *list = json_pack("[i]", fuse_session_fd(fuse->session));

	for (unsigned i = 0; list && i < frontend->queues; i++) {
		if (json_array_append_new(list, json_integer(fuse->queues[i].device_fd))) {
			json_decref(list);
			return NULL;
		}
	}
	if (list && json_array_append_new(list, json_integer(fuse->journal.fd))) {
		json_decref(list);
		return NULL;
	}
	return list;
}

static int fuse_describe(const struct frontend *frontend, json_t *ready)
{
	const struct fuse *fuse = frontend->private;
	char path[96];

	snprintf(path, sizeof(path), "/proc/%d/fd/%d%s%s", getpid(), fuse->place_fd,
		 is_takeover(frontend) ? "" : "/", is_takeover(frontend) ? "" : fuse->export.name);
	if (json_object_set_new(ready, "file", json_string(path)) ||
	    json_object_set_new(ready, "queues", json_integer(frontend->queues)) ||
	    json_object_set_new(ready, "depth", json_integer(frontend->depth)) ||
	    json_object_set_new(ready, "max_io_bytes", json_integer(frontend->max_io_bytes)) ||
	    json_object_set_new(ready, "recovery", json_string(recovery_name(fuse->recovery))) ||
	    json_object_set_new(ready, "fuse_fds", list_kept_fds(frontend)))
		return -ENOMEM;
	/* unknown after a takeover */
	if (fuse->export.minor &&
	    json_object_set_new(ready, "fuse_minor", json_integer(fuse->export.minor)))
		return -ENOMEM;
	return 0;
}

static dev_t fuse_number(const struct frontend *frontend)
{
	const struct fuse *fuse = frontend->private;
	struct statx status;

	/* NB: this must not ask the file system, which is this process. */
	if (fuse->place_fd < 0 ||
	    statx(fuse->place_fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, 0, &status))
		return 0;
	return makedev(status.stx_dev_major, status.stx_dev_minor);
}

static bool fuse_in_use(const struct frontend *frontend)
{
	const struct fuse *fuse = frontend->private;

	return __atomic_load_n(&fuse->export.opened, __ATOMIC_RELAXED) != 0;
}

/* The owner keeps the descriptors if it has asked for recovery; this process cannot tell. */
static bool fuse_outlives(const struct frontend *frontend)
{
	const struct fuse *fuse = frontend->private;

	return fuse->recovery == RECOVERY_REISSUE;
}

static void fuse_hand_over(struct frontend *frontend)
{
	leave_requests(frontend->private);
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
	/* Closing the last of these descriptors fails all requests that wait. */
	for (unsigned i = 0; i < fuse->opened; i++)
		close(fuse->queues[i].device_fd);
	if (fuse->session)
		fuse_session_destroy(fuse->session);
	cleanup_close(&fuse->connection_fd);
	cleanup_close(&fuse->ended_fd);
	cleanup_close(&fuse->journal.fd);
	cleanup_close(&fuse->export.introduced_fd);
	sem_destroy(&fuse->threads.calls);
	/* The process is ending, and so does a thread that waits for memory and uses this. */
	frontend->private = NULL;
	if (!fuse_allocator_stop(&fuse->allocator))
		return;
	for (unsigned i = 0; i < fuse->allocator.count; i++)
		close(fuse->queues[i].filled_fd);
	cleanup_close(&fuse->allocator.wake_fd);
	free(fuse->queues);
	free(fuse);
}

const struct frontend_ops fuse_frontend = {
	.name = "fuse",
	.kernel_device = fuse_device,
	.default_depth = 16,
	.default_max_io_bytes = MAX_IO_BYTES,
	/* Four times as many requests may wait, in no more memory for buffers. */
	.waiting_depth = 64,
	/*
	 * Any thread takes any request. All buffers are locked: 24 MiB, however many threads there
	 * are.
	 */
	.waiting_depth_of_all = 96,
	.waiting_max_io_bytes = MAX_IO_BYTES / 4,
	.takeover_option = "--recover-fds",
	.features = fuse_features_describe,
	.open = fuse_open,
	.start = fuse_start,
	.describe = fuse_describe,
	.ended_fd = fuse_ended_fd,
	.number = fuse_number,
	.in_use = fuse_in_use,
	.stop = fuse_stop,
	.outlives = fuse_outlives,
	.hand_over = fuse_hand_over,
	.close = fuse_close,
};
