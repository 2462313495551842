/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-make-files: makes the files of a plan and measures how long each took. It is in C
 * because benchmarks would measure a Python interpreter as well.
 *
 * The plan is shared memory, one struct plan_file for each file; the latencies are written there.
 * When all is set up the program prints "ready" and waits for a byte from --start-fd, so that several
 * processes begin together. At the end it prints one line of JSON.
 */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "base/message.h"
#include "base/size.h"
#include "bench/options.h"

#define PROGRAM "btrfs-ublk-make-files"

static const char help_text[] =
	"Usage: " PROGRAM " [OPTION]... OPERATION\n"
	"Make new files as a plan says, and write into it how long each took. For the\n"
	"benchmarks of the package; all options with a value are needed.\n"
	"\n"
	"OPERATION\n"
	"  clone        create, FICLONERANGE of whole blocks, ftruncate to the size\n"
	"  write        create, write\n"
	"  write-fsync  create, write, fsync\n"
	"\n"
	"  --directory DIR            empty; the files go to DIR/0/0, DIR/0/1 ... DIR/1/N\n"
	"  --files-per-directory N\n"
	"  --plan-fd FD               native 64-bit numbers, three per file: offset in the\n"
	"                             source, size in bytes, nanoseconds (written here)\n"
	"  --first N, --count N       the files of the plan to make\n"
	"  --start-fd FD              begin when there is a byte to read\n"
	"  --source FILE              what to clone from (clone only)\n"
	"  --help, --version\n"
	"\n"
	"Exit status: 0 done, 1 failed, 2 wrong usage.\n";

enum { WRITE_MAX_BYTES = 1 << 20 };

struct plan_file {
	uint64_t source_offset;
	uint64_t size;
	uint64_t latency_ns; /* out */
};
static_assert(sizeof(struct plan_file) == 24, "three numbers of 64 bits");

struct job {
	/* Inputs. */
	const char *directory;
	const char *source;
	uint64_t files_per_directory;
	uint64_t first;
	uint64_t count;
	uint64_t plan_fd;
	uint64_t start_fd;
	int (*fill)(struct job *job, int fd, const struct plan_file *file);
	/* State. */
	int source_fd;
	bool source_is_nodatasum;
	struct plan_file *plan; /* of all files */
	const void *data;
	const char *step; /* the step that failed, for the message */
};

static int fail_at(struct job *job, const char *step)
{
	job->step = step;
	return -errno;
}

/* Gives the file no checksums if the source has none: else the kernel refuses to clone. */
static int match_checksums(struct job *job, int fd)
{
	int attributes;

	if (!job->source_is_nodatasum)
		return 0;
	if (ioctl(fd, FS_IOC_GETFLAGS, &attributes))
		return fail_at(job, "FS_IOC_GETFLAGS");
	if (attributes & FS_NOCOW_FL)
		return 0;
	attributes |= FS_NOCOW_FL;
	return ioctl(fd, FS_IOC_SETFLAGS, &attributes) ? fail_at(job, "FS_IOC_SETFLAGS") : 0;
}

static int fill_clone(struct job *job, int fd, const struct plan_file *file)
{
	int ret = match_checksums(job, fd);
	struct file_clone_range range = {
		.src_fd = job->source_fd,
		.src_offset = file->source_offset,
		.src_length = round_up_u64(file->size, BLOCK_BYTES),
	};

	if (ret)
		return ret;
	if (ioctl(fd, FICLONERANGE, &range))
		return fail_at(job, "FICLONERANGE");
	if (range.src_length != file->size && ftruncate(fd, (off_t)file->size))
		return fail_at(job, "ftruncate");
	return 0;
}

static int fill_write(struct job *job, int fd, const struct plan_file *file)
{
	int ret = write_full(fd, job->data, file->size);

	if (ret)
		job->step = "write";
	return ret;
}

static int fill_write_fsync(struct job *job, int fd, const struct plan_file *file)
{
	int ret = fill_write(job, fd, file);

	if (!ret && fsync(fd))
		ret = fail_at(job, "fsync");
	return ret;
}

static int make_file(struct job *job, int directory_fd, uint64_t number,
		     const struct plan_file *file)
{
	_cleanup_close_ int fd = -1;
	char name[24];

	snprintf(name, sizeof(name), "%" PRIu64, number);
	fd = openat(directory_fd, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
	if (fd < 0)
		return fail_at(job, "create");
	return job->fill(job, fd, file);
}

static int next_directory(struct job *job, uint64_t number, int *fd)
{
	char path[PATH_MAX];

	if (*fd >= 0)
		close(*fd);
	*fd = -1;
	if (snprintf(path, sizeof(path), "%s/%" PRIu64, job->directory, number) >= PATH_MAX) {
		errno = ENAMETOOLONG;
		return fail_at(job, "mkdir");
	}
	if (mkdir(path, 0755))
		return fail_at(job, "mkdir");
	*fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	return *fd < 0 ? fail_at(job, "open directory") : 0;
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int make_files(struct job *job, uint64_t *made)
{
	_cleanup_close_ int directory_fd = -1;
	int ret;

	for (*made = 0; *made < job->count; ++*made) {
		struct plan_file *file = &job->plan[job->first + *made];
		uint64_t begin;

		if (*made % job->files_per_directory == 0) {
			ret = next_directory(job, *made / job->files_per_directory, &directory_fd);
			if (ret)
				return ret;
		}
		begin = now_ns();
		ret = make_file(job, directory_fd, *made, file);
		if (ret)
			return ret;
		file->latency_ns = now_ns() - begin;
	}
	return 0;
}

static int map_plan(struct job *job)
{
	uint64_t end = job->first + job->count;
	struct stat status;

	if (fstat((int)job->plan_fd, &status))
		return fail_at(job, "--plan-fd");
	if (end < job->first || end > (uint64_t)status.st_size / sizeof(*job->plan)) {
		errno = ERANGE;
		return fail_at(job, "the plan has fewer files");
	}
	job->plan = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED,
			 (int)job->plan_fd, 0);
	if (job->plan == MAP_FAILED)
		return fail_at(job, "map the plan");
	for (uint64_t i = job->first; i < end; i++) {
		if (job->plan[i].size <= WRITE_MAX_BYTES)
			continue;
		errno = EFBIG;
		return fail_at(job, "a file of the plan");
	}
	return 0;
}

static int set_up(struct job *job)
{
	static char data[WRITE_MAX_BYTES];

	if (job->source) {
		int attributes;

		job->source_fd = open(job->source, O_RDONLY | O_CLOEXEC);
		if (job->source_fd < 0)
			return fail_at(job, job->source);
		job->source_is_nodatasum = !ioctl(job->source_fd, FS_IOC_GETFLAGS, &attributes) &&
					   attributes & FS_NOCOW_FL;
	} else {
		/* Zeroes would take no space with compression or in sparse images. */
		for (size_t i = 0; i < WRITE_MAX_BYTES; i++)
			data[i] = (char)(i * 2654435761u >> 13);
		job->data = data;
	}
	return map_plan(job);
}

static int wait_for_start(struct job *job)
{
	ssize_t got;
	char byte;

	puts("ready");
	fflush(stdout);
	do
		got = read((int)job->start_fd, &byte, 1);
	while (got < 0 && errno == EINTR);
	if (got == 1)
		return 0;
	if (!got)
		errno = EPIPE; /* the benchmark has ended */
	return fail_at(job, "--start-fd");
}

static uint64_t to_us(struct timeval time)
{
	return (uint64_t)time.tv_sec * 1000000 + (uint64_t)time.tv_usec;
}

static int run(struct job *job)
{
	struct rusage before, after;
	uint64_t begin_ns, end_ns, made = 0;
	int ret = set_up(job);

	if (!ret)
		ret = wait_for_start(job);
	if (ret) {
		msg_error("%s: %s", job->step, strerror(-ret));
		return EXIT_FAILED;
	}
	getrusage(RUSAGE_SELF, &before);
	begin_ns = now_ns();
	ret = make_files(job, &made);
	end_ns = now_ns();
	getrusage(RUSAGE_SELF, &after);
	if (ret) {
		msg_error("file %" PRIu64 " in %s: %s: %s", made, job->directory, job->step,
			  strerror(-ret));
		return EXIT_FAILED;
	}
	printf("{\"begin_ns\": %" PRIu64 ", \"end_ns\": %" PRIu64 ", \"cpu_us\": %" PRIu64
	       ", \"waits\": %ld, \"preemptions\": %ld}\n",
	       begin_ns, end_ns,
	       to_us(after.ru_utime) + to_us(after.ru_stime) - to_us(before.ru_utime) -
		       to_us(before.ru_stime),
	       after.ru_nvcsw - before.ru_nvcsw, after.ru_nivcsw - before.ru_nivcsw);
	return fflush(stdout) ? EXIT_FAILED : EXIT_OK;
}

static bool parse_operation(struct job *job, const char *operation)
{
	if (!operation)
		return false;
	if (!strcmp(operation, "clone"))
		job->fill = fill_clone;
	else if (!strcmp(operation, "write"))
		job->fill = fill_write;
	else if (!strcmp(operation, "write-fsync"))
		job->fill = fill_write_fsync;
	return job->fill;
}

int main(int argc, char **argv)
{
	/* NB: descriptors 0 to 2 mean "not given", as they are standard input, output and error. */
	struct job job = { .source_fd = -1 };
	const struct bench_option table[] = {
		{ "directory", .text = &job.directory },
		{ "source", .text = &job.source },
		{ "files-per-directory", .number = &job.files_per_directory, .most = UINT32_MAX },
		{ "first", .number = &job.first, .most = UINT32_MAX },
		{ "count", .number = &job.count, .most = UINT32_MAX },
		{ "plan-fd", .number = &job.plan_fd, .most = INT32_MAX },
		{ "start-fd", .number = &job.start_fd, .most = INT32_MAX },
		{},
	};
	const char *operation;
	int status;

	message_init(PROGRAM);
	status = bench_options_parse(argc, argv, help_text, table, &operation);
	if (status != BENCH_OPTIONS_DONE)
		return status;
	if (!parse_operation(&job, operation) || !job.directory || !job.files_per_directory ||
	    !job.count || !job.plan_fd || !job.start_fd ||
	    (job.fill == fill_clone) != (job.source != NULL))
		return usage_error("the operation, or an option that it needs, is missing or wrong",
				   NULL);
	return run(&job);
}
