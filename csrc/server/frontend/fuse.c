/* SPDX-License-Identifier: MIT */
/*
 * The FUSE front end: the address space as one file, for kernels without ublk. The owner puts a loop
 * device on it. The file is in a mount that is attached to no directory (fuse_mount.h) and is opened
 * through /proc/PID/fd of this process, which only its owner may do.
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

#include "base/message.h"
#include "base/size.h"
#include "server/frontend/frontend.h"
#include "server/frontend/fuse_features.h"
#include "server/frontend/fuse_mount.h"
#include "server/frontend/fuse_queue.h"
#include "server/frontend/fuse_session.h"
#include "server/frontend/fuse_takeover.h"

enum {
	MAX_IO_BYTES = 1 << 20, /* 256 pages: FUSE_MAX_MAX_PAGES */
	INTRODUCTION_WAIT_MS = 10000,
	STOP_RETRY_MS = 10,
	DRAIN_WAIT_MS = 5000, /* for all threads, to come to an end of the requests */
};

static const char fuse_device[] = "/dev/fuse";

struct fuse {
	struct fuse_export export;
	struct fuse_session *session;
	struct fuse_crew crew;
	struct fuse_queue *queues;
	enum recovery_mode recovery; /* not RECOVERY_AUTO once it serves */
	unsigned opened;	     /* queues that have a descriptor */
	unsigned serving;	     /* queues that were started and not yet stopped */
	enum fuse_phase phase;	     /* atomic */
	int connection_fd;	     /* until the session has it */
	bool grown;		     /* taken over, and the kernel does not know its size */
	int place_fd; /* O_PATH, keeps the mount: its root, after a takeover the file */
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

/* Whether the connection is that of a server that is gone. */
static bool is_takeover(const struct frontend *frontend)
{
	return frontend->recover_fd_count != 0;
}

static int check_recovery(const struct frontend *frontend)
{
	enum recovery_mode recovery = frontend->recovery;

	if (recovery == RECOVERY_QUEUE || recovery == RECOVERY_FAIL_IO) {
		msg_error("--recovery %s is of ublk; with fuse it is reissue or swap",
			  recovery_name(recovery));
		return -EINVAL;
	}
	if (recovery == RECOVERY_SWAP && !frontend->engine->read_only) {
		msg_error("--recovery swap is for read-only devices: the kernel moves no other "
			  "loop device to another file");
		return -EINVAL;
	}
	return 0;
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
	if (frontend->unprivileged) {
		msg_error("--unprivileged is about ublk: a FUSE file needs a loop device, which "
			  "only root makes");
		return -EINVAL;
	}
	if (frontend->features_on || frontend->features_off) {
		msg_error("--feature and --no-feature are about the ublk driver");
		return -EINVAL;
	}
	if (frontend->recover_id >= 0) {
		msg_error("--recover is about ublk devices; a FUSE connection is taken over by "
			  "--recover-fds");
		return -EINVAL;
	}
	return check_recovery(frontend);
}

static int open_devices(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	int fd = open_device();

	if (fd < 0)
		return fd;
	fuse->connection_fd = fd;
	for (; fuse->opened < frontend->queues; fuse->opened++) {
		fd = open_device();
		if (fd < 0)
			return fd;
		fuse->queues[fuse->opened].device_fd = fd;
	}
	return 0;
}

static int take_kept_devices(struct frontend *frontend)
{
	const int *fds = frontend->recover_fds;
	struct fuse *fuse = frontend->private;

	for (unsigned i = 0; i < frontend->recover_fd_count; i++) {
		int err = fuse_take_kept_fd(fds[i], i ? FUSE_KEPT_DEVICE : FUSE_KEPT_FILE);

		if (err) {
			msg_error("--recover-fds: %d is not %s: %s", fds[i],
				  i ? fuse_device : "a file", strerror(-err));
			return err;
		}
	}
	fuse->place_fd = fds[0];
	fuse->connection_fd = fds[1];
	for (; fuse->opened < frontend->queues; fuse->opened++)
		fuse->queues[fuse->opened].device_fd = fds[2 + fuse->opened];
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
	frontend->private = fuse;
	fuse->crew.leader = FUSE_NO_LEADER;
	sem_init(&fuse->crew.calls, 0, 0);
	fuse->export.introduced_fd = -1;
	fuse->ended_fd = eventfd(0, EFD_CLOEXEC);
	if (fuse->ended_fd < 0)
		return -errno;
	fuse->export.introduced_fd = eventfd(0, EFD_CLOEXEC);
	if (fuse->export.introduced_fd < 0)
		return -errno;
	err = check_options(frontend);
	if (err)
		return err;
	fuse->export.engine = frontend->engine;
	fuse->export.page_cache = frontend->page_cache;
	fuse->export.max_io_bytes = frontend->max_io_bytes;
	clock_gettime(CLOCK_REALTIME, &fuse->export.time);
	snprintf(fuse->export.name, sizeof(fuse->export.name), "btrfs-ublk-%016llx",
		 (unsigned long long)frontend->tag);
	fuse->queues = calloc(frontend->queues, sizeof(*fuse->queues));
	if (!fuse->queues)
		return -ENOMEM;
	return is_takeover(frontend) ? take_kept_devices(frontend) : open_devices(frontend);
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

			msg_error("cannot clone the FUSE connection: %s", strerror(-err));
			return err;
		}
	}
	return make_session(fuse);
}

/* From the kernel's memory (DONT_SYNC): nobody could answer a request now. */
static int check_kept_file(const struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	uint64_t wanted = frontend->engine->size;
	struct pollfd connection = { .fd = fuse->queues[0].device_fd };
	struct statx status;
	int err;

	if (statx(fuse->place_fd, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_SIZE, &status)) {
		err = -errno;
		msg_error("--recover-fds: the file: %s", strerror(-err));
		return err;
	}
	fuse->grown = frontend->grow && status.stx_size < wanted;
	if (status.stx_size != wanted && !fuse->grown) {
		msg_error("the file has %llu bytes, the description %llu: they are not of the "
			  "same device",
			  (unsigned long long)status.stx_size, (unsigned long long)wanted);
		return -EINVAL;
	}
	if (poll(&connection, 1, 0) < 0)
		return -errno;
	if (connection.revents & POLLERR) {
		msg_error("the FUSE connection has ended");
		msg_hint("start a server anew, and move the loop device to its file (swap)");
		return -ENOTCONN;
	}
	return 0;
}

/* The mount is there, the kernel has been introduced, and whoever had the file open still has. */
static int take_over(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	int err = make_session(fuse);

	if (err)
		return err;
	fuse_introduce(fuse->session);
	fuse->export.minor = 0; /* that was not the kernel's */
	fuse->export.opened = 1;
	err = check_kept_file(frontend);
	return err ? err : fuse_resend(fuse->queues[0].device_fd);
}

static int start_queues(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;

	for (unsigned i = 0; i < frontend->queues; i++) {
		struct fuse_queue *queue = &fuse->queues[i];
		/* What a CPU submits, any thread may receive. */
		int err =
			placement_choose(frontend->placement, &(cpu_set_t){}, &queue->thread.cpus);

		if (err)
			return err;
		queue->index = (int)i;
		queue->depth = frontend->depth;
		queue->buffer_bytes = frontend->max_io_bytes;
		queue->thread.ended_fd = fuse->ended_fd;
		queue->thread.realtime = frontend->realtime;
		queue->phase = &fuse->phase;
		queue->session = fuse->session;
		queue->crew = &fuse->crew;
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

/*
 * The kernel introduces itself as soon as the threads read. NB: looking at the file would be a better
 * proof, but a process must not wait for itself: killed in between, it would never end, and its
 * connection neither.
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
	msg_error("the kernel does not take up the FUSE connection");
	return ready ? -ENOTCONN : -ETIMEDOUT;
}

/* What the owner can do when this server is killed. */
static int settle_recovery(const struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;
	unsigned minor = fuse->export.minor;
	/* After a takeover it is proven. */
	bool resends = is_takeover(frontend) || minor >= FUSE_RESEND_MINOR;

	fuse->recovery = frontend->recovery;
	if (fuse->recovery == RECOVERY_REISSUE && !resends) {
		msg_error("this kernel speaks FUSE 7.%u: --recovery reissue needs 7.%u (Linux 6.9)",
			  minor, FUSE_RESEND_MINOR);
		msg_hint("use --recovery swap, if the device is read-only");
		return -EOPNOTSUPP;
	}
	if (fuse->recovery != RECOVERY_AUTO)
		return 0;
	if (resends)
		fuse->recovery = RECOVERY_REISSUE;
	else
		fuse->recovery = frontend->engine->read_only ? RECOVERY_SWAP : RECOVERY_NONE;
	return 0;
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

/* Answers what the threads have taken, and no more. */
static void leave_requests(struct fuse *fuse)
{
	__atomic_store_n(&fuse->phase, FUSE_LEAVE, __ATOMIC_RELEASE);
	while (!stop_queues_within(fuse, DRAIN_WAIT_MS))
		;
}

static int fuse_stop(struct frontend *frontend)
{
	struct fuse *fuse = frontend->private;

	__atomic_store_n(&fuse->phase, FUSE_DRAIN, __ATOMIC_RELEASE);
	/* The mount goes now, unless somebody still has the file open. */
	if (fuse->place_fd >= 0)
		close(fuse->place_fd);
	fuse->place_fd = -1;
	/* NB: with several readers there is always another request, until they get errors. */
	if (!stop_queues_within(fuse, DRAIN_WAIT_MS)) {
		msg_warning("the file is still in use: what is not answered yet fails");
		leave_requests(fuse);
	}
	return 0;
}

static int fuse_start(struct frontend *frontend)
{
	/* Without SA_RESTART: it is to end a read(2). */
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
	if (!err)
		err = settle_recovery(frontend);
	if (err)
		fuse_stop(frontend);
	return err;
}

/* Their numbers, for an owner who wants to keep them too (pidfd_getfd(2)). */
static json_t *list_devices(const struct frontend *frontend)
{
	const struct fuse *fuse = frontend->private;
	json_t *list = json_pack("[i]", fuse_session_fd(fuse->session));

	for (unsigned i = 0; list && i < frontend->queues; i++) {
		if (json_array_append_new(list, json_integer(fuse->queues[i].device_fd))) {
			json_decref(list);
			return NULL;
		}
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
	    json_object_set_new(ready, "fuse_fds", list_devices(frontend)))
		return -ENOMEM;
	/* Not known after a takeover. */
	if (fuse->export.minor &&
	    json_object_set_new(ready, "fuse_minor", json_integer(fuse->export.minor)))
		return -ENOMEM;
	return 0;
}

static dev_t fuse_number(const struct frontend *frontend)
{
	const struct fuse *fuse = frontend->private;
	struct statx status;

	/* NB: without asking the file system, which is this process. */
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

/* An owner who asks for it keeps the descriptors: the process itself cannot tell. */
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
	/* With the last of these descriptors, what still waits for an answer fails. */
	for (unsigned i = 0; i < fuse->opened; i++)
		close(fuse->queues[i].device_fd);
	if (fuse->session)
		fuse_session_destroy(fuse->session);
	if (fuse->connection_fd >= 0)
		close(fuse->connection_fd);
	if (fuse->ended_fd >= 0)
		close(fuse->ended_fd);
	if (fuse->export.introduced_fd >= 0)
		close(fuse->export.introduced_fd);
	sem_destroy(&fuse->crew.calls);
	free(fuse->queues);
	free(fuse);
	frontend->private = NULL;
}

const struct frontend_ops fuse_frontend = {
	.name = "fuse",
	.kernel_device = fuse_device,
	.default_depth = 16,
	.default_max_io_bytes = MAX_IO_BYTES,
	/* No more memory for buffers, but four times as many that wait. */
	.waiting_depth = 64,
	/* Any thread takes what comes. All buffers are locked: 24 MiB, however many threads there are. */
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
