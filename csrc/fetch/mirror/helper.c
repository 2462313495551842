/* SPDX-License-Identifier: MIT */
#include "fetch/mirror/helper.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "base/cleanup.h"
#include "fetch/mirror/remote.h"

enum {
	OUTPUT_BYTES = 64 << 10,
	REAP_MS = 10,
	/* How long an answer is good for others; a helper runs about as often, if it has to. */
	ANSWER_MS = 5000,
	RUNS_AT_ONCE = 10,
};

/* A helper with an input, and its last answer. There are as many as maps name, and they stay. */
struct helper {
	struct helper *next;
	char *program, *input;
	pthread_mutex_t lock; /* for what follows */
	uint64_t paid_ns;     /* each run moves this on; how far it is ahead is bounded */
	/* What the last run gave, and the last one that was good: one that fails takes nothing away. */
	struct helper_answer {
		uint64_t number;   /* of the run, from 1 on; 0: there is none */
		uint64_t ended_ns; /* when that was over */
		struct secret output;
		int status, err;
		struct error error;
	} last, good;
};

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

static int run(const char *const arguments[], const char *input, uint32_t timeout_ms,
	       struct secret *output, int *status, struct error *error)
{
	_cleanup_close_ int local = -1, remote = -1;
	int fds[2];
	pid_t pid;
	int err;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds))
		return error_set(error, -errno, "cannot make a socket: %s", strerror(errno));
	local = fds[0];
	remote = fds[1];
	output->text = calloc(1, OUTPUT_BYTES + 1);
	if (!output->text)
		return error_set(error, -ENOMEM, "no memory for a helper's output");
	err = start(arguments, remote, &pid);
	if (err)
		return error_set(error, err, "cannot run %s: %s", arguments[0], strerror(-err));
	/* Close our copy, or its output would never end. */
	close(take_fd(&remote));
	err = talk(pid, local, input, timeout_ms, output, status);
	if (err)
		return error_set(error, err, "%s: %s", arguments[0],
				 err == -ETIMEDOUT ? "no answer in time" : strerror(-err));
	return 0;
}

static struct helper *find(const char *program, const char *input)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static struct helper *helpers;
	struct helper *helper;

	pthread_mutex_lock(&lock);
	helper = helpers;
	while (helper &&
	       (strcmp(helper->program, program) != 0 || strcmp(helper->input, input) != 0))
		helper = helper->next;
	if (!helper)
		helper = calloc(1, sizeof(*helper));
	if (helper && !helper->program) {
		helper->program = strdup(program);
		helper->input = strdup(input);
		pthread_mutex_init(&helper->lock, NULL);
		if (helper->program && helper->input) {
			helper->next = helpers;
			helpers = helper;
		} else {
			free(helper->program);
			free(helper->input);
			free(helper);
			helper = NULL;
		}
	}
	pthread_mutex_unlock(&lock);
	return helper;
}

/* Another one's answer, which came while the caller waited, or is new to it; or NULL. */
static const struct helper_answer *others(const struct helper *helper, uint64_t seen,
					  uint64_t since_ns, bool may_run)
{
	const struct helper_answer *last = &helper->last, *good = &helper->good;

	if (last->number && last->ended_ns >= since_ns && last->number != seen)
		return last->number == good->number ? good : last;
	if (!good->number || good->number == seen)
		return NULL;
	return !may_run || since_ns - good->ended_ns < ANSWER_MS * NS_PER_MS ? good : NULL;
}

static const struct helper_answer *run_again(struct helper *helper, const char *const arguments[],
					     uint32_t timeout_ms)
{
	struct helper_answer answer = { .number = helper->last.number + 1 };

	helper->paid_ns += ANSWER_MS * NS_PER_MS;
	answer.err = run(arguments, helper->input, timeout_ms, &answer.output, &answer.status,
			 &answer.error);
	answer.ended_ns = clock_now_ns();
	secret_clear(&helper->last.output);
	helper->last = answer;
	/* One that is not there has no login, and one that was there leaves its last. */
	if (answer.err == -ENOENT && helper->good.output.text)
		return &helper->good;
	if ((answer.err && answer.err != -ENOENT) ||
	    (answer.status && !strstr(answer.output.text, HELPER_HAS_NONE)))
		return &helper->last;
	helper->last.output = (struct secret){};
	secret_clear(&helper->good.output);
	helper->good = answer;
	return &helper->good;
}

static int copy_answer(const struct helper_answer *answer, struct secret *output, int *status,
		       struct error *error)
{
	*status = answer->status;
	if (answer->err) {
		*error = answer->error;
		return answer->err;
	}
	output->text = malloc(answer->output.length + 1);
	if (!output->text)
		return error_set(error, -ENOMEM, "no memory for a helper's output");
	memcpy(output->text, answer->output.text, answer->output.length + 1);
	output->length = answer->output.length;
	return 0;
}

int helper_ask(const char *const arguments[], const char *input, uint32_t timeout_ms,
	       uint64_t *seen, struct secret *output, int *status, struct error *error)
{
	struct helper *helper = find(arguments[0], input);
	uint64_t since_ns = clock_now_ns(), now_ns;
	const struct helper_answer *answer;
	bool may_run;
	int err;

	if (!helper)
		return error_set(error, -ENOMEM, "no memory for a helper");
	pthread_mutex_lock(&helper->lock);
	now_ns = clock_now_ns();
	if (helper->paid_ns < now_ns)
		helper->paid_ns = now_ns;
	may_run = helper->paid_ns - now_ns <= (RUNS_AT_ONCE - 1) * ANSWER_MS * NS_PER_MS;
	answer = others(helper, *seen, since_ns, may_run);
	if (!answer && may_run)
		answer = run_again(helper, arguments, timeout_ms);
	if (answer) {
		*seen = answer->number;
		err = copy_answer(answer, output, status, error);
	} else {
		err = error_set(error, -EBUSY,
				"%s has run %d times, and may run again every %d seconds",
				arguments[0], RUNS_AT_ONCE, ANSWER_MS / 1000);
	}
	pthread_mutex_unlock(&helper->lock);
	return err;
}
