/* SPDX-License-Identifier: MIT */
/* How the fetch process starts, is watched, and ends. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <uv.h>

#include "base/message.h"
#include "base/relaxed.h"
#include "fetch/event.h"
#include "fetch/process/internal.h"

enum {
	TICK_MS = 1000,
	/* It is asked every tick whether it is there, and killed after so many without an answer. */
	TICKS_MAX = 5,
	IDLE_MS = 60000, /* then it is ended, and its memory given back */
	BACK_OFF_FIRST_MS = 100,
	BACK_OFF_LAST_MS = 5000,
	/* One that has lived so long did not die of what it does first. */
	LIVED_S = 10,
	MESSAGE_MAX_BYTES = INQUIRY_TEXT_MAX_BYTES + (4 << 10),
};

static int program_fd = -1;
static unsigned idle_end_ms = IDLE_MS;
static struct error no_program; /* why there is none */
static void on_ready(uv_poll_t *poll, int status, int events);

void life_flush(struct front *front)
{
	int err;

	if (front->state != STATE_UP)
		return;
	err = channel_flush(&front->channel);
	/* Its end is found by reading. */
	if ((err == -EAGAIN) == front->waits_to_send)
		return;
	if (front->fetcher->visited) {
		timer_set(&front->timers, &front->flush, 0);
		return;
	}
	front->waits_to_send = err == -EAGAIN;
	uv_poll_start(front->poll, UV_READABLE | (front->waits_to_send ? UV_WRITABLE : 0),
		      on_ready);
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
	struct front *front = poll->data;
	struct channel_head head;
	const uint8_t *body;
	int err;

	fetcher_enter(front->fetcher);
	if (status < 0 || events & UV_READABLE) {
		err = channel_receive(&front->channel);
		if (err && err != -EAGAIN) {
			life_end(front, "it has died");
			return;
		}
	}
	while ((err = channel_next(&front->channel, &head, &body)) > 0) {
		if (!front_take(front, &head, body))
			err = -EPROTO;
		if (err < 0 || front->state != STATE_UP)
			break;
	}
	if (err < 0)
		life_end(front, "it has said what makes no sense, and was killed");
	else
		life_flush(front);
}

/* The process. */

static void free_poll(uv_handle_t *poll)
{
	free(poll);
}

static void on_ended(struct pool_job *job);

static void end_work(struct pool_job *job)
{
	spawn_end(container_of(job, struct front, job)->process.pid);
}

static void let_go(struct front *front)
{
	uv_poll_stop(front->poll);
	uv_close((uv_handle_t *)front->poll, free_poll);
	front->poll = NULL;
	channel_deinit(&front->channel);
	munmap(front->process.windows, CHANNEL_WINDOWS_BYTES);
	front->process.windows = NULL;
	timer_clear(&front->tick);
	relaxed_store(&front->counts->running, 0);
}

/* `why`: NULL where it is not needed any more. Its runs fail. */
void life_end(struct front *front, const char *why)
{
	let_go(front);
	front->state = STATE_ENDING;
	front->greeted = false;
	front->job.work = end_work;
	front->job.done = on_ended;
	front->fetcher->ops->spawn(front->fetcher, &front->job);
	for (unsigned i = 0; i < front->known_count; i++)
		front->known[i].told = front->known[i].login.wanted = false;
	front->logins = 0;
	if (!why) {
		front->failures = 0;
		return;
	}
	relaxed_add(&front->counts->died, 1);
	event_log(&(struct event){ .name = "fetch_process_died" }, "%s", why);
	front->failures =
		clock_now_ns() - front->began_ns > LIVED_S * NS_PER_S ? 1 : front->failures + 1;
	for (unsigned i = 0; i < CHANNEL_SLOTS; i++) {
		struct slot *slot = &front->slots[i];
		struct run *run;

		if (!slot->sent)
			continue;
		slot->over = true;
		if (!slot->run) {
			slot_free(slot);
			continue;
		}
		run = slot_leave(slot);
		run->cut = run->local_failure = true;
		run_failed(run, FETCH_TRANSIENT,
			   error_set(&run->error, -EIO, "the fetch process has failed: %s", why));
	}
	questions_lost(front, why);
}

static void on_tick(struct timer *timer)
{
	struct front *front = container_of(timer, struct front, tick);

	uint64_t now_ns = clock_now_ns(), next_ns = now_ns + TICK_MS * NS_PER_MS;
	uint64_t idle_ns = idle_end_ms * NS_PER_MS;

	if (front->busy)
		front->busy_ns = now_ns;
	if (now_ns - front->busy_ns >= idle_ns) {
		life_end(front, NULL);
		return;
	}
	if (next_ns > front->busy_ns + idle_ns)
		next_ns = front->busy_ns + idle_ns;
	/* NB: counted in ticks, because the server itself may have been stopped. */
	if (front->busy && ++front->unanswered > TICKS_MAX) {
		life_end(front, "it does not answer, and was killed");
		return;
	}
	if (front->busy && !channel_add(&front->channel, CHANNEL_PING, 0, NULL, 0, NULL))
		life_flush(front);
	timer_set(&front->timers, timer, next_ns);
}

struct last_job {
	struct pool_job job;
	pid_t pid;
};

static void end_last_work(struct pool_job *job)
{
	spawn_end(container_of(job, struct last_job, job)->pid);
}

static void last_has_ended(struct pool_job *job)
{
	free(container_of(job, struct last_job, job));
}

/* The job outlives the front: the fetcher does all that there are before it is freed. */
static void end_later(const struct front *front, pid_t pid)
{
	struct last_job *last = calloc(1, sizeof(*last));

	if (!last)
		return; /* it ends with its stream, and with the thread that has started it */
	last->pid = pid;
	last->job.work = end_last_work;
	last->job.done = last_has_ended;
	front->fetcher->ops->spawn(front->fetcher, &last->job);
}

static int attach(struct front *front)
{
	front->poll = calloc(1, sizeof(*front->poll));
	if (!front->poll)
		return -ENOMEM;
	if (uv_poll_init(front->fetcher->loop, front->poll, front->starting.fd)) {
		free(front->poll);
		return -ENOMEM;
	}
	front->poll->data = front;
	front->process = front->starting;
	channel_init(&front->channel, front->process.fd, MESSAGE_MAX_BYTES);
	front->waits_to_send = false;
	uv_poll_start(front->poll, UV_READABLE, on_ready);
	return 0;
}

static void start_failed(struct front *front)
{
	front->state = STATE_NONE;
	front->failures++;
	relaxed_add(&front->counts->failed, 1);
	event_log(&(struct event){ .name = "fetch_process_failed" }, "%s", front->error.text);
	for (unsigned i = 0; i < CHANNEL_SLOTS; i++) {
		struct run *run;

		if (!front->slots[i].run)
			continue;
		run = slot_leave(&front->slots[i]);
		run->local_failure = true;
		run_failed(run, FETCH_TRANSIENT,
			   error_set(&run->error, -EIO, "%s", front->error.text));
	}
	questions_fail(front, front->error.text);
}

static void on_started(struct pool_job *job)
{
	struct front *front = container_of(job, struct front, job);

	if (!front->err && attach(front)) {
		close(front->starting.fd);
		end_later(front, front->starting.pid);
		munmap(front->starting.windows, CHANNEL_WINDOWS_BYTES);
		front->err = -ENOMEM;
		error_set_text(&front->error, "no memory for a process");
	}
	if (front->err) {
		start_failed(front);
		return;
	}
	front->state = STATE_UP;
	front->began_ns = clock_now_ns();
	front->busy_ns = front->began_ns;
	front->unanswered = front->logins_sent = 0;
	front->greeted = false;
	relaxed_add(&front->counts->started, 1);
	relaxed_store(&front->counts->running, 1);
	timer_set(&front->timers, &front->tick, front->began_ns + TICK_MS * NS_PER_MS);
	front_send_all(front);
}

static void start_work(struct pool_job *job)
{
	struct front *front = container_of(job, struct front, job);

	front->error = no_program;
	front->err = program_fd < 0 ? -ENOENT :
				      spawn_start(program_fd, &front->starting, &front->error);
}

static void start_process(struct timer *timer)
{
	struct front *front = container_of(timer, struct front, retry);

	front->state = STATE_STARTING;
	front->job.work = start_work;
	front->job.done = on_started;
	front->fetcher->ops->spawn(front->fetcher, &front->job);
}

void life_need(struct front *front)
{
	unsigned doublings = front->failures > 7 ? 7 : front->failures;
	uint64_t wait_ms = front->failures ? (uint64_t)BACK_OFF_FIRST_MS << (doublings - 1) : 0;

	if (front->state != STATE_NONE || timer_is_set(&front->retry))
		return;
	if (wait_ms > BACK_OFF_LAST_MS)
		wait_ms = BACK_OFF_LAST_MS;
	if (wait_ms)
		timer_set(&front->timers, &front->retry, clock_now_ns() + wait_ms * NS_PER_MS);
	else
		start_process(&front->retry);
}

static void on_ended(struct pool_job *job)
{
	struct front *front = container_of(job, struct front, job);

	front->state = STATE_NONE;
	if (front->busy)
		life_need(front);
}

void life_close(struct front *front)
{
	if (front->state == STATE_UP) {
		let_go(front);
		end_later(front, front->process.pid);
	}
}

static void on_flush(struct timer *timer)
{
	life_flush(container_of(timer, struct front, flush));
}

void life_init(struct front *front)
{
	front->flush.expire = on_flush;
	front->tick.expire = on_tick;
	front->retry.expire = start_process;
}

static int beside_us(char path[static PATH_MAX])
{
	ssize_t length = readlink("/proc/self/exe", path, PATH_MAX - 1);
	char *slash;

	if (length < 0)
		return -errno;
	path[length] = 0;
	slash = strrchr(path, '/');
	if (!slash || slash - path > PATH_MAX - 32)
		return -ENAMETOOLONG;
	snprintf(slash + 1, 31, "btrfs-ublk-fetch");
	return 0;
}

int life_use(const char *program, unsigned idle_ms)
{
	char path[PATH_MAX] = "btrfs-ublk-fetch";
	int err = program ? 0 : beside_us(path);

	idle_end_ms = idle_ms ?: IDLE_MS;
	if (!err) {
		program_fd = open(program ?: path, O_PATH | O_CLOEXEC);
		err = program_fd < 0 ? -errno : 0;
	}
	/* NB: the sandbox hides it later. */
	if (!err || err == -EMFILE || err == -ENFILE || err == -ENOMEM)
		return err;
	error_set_text(&no_program, "cannot open '%.300s': %s", program ?: path, strerror(-err));
	msg_warning("%s; servers cannot be asked before it is there, and this server started anew",
		    no_program.text);
	return 0;
}
