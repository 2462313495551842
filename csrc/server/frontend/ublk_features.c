/* SPDX-License-Identifier: MIT */
#include "server/frontend/ublk_features.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/message.h"
#include "server/frontend/features.h"
#include "server/frontend/ublk_control.h"

static const char control_path[] = "/dev/ublk-control";

/* In the order of the flags. docs/features.md has the figures behind the reasons. */
static const struct ublk_feature table[] = {
	{ "support-zero-copy", UBLK_F_SUPPORT_ZERO_COPY, "6.15", UBLK_NOT_USED,
	  "registering buffers by hand costs two commands more per request; see auto-buf-reg" },
	{ "comp-in-task", UBLK_F_URING_CMD_COMP_IN_TASK, "6.0", UBLK_NOT_USED,
	  "for comparisons; the driver does it anyway" },
	{ "need-get-data", UBLK_F_NEED_GET_DATA, "6.0", UBLK_NOT_USED,
	  "each write would take one command more, to save buffers that are there" },
	{ "user-recovery", UBLK_F_USER_RECOVERY, "6.1", UBLK_ASKED,
	  "--recovery: the device outlives its server" },
	{ "user-recovery-reissue", UBLK_F_USER_RECOVERY_REISSUE, "6.1", UBLK_ASKED,
	  "--recovery reissue: requests in flight go to the next server" },
	{ "unprivileged-dev", UBLK_F_UNPRIVILEGED_DEV, "6.3", UBLK_NOT_USED,
	  "such devices have no recovery, and mounting them takes root all the same" },
	{ "cmd-ioctl-encode", UBLK_F_CMD_IOCTL_ENCODE, "6.4", UBLK_USED,
	  "drivers may be built without the older form of commands" },
	{ "user-copy", UBLK_F_USER_COPY, "6.5", UBLK_ASKED,
	  "with auto-buf-reg, for what is no file; alone, it costs a system call per request" },
	{ "zoned", UBLK_F_ZONED, "6.6", UBLK_NOT_USED, "no segment kind has zones" },
	{ "user-recovery-fail-io", UBLK_F_USER_RECOVERY_FAIL_IO, "6.13", UBLK_ASKED,
	  "--recovery fail-io: requests fail until the next server is there" },
	{ "update-size", UBLK_F_UPDATE_SIZE, "6.16", UBLK_USED,
	  "a longer description grows the device under its users: btrfs-ublk device update" },
	{ "auto-buf-reg", UBLK_F_AUTO_BUF_REG, "6.16", UBLK_WANTED,
	  "--feature: pays where a disk is read or written directly, costs all else a copy" },
	{ "quiesce", UBLK_F_QUIESCE, "6.16", UBLK_ASKED,
	  "a server can give its device away with nothing in flight" },
	{ "per-io-daemon", UBLK_F_PER_IO_DAEMON, "6.16", UBLK_NOT_USED,
	  "one thread serves a queue; more queues (--queues) give more threads" },
	{ "buf-reg-off-daemon", UBLK_F_BUF_REG_OFF_DAEMON, "6.17", UBLK_NOT_USED,
	  "only for buffers that are registered by hand; see auto-buf-reg" },
	{ "batch-io", UBLK_F_BATCH_IO, "7.0", UBLK_NOT_USED,
	  "single requests pay 5 % for the 6 to 7 % that many at once get" },
	{ "integrity", UBLK_F_INTEGRITY, "7.0", UBLK_NOT_USED,
	  "no segment kind has integrity data, and it needs user-copy" },
	{ "safe-stop-dev", UBLK_F_SAFE_STOP_DEV, "7.0", UBLK_USED,
	  "stop, or leave a device in use alone, in one step; else an exclusive open does it" },
	{ "no-auto-part-scan", UBLK_F_NO_AUTO_PART_SCAN, "7.0", UBLK_USED,
	  "the start reads nothing: an address space that fails or is slow does not delay it" },
	{ "shmem-zc", UBLK_F_SHMEM_ZC, "7.1", UBLK_NOT_USED,
	  "only for readers that share memory with the server" },
};

enum { FEATURE_COUNT = sizeof(table) / sizeof(*table) };

const struct ublk_feature *ublk_feature_find(const char *name)
{
	for (unsigned i = 0; i < FEATURE_COUNT; i++) {
		const struct ublk_feature *feature = &table[i];

		if (strcmp(feature->name, name) != 0)
			continue;
		if (feature->use == UBLK_USED || feature->use == UBLK_WANTED)
			return feature;
		return msg_fail(NULL, "feature '%s' cannot be switched: %s", name, feature->reason);
	}
	msg_error("there is no feature '%s'", name);
	msg_hint("--features lists them");
	return NULL;
}

int ublk_features_choose(const struct ublk_control *control, uint64_t on, uint64_t *flags)
{
	*flags = 0;
	for (unsigned i = 0; i < FEATURE_COUNT; i++) {
		const struct ublk_feature *feature = &table[i];
		bool offered = control->features & feature->flag;

		if (on & feature->flag && !offered) {
			msg_error("--feature %s: this kernel's ublk driver does not offer it",
				  feature->name);
			msg_hint("it came with Linux %s; leave the option out to do without",
				 feature->since);
			return -EOPNOTSUPP;
		}
		if (feature->use == UBLK_USED && offered)
			*flags |= feature->flag;
	}
	*flags |= on;
	/* Kinds other than files must copy data of their own. */
	if (on & UBLK_F_AUTO_BUF_REG)
		*flags |= UBLK_F_USER_COPY;
	return 0;
}

static const char *used_when(const struct ublk_feature *feature)
{
	switch (feature->use) {
	case UBLK_USED:
		return "always";
	case UBLK_ASKED:
	case UBLK_WANTED:
		return "asked";
	default:
		return "never";
	}
}

int ublk_features_describe(json_t *about)
{
	struct ublk_control control = { .fd = -1 };
	int err = access(control_path, F_OK) ? -errno : ublk_control_open(&control);

	if (err)
		err = features_unavailable(about, control_path, err,
					   "modprobe ublk_drv, on Linux 6.0 or newer that has it");
	else
		err = json_object_set_new(about, "available", json_true()) ? -ENOMEM : 0;
	for (unsigned i = 0; i < FEATURE_COUNT && !err; i++) {
		const struct ublk_feature *feature = &table[i];

		enum feature_offer offer = control.features & feature->flag ? FEATURE_OFFERED :
									      FEATURE_MISSING;

		/* Before 6.5, the driver does not tell. */
		if (control.fd >= 0 && !control.features)
			offer = FEATURE_UNKNOWN;
		err = features_add(about, feature->name, feature->since, offer, used_when(feature),
				   feature->reason);
	}
	ublk_control_close(&control);
	return err;
}
