/* SPDX-License-Identifier: MIT */
/* Asks for the sizes of sources that are added without one, several at a time. */
#include <errno.h>
#include <string.h>

#include "base/relaxed.h"
#include "content/store/internal.h"

enum {
	PROBE_MS = 30 * 1000,
	/*
	 * per request; concurrent requests ask for as many each. A host that has all the sources
	 * gets all of them.
	 */
	AT_ONCE = 16,
};

struct asking {
	const struct store *store;
	struct new_source *sources;
	size_t count;
	const bool *over;

	pthread_mutex_t lock;
	size_t next;
	/* The error of the first failed source in their order. */
	size_t failed;
	int err;
	struct error error;
};

/* Takes the answer of the first mirror that gives one. */
static int ask(const struct store *store, struct new_source *made, struct error *error)
{
	struct error of_first = {};
	int err = -EINVAL;

	for (unsigned i = 0; i < made->source->mirror_count; i++) {
		struct mirror *mirror = &made->source->mirrors[i];
		struct mirror_probe probe = {};
		struct error why = {};

		if (!mirror->ops->probe && !mirror->ops->inquire) {
			error_set_hint(error, "say how large it is: --size, or \"size\" in a "
					      "description");
			return error_set(error, -EINVAL, "a source of kind %s has no end",
					 mirror->ops->name);
		}
		err = store->ops->probe(store->fetcher, mirror, PROBE_MS, &probe, &why);
		if (!err) {
			made->probed = i;
			made->identity = probe.identity;
			made->size = probe.size;
			return 0;
		}
		if (!i)
			of_first = why;
	}
	if (*of_first.hint)
		error_set_hint(error, "%s", of_first.hint);
	return error_set(error, err, "cannot ask for the size: %s",
			 *of_first.text ? of_first.text : strerror(-err));
}

/* Returns the next source, or NULL when there is none or an earlier one has failed. */
static struct new_source *take(struct asking *asking)
{
	struct new_source *made = NULL;

	pthread_mutex_lock(&asking->lock);
	if (asking->over && relaxed_load(asking->over))
		asking->err = -ECANCELED;
	while (!asking->err && !made && asking->next < asking->count) {
		struct new_source *next = &asking->sources[asking->next++];

		if (next->size_is_wanted)
			made = next;
	}
	pthread_mutex_unlock(&asking->lock);
	return made;
}

/*
 * All sources before it were taken already, so the first failure in order is found whichever ends
 * first.
 */
static void note(struct asking *asking, const struct new_source *made, int err,
		 const struct error *error)
{
	size_t index = (size_t)(made - asking->sources);

	pthread_mutex_lock(&asking->lock);
	if (!asking->err || (asking->err != -ECANCELED && index < asking->failed)) {
		asking->err = err;
		asking->failed = index;
		asking->error = *error;
	}
	pthread_mutex_unlock(&asking->lock);
}

static void *ask_main(void *argument)
{
	struct asking *asking = argument;
	struct new_source *made;

	while ((made = take(asking))) {
		struct error error = {};
		int err = ask(asking->store, made, &error);

		if (err)
			note(asking, made, err, &error);
	}
	return NULL;
}

int new_sources_ask(const struct store *store, struct new_source *sources, size_t count,
		    const bool *over, size_t *failed, struct error *error)
{
	struct asking asking = {
		.store = store,
		.sources = sources,
		.count = count,
		.over = over,
	};
	pthread_t threads[AT_ONCE - 1];
	unsigned started = 0;
	size_t wanted = 0;

	for (size_t i = 0; i < count; i++)
		wanted += sources[i].size_is_wanted;
	pthread_mutex_init(&asking.lock, NULL);
	/* Start fewer when no more threads can be had. The calling thread is one of them. */
	while (started < AT_ONCE - 1 && started + 1 < wanted &&
	       !pthread_create(&threads[started], NULL, ask_main, &asking))
		started++;
	ask_main(&asking);
	while (started)
		pthread_join(threads[--started], NULL);
	pthread_mutex_destroy(&asking.lock);
	*failed = asking.failed;
	if (asking.err && asking.err != -ECANCELED)
		*error = asking.error;
	return asking.err;
}
