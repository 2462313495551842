/* SPDX-License-Identifier: MIT */
/* btrfs-ublk-server: one process serves one address space. */
#include <errno.h>
#include <getopt.h>
#include <malloc.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
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
#include "server/sandbox.h"
#include "server/stats.h"

enum {
	MAX_QUEUES = 256,
	MIN_IO_BYTES = 64 << 10,
	MAX_IO_BYTES = 32 << 20,
	IN_USE_POLL_MS = 250,
};

static const char help_text[] =
	"Usage: btrfs-ublk-server [OPTIONS] DESCRIPTION\n"
	"       btrfs-ublk-server --list-devices\n"
	"       btrfs-ublk-server --delete-device ID --tag HEX\n"
	"\n"
	"Serve the address space that DESCRIPTION (a JSON file, or - for standard input)\n"
	"defines, until TERM or INT, or until the owner at the other end of the control\n"
	"socket has gone. While the device is mounted, or the file open, it is served on;\n"
	"a second signal ends it all the same.\n"
	"\n"
	"  --front-end NAME    ublk: as a block device; fuse: as a file, for a loop device\n"
	"                      on it; auto (default): ublk if /dev/ublk-control exists\n"
	"  --queues N          hardware queues, or threads on the file (default: one per\n"
	"                      CPU that this process may use, at most 4)\n"
	"  --depth N           requests in flight per queue, 1 to 1024 (default: ublk 64,\n"
	"                      fuse 16)\n"
	"  --max-io SIZE       largest request, 64K to 32M (default: ublk 256K, fuse 1M,\n"
	"                      which is also its limit); the server locks queues x depth\n"
	"                      x this much memory\n"
	"  --id N              ublk: device number (default: the first free one)\n"
	"  --tag HEX           64-bit mark in the device's kernel record, or file name\n"
	"  --control-fd FD     connected Unix socket that speaks JSON lines; INT and HUP\n"
	"                      are then left to the owner\n"
	"  --list-devices      one JSON line per ublk device of this machine\n"
	"  --delete-device ID  remove a device whose server is gone; it must carry --tag\n"
	"  --verbose           say more on standard error\n"
	"  --help, --version\n"
	"\n"
	"When reads are answered, a JSON line with \"event\": \"ready\", and \"device\" or\n"
	"\"file\", goes to the control socket, or to standard output where there is none.\n"
	"Exit status: 0 stopped as asked, 1 failure, 2 wrong usage or description.\n";

struct options {
	const char *description;
	const struct frontend_ops *frontend; /* NULL: auto */
	unsigned long queues;
	unsigned long depth;   /* 0: the front end's default */
	uint64_t max_io_bytes; /* 0: the front end's default */
	int id;
	uint64_t tag;
	bool tag_given;
	int control_fd;
	bool list_devices;
	int delete_device; /* -1: none */
};

static int parse_number(const char *option, const char *text, unsigned long low, unsigned long high,
			unsigned long *value)
{
	char *end;

	errno = 0;
	*value = strtoul(text, &end, 10);
	if (errno || *end || end == text || *text == '-' || *value < low || *value > high) {
		msg_error("%s '%s' is not a number from %lu to %lu", option, text, low, high);
		return -EINVAL;
	}
	return 0;
}

static int parse_tag(const char *text, struct options *options)
{
	char *end;

	errno = 0;
	options->tag = strtoull(text, &end, 16);
	if (errno || *end || end == text || strlen(text) > 16) {
		msg_error("--tag '%s' is not a number of up to 16 hexadecimal digits", text);
		return -EINVAL;
	}
	options->tag_given = true;
	return 0;
}

static int parse_max_io(const char *text, struct options *options)
{
	uint64_t bytes;

	if (size_parse(text, &bytes) || bytes < MIN_IO_BYTES || bytes > MAX_IO_BYTES ||
	    bytes % BLOCK_BYTES) {
		msg_error("--max-io '%s' is not a multiple of 4K from 64K to 32M", text);
		return -EINVAL;
	}
	options->max_io_bytes = bytes;
	return 0;
}

static int parse_frontend(const char *name, struct options *options)
{
	options->frontend = frontend_find(name);
	if (!options->frontend && strcmp(name, "auto") != 0) {
		msg_error("--front-end '%s' is neither auto, ublk nor fuse", name);
		return -EINVAL;
	}
	return 0;
}

static unsigned long default_queues(void)
{
	cpu_set_t cpus;
	int count = 1;

	if (!sched_getaffinity(0, sizeof(cpus), &cpus))
		count = CPU_COUNT(&cpus);
	return count > 4 ? 4 : (unsigned long)count;
}

enum option_code {
	OPT_FRONT_END = 1,
	OPT_QUEUES,
	OPT_DEPTH,
	OPT_MAX_IO,
	OPT_ID,
	OPT_TAG,
	OPT_CONTROL_FD,
	OPT_LIST,
	OPT_DELETE,
	OPT_VERBOSE,
	OPT_HELP,
	OPT_VERSION,
};

static const struct option long_options[] = {
	{ "front-end", required_argument, NULL, OPT_FRONT_END },
	{ "queues", required_argument, NULL, OPT_QUEUES },
	{ "depth", required_argument, NULL, OPT_DEPTH },
	{ "max-io", required_argument, NULL, OPT_MAX_IO },
	{ "id", required_argument, NULL, OPT_ID },
	{ "tag", required_argument, NULL, OPT_TAG },
	{ "control-fd", required_argument, NULL, OPT_CONTROL_FD },
	{ "list-devices", no_argument, NULL, OPT_LIST },
	{ "delete-device", required_argument, NULL, OPT_DELETE },
	{ "verbose", no_argument, NULL, OPT_VERBOSE },
	{ "help", no_argument, NULL, OPT_HELP },
	{ "version", no_argument, NULL, OPT_VERSION },
	{},
};

static int parse_option(int code, const char *argument, struct options *options)
{
	unsigned long number;
	int err;

	switch (code) {
	case OPT_FRONT_END:
		return parse_frontend(argument, options);
	case OPT_QUEUES:
		return parse_number("--queues", argument, 1, MAX_QUEUES, &options->queues);
	case OPT_DEPTH:
		return parse_number("--depth", argument, 1, 1024, &options->depth);
	case OPT_MAX_IO:
		return parse_max_io(argument, options);
	case OPT_ID:
		err = parse_number("--id", argument, 0, 1 << 20, &number);
		options->id = err ? -1 : (int)number;
		return err;
	case OPT_TAG:
		return parse_tag(argument, options);
	case OPT_CONTROL_FD:
		err = parse_number("--control-fd", argument, 0, 1 << 20, &number);
		options->control_fd = err ? -1 : (int)number;
		return err;
	case OPT_LIST:
		options->list_devices = true;
		return 0;
	case OPT_DELETE:
		err = parse_number("--delete-device", argument, 0, 1 << 20, &number);
		options->delete_device = err ? -1 : (int)number;
		return err;
	case OPT_VERBOSE:
		message_set_verbose(true);
		return 0;
	case OPT_HELP:
		fputs(help_text, stdout);
		exit(EXIT_OK);
	case OPT_VERSION:
		puts("btrfs-ublk-server " BTRFS_UBLK_VERSION);
		exit(EXIT_OK);
	default:
		return -EINVAL; /* getopt has said what is wrong */
	}
}

static int parse_options(int argc, char **argv, struct options *options)
{
	int code, err;

	*options = (struct options){
		.queues = default_queues(),
		.id = -1,
		.control_fd = -1,
		.delete_device = -1,
	};
	while ((code = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
		err = parse_option(code, optarg, options);
		if (err)
			return err;
	}
	if (options->list_devices || options->delete_device >= 0) {
		if (optind != argc || (options->delete_device >= 0 && !options->tag_given)) {
			msg_error("%s", options->list_devices ? "--list-devices stands alone" :
								"--delete-device needs --tag only");
			return -EINVAL;
		}
		return 0;
	}
	if (optind != argc - 1) {
		msg_error("%s", optind == argc ? "no description given" :
						 "more than one description given");
		return -EINVAL;
	}
	options->description = argv[optind];
	return 0;
}

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
static int run(const struct options *options)
{
	_cleanup_close_ int signal_fd = open_signals(options->control_fd >= 0);
	const struct frontend_ops *ops = options->frontend ?: frontend_default();
	struct control_connection control;
	struct engine engine;
	struct frontend frontend = {
		.ops = ops,
		.engine = &engine,
		.queues = (unsigned)options->queues,
		.wanted_id = options->id,
		.tag = options->tag,
	};
	int err;

	if (signal_fd < 0 || !ops)
		return EXIT_FAILED;
	frontend.depth = options->depth ? (unsigned)options->depth : ops->default_depth;
	frontend.max_io_bytes = options->max_io_bytes ? (uint32_t)options->max_io_bytes :
							ops->default_max_io_bytes;
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
	struct options options;
	int err;

	message_init("btrfs-ublk-server");
	/* An arena of its own would cost each thread 64 MiB of locked address space. */
	mallopt(M_ARENA_MAX, 1);
	if (parse_options(argc, argv, &options)) {
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
