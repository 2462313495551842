/* SPDX-License-Identifier: MIT */
/*
 * Chooses the CPUs for each serving thread, always the same for the same machine and options.
 *
 * A thread gets CPUs of one NUMA node, so that buffers that it touches first stay near it; and
 * where the kernel tells which CPUs submit to its queue, only those. It gets more than one: on a
 * single CPU it would have to wait for whatever runs there, often the very program that it answers,
 * while the next CPU is idle.
 */
#pragma once

#include <jansson.h>
#include <sched.h>

#define PLACEMENT_NODES_PATH "/sys/devices/system/node"

struct placement {
	cpu_set_t allowed;
	cpu_set_t *nodes; /* the allowed CPUs of each node that has some */
	unsigned node_count;
	cpu_set_t *threads; /* chosen so far */
	unsigned thread_count;
};

/*
 * Threads may run on `allowed`, which is not empty. Reads `nodes_path` now; nodes that are not
 * listed there count as one. Returns 0 or a negative errno.
 */
int placement_init(struct placement *placement, const cpu_set_t *allowed, const char *nodes_path);
void placement_deinit(struct placement *placement);

/*
 * Chooses the CPUs of the next thread. `submitters` are the CPUs that submit to its queue; empty:
 * all. Returns 0 or a negative errno.
 */
int placement_choose(struct placement *placement, const cpu_set_t *submitters, cpu_set_t *cpus);

/* Returns [[cpu, ...], ...] with the CPUs of each thread so far, or NULL when memory is short. */
json_t *placement_json(const struct placement *placement);
