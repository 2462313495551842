/* SPDX-License-Identifier: MIT */
#include "bench/options.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>

#include "base/message.h"
#include "base/size.h"

enum {
	MAX_OPTIONS = 16,
	OPT_HELP = 256,
	OPT_VERSION,
};

static bool take(const struct bench_option *option)
{
	if (option->given)
		*option->given = true;
	if (option->text) {
		*option->text = optarg;
		return true;
	}
	if (!size_parse(optarg, option->number) && *option->number >= option->least &&
	    *option->number <= option->most)
		return true;
	return msg_fail(false, "--%s: \"%s\" is not a number from %" PRIu64 " to %" PRIu64,
			option->name, optarg, option->least, option->most);
}

int bench_options_parse(int argc, char **argv, const char *help, const struct bench_option *table,
			const char **word)
{
	struct option options[MAX_OPTIONS + 3] = {};
	int count = 0, id;

	for (; table[count].name && count < MAX_OPTIONS; count++)
		options[count] =
			(struct option){ table[count].name, required_argument, NULL, count };
	options[count] = (struct option){ "help", no_argument, NULL, OPT_HELP };
	options[count + 1] = (struct option){ "version", no_argument, NULL, OPT_VERSION };
	while ((id = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (id == OPT_HELP)
			return print_help(help);
		if (id == OPT_VERSION)
			return print_version();
		/* '?' is greater than any index. getopt has printed what is wrong. */
		if (id >= count || !take(&table[id]))
			return EXIT_USAGE;
	}
	*word = argc - optind == 1 ? argv[optind] : NULL;
	return BENCH_OPTIONS_DONE;
}
