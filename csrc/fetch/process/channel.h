/* SPDX-License-Identifier: MIT */
/*
 * Messages between a server and its fetch process, over a local stream. A message is a head and
 * a body: a structure of those below, and then texts that each end in a NUL. What has arrived for a
 * run is no message: it lies in the run's window in shared memory, and messages say how far.
 *
 * The server believes nothing that it receives: the stream's own copy is what is checked and used.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	CHANNEL_VERSION = 7,
	/* Descriptors of a new process. */
	CHANNEL_FD = 3,
	CHANNEL_WINDOWS_FD = 4,
	CHANNEL_PROGRAM_FD = 5, /* no use to the process, which closes it */

	CHANNEL_SLOTS = 128, /* runs at a time */
	CHANNEL_WINDOW_BYTES = 512 << 10,
	/* At a time, with slots of their own, without windows: all that control-workers can ask. */
	CHANNEL_INQUIRIES = 384,
	CHANNEL_NO_MIRROR = -1,
};
/* Of the mirror that an inquiry is for, which lives no longer: and its slot. */
#define CHANNEL_OF_INQUIRY (1u << 31)
#define CHANNEL_WINDOWS_BYTES ((size_t)CHANNEL_SLOTS * CHANNEL_WINDOW_BYTES)

enum channel_op {
	/* of the server */
	CHANNEL_MIRROR, /* struct channel_mirror, kind, via or "", keys in JSON */
	CHANNEL_START,	/* struct channel_start, pinned identity or "" */
	CHANNEL_CANCEL,
	CHANNEL_TAKEN,	 /* uint32_t: all bytes that have been copied from the window */
	CHANNEL_LOGIN,	 /* struct channel_login, an error's text and hint, a packed login */
	CHANNEL_INQUIRE, /* struct channel_inquire, kind, keys in JSON, a document's name or "" */
	CHANNEL_PING,
	/* of the process */
	CHANNEL_HELLO,	   /* struct channel_hello */
	CHANNEL_IDENTITY,  /* a text, before the first byte */
	CHANNEL_ARRIVED,   /* uint32_t: all bytes that were put into the window */
	CHANNEL_OVER,	   /* struct channel_over, an error's text. The slot is free then */
	CHANNEL_ASK_LOGIN, /* struct channel_ask */
	CHANNEL_ANSWER,	   /* struct channel_answer, an error's text and hint, identity, document */
	CHANNEL_EVENT,	   /* the name and the text of an event */
	CHANNEL_PONG,
	CHANNEL_WHOLE, /* before the first byte: all of the object comes, not only the range */
	CHANNEL_TOKEN, /* struct channel_token, token, why or "": once for each login that was asked for */
};

struct channel_head {
	uint32_t bytes; /* of the body */
	uint16_t op;
	uint16_t slot;
};

struct channel_mirror {
	uint64_t object_bytes;
	uint32_t number;
	int32_t origin; /* the number of the mirror that it is a cache for */
	uint32_t has_digests, unused;
};

struct channel_start {
	uint64_t offset, deadline_ns;
	uint32_t mirror, length, fresh, sized, widens, unused;
};

struct channel_inquire {
	uint64_t deadline_ns;
};

struct channel_answer {
	uint64_t size;
	int32_t result;
	uint32_t unused;
};

struct channel_ask {
	uint64_t token_refused;	  /* token_number(), or 0 */
	uint32_t mirror, refused; /* whether its last login was sent, and refused */
	uint32_t wants_token, unused;
};

struct channel_token {
	uint64_t until_ns;
	uint32_t mirror, refused;
};

struct channel_login {
	uint32_t mirror;
	int32_t err;
};

struct channel_hello {
	uint32_t version;
	uint32_t lacks; /* bits of base/confine_process.h, and this one */
};
/* Its memory is not locked, so that it may wait for memory that others have to write first. */
enum { CHANNEL_LACKS_LOCK = 1 << 4, CHANNEL_LACKS = 6 };
/* What each bit is called, in statistics, in the log, and by `btrfs-ublk-fetch --check`. */
extern const char *const channel_lack_names[CHANNEL_LACKS];

struct channel_over {
	int32_t result;
	uint32_t failure, retry_after_ms, arrived, cut, unsized, whole;
};

struct channel {
	int fd; /* does not block */
	/* Its own. */
	struct channel_buffer {
		uint8_t *data;
		size_t used, room, taken;
	} in, out;
	size_t body_max; /* of what comes in */
};

void channel_init(struct channel *channel, int fd, size_t body_max);
/* Frees the buffers, and closes the descriptor. */
void channel_deinit(struct channel *channel);
/*
 * Adds a message. `texts` are added behind the structure, each with its NUL; NULL ends them.
 * Returns 0 or -ENOMEM.
 */
int channel_add(struct channel *channel, enum channel_op op, unsigned slot, const void *body,
		size_t bytes, const char *const texts[]);
/* The same, with any bytes behind the texts. */
int channel_add_data(struct channel *channel, enum channel_op op, unsigned slot, const void *body,
		     size_t bytes, const char *const texts[], const void *data, size_t data_bytes);
/* Sends what was added. Returns 0, -EAGAIN when some of it is left, or another negative errno. */
int channel_flush(struct channel *channel);
/* Receives once. Returns 0, -EAGAIN, -EPIPE at the end of the stream, or another negative errno. */
int channel_receive(struct channel *channel);
/*
 * Returns 1 and the next message, whose body stays until the next call; 0 when none is whole; or
 * -EPROTO.
 */
int channel_next(struct channel *channel, struct channel_head *head, const uint8_t **body);
/* Takes the next text of a body. Returns NULL when there is no whole one. */
const char *channel_text(const uint8_t **at, const uint8_t *end);
