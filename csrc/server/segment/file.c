/* SPDX-License-Identifier: MIT */
/*
 * A range of a local file or block device: `"path"`, `"file_offset"` (bytes, default 0),
 * `"writable"` and `"direct"` (O_DIRECT), both off by default.
 */
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>

#include "base/cleanup.h"
#include "base/keys.h"
#include "base/message.h"
#include "base/size.h"
#include "server/engine.h"
#include "server/segment.h"

struct file_segment {
	char *path;
	uint64_t file_offset;
	bool writable;
	bool direct;
	unsigned file; /* from engine_add_file() */
	int fd;	       /* its descriptor, which the engine owns */
	bool in_memory;
};

static int file_parse(struct segment *segment, json_t *keys, struct error *error)
{
	struct file_segment *file = segment->private;
	int err = keys_take_string(keys, "path", true, &file->path, error);

	if (!err)
		err = keys_take_u64(keys, "file_offset", false, &file->file_offset, error);
	if (!err)
		err = keys_take_bool(keys, "writable", &file->writable, error);
	if (!err)
		err = keys_take_bool(keys, "direct", &file->direct, error);
	if (!err &&
	    (file->file_offset % BLOCK_BYTES || file->file_offset > INT64_MAX - segment->length))
		err = error_set(error, -EINVAL,
				"\"file_offset\" %llu is not a multiple of %u, or reaches beyond "
				"what a file can hold",
				(unsigned long long)file->file_offset, BLOCK_BYTES);
	return err;
}

static int file_size(int fd, uint64_t *size)
{
	struct stat status;

	if (fstat(fd, &status))
		return -errno;
	if (S_ISBLK(status.st_mode))
		return ioctl(fd, BLKGETSIZE64, size) ? -errno : 0;
	if (!S_ISREG(status.st_mode))
		return -EMEDIUMTYPE;
	*size = (uint64_t)status.st_size;
	return 0;
}

/*
 * Claims a block device before it is written. Clears O_NONBLOCK, which is not needed any more:
 * io_uring would take it as a promise that reads never wait.
 */
static int claim(int *fd, const struct file_segment *file, bool dry)
{
	struct stat status;
	int flags = fcntl(*fd, F_GETFL);

	if (flags < 0 || fcntl(*fd, F_SETFL, flags & ~O_NONBLOCK) || fstat(*fd, &status))
		return -errno;
	if (!file->writable || !S_ISBLK(status.st_mode) || dry)
		return 0;
	close(*fd);
	*fd = open(file->path, O_RDWR | O_EXCL | O_CLOEXEC | (file->direct ? O_DIRECT : 0));
	return *fd < 0 ? -errno : 0;
}

/*
 * tmpfs and ramfs have no non-blocking reads, so io_uring passes each read to a kernel thread,
 * which takes two switches. A system call reads from memory at once. NB: if a page was swapped out,
 * this thread waits, and so do requests that no other thread receives (docs/limits.md).
 */
static bool is_in_memory(int fd)
{
	struct statfs system;
	struct stat status;

	/* NB: the node of a disk is in a tmpfs too: /dev. */
	return !fstat(fd, &status) && S_ISREG(status.st_mode) && !fstatfs(fd, &system) &&
	       (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC);
}

static int file_open(struct engine *engine, struct segment *segment)
{
	struct file_segment *file = segment->private;
	int flags = (file->writable ? O_RDWR : O_RDONLY) | (file->direct ? O_DIRECT : 0);
	uint64_t needed = file->file_offset + segment->length;
	_cleanup_close_ int fd = -1;
	uint64_t size = 0;
	int err;

	if (file->writable && engine->read_only)
		return msg_fail(-EINVAL,
				"segment %u (file %s) is writable, the device is read-only",
				segment->index, file->path);
	/* O_NONBLOCK: opening a FIFO must not hang; it does not affect files and disks. */
	fd = open(file->path, flags | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0) {
		err = -errno;
		msg_error("segment %u: cannot open file '%s': %s", segment->index, file->path,
			  strerror(-err));
		if (err == -EINVAL && file->direct)
			msg_hint("its file system has no O_DIRECT; leave \"direct\" out");
		return err;
	}
	err = claim(&fd, file, engine->dry);
	if (err) {
		msg_error("segment %u: cannot claim '%s' for writing: %s", segment->index,
			  file->path, strerror(-err));
		if (err == -EBUSY)
			msg_hint("it is mounted, or another program has claimed it");
		return err;
	}
	err = file_size(fd, &size);
	if (err)
		return msg_fail(err, "segment %u: '%s': %s", segment->index, file->path,
				err == -EMEDIUMTYPE ? "neither a regular file nor a block device" :
						      strerror(-err));
	if (size < needed) {
		msg_error("segment %u: '%s' has %llu bytes, the segment needs %llu", segment->index,
			  file->path, (unsigned long long)size, (unsigned long long)needed);
		msg_hint("shorten the segment, or fill the rest with a \"zero\" segment");
		return -EINVAL;
	}
	file->in_memory = is_in_memory(fd);
	file->fd = fd;
	err = engine_add_file(engine, take_fd(&fd));
	if (err < 0)
		return err;
	file->file = (unsigned)err;
	return 0;
}

static void file_close(struct segment *segment)
{
	struct file_segment *file = segment->private;

	free(file->path);
}

static uint64_t file_position(const struct file_segment *file, const struct part *part)
{
	return file->file_offset + part->offset + part->done;
}

static int transfer_now(const struct file_segment *file, struct io *io)
{
	struct part *part = &io->part;

	while (part->done < part->length) {
		struct iovec rest = { part->data + part->done, part->length - part->done };
		off_t position = (off_t)file_position(file, part);
		ssize_t moved = io->op == IO_OP_READ ? preadv(file->fd, &rest, 1, position) :
						       pwritev2(file->fd, &rest, 1, position,
								io->fua ? RWF_DSYNC : 0);

		if (moved < 0 && errno == EINTR)
			continue;
		if (moved < 0)
			return -errno;
		/* The file has become shorter: that is an error, never zeroes. */
		if (moved == 0)
			return -EIO;
		part->done += (uint32_t)moved;
	}
	return 0;
}

/* Transfers directly to or from the request's own memory, whose addresses begin with 0. */
static void prepare_in_place(const struct file_segment *file, struct io *io,
			     struct io_uring_sqe *sqe)
{
	struct part *part = &io->part;
	void *place = (void *)(uintptr_t)(io->done + part->done);
	unsigned length = part->length - part->done;

	part->in_place = true;
	if (io->op == IO_OP_READ)
		io_uring_prep_read_fixed(sqe, -1, place, length, file_position(file, part),
					 io->fixed);
	else
		io_uring_prep_write_fixed(sqe, -1, place, length, file_position(file, part),
					  io->fixed);
}

static void prepare(const struct file_segment *file, struct io *io, struct io_uring_sqe *sqe)
{
	const struct part *part = &io->part;
	uint8_t *data = part->data + part->done;
	unsigned length = part->length - part->done;

	if (io->op == IO_OP_READ)
		io_uring_prep_read(sqe, -1, data, length, file_position(file, part));
	else
		io_uring_prep_write(sqe, -1, data, length, file_position(file, part));
}

/* Transfers the rest of the part; it is called again after short I/O. */
static int file_transfer(struct segment *segment, struct io *io)
{
	const struct file_segment *file = segment->private;
	bool in_place = io->has_fixed && !file->in_memory;
	struct io_uring_sqe *sqe;

	if (io->op == IO_OP_WRITE && !in_place) {
		int err = engine_fetch_data(io);

		if (err)
			return err;
	}
	if (file->in_memory)
		return transfer_now(file, io);
	sqe = worker_get_sqe(io->worker);
	if (in_place)
		prepare_in_place(file, io, sqe);
	else
		prepare(file, io, sqe);
	if (io->op == IO_OP_WRITE && io->fua)
		sqe->rw_flags = RWF_DSYNC;
	worker_prepare_file(io->worker, sqe, io, file->file);
	return PART_PENDING;
}

static int file_write(struct segment *segment, struct io *io)
{
	const struct file_segment *file = segment->private;

	return file->writable ? file_transfer(segment, io) : -EROFS;
}

static int file_flush(struct segment *segment, struct io *io)
{
	const struct file_segment *file = segment->private;
	struct io_uring_sqe *sqe;

	if (!file->writable)
		return 0;
	sqe = worker_get_sqe(io->worker);
	io_uring_prep_fsync(sqe, -1, IORING_FSYNC_DATASYNC);
	worker_prepare_file(io->worker, sqe, io, file->file);
	return PART_PENDING;
}

static int file_allocate(struct segment *segment, struct io *io, int mode)
{
	const struct file_segment *file = segment->private;
	struct io_uring_sqe *sqe;

	if (!file->writable)
		return -EROFS;
	sqe = worker_get_sqe(io->worker);
	io_uring_prep_fallocate(sqe, -1, mode | FALLOC_FL_KEEP_SIZE,
				(off_t)file_position(file, &io->part), io->part.length);
	worker_prepare_file(io->worker, sqe, io, file->file);
	return PART_PENDING;
}

static int file_discard(struct segment *segment, struct io *io)
{
	return file_allocate(segment, io, FALLOC_FL_PUNCH_HOLE);
}

static int file_write_zeroes(struct segment *segment, struct io *io)
{
	return file_allocate(segment, io,
			     io->no_unmap ? FALLOC_FL_ZERO_RANGE : FALLOC_FL_PUNCH_HOLE);
}

/*
 * A reader of our device may use memory that is aligned to 4 bytes only. Disks below mostly require
 * 512, and files may not accept such memory at all. Our own buffer suits all.
 */
static bool wants_other_memory(const struct part *part, int result)
{
	return part->in_place && (result == -EINVAL || result == -EFAULT);
}

static int file_complete(struct segment *segment, struct io *io, int cqe_result)
{
	struct part *part = &io->part;

	if (io->op != IO_OP_READ && io->op != IO_OP_WRITE)
		return cqe_result;
	if (cqe_result == -EINTR)
		return file_transfer(segment, io);
	if (wants_other_memory(part, cqe_result)) {
		io->has_fixed = false;
		part->in_place = false;
		part->done = 0;
		return file_transfer(segment, io);
	}
	if (cqe_result < 0)
		return cqe_result;
	/* The file has become shorter: that is an error, never zeroes. */
	if (cqe_result == 0)
		return -EIO;
	part->done += (uint32_t)cqe_result;
	return part->done == part->length ? 0 : file_transfer(segment, io);
}

static const struct segment_ops file_ops = {
	.name = "file",
	.private_bytes = sizeof(struct file_segment),
	.parse = file_parse,
	.open = file_open,
	.close = file_close,
	.read = file_transfer,
	.write = file_write,
	.flush = file_flush,
	.discard = file_discard,
	.write_zeroes = file_write_zeroes,
	.complete = file_complete,
};
SEGMENT_KIND(file_ops);
