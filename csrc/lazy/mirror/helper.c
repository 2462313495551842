/* SPDX-License-Identifier: MIT */
#include "lazy/mirror/helper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "base/cleanup.h"
#include "lazy/mirror/remote.h"

enum { OUTPUT_BYTES = 64 << 10, REAP_MS = 10 };

extern char **environ;

static int start(const char *const arguments[], int fd, pid_t *pid)
{
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t none;
	int err;

	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, fd, STDIN_FILENO);
	posix_spawn_file_actions_adddup2(&actions, fd, STDOUT_FILENO);
	posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
	/* Close the server's devices and other descriptors. */
	posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
	posix_spawnattr_init(&attributes);
	/*
	 * Unblock the signals that the server's threads block. A group of its own can be killed as
	 * a whole.
	 */
	sigemptyset(&none);
	posix_spawnattr_setsigmask(&attributes, &none);
	posix_spawnattr_setpgroup(&attributes, 0);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
	err = -posix_spawnp(pid, arguments[0], &actions, &attributes, (char *const *)arguments,
			    environ);
	posix_spawnattr_destroy(&attributes);
	posix_spawn_file_actions_destroy(&actions);
	return err;
}

static int left_ms(uint64_t deadline_ns)
{
	uint64_t now_ns = clock_now_ns();

	return now_ns < deadline_ns ? (int)((deadline_ns - now_ns) / 1000000 + 1) : 0;
}

/* Reads until the end of file. */
static int read_output(int fd, uint64_t deadline_ns, struct secret *output)
{
	for (;;) {
		struct pollfd poll_fd = { .fd = fd, .events = POLLIN };
		ssize_t bytes;

		if (!poll(&poll_fd, 1, left_ms(deadline_ns)))
			return -ETIMEDOUT;
		bytes = recv(fd, output->text + output->length, OUTPUT_BYTES - output->length,
			     MSG_DONTWAIT);
		if (!bytes || (bytes < 0 && errno == ECONNRESET))
			return 0; /* reset: the helper has not read its input */
		if (bytes < 0 && errno != EINTR && errno != EAGAIN)
			return -errno;
		if (bytes > 0)
			output->length += (size_t)bytes;
		if (output->length == OUTPUT_BYTES)
			return -EFBIG;
	}
}

static int wait_for(pid_t pid, uint64_t deadline_ns, int *status)
{
	const struct timespec pause = { .tv_nsec = REAP_MS * 1000000 };
	pid_t ended;

	while ((ended = waitpid(pid, status, WNOHANG)) != pid) {
		if (ended < 0 && errno != EINTR)
			return -errno;
		if (!left_ms(deadline_ns))
			return -ETIMEDOUT;
		nanosleep(&pause, NULL);
	}
	*status = WIFEXITED(*status) ? WEXITSTATUS(*status) : 128 + WTERMSIG(*status);
	return 0;
}

static int talk(pid_t pid, int fd, const char *input, uint32_t timeout_ms, struct secret *output,
		int *status)
{
	uint64_t deadline_ns = clock_now_ns() + (uint64_t)timeout_ms * 1000000;
	size_t length = strlen(input);
	int err = 0;

	/* The input fits into the socket's buffer. EPIPE: the helper does not read it. */
	if (send(fd, input, length, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)length &&
	    errno != EPIPE)
		err = -errno;
	shutdown(fd, SHUT_WR);
	if (!err)
		err = read_output(fd, deadline_ns, output);
	if (!err)
		err = wait_for(pid, deadline_ns, status);
	if (err) {
		kill(-pid, SIGKILL);
		waitpid(pid, status, 0);
	}
	return err;
}

int helper_run(const char *const arguments[], const char *input, uint32_t timeout_ms,
	       struct secret *output, int *status, struct error *error)
{
	_cleanup_close_ int ours = -1, theirs = -1;
	int fds[2];
	pid_t pid;
	int err;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds))
		return error_set(error, -errno, "cannot make a socket: %s", strerror(errno));
	ours = fds[0];
	theirs = fds[1];
	output->text = calloc(1, OUTPUT_BYTES + 1);
	if (!output->text)
		return error_set(error, -ENOMEM, "no memory for a helper's output");
	err = start(arguments, theirs, &pid);
	if (err)
		return error_set(error, err, "cannot run %s: %s", arguments[0], strerror(-err));
	/* Close our copy, or its output would never end. */
	close(take_fd(&theirs));
	err = talk(pid, ours, input, timeout_ms, output, status);
	if (err)
		return error_set(error, err, "%s: %s", arguments[0],
				 err == -ETIMEDOUT ? "no answer in time" : strerror(-err));
	return 0;
}
