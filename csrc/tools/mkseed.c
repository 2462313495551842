/* SPDX-License-Identifier: MIT */
/* btrfs-ublk-mkseed: makes a mega-extent seed. btrfs/seed.h has the layout. */
#include <errno.h>
#include <jansson.h>
#include <signal.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <uuid/uuid.h>

#include "base/cleanup.h"
#include "base/json_text.h"
#include "base/message.h"
#include "base/size.h"
#include "base/utf8.h"
#include "btrfs/outfile.h"
#include "tools/mkseed-options.h"

/* Refuses early, with a clear message. Only outfile_publish() prevents overwriting for sure. */
static int check_output(const struct options *options)
{
	struct stat st;

	if (lstat(options->output, &st)) {
		if (errno == ENOENT)
			return 0;
		msg_error("%s: %s", options->output, strerror(errno));
		return -errno;
	}
	if (!S_ISREG(st.st_mode)) {
		msg_error("%s exists and is not a regular file", options->output);
		msg_hint("give the name of a file to create");
		return -EINVAL;
	}
	if (!options->force) {
		msg_error("%s exists", options->output);
		msg_hint("choose another name, or replace it with --force");
		return -EEXIST;
	}
	return 0;
}

static void report_too_big(const struct options *options, uint64_t bytes)
{
	char text[SIZE_TEXT_BYTES], local_text[SIZE_TEXT_BYTES];
	struct rlimit limit;

	size_format(bytes, text);
	size_format(options->seed.local_bytes, local_text);
	if (!getrlimit(RLIMIT_FSIZE, &limit) && limit.rlim_cur < bytes) {
		msg_error("%s: a sparse file of %s is over the limit of this process",
			  options->output, text);
		msg_hint("see `ulimit -f`");
		return;
	}
	msg_error("%s: this file system cannot hold a sparse file of %s", options->output, text);
	if (options->metadata_only)
		msg_hint("xfs, btrfs, tmpfs (/dev/shm) and ext4 can");
	else
		msg_hint("xfs, btrfs and tmpfs (/dev/shm) can, ext4 stops at 16 TiB; or use "
			 "--metadata-only, which a block server is content with and which "
			 "needs %s, sparse",
			 local_text);
}

static int create_output(const struct options *options, struct outfile *out)
{
	const struct seed *seed = &options->seed;
	uint64_t bytes = options->metadata_only ? seed->local_bytes : seed->device_bytes;
	int ret;

	ret = outfile_open(out, options->output, false);
	if (ret) {
		msg_error("%s: cannot create it: %s", options->output, strerror(-ret));
		if (ret == -ENOENT || ret == -ENOTDIR)
			msg_hint("its directory does not exist; create that first");
		return ret;
	}
	if (ftruncate(out->fd, (off_t)bytes)) {
		ret = -errno;
		if (ret != -EFBIG && ret != -EINVAL)
			return msg_fail(ret, "%s: %s", options->output, strerror(-ret));
		report_too_big(options, bytes);
		return ret;
	}
	ret = seed_write(seed, out->fd);
	if (ret)
		msg_error("%s: cannot write: %s", options->output, strerror(-ret));
	if (ret == -ENOSPC)
		msg_hint("the metadata have %llu bytes", (unsigned long long)seed->metadata_bytes);
	return ret;
}

static int print_json(const struct options *options, const struct stat *st)
{
	const struct seed *seed = &options->seed;
	char fsid[UUID_STR_LEN], device_uuid[UUID_STR_LEN];
	json_t *json;

	uuid_unparse_lower(seed->fsid, fsid);
	uuid_unparse_lower(seed->device_uuid, device_uuid);
	json = json_pack(
		"{so ss ss ss sI sI sI sI sI s{ss sI sI sI} sI sI sb ss sb}", "path",
		utf8_json(options->output), "fsid", fsid, "device_uuid", device_uuid, "label",
		seed->label, "device_bytes", (json_int_t)seed->device_bytes, "file_bytes",
		(json_int_t)st->st_size, "allocated_bytes", (json_int_t)st->st_blocks * 512,
		"metadata_bytes", (json_int_t)seed->metadata_bytes, "local_bytes",
		(json_int_t)seed->local_bytes, "virtual_data", "filename", seed->virtual_name,
		"inode", (json_int_t)seed->virtual_inode, "size", (json_int_t)seed->virtual_bytes,
		"device_offset", (json_int_t)seed->virtual_start, "chunks",
		(json_int_t)seed->chunk_count, "chunk_bytes", (json_int_t)seed->chunk_bytes,
		"stub_chunk", (int)seed->has_stub, "metadata_profile",
		seed->metadata_dup ? "dup" : "single", "inherit_nodatasum",
		(int)seed->inherit_nodatasum);
	if (json_text_print(json))
		return msg_fail(-EIO, "%s is complete, but printing the result failed",
				options->output);
	return 0;
}

static int make_seed(struct options *options)
{
	_cleanup_(outfile_close) struct outfile out = OUTFILE_CLOSED;
	struct stat st;
	int ret;

	ret = check_output(options);
	if (ret)
		return ret;
	ret = seed_plan(&options->seed);
	if (ret)
		return msg_fail(ret, "cannot lay the seed out: %s", strerror(-ret));
	ret = create_output(options, &out);
	if (ret)
		return ret;
	if (fstat(out.fd, &st))
		ret = -errno;
	if (!ret)
		ret = outfile_publish(&out, options->force);
	if (ret)
		return msg_fail(ret, "%s: cannot put it in place: %s", options->output,
				strerror(-ret));
	return print_json(options, &st);
}

int main(int argc, char **argv)
{
	struct options options;
	int status;

	message_init(MKSEED_PROGRAM);
	/* Report a limit on file sizes like any other failure. */
	signal(SIGXFSZ, SIG_IGN);
	status = options_parse(&options, argc, argv);
	if (status >= 0)
		return status;
	if (options_fill_identity(&options))
		return EXIT_USAGE;
	return make_seed(&options) ? EXIT_FAILED : EXIT_OK;
}
