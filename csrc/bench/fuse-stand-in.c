/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-fuse-stand-in: a minimal FUSE server, which can be reached in each way that FUSE has.
 * Benchmarks compare FUSE file systems with it.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"
#include "bench/fuse-stand-in.h"
#include "bench/options.h"
#include "server/frontend/fuse_mount.h"

static const char program[] = "btrfs-ublk-fuse-stand-in";
static const char help[] =
	"Usage: btrfs-ublk-fuse-stand-in [OPTIONS] FILE\n"
	"\n"
	"Show FILE (on tmpfs, say) as the one file of a FUSE mount, print where that is, and\n"
	"serve it until standard input ends. It is written to in place.\n"
	"\n"
	"  --how device       requests are read from /dev/fuse, by a thread for each CPU (default)\n"
	"  --how io-uring     they come through io_uring (Linux 6.14, fuse.enable_uring=1)\n"
	"  --how passthrough  the kernel reads and writes FILE itself (Linux 6.9)\n"
	"  --version, --help\n";

/* For requests with operands and payload. The kernel demands FUSE_MIN_READ_BUFFER. */
enum { REQUEST_BYTES = STAND_IN_MAX_BYTES + FUSE_MIN_READ_BUFFER };

static size_t operand_bytes(uint32_t opcode)
{
	switch (opcode) {
	case FUSE_WRITE:
		return sizeof(struct fuse_write_in);
	default:
		return 0; /* others lack operands, or their payload is not read */
	}
}

static void send(int fd, const struct fuse_in_header *request, const struct answer *answer)
{
	struct fuse_out_header header = {
		.error = answer->error,
		.unique = request->unique,
	};
	struct iovec vectors[] = {
		{ &header, sizeof(header) },
		{ (void *)answer->data, answer->error ? 0 : answer->size },
	};

	header.len = (uint32_t)(vectors[0].iov_len + vectors[1].iov_len);
	/* ENOENT: the caller was interrupted. */
	if (writev(fd, vectors, 2) < 0 && errno != ENOENT) {
		msg_error("cannot answer: %m");
		_exit(EXIT_FAILED); /* the caller would wait for ever */
	}
}

struct reader {
	const struct stand_in *server;
	int fd;
};

struct served {
	uint32_t opcode;
	int error; /* in the answer */
};

/* Returns false when the connection has ended. */
static bool serve_one(const struct reader *reader, uint8_t *buffer, struct served *served)
{
	const struct fuse_in_header *request = (struct fuse_in_header *)buffer;
	const uint8_t *operands = buffer + sizeof(*request);
	ssize_t length = read(reader->fd, buffer, REQUEST_BYTES);
	struct answer answer;

	if (length < 0)
		return errno == EINTR || errno == EAGAIN || errno == ENOENT;
	stand_in_answer(reader->server, request, operands,
			operands + operand_bytes(request->opcode), &answer);
	*served = (struct served){ request->opcode, answer.error };
	if (!answer.none)
		send(reader->fd, request, &answer);
	return true;
}

static void *reader_main(void *argument)
{
	const struct reader *reader = argument;
	_cleanup_free_ uint8_t *buffer = aligned_alloc(4096, REQUEST_BYTES);
	struct served served;

	while (buffer && serve_one(reader, buffer, &served))
		;
	return NULL;
}

/* Answers FUSE_INIT, which settles in which way other requests come. */
static int introduce(const struct stand_in *server)
{
	struct reader reader = { server, server->fuse_fd };
	_cleanup_free_ uint8_t *buffer = aligned_alloc(4096, REQUEST_BYTES);
	struct served served = {};

	if (!buffer)
		return -ENOMEM;
	while (served.opcode != FUSE_INIT)
		if (!serve_one(&reader, buffer, &served))
			return -errno;
	return served.error;
}

/* Each reader has a clone of the connection, on which it also answers. */
static int start_readers(const struct stand_in *server)
{
	unsigned count = (unsigned)get_nprocs();
	struct reader *readers = calloc(count, sizeof(*readers));

	for (unsigned i = 0; readers && i < count; i++) {
		uint32_t source = (uint32_t)server->fuse_fd;
		pthread_t thread;
		int err;

		readers[i].server = server;
		readers[i].fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
		if (readers[i].fd < 0 || ioctl(readers[i].fd, FUSE_DEV_IOC_CLONE, &source))
			return -errno;
		err = pthread_create(&thread, NULL, reader_main, &readers[i]);
		if (err)
			return -err;
	}
	return readers ? 0 : -ENOMEM;
}

static int map_content(struct stand_in *server, const char *path)
{
	_cleanup_close_ int fd = open(path, O_RDWR | O_CLOEXEC);
	struct stat status;

	if (fd < 0 || fstat(fd, &status))
		return -errno;
	server->size = (uint64_t)status.st_size;
	server->content = mmap(NULL, server->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	return server->content == MAP_FAILED ? -errno : 0;
}

static int give_to_kernel(struct stand_in *server, const char *path)
{
	_cleanup_close_ int fd = open(path, O_RDWR | O_CLOEXEC);
	struct fuse_backing_map map = { .fd = fd };

	if (fd < 0)
		return -errno;
	server->backing_id = ioctl(server->fuse_fd, FUSE_DEV_IOC_BACKING_OPEN, &map);
	return server->backing_id < 0 ? -errno : 0;
}

static int serve(struct stand_in *server, const char *path)
{
	/* The mount ends when this descriptor is closed. */
	_cleanup_close_ int mount = -1;
	int err;

	mount = fuse_mount_detached(server->fuse_fd, STAND_IN_MAX_BYTES);
	if (mount < 0)
		return mount;
	err = introduce(server);
	/* Do this after FUSE_INIT, in which the kernel agrees to passthrough. */
	if (!err && server->passthrough)
		err = give_to_kernel(server, path);
	if (!err && server->over_rings)
		err = stand_in_start_rings(server);
	if (!err)
		err = start_readers(server);
	if (err)
		return err;
	printf("{\"file\": \"/proc/%d/fd/%d/file\"}\n", getpid(), mount);
	fflush(stdout);
	poll(&(struct pollfd){ .fd = STDIN_FILENO, .events = POLLIN }, 1, -1);
	return 0;
}

static bool known(const char *how)
{
	return !strcmp(how, "device") || !strcmp(how, "io-uring") || !strcmp(how, "passthrough");
}

int main(int argc, char **argv)
{
	const char *path, *how = "device";
	const struct bench_option options[] = { { .name = "how", .text = &how }, {} };
	struct stand_in server = { .fuse_fd = -1 };
	int err, status;

	message_init(program);
	status = bench_options_parse(argc, argv, help, options, &path);
	if (status != BENCH_OPTIONS_DONE)
		return status;
	if (!path || !known(how)) {
		msg_error("%s", path ? "--how is device, io-uring or passthrough" :
				       "exactly one FILE is expected");
		return EXIT_USAGE;
	}
	server.over_rings = !strcmp(how, "io-uring");
	server.passthrough = !strcmp(how, "passthrough");
	server.fuse_fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	err = server.fuse_fd < 0 ? -errno : map_content(&server, path);
	if (!err)
		err = serve(&server, path);
	if (err) {
		msg_error("cannot serve %s by %s: %s", path, how, strerror(-err));
		return EXIT_FAILED;
	}
	/* Do not clean up: threads wait in the kernel until the connection ends. */
	_exit(EXIT_OK);
}
