/* SPDX-License-Identifier: MIT */
/* The core's queues, which all other files use: of completions, messages and jobs. */
#include "lazy/core.h"

#include <sys/eventfd.h>

void completion_put(struct core *core, struct completion *completion)
{
	if (!link_is_in_list(&completion->link))
		list_append(&core->completions, &completion->link);
}

/*
 * NB: uv_async_send() would make the woken thread wait until it returns, and spin while the sender
 * is preempted on the same CPU.
 */
void core_send(struct core *core, struct completion *completion)
{
	if (message_queue_put(&core->messages, &completion->message))
		eventfd_write(core->wake_fd, 1);
}

void core_receive(struct core *core)
{
	struct message *message = message_queue_take(&core->messages);

	while (message) {
		struct completion *completion = container_of(message, struct completion, message);

		message = message->next;
		completion->link = (struct link){};
		completion_put(core, completion);
	}
}

static void job_ended(struct core *core, struct completion *completion)
{
	struct pool_job *job = container_of(completion, struct pool_job, ended);

	job->done(job);
}

void core_submit(struct worker_pool *pool, struct pool_job *job)
{
	job->ended.take = job_ended;
	worker_pool_submit(pool, job);
}

uint64_t core_slots(const struct core *core, const struct source *source)
{
	uint64_t most = core->options.max_buffer_bytes / source->unit_bytes;

	return most < core->options.max_transfers ? most : core->options.max_transfers;
}
