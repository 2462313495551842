/* SPDX-License-Identifier: MIT */
#include "server/control_request.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json_text.h"
#include "base/utf8.h"
#include "server/frontend/frontend.h"
#include "server/stats.h"

extern const struct control_kind *const __start_control_kinds[];
extern const struct control_kind *const __stop_control_kinds[];

json_t *control_whole(json_t *reply, uint64_t losses)
{
	if (losses == json_text_losses())
		return reply;
	json_decref(reply);
	return NULL;
}

json_t *control_error(const char *text)
{
	return json_pack("{s:o}", "error", utf8_json(text));
}

static enum control_action answer_stats(const struct control_subject *subject, json_t **reply)
{
	*reply = json_pack("{s:s, s:o}", "reply", "stats", "stats",
			   stats_json(subject->frontend->engine));
	return CONTROL_GO_ON;
}

static const struct control_kind kind_stats = { .name = "stats", .answer = answer_stats };
CONTROL_REQUEST(kind_stats);

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

static const struct control_kind kind_info = { .name = "info", .answer = answer_info };
CONTROL_REQUEST(kind_info);

static enum control_action answer_stop(const struct control_subject *subject, json_t **reply)
{
	const struct frontend_ops *ops = subject->frontend->ops;

	if (ops->withdraw && ops->withdraw(subject->frontend)) {
		*reply = json_pack("{s:s, s:b}", "error", "the device is in use", "in_use", 1);
		return CONTROL_GO_ON;
	}
	*reply = json_pack("{s:s}", "reply", "stop");
	return CONTROL_STOP;
}

static const struct control_kind kind_stop = { .name = "stop", .answer = answer_stop };
CONTROL_REQUEST(kind_stop);

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

static const struct control_kind kind_handover = { .name = "handover", .answer = answer_handover };
CONTROL_REQUEST(kind_handover);

static bool is_available(const struct control_kind *kind)
{
	return !kind->available || kind->available();
}

static json_t *unknown_request(void)
{
	char text[512] = "unknown request; known: ";
	bool first = true;

	for (const struct control_kind *const *kind = __start_control_kinds;
	     kind < __stop_control_kinds; kind++) {
		size_t used = strlen(text);

		if (!is_available(*kind))
			continue;
		snprintf(text + used, sizeof(text) - used, "%s%s", first ? "" : ", ",
			 (*kind)->name);
		first = false;
	}
	return control_error(text);
}

static bool is_protocol_ours(const json_t *message)
{
	const json_t *protocol = json_object_get(message, "protocol");

	return !protocol || json_integer_value(protocol) == CONTROL_PROTOCOL;
}

const struct control_kind *control_kind_of(const json_t *message, json_t **reply)
{
	const char *name = json_string_value(json_object_get(message, "request"));
	char text[80];

	if (!name) {
		*reply = control_error("a request is an object with a string \"request\"");
		return NULL;
	}
	if (!is_protocol_ours(message)) {
		snprintf(text, sizeof(text), "another protocol than the server's, which is %d",
			 CONTROL_PROTOCOL);
		*reply = control_error(text);
		return NULL;
	}
	for (const struct control_kind *const *kind = __start_control_kinds;
	     kind < __stop_control_kinds; kind++) {
		if (!strcmp((*kind)->name, name) && is_available(*kind))
			return *kind;
	}
	*reply = unknown_request();
	return NULL;
}

bool control_has_work(void)
{
	for (const struct control_kind *const *kind = __start_control_kinds;
	     kind < __stop_control_kinds; kind++) {
		if ((*kind)->work && is_available(*kind))
			return true;
	}
	return false;
}
