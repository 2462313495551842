/* SPDX-License-Identifier: MIT */
#include "server/account.h"

#include <sys/mman.h>

struct account *account_new(unsigned kind_count)
{
	size_t bytes = sizeof(struct account) + kind_count * sizeof(struct kind_account);
	/* Not from the heap, whose pages may have been touched by other threads. */
	struct account *account = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
				       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (account == MAP_FAILED)
		return NULL;
	account->mapped_bytes = bytes;
	return account;
}

void account_free(struct account *account)
{
	if (account)
		munmap(account, account->mapped_bytes);
}

void account_merge(struct kind_account *sum, const struct kind_account *from)
{
	const struct counters *counters = &from->counters;

	for (unsigned op = 0; op < IO_OP_COUNT; op++) {
		sum->counters.requests[op] += relaxed_load(&counters->requests[op]);
		sum->counters.bytes[op] += relaxed_load(&counters->bytes[op]);
	}
	sum->counters.errors += relaxed_load(&counters->errors);
	for (unsigned group = 0; group < LATENCY_GROUPS; group++)
		histogram_merge(&sum->latency[group], &from->latency[group]);
}

void account_time_answers(struct account *account)
{
	uint64_t now_ns;

	if (!account->answers_count)
		return;
	now_ns = account_clock_ns();
	for (unsigned i = 0; i < account->answers_count; i++) {
		struct account_answers *answers = &account->answers[i];

		histogram_add(answers->latency, now_ns - answers->started_ns, answers->count);
	}
	account->answers_count = 0;
}

void account_end_round(struct account *account)
{
	account_time_answers(account);
	account->round_ns = 0;
	if (!account->answered)
		return;
	account->rounds++;
	if (account->in_flight > account->max_in_flight)
		relaxed_store(&account->max_in_flight, account->in_flight);
	relaxed_store(&account->in_flight, account->in_flight - account->answered);
	account->answered = 0;
}
