/* SPDX-License-Identifier: MIT */
/*
 * placement-shell NODES ALLOWED SUBMITTERS...: prints, as JSON, the CPUs of a thread for each
 * SUBMITTERS, which is a list of CPUs or "any". NODES is a directory like the kernel's.
 */
#include <stdio.h>
#include <string.h>

#include "base/cpulist.h"
#include "base/message.h"
#include "server/placement.h"

int main(int argc, char **argv)
{
	struct placement placement;
	cpu_set_t allowed, submitters, cpus;
	json_t *chosen;
	int err = argc < 3 || cpulist_parse(argv[2], &allowed);

	message_init("placement-shell");
	if (err) {
		msg_error("usage: placement-shell NODES ALLOWED SUBMITTERS...");
		return EXIT_USAGE;
	}
	err = placement_init(&placement, &allowed, argv[1]);
	for (int i = 3; i < argc && !err; i++) {
		CPU_ZERO(&submitters);
		if (strcmp(argv[i], "any") != 0)
			err = cpulist_parse(argv[i], &submitters);
		if (!err)
			err = placement_choose(&placement, &submitters, &cpus);
	}
	chosen = placement_json(&placement);
	json_dumpf(chosen, stdout, JSON_COMPACT);
	json_decref(chosen);
	placement_deinit(&placement);
	return err ? EXIT_FAILED : EXIT_OK;
}
