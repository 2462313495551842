/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-keeper: holds what a device needs to outlive its server and its supervisor, and starts
 * another supervisor when that has died. It allocates nothing and reads no file while it waits.
 */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/clock.h"
#include "base/message.h"

#define PROGRAM "btrfs-ublk-keeper"

static const char usage_text[] =
	"Usage: " PROGRAM " --watch FD --directory DIR [--lock FILE] [COMMAND [WORD...]]\n"
	"\n"
	"Keep all inherited descriptors open for as long as DIR exists. FD is the end to read\n"
	"of a pipe whose other end only a device's supervisor has: when it is closed without\n"
	"a farewell, the supervisor has died, and COMMAND is started, again and again with\n"
	"longer and longer pauses, until it ends with status 0. It inherits the descriptors.\n"
	"With --lock, that is done only by who holds flock(2) on FILE, of all that wait for\n"
	"it; COMMAND inherits it, and its number is appended to the last WORD.\n"
	"\n"
	"The supervisor writes one byte at a time:\n"
	"  g   go: before that, a closed pipe ends this process\n"
	"  s   stay: hold the descriptors, and start nothing\n"
	"\n"
	"  --help      show this text\n"
	"  --version   show the version\n";

enum {
	FIRST_DELAY_MS = 100,
	LONGEST_DELAY_MS = 30000,
	/* A supervisor that has lived for so long did not fail to start. */
	LONG_LIFE_MS = 60000,
	/*
	 * How often to check whether the device is gone; normally, the process that removes it ends
	 * this one.
	 */
	LOOK_MS = 60000,
	NUMBER_BYTES = 12,
};

static const char score_path[] = "/proc/self/oom_score_adj";

struct keeper {
	const char *directory;
	char **command;	  /* NULL: only hold the descriptors */
	char *last_word;  /* the command's last word, with room for the lock's number */
	const char *lock; /* NULL: none */
	int watch_fd;
	int score; /* the score of what is started */
};

static int read_score(void)
{
	FILE *file = fopen(score_path, "re");
	int score = 0;

	if (!file)
		return 0;
	if (fscanf(file, "%d", &score) != 1)
		score = 0;
	fclose(file);
	return score;
}

/* Without CAP_SYS_RESOURCE, the score cannot be lowered, and stays as it is. */
static void write_score(int score)
{
	char text[16];
	int length = snprintf(text, sizeof(text), "%d", score);
	int fd = open(score_path, O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return;
	(void)!write(fd, text, (size_t)length);
	close(fd);
}

static bool is_gone(const struct keeper *keeper)
{
	return access(keeper->directory, F_OK) && errno == ENOENT;
}

/* Waits until the supervisor says something or ends. Returns 0 when it has ended. */
static char next_word(const struct keeper *keeper)
{
	struct pollfd pollfd = { .fd = keeper->watch_fd, .events = POLLIN };
	char word;

	for (;;) {
		ssize_t got;

		if (poll(&pollfd, 1, LOOK_MS) == 0) {
			if (is_gone(keeper))
				exit(EXIT_OK);
			continue;
		}
		got = read(keeper->watch_fd, &word, 1);
		if (got == 1)
			return word;
		if (got == 0)
			return 0;
		if (errno != EINTR && errno != EAGAIN) {
			msg_error("--watch %d: %s", keeper->watch_fd, strerror(errno));
			exit(EXIT_FAILED);
		}
	}
}

static void hold(const struct keeper *keeper)
{
	while (!is_gone(keeper))
		poll(NULL, 0, LOOK_MS);
	exit(EXIT_OK);
}

static void on_alarm(int signum)
{
}

/*
 * Returns the locked open file, or a negative errno. A supervisor that another keeper has revived
 * has the lock, and ends this process when it takes over.
 */
static int wait_for_lock(const struct keeper *keeper)
{
	const struct itimerval often = { { LOOK_MS / 1000, 0 }, { LOOK_MS / 1000, 0 } };
	const struct itimerval never = { 0 };
	struct sigaction action = { .sa_handler = on_alarm }; /* without SA_RESTART */
	int fd = open(keeper->lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	int err = 0;

	if (fd < 0)
		return -errno;
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	while (!err && flock(fd, LOCK_EX)) {
		/* NB: a kernel without memory for locks answers at once. */
		err = errno == EINTR ? 0 : -errno;
		if (is_gone(keeper))
			exit(EXIT_OK);
	}
	setitimer(ITIMER_REAL, &never, NULL);
	if (err)
		close(fd);
	return err ?: fd;
}

static pid_t start(const struct keeper *keeper, int lock_fd)
{
	sigset_t none;
	pid_t child = fork();

	if (child)
		return child;
	if (lock_fd >= 0) {
		fcntl(lock_fd, F_SETFD, 0);
		snprintf(keeper->last_word + strlen(keeper->last_word), NUMBER_BYTES, "%d",
			 lock_fd);
	}
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	setsid();
	write_score(keeper->score);
	execv(keeper->command[0], keeper->command);
	msg_error("cannot start %s: %s", keeper->command[0], strerror(errno));
	_exit(EXIT_FAILED);
}

/*
 * Returns the command's exit status, 128 and more for a signal, or -1 when it could not be started.
 */
static int run_command(const struct keeper *keeper)
{
	int status, lock_fd = keeper->lock ? wait_for_lock(keeper) : -1;
	pid_t child;

	if (keeper->lock && lock_fd < 0)
		return msg_fail(-1, "cannot lock %s: %s", keeper->lock, strerror(-lock_fd));
	child = start(keeper, lock_fd);
	cleanup_close(&lock_fd); /* only the child has the lock now */
	if (child < 0)
		return msg_fail(-1, "cannot start another supervisor: %s", strerror(errno));
	while (waitpid(child, &status, 0) < 0) {
		if (errno != EINTR)
			return -1;
	}
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The process that takes the supervisor's place ends this one. */
static void revive(const struct keeper *keeper)
{
	unsigned delay_ms = 0;

	for (;;) {
		uint64_t started_ns;
		int status;

		poll(NULL, 0, (int)delay_ms);
		if (is_gone(keeper))
			exit(EXIT_OK);
		started_ns = clock_now_ns();
		status = run_command(keeper);
		if (!status)
			return;
		if (clock_now_ns() - started_ns > LONG_LIFE_MS * NS_PER_MS)
			delay_ms = 0;
		else if (!delay_ms)
			delay_ms = FIRST_DELAY_MS;
		else
			delay_ms = delay_ms * 2 < LONGEST_DELAY_MS ? delay_ms * 2 :
								     LONGEST_DELAY_MS;
	}
}

static void keep(const struct keeper *keeper)
{
	bool is_going = false;

	for (;;) {
		switch (next_word(keeper)) {
		case 'g':
			is_going = true;
			break;
		case 's':
			hold(keeper);
			break;
		case 0:
			if (!is_going)
				exit(EXIT_OK);
			if (keeper->command)
				revive(keeper);
			hold(keeper);
			break;
		default:
			break;
		}
	}
}

static char *with_room(const char *word)
{
	char *copy = malloc(strlen(word) + NUMBER_BYTES);

	if (copy)
		strcpy(copy, word);
	return copy;
}

static int parse(int argc, char **argv, struct keeper *keeper)
{
	static const struct option options[] = {
		{ "watch", required_argument, NULL, 'w' },
		{ "directory", required_argument, NULL, 'd' },
		{ "lock", required_argument, NULL, 'l' },
		{ "help", no_argument, NULL, 'h' },
		{ "version", no_argument, NULL, 'V' },
		{ NULL, 0, NULL, 0 },
	};
	char *end;
	int option;

	/* "+" stops at the first word that is no option, because the command has its own. */
	while ((option = getopt_long(argc, argv, "+", options, NULL)) != -1) {
		switch (option) {
		case 'w':
			errno = 0;
			keeper->watch_fd = (int)strtol(optarg, &end, 10);
			if (errno || *end || end == optarg || fcntl(keeper->watch_fd, F_GETFD) < 0)
				return msg_fail(-EINVAL, "--watch '%s' is no open descriptor",
						optarg);
			break;
		case 'd':
			keeper->directory = optarg;
			break;
		case 'l':
			keeper->lock = optarg;
			break;
		case 'h':
			exit(print_help(usage_text));
		case 'V':
			exit(print_version());
		default:
			hint_usage();
			return -EINVAL;
		}
	}
	if (keeper->watch_fd < 0 || !keeper->directory)
		return msg_fail(-EINVAL, "%s is missing",
				keeper->watch_fd < 0 ? "--watch" : "--directory");
	if (optind < argc) {
		keeper->command = argv + optind;
		keeper->last_word = with_room(argv[argc - 1]);
		if (!keeper->last_word)
			return -ENOMEM;
		argv[argc - 1] = keeper->last_word;
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct keeper keeper = { .watch_fd = -1 };

	message_init(PROGRAM);
	if (parse(argc, argv, &keeper))
		return EXIT_USAGE;
	/* The next supervisor must not inherit the pipe of the previous one. */
	if (fcntl(keeper.watch_fd, F_SETFD, FD_CLOEXEC))
		return msg_fail(EXIT_FAILED, "--watch: %s", strerror(errno));
	/* Only a process that removes the device, or takes our place, ends this one. */
	signal(SIGHUP, SIG_IGN);
	signal(SIGINT, SIG_IGN);
	signal(SIGPIPE, SIG_IGN);
	keeper.score = read_score();
	write_score(-1000);
	if (mlockall(MCL_CURRENT | MCL_FUTURE))
		msg_warning("cannot lock memory: %s", strerror(errno));
	prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0);
	keep(&keeper);
}
