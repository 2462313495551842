/* SPDX-License-Identifier: MIT */
/*
 * Which CPUs each serving thread may run on: always the same ones for the same machine and options.
 *
 * A thread gets CPUs of one NUMA node, so that the buffers that it touches first stay near it; where
 * the kernel says which CPUs submit to its queue, only those. It does not get a single one of them:
 * then it would have to wait for whatever runs there, often the very program that it answers, while
 * the CPU beside it is idle.
 */
#ifndef SERVER_PLACEMENT_H
#define SERVER_PLACEMENT_H

#include <jansson.h>
#include <sched.h>

#define PLACEMENT_NODES_PATH "/sys/devices/system/node"

struct placement {
	cpu_set_t allowed;
	cpu_set_t *nodes; /* those of `allowed`, by node; without empty ones */
	unsigned node_count;
	cpu_set_t *threads; /* chosen so far */
	unsigned thread_count;
};

/*
 * Threads may run on `allowed`, which is not empty. `nodes_path` is read now; nodes that it does not
 * tell of count as one. Returns 0 or a negative errno.
 */
int placement_init(struct placement *placement, const cpu_set_t *allowed, const char *nodes_path);
void placement_deinit(struct placement *placement);

/*
 * The CPUs of the next thread. `submitters`: those that submit to its queue; empty where all of them
 * do. Returns 0 or a negative errno.
 */
int placement_choose(struct placement *placement, const cpu_set_t *submitters, cpu_set_t *cpus);

/* [[cpu, ...], ...]: of each thread so far. NULL when memory is short. */
json_t *placement_json(const struct placement *placement);

#endif
