/* SPDX-License-Identifier: MIT */
#include <errno.h>

#include "base/clock.h"
#include "fetch/fetcher_ops.h"
#include "fetch/inquiry.h"

static int ask(struct fetcher *fetcher, struct inquiry *inquiry, uint32_t timeout_ms,
	       struct error *error)
{
	if (!fetcher)
		return error_set(error, -ENOTCONN, "nobody asks servers here");
	inquiry->fetcher = fetcher;
	inquiry->deadline_ns = clock_now_ns() + timeout_ms * NS_PER_MS;
	fetcher->ops->inquire(fetcher, inquiry);
	if (!inquiry->result)
		return 0;
	if (*inquiry->error.hint)
		error_set_hint(error, "%s", inquiry->error.hint);
	return error_set(error, inquiry->result, "%s", inquiry->error.text);
}

int mirror_probe(struct fetcher *fetcher, struct mirror *mirror, uint32_t timeout_ms,
		 struct mirror_probe *probe, struct error *error)
{
	struct inquiry inquiry = { .mirror = mirror };
	int err;

	if (mirror->ops->probe)
		return mirror->ops->probe(mirror, probe, error);
	err = ask(fetcher, &inquiry, timeout_ms, error);
	*probe = inquiry.found;
	return err;
}

int mirror_look_up(struct fetcher *fetcher, struct mirror *mirror, const char *name,
		   uint32_t timeout_ms, char **text, struct error *error)
{
	struct inquiry inquiry = { .mirror = mirror, .name = name };
	int err = ask(fetcher, &inquiry, timeout_ms, error);

	*text = inquiry.text;
	return err;
}
