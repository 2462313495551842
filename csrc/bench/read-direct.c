/* SPDX-License-Identifier: MIT */
/* Reads with O_DIRECT through an io_uring. Each slot of the thread is one read under way. */
#include <errno.h>
#include <liburing.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/message.h"
#include "base/size.h"
#include "bench/reads.h"

enum { SECTOR_BYTES = 512 };

struct direct {
	struct reader *reader;
	struct io_uring ring;
	uint8_t *buffers;
	unsigned in_flight;
};

static uint8_t *buffer_of(const struct direct *direct, const struct slot *slot)
{
	return direct->buffers + (size_t)(slot - direct->reader->slots) * READ_MAX_BYTES;
}

/* Puts a wrong word in each sector, to detect a read that succeeds without filling it. */
static void poison(const struct reads *reads, uint8_t *buffer, const struct slot *slot)
{
	for (uint32_t at = slot->done; at < slot->length; at += SECTOR_BYTES) {
		uint64_t word = reads->byte < 0 ? ~(reads->base + slot->offset + at) :
						  0x0101010101010101ull * (uint8_t)~reads->byte;

		memcpy(buffer + at, &word, sizeof(word));
	}
}

static void submit(struct direct *direct, struct slot *slot)
{
	struct reads *reads = direct->reader->reads;
	struct io_uring_sqe *sqe = io_uring_get_sqe(&direct->ring);
	uint8_t *buffer = buffer_of(direct, slot);

	poison(reads, buffer, slot);
	io_uring_prep_read(sqe, reads->fd, buffer + slot->done, slot->length - slot->done,
			   slot->offset + slot->done);
	io_uring_sqe_set_data(sqe, slot);
	direct->in_flight++;
}

static void begin(struct direct *direct, struct slot *slot)
{
	if (reads_begin(direct->reader->reads, slot))
		submit(direct, slot);
}

/* Returns true for an error. */
static bool handle(struct direct *direct, struct slot *slot, int result)
{
	struct reads *reads = direct->reader->reads;
	uint64_t end_ns = clock_now_ns();
	int error = result < 0 ? -result : (result ? 0 : ERROR_SHORT);

	direct->in_flight--;
	if (error) {
		reads_end(reads, slot, end_ns, error, slot->offset + slot->done);
		begin(direct, slot);
		return true;
	}
	reads_verify(reads, slot->offset + slot->done, buffer_of(direct, slot) + slot->done,
		     (size_t)result);
	slot->done += (uint32_t)result;
	if (slot->done < slot->length && !(slot->done % BLOCK_BYTES)) {
		submit(direct, slot); /* the rest of it */
		return false;
	}
	error = slot->done < slot->length ? ERROR_SHORT : 0;
	reads_end(reads, slot, end_ns, error, slot->offset + slot->done);
	begin(direct, slot);
	return error;
}

static int run(struct direct *direct)
{
	for (unsigned i = 0; i < direct->reader->slot_count; i++)
		begin(direct, &direct->reader->slots[i]);
	while (direct->in_flight) {
		struct io_uring_cqe *cqe;
		unsigned head, seen = 0, errors = 0;
		int err = io_uring_submit_and_wait(&direct->ring, 1);

		if (err < 0 && err != -EINTR && err != -EAGAIN && err != -EBUSY)
			return err;
		io_uring_for_each_cqe(&direct->ring, head, cqe)
		{
			seen++;
			errors += handle(direct, io_uring_cqe_get_data(cqe), cqe->res);
		}
		io_uring_cq_advance(&direct->ring, seen);
		if (errors) /* a removed device fails a million reads per second */
			nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
	}
	return 0;
}

static int init(struct direct *direct)
{
	size_t bytes = (size_t)direct->reader->slot_count * READ_MAX_BYTES;
	/* NB: kernel threads run reads that cannot start at once. By default they are too few. */
	unsigned threads[] = { direct->reader->slot_count, 0 };
	void *buffers =
		mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int err;

	if (buffers == MAP_FAILED)
		return -errno;
	direct->buffers = buffers;
	err = io_uring_queue_init(direct->reader->slot_count, &direct->ring, 0);
	if (!err)
		io_uring_register_iowq_max_workers(&direct->ring, threads);
	return err;
}

void *read_direct_main(void *argument)
{
	struct direct direct = { .reader = argument };
	int err = init(&direct);

	if (!err)
		err = run(&direct);
	if (err)
		msg_error("io_uring: %s", strerror(-err));
	/* Keep the ring and its buffers, as reads may still be under way. */
	direct.reader->error = err;
	reads_leave(direct.reader->reads);
	return NULL;
}
