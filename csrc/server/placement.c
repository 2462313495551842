/* SPDX-License-Identifier: MIT */
#include "server/placement.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/cleanup.h"
#include "base/cpulist.h"

/* Adds a copy of the set to the array. */
static int append(cpu_set_t **sets, unsigned *count, const cpu_set_t *set)
{
	cpu_set_t *grown = realloc(*sets, (*count + 1) * sizeof(**sets));

	if (!grown)
		return -ENOMEM;
	*sets = grown;
	grown[(*count)++] = *set;
	return 0;
}

static int compare_nodes(const struct dirent **left, const struct dirent **right)
{
	return strtol((*left)->d_name + 4, NULL, 10) < strtol((*right)->d_name + 4, NULL, 10) ? -1 :
												1;
}

static int is_node(const struct dirent *entry)
{
	unsigned number;
	char rest;

	return sscanf(entry->d_name, "node%u%c", &number, &rest) == 1;
}

static int add_node(struct placement *placement, const char *nodes_path, const char *name)
{
	_cleanup_fclose_ FILE *file = NULL;
	_cleanup_free_ char *path = NULL;
	_cleanup_free_ char *text = NULL;
	size_t room = 0;
	cpu_set_t cpus;

	if (asprintf(&path, "%s/%s/cpulist", nodes_path, name) < 0) {
		path = NULL;
		return -ENOMEM;
	}
	file = fopen(path, "re");
	/* A node that has memory only has an empty list. */
	if (!file || getline(&text, &room, file) < 0 || cpulist_parse(text, &cpus))
		return 0;
	CPU_AND(&cpus, &cpus, &placement->allowed);
	if (!CPU_COUNT(&cpus))
		return 0;
	return append(&placement->nodes, &placement->node_count, &cpus);
}

int placement_init(struct placement *placement, const cpu_set_t *allowed, const char *nodes_path)
{
	struct dirent **entries = NULL;
	int count = scandir(nodes_path, &entries, is_node, compare_nodes);
	int err = 0;

	*placement = (struct placement){ .allowed = *allowed };
	for (int i = 0; i < count; i++) {
		if (!err)
			err = add_node(placement, nodes_path, entries[i]->d_name);
		free(entries[i]);
	}
	free(entries);
	if (!err && !placement->node_count)
		err = append(&placement->nodes, &placement->node_count, allowed);
	return err;
}

void placement_deinit(struct placement *placement)
{
	free(placement->nodes);
	free(placement->threads);
	*placement = (struct placement){};
}

/* Keeps the CPUs of the node that has most of them; the first one if several have. */
static void narrow_to_node(const struct placement *placement, cpu_set_t *cpus)
{
	cpu_set_t best = *cpus;
	int most = 0;

	for (unsigned i = 0; i < placement->node_count; i++) {
		cpu_set_t common;

		CPU_AND(&common, cpus, &placement->nodes[i]);
		if (CPU_COUNT(&common) > most) {
			most = CPU_COUNT(&common);
			best = common;
		}
	}
	*cpus = best;
}

int placement_choose(struct placement *placement, const cpu_set_t *submitters, cpu_set_t *cpus)
{
	CPU_AND(cpus, submitters, &placement->allowed);
	if (CPU_COUNT(cpus))
		narrow_to_node(placement, cpus);
	else
		/*
		 * All CPUs submit, or only ones that are not allowed: distribute the threads over
		 * all nodes.
		 */
		*cpus = placement->nodes[placement->thread_count % placement->node_count];
	return append(&placement->threads, &placement->thread_count, cpus);
}

static json_t *numbers_json(const cpu_set_t *cpus)
{
	json_t *numbers = json_array();

	for (int cpu = 0; numbers && cpu < CPU_SETSIZE; cpu++) {
		if (CPU_ISSET(cpu, cpus) && json_array_append_new(numbers, json_integer(cpu))) {
			json_decref(numbers);
			return NULL;
		}
	}
	return numbers;
}

json_t *placement_json(const struct placement *placement)
{
	json_t *threads = json_array();

	for (unsigned i = 0; threads && i < placement->thread_count; i++) {
		if (json_array_append_new(threads, numbers_json(&placement->threads[i]))) {
			json_decref(threads);
			return NULL;
		}
	}
	return threads;
}
