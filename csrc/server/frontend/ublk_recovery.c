/* SPDX-License-Identifier: MIT */
#include "server/frontend/ublk_recovery.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "base/size.h"
#include "server/frontend/ublk_refetch.h"

enum {
	SECTOR_SHIFT = 9,
	POLL_MS = 2,
	/*
	 * Before 6.15, the driver learns of the server's end from a tag that waits for a request.
	 * If all are in flight, it learns from the block layer's time-out: 30 s, unless the server
	 * has shortened it.
	 */
	DEATH_WAIT_MS = 40 * 1000,
	/* How long a killed process may take to end. */
	EXIT_WAIT_MS = 2000,
	/*
	 * How long until its descriptor of /dev/ublkcN is closed, and udev has finished with the
	 * node.
	 */
	OPEN_WAIT_MS = 5000,
};

static const uint64_t recovery_flags[] = {
	[RECOVERY_NONE] = 0,
	[RECOVERY_REISSUE] = UBLK_F_USER_RECOVERY | UBLK_F_USER_RECOVERY_REISSUE,
	[RECOVERY_QUEUE] = UBLK_F_USER_RECOVERY,
	[RECOVERY_FAIL_IO] = UBLK_F_USER_RECOVERY | UBLK_F_USER_RECOVERY_FAIL_IO,
};

static const uint64_t all_recovery_flags = UBLK_F_USER_RECOVERY | UBLK_F_USER_RECOVERY_REISSUE |
					   UBLK_F_USER_RECOVERY_FAIL_IO;

const char *ublk_recovery_name(uint64_t flags)
{
	for (unsigned mode = RECOVERY_NONE; mode <= RECOVERY_FAIL_IO; mode++) {
		if ((flags & all_recovery_flags) == recovery_flags[mode])
			return recovery_name((enum recovery_mode)mode);
	}
	return "unknown";
}

static int refuse_mode(enum recovery_mode mode)
{
	msg_error("this kernel's ublk driver does not have --recovery %s", recovery_name(mode));
	msg_hint("reissue and queue need Linux 6.1, fail-io needs 6.13; auto takes the best there "
		 "is");
	return -EOPNOTSUPP;
}

int ublk_recovery_flags(enum recovery_mode mode, const struct ublk_control *control,
			uint64_t *flags)
{
	static const enum recovery_mode best[] = { RECOVERY_REISSUE, RECOVERY_QUEUE };
	uint64_t had = control->features;

	*flags = 0;
	for (unsigned i = 0; mode == RECOVERY_AUTO && i < sizeof(best) / sizeof(*best); i++) {
		if (!had || (recovery_flags[best[i]] & ~had) == 0)
			mode = best[i];
	}
	if (mode == RECOVERY_AUTO || mode == RECOVERY_NONE)
		return 0;
	if (had && recovery_flags[mode] & ~had)
		return refuse_mode(mode);
	/* With it, a server can answer what is in flight before it hands over. */
	*flags = recovery_flags[mode] | (had & UBLK_F_QUIESCE);
	return 0;
}

int ublk_recovery_granted(enum recovery_mode mode, uint64_t flags)
{
	/* The kernel clears unknown flags instead of refusing them. */
	if (mode == RECOVERY_AUTO || (flags & all_recovery_flags) == recovery_flags[mode])
		return 0;
	return refuse_mode(mode);
}

static void pause_ms(unsigned ms)
{
	nanosleep(&(struct timespec){ .tv_nsec = (long)ms * 1000000 }, NULL);
}

/* A zombie that its parent has not waited for does not count as alive. */
static bool is_alive(int pid)
{
	_cleanup_close_ int fd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
	struct pollfd ended = { .fd = fd, .events = POLLIN };

	return fd >= 0 && poll(&ended, 1, 0) == 0;
}

static bool is_recoverable(const struct ublksrv_ctrl_dev_info *info)
{
	return info->state == UBLK_S_DEV_QUIESCED || info->state == UBLK_S_DEV_FAIL_IO;
}

static int refuse_other(const struct ublksrv_ctrl_dev_info *info, uint64_t tag)
{
	return msg_fail(
		-EPERM, "ublk device %u carries tag %016llx, not %016llx; it was left alone",
		info->dev_id, (unsigned long long)info->ublksrv_flags, (unsigned long long)tag);
}

static int refuse_hopeless(const struct ublksrv_ctrl_dev_info *info)
{
	if (info->state == UBLK_S_DEV_DEAD)
		msg_error("ublk device %u was stopped, or never started: there is nothing to "
			  "recover",
			  info->dev_id);
	else
		msg_error("ublk device %u has no recovery mode: it goes with its server",
			  info->dev_id);
	msg_hint("--delete-device removes it");
	return -EINVAL;
}

static int refuse_live(const struct ublksrv_ctrl_dev_info *info)
{
	msg_error("ublk device %u is live: process %d serves it", info->dev_id, info->ublksrv_pid);
	msg_hint("the request 'handover' makes that server leave its device to another one");
	return -EBUSY;
}

/* Waits until the device waits for a server; returns 0 then. */
static int wait_for_death(const struct frontend *frontend, struct ublk_control *control,
			  struct ublksrv_ctrl_dev_info *info)
{
	for (unsigned waited_ms = 0;; waited_ms += POLL_MS) {
		int err = ublk_get_device(control, (uint32_t)frontend->recover_id, info);

		if (err)
			return msg_fail(err, "no ublk device %d: %s", frontend->recover_id,
					strerror(-err));
		if (info->ublksrv_flags != frontend->tag)
			return refuse_other(info, frontend->tag);
		if (is_recoverable(info))
			return 0;
		if (info->state == UBLK_S_DEV_DEAD || !(info->flags & UBLK_F_USER_RECOVERY))
			return refuse_hopeless(info);
		if (waited_ms >= DEATH_WAIT_MS ||
		    (waited_ms >= EXIT_WAIT_MS && is_alive(info->ublksrv_pid)))
			return refuse_live(info);
		pause_ms(POLL_MS);
	}
}

static int refuse_size(const struct ublk_control *control, uint32_t id, uint64_t bytes,
		       const struct frontend *frontend)
{
	uint64_t wanted = frontend->engine->size;

	msg_error("ublk device %u has %llu bytes, the description %llu; it was left alone", id,
		  (unsigned long long)bytes, (unsigned long long)wanted);
	if (bytes < wanted && frontend->grow && !(control->features & UBLK_F_UPDATE_SIZE))
		msg_hint("this kernel's ublk driver cannot change a size: that needs Linux 6.16");
	return -EINVAL;
}

static int check_params(const struct frontend *frontend, struct ublk_control *control, uint32_t id)
{
	const struct engine *engine = frontend->engine;
	struct ublk_params params;
	int err = ublk_get_params(control, id, &params);
	uint64_t bytes;
	bool read_only;

	if (err)
		return msg_fail(err, "ublk device %u does not tell its parameters (GET_PARAMS): %s",
				id, strerror(-err));
	bytes = params.basic.dev_sectors << SECTOR_SHIFT;
	read_only = params.basic.attrs & UBLK_ATTR_READ_ONLY;
	if (bytes != engine->size &&
	    !(frontend->grow && bytes < engine->size && control->features & UBLK_F_UPDATE_SIZE))
		return refuse_size(control, id, bytes, frontend);
	if (read_only != engine->read_only)
		return msg_fail(-EINVAL,
				"ublk device %u is %s, the description is not; it was left alone",
				id, read_only ? "read-only" : "writable");
	return 0;
}

int ublk_recovery_find(const struct frontend *frontend, struct ublk_control *control,
		       struct ublksrv_ctrl_dev_info *info)
{
	int err = wait_for_death(frontend, control, info);

	return err ?: check_params(frontend, control, info->dev_id);
}

int ublk_recovery_grow(const struct engine *engine, struct ublk_control *control, uint32_t id)
{
	struct ublk_params params;
	int err = ublk_get_params(control, id, &params);

	if (!err && params.basic.dev_sectors << SECTOR_SHIFT < engine->size)
		err = ublk_update_size(control, id, engine->size);
	if (err)
		return msg_fail(err,
				"cannot make ublk device %u %llu bytes large (UPDATE_SIZE): %s", id,
				(unsigned long long)engine->size, strerror(-err));
	return 0;
}

int ublk_open_char_device(int dev_dir, uint32_t id)
{
	char name[32];

	snprintf(name, sizeof(name), "ublkc%u", id);
	for (unsigned waited_ms = 0;; waited_ms++) {
		int fd = openat(dev_dir, name, O_RDWR | O_CLOEXEC);
		int err = -errno;

		if (fd >= 0)
			return fd;
		/* The node exists with the device, but udev may hold it for a moment. */
		if ((err != -EBUSY && err != -ENOENT) || waited_ms == OPEN_WAIT_MS) {
			msg_error("cannot open /dev/%s: %s", name, strerror(-err));
			if (err == -EBUSY)
				msg_hint("another server has it open");
			return err;
		}
		pause_ms(1);
	}
}

static int start_recovery(struct ublk_control *control, uint32_t id)
{
	int err = ublk_start_recovery(control, id);

	for (unsigned waited_ms = 0; err == -EBUSY && waited_ms < OPEN_WAIT_MS; waited_ms++) {
		pause_ms(1);
		err = ublk_start_recovery(control, id);
	}
	if (err)
		msg_error("cannot take over ublk device %u (START_USER_RECOVERY): %s", id,
			  strerror(-err));
	if (err == -EBUSY)
		msg_hint("another server has /dev/ublkc%u open", id);
	return err;
}

/* NB: closes the device afterwards, because START_USER_RECOVERY fails while it is open. */
static int refetch(const struct ublk_control *control, int dev_dir,
		   const struct ublksrv_ctrl_dev_info *info)
{
	_cleanup_close_ int device_fd = ublk_open_char_device(dev_dir, info->dev_id);

	return device_fd < 0 ? device_fd : ublk_refetch(device_fd, info, control->encoded);
}

int ublk_recovery_begin(struct ublk_control *control, int dev_dir,
			const struct ublksrv_ctrl_dev_info *info)
{
	int err = 0;

	/*
	 * Zero copy came with 6.15. Since then, the driver resets the queues as soon as a server is
	 * gone (2d786e66c966), whatever state that server had reached.
	 */
	if (!(control->features & UBLK_F_SUPPORT_ZERO_COPY))
		err = refetch(control, dev_dir, info);
	return err ?: start_recovery(control, info->dev_id);
}
