/* SPDX-License-Identifier: MIT */
/* btrfs-ublk-server: one process serves one address space. */
#include <errno.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "server/control_connection.h"
#include "server/description.h"
#include "server/frontend/frontend.h"
#include "server/frontend/ublk_admin.h"
#include "server/options.h"
#include "server/sandbox.h"
#include "server/stats.h"

enum { IN_USE_POLL_MS = 250 };

static int load(const char *path, struct engine *engine)
{
	_cleanup_fclose_ FILE *file = NULL;

	if (!strcmp(path, "-"))
		return description_load(stdin, "standard input", engine);
	file = fopen(path, "re");
	if (!file) {
		int err = -errno;

		msg_error("cannot open description '%s': %s", path, strerror(-err));
		return err;
	}
	return description_load(file, path, engine);
}

/* INT and HUP come from a terminal to all its processes: where there is an owner, it decides. */
static int open_signals(bool owned)
{
	sigset_t signals;
	int fd;

	sigemptyset(&signals);
	sigaddset(&signals, SIGTERM);
	if (owned) {
		signal(SIGINT, SIG_IGN);
		signal(SIGHUP, SIG_IGN);
	} else {
		sigaddset(&signals, SIGINT);
		sigaddset(&signals, SIGHUP);
	}
	signal(SIGPIPE, SIG_IGN);
	/* Before any thread exists, so that all inherit it. */
	sigprocmask(SIG_BLOCK, &signals, NULL);
	fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
	return fd < 0 ? -errno : fd;
}

static int announce(struct control_connection *control, const struct frontend *frontend)
{
	json_t *ready = json_pack("{s:s, s:i, s:s, s:b}", "event", "ready", "protocol",
				  CONTROL_PROTOCOL, "front_end", frontend->ops->name, "io_flusher",
				  (int)sandbox_has_io_flushers());
	int err = ready ? frontend->ops->describe(frontend, ready) : -ENOMEM;

	if (err) {
		json_decref(ready);
		return err;
	}
	if (control->fd >= 0)
		return control_send(control, ready);
	json_dumpf(ready, stdout, JSON_COMPACT);
	json_decref(ready);
	putchar('\n');
	return fflush(stdout) ? -EIO : 0;
}

/* Returns true when the device may go: nobody uses it, or a second signal insists. */
static bool may_stop(const struct frontend *frontend, int signals, bool *warned)
{
	if (signals > 1 || !frontend->ops->in_use(frontend))
		return true;
	if (!*warned)
		msg_warning("the device is in use: it is served until it is not, or until another "
			    "signal comes");
	*warned = true;
	return false;
}

/*
 * Returns 0 when it is time to stop, or a negative errno when the front end failed. An owner that
 * died, or a signal, does not pull the device from under a file system that has it mounted.
 */
static int wait_for_stop(struct control_connection *control, const struct frontend *frontend,
			 int signal_fd)
{
	struct pollfd fds[] = {
		{ .fd = signal_fd, .events = POLLIN },
		{ .fd = control->fd, .events = POLLIN },
		{ .fd = frontend->ops->ended_fd(frontend), .events = POLLIN },
	};
	bool stopping = false, warned = false;
	int signals = 0;

	for (;;) {
		struct signalfd_siginfo signal_info;
		enum control_action action = CONTROL_GO_ON;

		if (poll(fds, 3, stopping ? IN_USE_POLL_MS : -1) < 0) {
			if (errno == EINTR)
				continue;
			return -errno;
		}
		if (fds[2].revents) {
			msg_error("the device failed, or somebody else stopped it");
			return -EIO;
		}
		while (read(signal_fd, &signal_info, sizeof(signal_info)) > 0)
			signals++;
		if (fds[1].revents)
			action = control_receive(control);
		if (action == CONTROL_STOP)
			return 0;
		if (action == CONTROL_GONE)
			fds[1].fd = -1;
		stopping |= signals || action == CONTROL_GONE;
		if (stopping && may_stop(frontend, signals, &warned))
			return 0;
	}
}

static int serve(struct frontend *frontend, struct control_connection *control, int signal_fd)
{
	int err, stop_err;

	err = frontend->ops->open(frontend);
	if (!err)
		err = sandbox_enter();
	if (!err)
		err = frontend->ops->start(frontend);
	if (err)
		return err;
	err = announce(control, frontend);
	if (err)
		msg_error("cannot say that the device is ready: %s", strerror(-err));
	else
		err = wait_for_stop(control, frontend, signal_fd);
	stop_err = frontend->ops->stop(frontend);
	if (!err)
		err = stop_err;
	control_send(control, json_pack("{s:s, s:o}", "event", "stopped", "stats",
					stats_json(frontend->engine)));
	return err;
}

/* Buffers are locked: more of them than the machine has memory would kill others. */
static int check_memory(const struct frontend *frontend)
{
	uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t buffers = (uint64_t)frontend->queues * frontend->depth * frontend->max_io_bytes;
	char wanted[SIZE_TEXT_BYTES], limit[SIZE_TEXT_BYTES];

	if (buffers <= memory / 4)
		return 0;
	msg_error("%u queues x %u requests x %u bytes would lock %s; the limit is a quarter of "
		  "this machine's memory, %s",
		  frontend->queues, frontend->depth, frontend->max_io_bytes,
		  size_format(buffers, wanted), size_format(memory / 4, limit));
	return -EINVAL;
}

/* Returns an exit status: only a wrong description is the caller's fault, not a kernel's EINVAL. */
static int run(const struct server_options *options)
{
	_cleanup_close_ int signal_fd = open_signals(options->control_fd >= 0);
	const struct frontend_ops *ops = options->frontend ?: frontend_default();
	struct control_connection control;
	struct engine engine;
	struct frontend frontend = {
		.ops = ops,
		.engine = &engine,
		.queues = options->queues,
		.wanted_id = options->id,
		.tag = options->tag,
		.recovery = options->recovery,
		.recover_fds = options->recover_fds,
		.recover_fd_count = options->recover_fd_count,
	};
	int err;

	if (signal_fd < 0 || !ops)
		return EXIT_FAILED;
	frontend.depth = options->depth ?: ops->default_depth;
	frontend.max_io_bytes = options->max_io_bytes ?: ops->default_max_io_bytes;
	if (check_memory(&frontend))
		return EXIT_USAGE;
	err = load(options->description, &engine);
	if (err)
		return err == -EINVAL ? EXIT_USAGE : EXIT_FAILED;
	err = control_init(&control, options->control_fd, &engine);
	if (err) {
		msg_error("--control-fd %d is no socket: %s", options->control_fd, strerror(-err));
		engine_close(&engine);
		return EXIT_USAGE;
	}
	err = engine_open(&engine, frontend.queues);
	if (err) {
		engine_close(&engine);
		return err == -EINVAL ? EXIT_USAGE : EXIT_FAILED;
	}
	err = serve(&frontend, &control, signal_fd);
	frontend.ops->close(&frontend);
	engine_close(&engine);
	return err ? EXIT_FAILED : EXIT_OK;
}

int main(int argc, char **argv)
{
	struct server_options options;
	int err;

	message_init("btrfs-ublk-server");
	/* An arena of its own would cost each thread 64 MiB of locked address space. */
	mallopt(M_ARENA_MAX, 1);
	if (server_options_parse(argc, argv, &options)) {
		msg_hint("see btrfs-ublk-server --help");
		return EXIT_USAGE;
	}
	if (options.list_devices)
		err = ublk_list_devices();
	else if (options.delete_device >= 0)
		err = ublk_remove_device((unsigned)options.delete_device, options.tag);
	else
		return run(&options);
	return err ? EXIT_FAILED : EXIT_OK;
}
