/* SPDX-License-Identifier: MIT */
#include "server/lifetime.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/json_text.h"
#include "base/message.h"
#include "server/control_pool.h"
#include "server/frontend/frontend.h"
#include "server/sandbox.h"
#include "server/stats.h"

enum {
	IN_USE_POLL_MS = 250,
	FD_SIGNAL = 0,
	FD_OWNER,
	FD_ENDED,
	FD_POOL,
	FD_CLIENTS,
	FD_COUNT = FD_CLIENTS + CONTROL_POLL_FDS,
};

int lifetime_open_signals(bool owned)
{
	sigset_t signals;
	int fd;

	sigemptyset(&signals);
	sigaddset(&signals, SIGTERM);
	/* A terminal sends INT and HUP to all its processes; the owner handles them. */
	if (owned) {
		signal(SIGINT, SIG_IGN);
		signal(SIGHUP, SIG_IGN);
	} else {
		sigaddset(&signals, SIGINT);
		sigaddset(&signals, SIGHUP);
	}
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ,
	       SIG_IGN); /* writing to a file that may not grow (RLIMIT_FSIZE) returns an error then */
	/* Block them now, so that all threads inherit that. */
	sigprocmask(SIG_BLOCK, &signals, NULL);
	fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
	return fd < 0 ? -errno : fd;
}

/*
 * Tells the owner, or writes to standard output when there is none. Drops a reference to `event`.
 */
static int tell(struct lifetime *lifetime, json_t *event)
{
	return lifetime->owner.fd >= 0 ? control_send(&lifetime->owner, event) :
					 json_text_print(event);
}

int lifetime_announce(struct lifetime *lifetime)
{
	struct frontend *frontend = lifetime->frontend;
	uint64_t losses = json_text_losses();
	json_t *ready = json_pack("{s:s, s:i, s:s, s:b, s:b}", "event", "ready", "protocol",
				  CONTROL_PROTOCOL, "front_end", frontend->ops->name, "io_flusher",
				  (int)sandbox_has_io_flushers(), "safe_stop",
				  frontend->ops->withdraw != NULL);
	int err = ready ? frontend->ops->describe(frontend, ready) : -ENOMEM;

	if (losses != json_text_losses())
		err = -ENOMEM;
	lifetime->subject.frontend = frontend;
	lifetime->subject.ready = ready;
	clock_gettime(CLOCK_BOOTTIME, &lifetime->subject.started);
	return err ?: tell(lifetime, json_incref(ready));
}

static bool is_in_use(struct frontend *frontend)
{
	const struct frontend_ops *ops = frontend->ops;

	return ops->withdraw ? ops->withdraw(frontend) != 0 : ops->in_use(frontend);
}

/* Returns how to end, or CONTROL_GO_ON while the device is in use and no second signal insists. */
static enum control_action how_to_stop(struct lifetime *lifetime)
{
	const struct frontend_ops *ops = lifetime->frontend->ops;

	if (!is_in_use(lifetime->frontend))
		return CONTROL_STOP;
	if (lifetime->signals > 1)
		/* A file system on the device loses nothing if there is another server. */
		return ops->outlives && ops->outlives(lifetime->frontend) ? CONTROL_HAND_OVER :
									    CONTROL_STOP;
	if (!lifetime->warned)
		msg_warning("the device is in use: it is served until it is free, or until another "
			    "signal comes");
	lifetime->warned = true;
	return CONTROL_GO_ON;
}

static bool is_stopping(const struct lifetime *lifetime)
{
	return lifetime->signals || lifetime->owner_gone;
}

void lifetime_allow_descriptors(void)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) || limit.rlim_cur >= limit.rlim_max)
		return;
	limit.rlim_cur = limit.rlim_max;
	setrlimit(RLIMIT_NOFILE, &limit);
}

/*
 * poll(2) takes no more descriptors than the soft limit of open files, which somebody may lower
 * while we serve: then raise it again.
 */
static int poll_all(struct pollfd fds[static FD_COUNT], int wait_ms)
{
	int found = poll(fds, FD_COUNT, wait_ms);

	if (found >= 0 || errno != EINVAL)
		return found;
	lifetime_allow_descriptors();
	return poll(fds, FD_COUNT, wait_ms);
}

/* Returns a negative errno when poll(2) fails. */
static int wait_for_something(struct lifetime *lifetime, struct pollfd fds[static FD_COUNT])
{
	int owner_fd = lifetime->owner_gone ? -1 : lifetime->owner.fd;
	int pool_fd = control_pool_fd(lifetime->pool);
	int ended_fd = lifetime->frontend->ops->ended_fd(lifetime->frontend);
	int wait_ms;

	fds[FD_SIGNAL] = (struct pollfd){ .fd = lifetime->signal_fd, .events = POLLIN };
	fds[FD_ENDED] = (struct pollfd){ .fd = ended_fd, .events = POLLIN };
	fds[FD_POOL] = (struct pollfd){ .fd = pool_fd, .events = POLLIN };
	wait_ms = control_server_prepare(&lifetime->clients, fds + FD_CLIENTS);
	fds[FD_OWNER] = (struct pollfd){
		.fd = owner_fd,
		.events = control_events(&lifetime->owner, &wait_ms),
	};
	if (is_stopping(lifetime))
		wait_ms = IN_USE_POLL_MS;
	return poll_all(fds, wait_ms) < 0 && errno != EINTR ? -errno : 0;
}

int lifetime_start_pool(struct lifetime *lifetime)
{
	int err = control_has_work() ? control_pool_start(&lifetime->pool) : 0;

	lifetime->owner.pool = lifetime->clients.pool = lifetime->pool;
	return err;
}

int lifetime_stop_pool(struct lifetime *lifetime)
{
	int err = control_pool_stop(lifetime->pool);

	lifetime->pool = lifetime->owner.pool = lifetime->clients.pool = NULL;
	return err;
}

static void lose_owner(struct lifetime *lifetime)
{
	lifetime->owner_gone = true;
	control_deinit(&lifetime->owner);
}

/* After half of an answer, the owner could make no sense of the next ones. */
static enum control_action settle_owner(struct lifetime *lifetime, enum control_action action)
{
	if (lifetime->owner.broken && action != CONTROL_GONE)
		msg_warning(
			"the owner does not read answers: it counts as dead, so the server ends "
			"once the device is free");
	if (action == CONTROL_GONE || lifetime->owner.broken)
		lose_owner(lifetime);
	return action == CONTROL_GONE ? CONTROL_GO_ON : action;
}

/* Sends the answers of requests that took long. */
static enum control_action finish_jobs(struct lifetime *lifetime)
{
	enum control_action action = CONTROL_GO_ON;
	struct control_job *job;

	while (action == CONTROL_GO_ON && (job = control_pool_take(lifetime->pool))) {
		if (lifetime->owner.job == job) {
			action = settle_owner(lifetime,
					      control_finish(&lifetime->owner, &lifetime->subject));
			continue;
		}
		action = control_server_finish(&lifetime->clients, &lifetime->subject, job);
		if (action != CONTROL_GONE)
			continue;
		control_job_free(job);
		action = CONTROL_GO_ON;
	}
	return action;
}

static enum control_action serve_all(struct lifetime *lifetime,
				     const struct pollfd fds[static FD_COUNT])
{
	enum control_action action = CONTROL_GO_ON;

	if (fds[FD_OWNER].revents)
		action = settle_owner(lifetime,
				      control_receive(&lifetime->owner, &lifetime->subject));
	if (action == CONTROL_GO_ON)
		action = control_server_serve(&lifetime->clients, &lifetime->subject,
					      fds + FD_CLIENTS);
	/* Do this last: `fds` may then refer to the place of another client. */
	if (action == CONTROL_GO_ON && fds[FD_POOL].revents)
		action = finish_jobs(lifetime);
	return action;
}

int lifetime_wait(struct lifetime *lifetime)
{
	for (;;) {
		struct signalfd_siginfo signal_info;
		struct pollfd fds[FD_COUNT];
		enum control_action action;
		int err = wait_for_something(lifetime, fds);

		if (err)
			return err;
		if (fds[FD_ENDED].revents)
			return msg_fail(-EIO,
					"the device has failed, or another program has stopped it");
		while (read(lifetime->signal_fd, &signal_info, sizeof(signal_info)) > 0)
			lifetime->signals++;
		action = serve_all(lifetime, fds);
		if (action == CONTROL_GO_ON && is_stopping(lifetime))
			action = how_to_stop(lifetime);
		if (action != CONTROL_GO_ON)
			return (int)action;
	}
}

void lifetime_end(struct lifetime *lifetime, bool handed_over)
{
	json_t *stopped = json_pack("{s:s, s:b, s:o}", "event", "stopped", "handed_over",
				    (int)handed_over, "stats",
				    stats_json(lifetime->frontend->engine));

	tell(lifetime, stopped);
	json_decref(lifetime->subject.ready);
	lifetime->subject.ready = NULL;
	control_server_deinit(&lifetime->clients);
	control_deinit(&lifetime->owner);
}
