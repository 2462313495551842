/* SPDX-License-Identifier: MIT */
#include "server/frontend/frontend.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/json_text.h"
#include "base/message.h"

/* In the order of preference of "auto". */
static const struct frontend_ops *const frontends[] = { &ublk_frontend, &fuse_frontend };

enum { FRONTEND_COUNT = sizeof(frontends) / sizeof(*frontends) };

static const char *const recovery_names[] = {
	[RECOVERY_NONE] = "none",	[RECOVERY_REISSUE] = "reissue", [RECOVERY_QUEUE] = "queue",
	[RECOVERY_FAIL_IO] = "fail-io", [RECOVERY_AUTO] = "auto",
};

enum { RECOVERY_COUNT = sizeof(recovery_names) / sizeof(*recovery_names) };

const char *recovery_name(enum recovery_mode recovery)
{
	return recovery_names[recovery];
}

bool recovery_find(const char *name, enum recovery_mode *recovery)
{
	for (unsigned i = 0; i < RECOVERY_COUNT; i++) {
		if (!strcmp(recovery_names[i], name)) {
			*recovery = (enum recovery_mode)i;
			return true;
		}
	}
	return false;
}

int frontend_print_features(void)
{
	json_t *all = json_object();
	int err = all ? 0 : -ENOMEM;

	for (unsigned i = 0; i < FRONTEND_COUNT && !err; i++) {
		json_t *about = json_object();

		err = json_object_set_new(all, frontends[i]->name, about) ?
			      -ENOMEM :
			      frontends[i]->features(about);
	}
	if (err)
		json_decref(all);
	else
		err = json_text_print(all);
	if (err)
		msg_error("cannot list the features: %s", strerror(-err));
	return err;
}

const struct frontend_ops *frontend_find(const char *name)
{
	for (unsigned i = 0; i < FRONTEND_COUNT; i++) {
		if (!strcmp(frontends[i]->name, name))
			return frontends[i];
	}
	return NULL;
}

const struct frontend_ops *frontend_default(void)
{
	for (unsigned i = 0; i < FRONTEND_COUNT; i++) {
		if (!access(frontends[i]->kernel_device, F_OK))
			return frontends[i];
	}
	msg_error("this kernel has neither %s nor %s", frontends[0]->kernel_device,
		  frontends[FRONTEND_COUNT - 1]->kernel_device);
	msg_hint("modprobe ublk_drv, or modprobe fuse");
	return NULL;
}
