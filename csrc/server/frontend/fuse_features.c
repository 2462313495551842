/* SPDX-License-Identifier: MIT */
#include "server/frontend/fuse_features.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "server/frontend/features.h"
#include "server/frontend/fuse_mount.h"

/* The kernel's INIT request. Since 7.36 it has a second half of the flags. */
struct greeting {
	struct fuse_in_header header;
	uint32_t major;
	uint32_t minor;
	uint32_t max_readahead;
	uint32_t flags;
	uint32_t flags2;
	uint32_t unused[11];
};

_Static_assert(offsetof(struct greeting, flags2) == sizeof(struct fuse_in_header) + 16,
	       "struct fuse_init_in");

/* Bits of the 64-bit flags (FUSE_HAS_RESEND, FUSE_OVER_IO_URING); newer than Debian 12's header. */
#define HAS_RESEND (1ULL << 39)
#define OVER_IO_URING (1ULL << 41)

enum {
	GREETING_BYTES = 8192, /* FUSE_MIN_READ_BUFFER: a read(2) with a smaller buffer fails */
	PROBE_READ_BYTES = 4096,
};

/* Makes a mount that is attached to no directory, and that is gone when this returns. */
static int ask_kernel(int device, struct greeting *greeting)
{
	union {
		struct greeting greeting;
		char bytes[GREETING_BYTES];
	} buffer = {};
	_cleanup_close_ int mount = fuse_mount_detached(device, PROBE_READ_BYTES);
	ssize_t got;

	if (mount < 0)
		return mount;
	got = read(device, &buffer, sizeof(buffer));
	if (got < 0)
		return -errno;
	if (got < offsetof(struct greeting, flags2) || buffer.greeting.header.opcode != FUSE_INIT)
		return -EPROTO;
	*greeting = buffer.greeting;
	return 0;
}

struct fuse_feature {
	const char *name;
	uint64_t flag; /* in the INIT request; 0: any kernel that sends one has it */
	const char *since;
	const char *used;
	const char *reason;
};

static const struct fuse_feature table[] = {
	{ "clone-fd", 0, "4.2", "always", "each thread has a queue of its own" },
	{ "direct-loop", 0, "4.10", "always",
	  "the loop device reads past the page cache: nothing is cached twice" },
	{ "detached-mount", 0, "5.4", "always",
	  "no directory shows the file, no mount namespace copies it" },
	{ "resend", HAS_RESEND, "6.9", "never",
	  "the server's journal has the requests in flight, on any kernel" },
	{ "over-io-uring", OVER_IO_URING, "6.14", "never",
	  "/dev/fuse does not give a next server what waits after a death" },
};

enum { FEATURE_COUNT = sizeof(table) / sizeof(*table) };

static enum feature_offer offer(const struct fuse_feature *feature, bool there,
				const struct greeting *greeting)
{
	uint64_t flags = greeting->flags | (uint64_t)greeting->flags2 << 32;

	if (!there)
		return FEATURE_MISSING;
	if (!greeting->major)
		return FEATURE_UNKNOWN;
	return !feature->flag || flags & feature->flag ? FEATURE_OFFERED : FEATURE_MISSING;
}

int fuse_features_describe(json_t *about)
{
	_cleanup_close_ int device = open("/dev/fuse", O_RDWR | O_CLOEXEC | O_NONBLOCK);
	struct greeting greeting = {};
	int err = device < 0 ? -errno : 0;

	if (err)
		err = features_unavailable(about, "/dev/fuse", err, "modprobe fuse");
	else
		err = json_object_set_new(about, "available", json_true()) ? -ENOMEM : 0;
	/* Only root may mount, which is what makes the kernel send it. */
	if (!err && device >= 0 && geteuid() == 0 && !ask_kernel(device, &greeting) &&
	    json_object_set_new(about, "protocol",
				json_sprintf("%u.%u", greeting.major, greeting.minor)))
		err = -ENOMEM;
	for (unsigned i = 0; i < FEATURE_COUNT && !err; i++)
		err = features_add(about, table[i].name, table[i].since,
				   offer(&table[i], device >= 0, &greeting), table[i].used,
				   table[i].reason);
	return err;
}
