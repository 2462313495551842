/* SPDX-License-Identifier: MIT */
/* btrfs-ublk-server: one process that serves one address space. */
#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/confine.h"
#include "base/message.h"
#include "base/size.h"
#include "base/worker_pool.h"
#include "fetch/dependence.h"
#include "fetch/mirror/secret.h"
#include "server/description.h"
#include "server/frontend/frontend.h"
#include "server/frontend/ublk_admin.h"
#include "server/lifetime.h"
#include "server/options.h"
#include "server/sandbox.h"

/* An addition to every helper's: the device was left for another server, as requested. */
enum { EXIT_HANDED_OVER = 4 };

static int load(const char *path, struct engine *engine)
{
	_cleanup_fclose_ FILE *file = NULL;

	if (!strcmp(path, "-"))
		return description_load(stdin, "standard input", engine);
	file = fopen(path, "re");
	if (!file) {
		int err = -errno;

		return msg_fail(err, "cannot open description '%s': %s", path, strerror(-err));
	}
	return description_load(file, path, engine);
}

/*
 * Ends the process without cleaning up: the device stays, and threads serve it to the very end, so
 * only the exit may take their memory.
 */
static void leave(int status) __attribute__((noreturn));

static void leave(int status)
{
	fflush(NULL);
	_exit(status);
}

static int stop(struct frontend *frontend)
{
	/* Otherwise stop() would wait for reads without a deadline. */
	engine_abandon(frontend->engine);
	return frontend->ops->stop(frontend);
}

/* Call this when the front end has failed, or when its device could not be announced. */
static void stop_or_leave(struct frontend *frontend, bool announced)
{
	bool taken_over = frontend->recover_id >= 0 || frontend->recover_fd_count;
	bool known = announced || taken_over;

	/*
	 * Other processes may use a device that was announced. One that was not would never be
	 * found again.
	 */
	if (known && frontend->ops->outlives && frontend->ops->outlives(frontend)) {
		msg_hint("the device was left for another server: %s takes it over",
			 frontend->ops->takeover_option);
		leave(EXIT_FAILED);
	}
	stop(frontend);
}

static int serve(struct frontend *frontend, struct lifetime *lifetime)
{
	int action, err = sandbox_enter();

	if (!err)
		err = frontend->ops->start(frontend);
	if (err)
		return err;
	dependence_set_own(frontend->ops->number(frontend));
	err = lifetime_announce(lifetime);
	if (err) {
		msg_error("cannot say that the device is ready: %s", strerror(-err));
		stop_or_leave(frontend, false);
		return err;
	}
	action = lifetime_wait(lifetime);
	if (action == CONTROL_HAND_OVER) {
		frontend->ops->hand_over(frontend);
		lifetime_end(lifetime, true);
		leave(EXIT_HANDED_OVER);
	}
	if (action < 0)
		stop_or_leave(frontend, true);
	else
		err = stop(frontend);
	lifetime_end(lifetime, false);
	return action < 0 ? action : err;
}

/* Functions that only lack memory or descriptors return that, without a message. */
static void say_why(int err)
{
	if (!message_has_error())
		msg_error("cannot serve: %s", strerror(-err));
}

/* Returns an exit status. The front end returns -EOPNOTSUPP only for what the kernel lacks. */
static int failure_status(int err)
{
	say_why(err);
	return err == -EOPNOTSUPP ? EXIT_CAPABILITY : EXIT_FAILED;
}

/* Returns an exit status of a description, whose mistakes are the caller's. */
static int description_status(int err)
{
	say_why(err);
	return err == -EINVAL ? EXIT_USAGE : EXIT_FAILED;
}

/* Returns an exit status. */
static int serve_requests(struct frontend *frontend, struct lifetime *lifetime)
{
	int err = lifetime_start_pool(lifetime), status;

	if (err)
		return msg_fail(EXIT_FAILED, "cannot start a thread for requests: %s",
				strerror(-err));
	err = serve(frontend, lifetime);
	status = err ? failure_status(err) : EXIT_OK;
	if (lifetime_stop_pool(lifetime)) {
		msg_warning("a request is still running, and is abandoned");
		leave(status);
	}
	return status;
}

/* Buffers are locked, so more of them than the machine has memory would kill other processes. */
static int check_memory(const struct frontend *frontend)
{
	uint64_t memory = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t buffers = (uint64_t)frontend->queues * frontend->depth * frontend->max_io_bytes;
	char wanted[SIZE_TEXT_BYTES], limit[SIZE_TEXT_BYTES];

	if (buffers <= memory / 4)
		return 0;
	return msg_fail(
		-EINVAL,
		"%u queues x %u requests x %u bytes would lock %s; the limit is a quarter of "
		"this machine's memory, %s",
		frontend->queues, frontend->depth, frontend->max_io_bytes,
		size_format(buffers, wanted), size_format(memory / 4, limit));
}

static int open_sockets(const struct server_options *options, struct lifetime *lifetime)
{
	int err = control_init(&lifetime->owner, options->control_fd, NULL, CONTROL_OWNER_WAIT_MS);

	if (err)
		return msg_fail(err, "--control-fd %d is no socket: %s", options->control_fd,
				strerror(-err));
	err = control_server_init(&lifetime->clients, options->listen_fd);
	if (err)
		return msg_fail(err, "--listen-fd %d is no listening socket: %s",
				options->listen_fd, strerror(-err));
	return err;
}

/*
 * Returns an exit status. Only a wrong description is the caller's fault, while EINVAL may also
 * come from the kernel.
 */
static int run_loaded(struct frontend *frontend, struct lifetime *lifetime)
{
	int err = frontend->ops->open(frontend);
	int status;

	if (err) {
		status = failure_status(err);
	} else if (check_memory(frontend)) {
		status = EXIT_USAGE;
	} else {
		dependence_set_own(frontend->ops->number(frontend));
		err = engine_open(frontend->engine, frontend->queues);
		status = err ? description_status(err) : serve_requests(frontend, lifetime);
	}
	frontend->ops->close(frontend);
	return status;
}

/* Returns an exit status. Serves, makes and writes nothing. */
static int check_description(const char *path)
{
	struct engine engine;
	int err = load(path, &engine);

	if (err)
		return description_status(err);
	engine.dry = true;
	err = engine_open(&engine, 1);
	engine_close(&engine);
	return err ? description_status(err) : EXIT_OK;
}

static unsigned default_depth(const struct frontend *frontend, bool waits)
{
	const struct frontend_ops *ops = frontend->ops;
	unsigned share = ops->waiting_depth_of_all / frontend->queues ?: 1;

	if (!waits)
		return ops->default_depth;
	return share < ops->waiting_depth ? share : ops->waiting_depth;
}

/* Sets queue depth and request size as asked for, or as the description suggests. */
static void set_sizes(struct frontend *frontend, const struct server_options *options)
{
	const struct frontend_ops *ops = frontend->ops;
	bool waits = ops->waiting_depth && engine_waits(frontend->engine);

	frontend->depth = options->depth ?: default_depth(frontend, waits);
	frontend->max_io_bytes =
		options->max_io_bytes ?:
			(waits ? ops->waiting_max_io_bytes : ops->default_max_io_bytes);
}

static int run(const struct server_options *options)
{
	_cleanup_close_ int signal_fd = lifetime_open_signals(options->control_fd >= 0);
	const struct frontend_ops *ops = options->frontend ?: frontend_default();
	struct engine engine;
	struct frontend frontend = {
		.ops = ops,
		.engine = &engine,
		.wanted_id = options->id,
		.tag = options->tag,
		.recovery = options->recovery,
		.recover_id = options->recover_id,
		.grow = options->grow,
		.features = options->features,
		.recover_fds = options->recover_fds,
		.recover_fd_count = options->recover_fd_count,
		.queues = options->queues,
	};
	struct lifetime lifetime = { .frontend = &frontend, .signal_fd = signal_fd };
	int err, status;

	if (signal_fd < 0)
		return failure_status(signal_fd);
	if (!ops)
		return EXIT_FAILED;
	lifetime_allow_descriptors();
	/* Do this before there are threads. */
	confine_thread(CONFINE_MAIN);
	if (open_sockets(options, &lifetime))
		return EXIT_USAGE;
	err = load(options->description, &engine);
	if (err)
		return description_status(err);
	set_sizes(&frontend, options);
	status = run_loaded(&frontend, &lifetime);
	engine_close(&engine);
	return status;
}

int main(int argc, char **argv)
{
	struct server_options options;
	int err;

	message_init("btrfs-ublk-server");
	/*
	 * Otherwise each thread would have an arena of its own, with 64 MiB of locked address
	 * space.
	 */
	mallopt(M_ARENA_MAX, 1);
	lazy_small_stacks();
	secret_guard_json();
	if (server_options_parse(argc, argv, &options))
		return hint_usage();
	if (options.list_features)
		err = frontend_print_features();
	else if (options.list_devices)
		err = ublk_list_devices();
	else if (options.delete_device >= 0)
		err = ublk_remove_device((unsigned)options.delete_device, options.tag);
	else if (options.check)
		return check_description(options.description);
	else
		return run(&options);
	return err ? EXIT_FAILED : EXIT_OK;
}
