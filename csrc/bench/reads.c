/* SPDX-License-Identifier: MIT */
#include "bench/reads.h"

#include <endian.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/json_text.h"
#include "base/size.h"

/* splitmix64 (Steele, Lea, Flood 2014): any seed will do, and all 64 bits are good. */
static uint64_t next_random(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
	z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
	return z ^ (z >> 31);
}

/* Chooses a number below `count`. The remainder's bias does not matter here. */
static uint64_t choose(struct reads *reads, uint64_t count)
{
	return next_random(&reads->random) % count;
}

/* Chooses long reads seldom enough not to be most of the work. */
static unsigned choose_log_blocks(struct reads *reads)
{
	uint64_t a = choose(reads, READ_LOG_BLOCKS + 1), b = choose(reads, READ_LOG_BLOCKS + 1);

	return (unsigned)(a < b ? a : b);
}

bool reads_begin(struct reads *reads, struct slot *slot)
{
	uint64_t blocks;
	bool go_on;

	pthread_mutex_lock(&reads->lock);
	go_on = !reads->stopping;
	if (go_on) {
		blocks = 1 + choose(reads, 1u << choose_log_blocks(reads));
		if (blocks > reads->size / BLOCK_BYTES)
			blocks = reads->size / BLOCK_BYTES;
		slot->offset = choose(reads, reads->size / BLOCK_BYTES - blocks + 1) * BLOCK_BYTES;
		slot->length = (uint32_t)blocks * BLOCK_BYTES;
		slot->done = 0;
		slot->hung = false;
		slot->begin_ns = clock_now_ns();
	}
	pthread_mutex_unlock(&reads->lock);
	return go_on;
}

static void note_wrong(struct reads *reads, uint64_t offset, uint64_t expected, uint64_t found)
{
	const uint8_t *a = (const uint8_t *)&expected, *b = (const uint8_t *)&found;

	pthread_mutex_lock(&reads->lock);
	for (unsigned i = 0; i < sizeof(expected); i++)
		reads->wrong_bytes += a[i] != b[i];
	if (reads->wrong_words < EXAMPLES)
		reads->wrong[reads->wrong_words++] = (struct example){
			.offset = offset,
			.at_ns = clock_now_ns(),
			.expected = le64toh(expected),
			.found = le64toh(found),
		};
	pthread_mutex_unlock(&reads->lock);
}

void reads_verify(struct reads *reads, uint64_t offset, const void *data, size_t length)
{
	const uint8_t *bytes = data;
	uint64_t expected = 0x0101010101010101ull * (uint8_t)reads->byte, word;

	for (size_t at = 0; at < length; at += sizeof(word)) {
		if (reads->byte < 0)
			expected = htole64(reads->base + offset + at);
		memcpy(&word, bytes + at, sizeof(word));
		if (word != expected)
			note_wrong(reads, offset + at, expected, word);
	}
}

static unsigned bucket_of(uint64_t ns)
{
	unsigned power;

	if (ns < LATENCY_STEPS)
		return (unsigned)ns;
	power = 63 - (unsigned)__builtin_clzll(ns);
	return (power - 3) * LATENCY_STEPS + (unsigned)(ns >> (power - 4)) % LATENCY_STEPS;
}

/* Returns the highest latency in a bucket. */
static uint64_t bucket_end(unsigned bucket)
{
	unsigned power = bucket / LATENCY_STEPS + 3;

	if (bucket < LATENCY_STEPS)
		return bucket;
	return ((uint64_t)(LATENCY_STEPS + bucket % LATENCY_STEPS + 1) << (power - 4)) - 1;
}

static uint64_t quantile(const struct reads *reads, double share)
{
	uint64_t rank = (uint64_t)((double)reads->reads * share), seen = 0;

	for (unsigned i = 0; i < LATENCY_BUCKETS; i++) {
		seen += reads->latencies[i];
		if (seen > rank)
			return bucket_end(i) < reads->max_ns ? bucket_end(i) : reads->max_ns;
	}
	return reads->max_ns;
}

static void tell_served(struct reads *reads, uint64_t at_ns)
{
	reads->mark_ns = 0;
	json_text_print(json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "event", "served", "mark",
				  (json_int_t)reads->marks, "at_ns", (json_int_t)at_ns, "reads",
				  (json_int_t)reads->reads, "wrong_bytes",
				  (json_int_t)reads->wrong_bytes, "errors",
				  (json_int_t)reads->errors, "hung", (json_int_t)reads->hung));
}

static void note_answer(struct reads *reads, const struct slot *slot, uint64_t end_ns)
{
	uint64_t latency_ns = end_ns - slot->begin_ns;

	reads->reads++;
	reads->bytes += slot->length;
	reads->latencies[bucket_of(latency_ns)]++;
	if (latency_ns > reads->max_ns)
		reads->max_ns = latency_ns;
	/* NB: threads may get here in another order than they read the clock. */
	if (reads->last_ns && end_ns > reads->last_ns &&
	    end_ns - reads->last_ns > reads->pause_ns) {
		reads->pause_ns = end_ns - reads->last_ns;
		reads->pause_at_ns = reads->last_ns;
	}
	if (end_ns > reads->last_ns)
		reads->last_ns = end_ns;
	if (reads->mark_ns && slot->begin_ns >= reads->mark_ns)
		tell_served(reads, end_ns);
}

void reads_end(struct reads *reads, struct slot *slot, uint64_t end_ns, int error, uint64_t offset)
{
	pthread_mutex_lock(&reads->lock);
	if (error) {
		if (error < 0 || error >= ERRORS)
			error = EIO;
		reads->by_error[error]++;
		if (reads->errors < EXAMPLES)
			reads->failed[reads->errors] = (struct example){ .offset = offset,
									 .at_ns = end_ns,
									 .error = error };
		reads->errors++;
	} else {
		note_answer(reads, slot, end_ns);
	}
	slot->begin_ns = 0;
	pthread_mutex_unlock(&reads->lock);
}

void reads_leave(struct reads *reads)
{
	pthread_mutex_lock(&reads->lock);
	reads->running--;
	pthread_cond_signal(&reads->idle);
	pthread_mutex_unlock(&reads->lock);
}

void reads_mark(struct reads *reads)
{
	pthread_mutex_lock(&reads->lock);
	reads->marks++;
	reads->mark_ns = clock_now_ns();
	pthread_mutex_unlock(&reads->lock);
}

void reads_find_hung(struct reads *reads)
{
	uint64_t now = clock_now_ns();

	pthread_mutex_lock(&reads->lock);
	for (unsigned i = 0; i < reads->slot_count; i++) {
		struct slot *slot = &reads->slots[i];

		if (!slot->begin_ns || slot->hung || now < slot->begin_ns + reads->deadline_ns)
			continue;
		slot->hung = true;
		reads->hung++;
		json_text_print(json_pack("{s:s, s:I, s:I, s:I}", "event", "hung", "offset",
					  (json_int_t)slot->offset, "length",
					  (json_int_t)slot->length, "begin_ns",
					  (json_int_t)slot->begin_ns));
	}
	pthread_mutex_unlock(&reads->lock);
}

bool reads_stop(struct reads *reads)
{
	uint64_t end_ns = clock_now_ns() + reads->deadline_ns;
	struct timespec end = { .tv_sec = (time_t)(end_ns / NS_PER_S),
				.tv_nsec = (long)(end_ns % NS_PER_S) };
	bool idle;
	int err = 0;

	pthread_mutex_lock(&reads->lock);
	reads->stopping = true;
	while (reads->running && err != ETIMEDOUT)
		err = pthread_cond_clockwait(&reads->idle, &reads->lock, CLOCK_MONOTONIC, &end);
	idle = !reads->running;
	pthread_mutex_unlock(&reads->lock);
	if (!idle)
		reads_find_hung(reads);
	return idle;
}

static const char *error_name(int error)
{
	const char *name;

	if (error == ERROR_SHORT)
		return "short";
	if (error == ERROR_SIGBUS)
		return "SIGBUS";
	name = strerrorname_np(error);
	return name ? name : "unknown";
}

static json_t *errors_json(const struct reads *reads)
{
	json_t *errors = json_object();

	for (int i = 0; i < ERRORS; i++) {
		if (reads->by_error[i])
			json_object_set_new(errors, error_name(i),
					    json_integer((json_int_t)reads->by_error[i]));
	}
	return errors;
}

static json_t *wrong_json(const struct reads *reads)
{
	json_t *list = json_array();

	for (unsigned i = 0; i < reads->wrong_words; i++) {
		const struct example *wrong = &reads->wrong[i];
		char expected[20], found[20];

		snprintf(expected, sizeof(expected), "0x%016" PRIx64, wrong->expected);
		snprintf(found, sizeof(found), "0x%016" PRIx64, wrong->found);
		json_array_append_new(list, json_pack("{s:I, s:I, s:s, s:s}", "offset",
						      (json_int_t)wrong->offset, "at_ns",
						      (json_int_t)wrong->at_ns, "expected",
						      expected, "found", found));
	}
	return list;
}

static json_t *failed_json(const struct reads *reads)
{
	json_t *list = json_array();

	for (unsigned i = 0; i < EXAMPLES && i < reads->errors; i++) {
		const struct example *failed = &reads->failed[i];

		json_array_append_new(list, json_pack("{s:I, s:I, s:s}", "offset",
						      (json_int_t)failed->offset, "at_ns",
						      (json_int_t)failed->at_ns, "error",
						      error_name(failed->error)));
	}
	return list;
}

int reads_report(struct reads *reads)
{
	int err;

	pthread_mutex_lock(&reads->lock);
	err = json_text_print(json_pack(
		"{s:s, s:I, s:I, s:I, s:o, s:I, s:o, s:o, s:I, s:I, s:I, s:I, s:I, s:I}", "event",
		"report", "reads", (json_int_t)reads->reads, "bytes", (json_int_t)reads->bytes,
		"wrong_bytes", (json_int_t)reads->wrong_bytes, "wrong", wrong_json(reads), "errors",
		(json_int_t)reads->errors, "by_error", errors_json(reads), "failed",
		failed_json(reads), "hung", (json_int_t)reads->hung, "pause_ns",
		(json_int_t)reads->pause_ns, "pause_at_ns", (json_int_t)reads->pause_at_ns,
		"p50_ns", (json_int_t)quantile(reads, 0.5), "p99_ns",
		(json_int_t)quantile(reads, 0.99), "max_ns", (json_int_t)reads->max_ns));
	pthread_mutex_unlock(&reads->lock);
	return err;
}
