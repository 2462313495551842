/* SPDX-License-Identifier: MIT */
#include "fetch/process/channel.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/cleanup.h"

enum {
	FIRST_BYTES = 16 << 10,
	/* What may wait for the other side: it has died, or is about to. */
	OUT_MAX_BYTES = 16 << 20,
};

const char *const channel_lack_names[CHANNEL_LACKS] = { "user",	   "capabilities", "landlock",
							"seccomp", "lock",	   "files" };

void channel_init(struct channel *channel, int fd, size_t body_max)
{
	*channel = (struct channel){ .fd = fd, .body_max = body_max };
}

static void drop(struct channel_buffer *buffer)
{
	if (buffer->data)
		explicit_bzero(buffer->data, buffer->room);
	free(buffer->data);
	*buffer = (struct channel_buffer){};
}

void channel_deinit(struct channel *channel)
{
	drop(&channel->in);
	drop(&channel->out);
	cleanup_close(&channel->fd);
	channel->fd = -1;
}

/* Forgets what was taken. Credentials go this way, so it is overwritten. */
static void settle(struct channel_buffer *buffer)
{
	size_t left = buffer->used - buffer->taken;

	if (!buffer->taken)
		return;
	if (left)
		memmove(buffer->data, buffer->data + buffer->taken, left);
	explicit_bzero(buffer->data + left, buffer->taken);
	buffer->used = left;
	buffer->taken = 0;
}

/* Makes room for so many more bytes. Not by realloc(), which would leave secrets in freed memory. */
static int grow(struct channel_buffer *buffer, size_t bytes)
{
	struct channel_buffer larger = { .room = buffer->room ?: FIRST_BYTES };

	settle(buffer);
	if (buffer->used + bytes <= buffer->room)
		return 0;
	while (larger.room < buffer->used + bytes)
		larger.room *= 2;
	larger.data = malloc(larger.room);
	if (!larger.data)
		return -ENOMEM;
	larger.used = buffer->used;
	if (buffer->used)
		memcpy(larger.data, buffer->data, buffer->used);
	drop(buffer);
	*buffer = larger;
	return 0;
}

static void append(struct channel_buffer *buffer, const void *data, size_t bytes)
{
	if (bytes)
		memcpy(buffer->data + buffer->used, data, bytes);
	buffer->used += bytes;
}

int channel_add_data(struct channel *channel, enum channel_op op, unsigned slot, const void *body,
		     size_t bytes, const char *const texts[], const void *data, size_t data_bytes)
{
	struct channel_head head = { .op = (uint16_t)op, .slot = (uint16_t)slot };
	size_t all = bytes + data_bytes;
	unsigned count = 0;

	for (; texts && texts[count]; count++)
		all += strlen(texts[count]) + 1;
	if (channel->out.used + sizeof(head) + all > OUT_MAX_BYTES ||
	    grow(&channel->out, sizeof(head) + all))
		return -ENOMEM;
	head.bytes = (uint32_t)all;
	append(&channel->out, &head, sizeof(head));
	append(&channel->out, body, bytes);
	for (unsigned i = 0; i < count; i++)
		append(&channel->out, texts[i], strlen(texts[i]) + 1);
	append(&channel->out, data, data_bytes);
	return 0;
}

int channel_add(struct channel *channel, enum channel_op op, unsigned slot, const void *body,
		size_t bytes, const char *const texts[])
{
	return channel_add_data(channel, op, slot, body, bytes, texts, NULL, 0);
}

int channel_flush(struct channel *channel)
{
	struct channel_buffer *out = &channel->out;

	while (out->taken < out->used) {
		ssize_t sent = send(channel->fd, out->data + out->taken, out->used - out->taken,
				    MSG_NOSIGNAL | MSG_DONTWAIT);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent < 0)
			return -errno;
		out->taken += (size_t)sent;
	}
	settle(out);
	return 0;
}

int channel_receive(struct channel *channel)
{
	struct channel_buffer *in = &channel->in;
	ssize_t received;

	if (grow(in, FIRST_BYTES))
		return -ENOMEM;
	do
		received =
			recv(channel->fd, in->data + in->used, in->room - in->used, MSG_DONTWAIT);
	while (received < 0 && errno == EINTR);
	if (received <= 0)
		return received ? -errno : -EPIPE;
	in->used += (size_t)received;
	return 0;
}

int channel_next(struct channel *channel, struct channel_head *head, const uint8_t **body)
{
	struct channel_buffer *in = &channel->in;
	size_t left = in->used - in->taken;

	if (left < sizeof(*head))
		return 0;
	memcpy(head, in->data + in->taken, sizeof(*head));
	if (head->bytes > channel->body_max)
		return -EPROTO;
	if (left < sizeof(*head) + head->bytes)
		return 0;
	*body = in->data + in->taken + sizeof(*head);
	in->taken += sizeof(*head) + head->bytes;
	return 1;
}

const char *channel_text(const uint8_t **at, const uint8_t *end)
{
	const char *text = (const char *)*at;
	const uint8_t *nul = *at < end ? memchr(*at, 0, (size_t)(end - *at)) : NULL;

	if (nul)
		*at = nul + 1;
	return nul ? text : NULL;
}
