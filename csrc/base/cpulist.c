/* SPDX-License-Identifier: MIT */
#include "base/cpulist.h"

#include <ctype.h>
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

static int parse_cpu(const char **text, unsigned long *cpu)
{
	char *end;

	/* strtoul() accepts signs and spaces too. */
	if (!isdigit((unsigned char)**text))
		return -EINVAL;
	errno = 0;
	*cpu = strtoul(*text, &end, 10);
	*text = end;
	return errno || *cpu >= CPU_SETSIZE ? -ERANGE : 0;
}

int cpulist_parse(const char *text, cpu_set_t *cpus)
{
	CPU_ZERO(cpus);
	for (;; text++) {
		unsigned long first = 0, last;
		int err = parse_cpu(&text, &first);

		last = first;
		if (!err && *text == '-') {
			text++;
			err = parse_cpu(&text, &last);
		}
		if (err)
			return err;
		if (last < first)
			return -EINVAL;
		for (unsigned long cpu = first; cpu <= last; cpu++)
			CPU_SET(cpu, cpus);
		if (*text == ',')
			continue;
		if (*text == '\n')
			text++;
		return *text ? -EINVAL : 0;
	}
}

const char *cpulist_format(const cpu_set_t *cpus, char text[static CPULIST_TEXT_BYTES])
{
	static const int longest = sizeof(",1023-1023...");
	int used = 0;

	*text = '\0';
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		int last = cpu;

		if (!CPU_ISSET(cpu, cpus))
			continue;
		while (last + 1 < CPU_SETSIZE && CPU_ISSET(last + 1, cpus))
			last++;
		if (used > CPULIST_TEXT_BYTES - longest) {
			sprintf(text + used, "...");
			break;
		}
		used += sprintf(text + used, last > cpu ? "%s%d-%d" : "%s%d", used ? "," : "", cpu,
				last);
		cpu = last;
	}
	return text;
}
