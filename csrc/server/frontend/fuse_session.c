/* SPDX-License-Identifier: MIT */
#include "server/frontend/fuse_session.h"

#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <linux/falloc.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/size.h"
#include "server/frontend/fuse_queue.h"

enum {
	/* More than a loop device ever has in flight (128), or the kernel would hold some back. */
	MAX_BACKGROUND = 1024,
};

/*
 * For ever, because nothing changes without the kernel. So an owner can stat the file, and a loop
 * device on it, while the server is stopped.
 */
static const double cache_seconds = 1e9;

static struct fuse_export *export_of(fuse_req_t request)
{
	return fuse_req_userdata(request);
}

static void on_init(void *userdata, struct fuse_conn_info *connection)
{
	struct fuse_export *export = userdata;

	export->minor = connection->proto_minor;
	eventfd_write(export->introduced_fd, 1);
	connection->max_write = export->max_io_bytes;
	connection->max_background = MAX_BACKGROUND;
	connection->congestion_threshold = MAX_BACKGROUND;
}

static bool fill_attributes(const struct fuse_export *export, fuse_ino_t inode, struct stat *status)
{
	*status = (struct stat){
		.st_ino = inode,
		.st_uid = geteuid(),
		.st_gid = getegid(),
		.st_blksize = BLOCK_BYTES,
		.st_atim = export->time,
		.st_mtim = export->time,
		.st_ctim = export->time,
	};
	if (inode == FUSE_ROOT_ID) {
		status->st_mode = S_IFDIR | 0500;
		status->st_nlink = 2;
	} else if (inode == FUSE_FILE_INODE) {
		status->st_mode = S_IFREG | (export->engine->read_only ? 0400 : 0600);
		status->st_nlink = 1;
		status->st_size = (off_t) export->engine->size;
		/* Report the file as fully allocated, or copying tools would look for holes. */
		status->st_blocks = (blkcnt_t)(export->engine->size >> 9);
	} else {
		return false;
	}
	return true;
}

static void on_lookup(fuse_req_t request, fuse_ino_t parent, const char *name)
{
	const struct fuse_export *export = export_of(request);
	struct fuse_entry_param entry = {
		.ino = FUSE_FILE_INODE,
		.attr_timeout = cache_seconds,
		.entry_timeout = cache_seconds,
	};

	if (parent != FUSE_ROOT_ID || strcmp(name, export->name) != 0) {
		fuse_reply_err(request, ENOENT);
		return;
	}
	fill_attributes(export, FUSE_FILE_INODE, &entry.attr);
	fuse_reply_entry(request, &entry);
}

static void on_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
	struct stat status;

	if (fill_attributes(export_of(request), inode, &status))
		fuse_reply_attr(request, &status, cache_seconds);
	else
		fuse_reply_err(request, ENOENT);
}

static void on_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
	struct fuse_export *export = export_of(request);

	if (export->engine->read_only && (file->flags & O_ACCMODE) != O_RDONLY) {
		fuse_reply_err(request, EROFS);
		return;
	}
	/* No page cache: that of the block device, or of btrfs, is enough. */
	file->direct_io = 1;
	file->noflush = 1;
#if FUSE_VERSION >= FUSE_MAKE_VERSION(3, 15)
	file->parallel_direct_writes = 1;
#endif
	/* If the opener is gone, the file is not open and will never be released. */
	__atomic_add_fetch(&export->opened, 1, __ATOMIC_RELAXED);
	if (fuse_reply_open(request, file))
		__atomic_sub_fetch(&export->opened, 1, __ATOMIC_RELAXED);
}

static void on_release(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
	struct fuse_export *export = export_of(request);

	/* Nobody waits for the answer if the previous server has given it. */
	if (!fuse_reply_err(request, 0))
		__atomic_sub_fetch(&export->opened, 1, __ATOMIC_RELAXED);
}

static void on_statfs(fuse_req_t request, fuse_ino_t inode)
{
	const struct fuse_export *export = export_of(request);
	struct statvfs status = {
		.f_bsize = BLOCK_BYTES, /* the discard granularity of a loop device */
		.f_frsize = BLOCK_BYTES,
		.f_blocks = export->engine->size / BLOCK_BYTES,
		.f_files = 1,
		.f_namemax = sizeof(export->name) - 1,
	};

	fuse_reply_statfs(request, &status);
}

static void on_read(fuse_req_t request, fuse_ino_t inode, size_t bytes, off_t offset,
		    struct fuse_file_info *file)
{
	uint64_t size = export_of(request)->engine->size;

	/* Reads end where the file ends. */
	if ((uint64_t)offset >= size)
		fuse_reply_buf(request, NULL, 0);
	else
		fuse_queue_submit(request, IO_OP_READ, (uint64_t)offset,
				  bytes < size - (uint64_t)offset ? bytes : size - (uint64_t)offset,
				  false);
}

static void on_write(fuse_req_t request, fuse_ino_t inode, const char *data, size_t bytes,
		     off_t offset, struct fuse_file_info *file)
{
	(void)data; /* the engine takes it from the record */
	fuse_queue_submit(request, IO_OP_WRITE, (uint64_t)offset, bytes, file->flags & O_DSYNC);
}

static void on_fsync(fuse_req_t request, fuse_ino_t inode, int datasync,
		     struct fuse_file_info *file)
{
	fuse_queue_submit(request, IO_OP_FLUSH, 0, 0, false);
}

/* Loop devices send these for discards and zeroes, both with KEEP_SIZE. */
static void on_fallocate(fuse_req_t request, fuse_ino_t inode, int mode, off_t offset, off_t bytes,
			 struct fuse_file_info *file)
{
	bool zero_range = mode & FALLOC_FL_ZERO_RANGE;

	if (mode != (FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE) &&
	    mode != (FALLOC_FL_KEEP_SIZE | FALLOC_FL_ZERO_RANGE)) {
		fuse_reply_err(request, EOPNOTSUPP);
		return;
	}
	/* A hole reads as zeroes, which a discard does not guarantee. */
	fuse_queue_submit(request, IO_OP_WRITE_ZEROES, (uint64_t)offset, (size_t)bytes, zero_range);
}

/* libfuse answers all others with ENOSYS, or with success where nothing has to be done. */
static const struct fuse_lowlevel_ops operations = {
	.init = on_init,
	.lookup = on_lookup,
	.getattr = on_getattr,
	.open = on_open,
	.release = on_release,
	.statfs = on_statfs,
	.read = on_read,
	.write = on_write,
	.fsync = on_fsync,
	.fallocate = on_fallocate,
};

struct fuse_session *fuse_export_session(struct fuse_export *export, int fuse_fd)
{
	static char program[] = "btrfs-ublk-server";
	char *words[] = { program, NULL };
	struct fuse_args arguments = FUSE_ARGS_INIT(1, words);
	struct fuse_session *session =
		fuse_session_new(&arguments, &operations, sizeof(operations), export);

	fuse_opt_free_args(&arguments);
	if (session && fuse_session_custom_io(session, &fuse_queue_io, fuse_fd)) {
		fuse_session_destroy(session);
		session = NULL;
	}
	if (!session)
		close(fuse_fd);
	return session;
}
