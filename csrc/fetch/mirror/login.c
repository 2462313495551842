/* SPDX-License-Identifier: MIT */
/*
 * Waits for a login. However many requests need one, it is made once: files are read on a worker,
 * then perhaps a token server is asked on the loop.
 */
#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <uv.h>

#include "fetch/event.h"
#include "fetch/fetcher_ops.h"
#include "fetch/mirror/exchange.h"

enum {
	CHECK_MS = 50, /* how late a deadline may be noticed meanwhile */
	READ_AGAIN = 3,
	RENEW_S = 30, /* how long a token server has for a token that nobody waits for */
};

/*
 * A login that is being made. Between its steps, and after its requests have gone, it is in
 * remote->load, or its job is on a worker.
 */
struct login_load {
	struct pool_job job;
	struct exchange ask;
	struct remote *remote;
	struct exchange *waiting;
	struct login *login;
	struct fetcher *fetcher;
	uv_timer_t *timer;
	struct error error;
	int err;
	bool on_worker, asking;
	unsigned again; /* how often the token server has refused what files had */
	bool renews;	/* it has begun while the last one was good, so requests need not wait */
};

static void free_timer(uv_handle_t *timer)
{
	free(timer);
}

static void end_timer(struct login_load *load)
{
	if (!load->timer)
		return;
	uv_timer_stop(load->timer);
	uv_close((uv_handle_t *)load->timer, free_timer);
	load->timer = NULL;
}

/* A request that nobody waits for is cancelled: the loop may be ending. */
static bool is_unwanted(const struct login_load *load)
{
	return !load->waiting && (!load->renews || load->fetcher->ending);
}

static void cancel_unwanted(struct login_load *load)
{
	if (is_unwanted(load) && load->asking)
		exchange_cancel(&load->ask);
}

static struct exchange *take_first(struct login_load *load)
{
	struct exchange *first = load->waiting;

	if (first) {
		load->waiting = first->next_waiting;
		first->next_waiting = NULL;
		first->waiting = false;
	}
	return first;
}

/*
 * Keeps the last credentials, which may still be good; the server will tell. Returns whether there
 * are any.
 */
static bool keep_last(struct login_load *load)
{
	struct login *last = login_keep(load->remote);

	if (!last)
		return false;
	event_log(&(struct event){ .name = "login_kept" },
		  "the previous credentials are used, because there are no new ones: %s",
		  load->error.text);
	if (load->login)
		login_put(load->remote, load->login);
	load->login = last;
	return true;
}

/* Nothing refers to `load` any more: its waiters may start another one now. */
static void finish(struct login_load *load, int err, enum fetch_failure failure)
{
	struct remote *remote = load->remote;
	struct exchange *exchange;

	end_timer(load);
	remote->load = NULL;
	load->fetcher->logins--;
	if (!err)
		login_publish(remote, load->login);
	else if (failure != FETCH_DENIED && keep_last(load))
		err = 0;
	else if (load->renews)
		login_put_off(remote);
	while ((exchange = take_first(load))) {
		if (err) {
			exchange_login_failed(exchange, err, failure, &load->error);
			continue;
		}
		pthread_mutex_lock(&remote->lock);
		load->login->references++;
		pthread_mutex_unlock(&remote->lock);
		exchange_login_ready(exchange, load->login);
	}
	if (load->login)
		login_put(remote, load->login);
	free(load);
}

static void begin_reading(struct login_load *load)
{
	load->on_worker = true;
	load->fetcher->ops->submit(load->fetcher, &load->job);
}

static void on_asked(struct exchange *ask)
{
	struct login_load *load = container_of(ask, struct login_load, ask);
	bool denied = ask->result && ask->failure == FETCH_DENIED;
	bool refused = denied && (ask->response.status == 401 || ask->response.status == 403);
	const char *why = NULL;
	int err = ask->result;

	load->asking = false;
	if (err)
		load->error = ask->error;
	else
		err = load->remote->ops->answered(load->remote, load->login, ask->text,
						  &load->error);
	exchange_clear(ask);
	/*
	 * A refusal by a proxy or TLS, or a request that was given up, says nothing about other
	 * maps' logins.
	 */
	if (err && err != -ECANCELED && (!denied || refused))
		why = load->error.text;
	remote_tell_token(load->fetcher, load->remote, err ? NULL : login_token(load->login), why,
			  refused, load->login->until_ns);
	/* Somebody may have changed the files in between. If not, the refusal is known there. */
	if (err && refused && load->again++ < READ_AGAIN && !is_unwanted(load)) {
		login_put(load->remote, load->login);
		load->login = NULL;
		load->ask = (struct exchange){};
		begin_reading(load);
		return;
	}
	finish(load, err, ask->result ? ask->failure : FETCH_WRONG);
}

static void on_read(struct pool_job *job)
{
	struct login_load *load = container_of(job, struct login_load, job);
	const struct remote_ops *ops = load->remote->ops;
	int err = load->err;

	load->on_worker = false;
	if (!err && !is_unwanted(load) && ops->ask) {
		load->ask.remote = load->remote;
		load->ask.fetcher = load->fetcher;
		load->ask.deadline_ns = load->renews ? clock_now_ns() + RENEW_S * NS_PER_S :
						       load->waiting->deadline_ns;
		load->ask.done = on_asked;
		err = ops->ask(load->remote, load->login, &load->ask, &load->error);
		if (err > 0) {
			load->asking = true;
			exchange_start(&load->ask);
			return;
		}
	}
	finish(load, err, load->err && load->err != -EKEYREJECTED ? FETCH_NO_LOGIN : FETCH_DENIED);
}

static void read_files(struct pool_job *job)
{
	struct login_load *load = container_of(job, struct login_load, job);

	load->err = login_read(load->remote, &load->login, &load->error);
}

/*
 * Fails waiters whose deadline has passed. The login is made anyway, for others and for later
 * requests.
 */
static void check_deadlines(uv_timer_t *timer)
{
	const struct error late = { .text = "its credentials could not be had in time" };
	struct login_load *load = timer->data;
	uint64_t now_ns = clock_now_ns();
	struct exchange *over = NULL, **link = &load->waiting;

	while (*link) {
		struct exchange *exchange = *link;

		/* A cache is not silent while it has not been asked. */
		if (exchange->via)
			++*exchange->progress;
		/* One that keeps its remote waits for the worker; requests have deadlines. */
		if (exchange->deadline_ns > now_ns || exchange->keeps_remote) {
			link = &exchange->next_waiting;
			continue;
		}
		*link = exchange->next_waiting;
		exchange->next_waiting = over;
		over = exchange;
	}
	cancel_unwanted(load);
	/* NB: `load` may be freed from here on. */
	while (over) {
		struct exchange *exchange = over;

		over = exchange->next_waiting;
		exchange->next_waiting = NULL;
		exchange->waiting = false;
		exchange_login_failed(exchange, -ETIMEDOUT, FETCH_NO_LOGIN, &late);
	}
}

static int start_load(struct remote *remote, struct fetcher *fetcher)
{
	struct login_load *load = calloc(1, sizeof(*load));
	uv_timer_t *timer = calloc(1, sizeof(*timer));

	if (!load || !timer || uv_timer_init(fetcher->loop, timer)) {
		free(load);
		free(timer);
		return -ENOMEM;
	}
	timer->data = load;
	uv_timer_start(timer, check_deadlines, CHECK_MS, CHECK_MS);
	load->timer = timer;
	load->remote = remote;
	load->fetcher = fetcher;
	load->job.work = read_files;
	load->job.done = on_read;
	remote->load = load;
	fetcher->logins++;
	fetcher->wanted |= fetcher->visited; /* for the timer */
	begin_reading(load);
	return 0;
}

/* Without memory for it, the next request tries again. */
void login_renew(struct remote *remote, struct fetcher *fetcher)
{
	if (!remote->load && !fetcher->ending && !start_load(remote, fetcher))
		remote->load->renews = true;
}

void login_wait(struct exchange *exchange)
{
	const struct error no_memory = { .text = "no memory for its credentials" };
	struct remote *remote = exchange->remote;
	struct exchange **last;

	if (!remote->load && start_load(remote, exchange->fetcher)) {
		exchange_login_failed(exchange, -ENOMEM, FETCH_TRANSIENT, &no_memory);
		return;
	}
	last = &remote->load->waiting;
	while (*last)
		last = &(*last)->next_waiting;
	*last = exchange;
	exchange->waiting = true;
}

void login_wait_no_more(struct exchange *exchange)
{
	struct login_load *load = exchange->remote->load;

	for (struct exchange **link = &load->waiting; *link; link = &(*link)->next_waiting) {
		if (*link != exchange)
			continue;
		*link = exchange->next_waiting;
		break;
	}
	exchange->next_waiting = NULL;
	exchange->waiting = false;
	cancel_unwanted(load);
}
