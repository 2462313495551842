/* SPDX-License-Identifier: MIT */
/* One request is a function and a row of `table`; nothing else has to name it. */
#include "server/control_request.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/frontend/frontend.h"
#include "server/stats.h"

struct row {
	const char *name;
	enum control_action (*answer)(const struct control_subject *subject, json_t **reply);
};

json_t *control_error(const char *text)
{
	return json_pack("{s:s}", "error", text);
}

static enum control_action answer_stats(const struct control_subject *subject, json_t **reply)
{
	*reply = json_pack("{s:s, s:o}", "reply", "stats", "stats",
			   stats_json(subject->frontend->engine));
	return CONTROL_GO_ON;
}

static double seconds_since(const struct timespec *begin)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now);
	return (double)(now.tv_sec - begin->tv_sec) + (double)(now.tv_nsec - begin->tv_nsec) * 1e-9;
}

static enum control_action answer_info(const struct control_subject *subject, json_t **reply)
{
	json_t *more = json_pack("{s:i, s:s, s:f}", "pid", (int)getpid(), "version",
				 BTRFS_UBLK_VERSION, "uptime_s", seconds_since(&subject->started));
	json_t *info = json_copy(subject->ready);

	if (!more || !info || json_object_update(info, more)) {
		json_decref(info);
		info = NULL;
	}
	json_decref(more);
	*reply = json_pack("{s:s, s:o}", "reply", "info", "info", info);
	return CONTROL_GO_ON;
}

static enum control_action answer_stop(const struct control_subject *subject, json_t **reply)
{
	(void)subject;
	*reply = json_pack("{s:s}", "reply", "stop");
	return CONTROL_STOP;
}

static enum control_action answer_handover(const struct control_subject *subject, json_t **reply)
{
	const struct frontend_ops *ops = subject->frontend->ops;

	if (!ops->outlives || !ops->outlives(subject->frontend)) {
		*reply = control_error("this device has no recovery mode: it would go with its "
				       "server");
		return CONTROL_GO_ON;
	}
	*reply = json_pack("{s:s}", "reply", "handover");
	return CONTROL_HAND_OVER;
}

static const struct row table[] = {
	{ "stats", answer_stats },
	{ "info", answer_info },
	{ "stop", answer_stop },
	{ "handover", answer_handover },
};

enum { ROW_COUNT = sizeof(table) / sizeof(*table) };

static json_t *unknown_request(void)
{
	char text[256] = "unknown request; known: ";

	for (unsigned i = 0; i < ROW_COUNT; i++) {
		size_t used = strlen(text);

		snprintf(text + used, sizeof(text) - used, "%s%s", i ? ", " : "", table[i].name);
	}
	return control_error(text);
}

static enum control_action answer(const struct control_subject *subject, const json_t *message,
				  json_t **reply)
{
	const char *name = json_string_value(json_object_get(message, "request"));

	if (!name) {
		*reply = control_error("a request is an object with a string \"request\"");
		return CONTROL_GO_ON;
	}
	for (unsigned i = 0; i < ROW_COUNT; i++) {
		if (!strcmp(table[i].name, name))
			return table[i].answer(subject, reply);
	}
	*reply = unknown_request();
	return CONTROL_GO_ON;
}

enum control_action control_request(const struct control_subject *subject, const char *line,
				    size_t length, json_t **reply)
{
	json_error_t error;
	json_t *message = json_loadb(line, length, JSON_REJECT_DUPLICATES, &error);
	enum control_action action;

	if (!message) {
		*reply = control_error("not valid JSON");
		return CONTROL_GO_ON;
	}
	action = answer(subject, message, reply);
	json_decref(message);
	return action;
}
