/* SPDX-License-Identifier: MIT */
/*
 * btrfs-ublk-add-device: adds a device to a mounted btrfs, in a process that is not killed by
 * accident: it has a session of its own, init is its parent, it ignores all signals but KILL, and
 * the OOM killer spares it.
 *
 * The kernel relocates the SYSTEM chunks of a mounted seed once the device is there. Relocation
 * gives up with -ECANCELED when the caller has a fatal signal pending, and
 * btrfs_relocate_sys_chunks() (fs/btrfs/volumes.c, up to Linux 7.3 at least) answers any error but
 * -ENOSPC with BUG_ON(): a SIGKILL at that moment stops the machine.
 * docs/upstream.md has more.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/message.h"

#define PROGRAM "btrfs-ublk-add-device"

static const char usage_text[] =
	"Usage: " PROGRAM " DEVICE TARGET\n"
	"Add the block device DEVICE to the btrfs that is mounted at TARGET; what DEVICE\n"
	"held is lost. It goes on when this command is killed; descriptors that it inherits\n"
	"stay open until it has ended.\n"
	"Exit status: 0 done, 1 failed, 2 wrong usage.\n";

/* Protects this process as far as it can; a failure is ignored. */
static void shelter(void)
{
	static const char score[] = "-1000";
	_cleanup_close_ int null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	_cleanup_close_ int score_fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (score_fd >= 0)
		(void)!write(score_fd, score, strlen(score)); /* CAP_SYS_RESOURCE */
	/* Readers of our output must not wait for this process, which writes no more. */
	for (int fd = 0; null_fd >= 0 && fd <= STDERR_FILENO; fd++)
		dup2(null_fd, fd);
}

/*
 * Never returns. The waiting process gets the error number, or finds the pipe closed without one.
 */
static void add(int target, struct btrfs_ioctl_vol_args *args, int result_fd)
{
	int result;

	shelter();
	result = ioctl(target, BTRFS_IOC_ADD_DEV, args);
	if (result) /* positive: a balance, or another exclusive operation, is running */
		result = result < 0 ? errno : EBUSY;
	close(target); /* the caller may unmount as soon as it gets the result */
	(void)!write(result_fd, &result, sizeof(result));
	_exit(EXIT_OK);
}

/* Starts the process for add(), as a child of init. Its result can be read from `*result_fd`. */
static int start(int target, struct btrfs_ioctl_vol_args *args, int *result_fd)
{
	_cleanup_close_ int read_fd = -1, write_fd = -1;
	int fds[2], status = 0;
	sigset_t all;
	pid_t pid;

	if (pipe2(fds, O_CLOEXEC))
		return -errno;
	read_fd = fds[0];
	write_fd = fds[1];
	pid = fork();
	if (pid < 0)
		return -errno;
	if (!pid) {
		sigfillset(&all);
		sigprocmask(SIG_SETMASK, &all, NULL);
		setsid();
		pid = fork();
		if (!pid)
			add(target, args, write_fd);
		_exit(pid < 0 ? errno : 0);
	}
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	if (WIFEXITED(status) && WEXITSTATUS(status))
		return -WEXITSTATUS(status);
	*result_fd = take_fd(&read_fd);
	return 0;
}

static int add_device(const char *device, const char *path)
{
	struct btrfs_ioctl_vol_args args = { 0 };
	_cleanup_close_ int target = -1, result_fd = -1;
	size_t length = strlen(device);
	ssize_t got;
	int result;

	if (length >= sizeof(args.name))
		return msg_fail(EXIT_USAGE, "the name of the device has %zu bytes, too many",
				length);
	memcpy(args.name, device, length);
	target = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (target < 0)
		return msg_fail(EXIT_USAGE, "%s: %s", path, strerror(errno));
	result = -start(target, &args, &result_fd);
	if (!result) {
		do
			got = read(result_fd, &result, sizeof(result));
		while (got < 0 && errno == EINTR);
		if (got != sizeof(result))
			return msg_fail(EXIT_FAILED,
					"the process that adds %s to the btrfs at %s was killed",
					device, path);
	}
	if (!result)
		return EXIT_OK;
	msg_error("cannot add %s to the btrfs at %s: %s", device, path, strerror(result));
	msg_hint("see the kernel log: dmesg | grep -i btrfs");
	return EXIT_FAILED;
}

int main(int argc, char **argv)
{
	int status;

	message_init(PROGRAM);
	if (answer_options(argc, argv, usage_text, &status))
		return status;
	if (argc != 3)
		return usage_error("DEVICE and TARGET are needed, and nothing else", NULL);
	return add_device(argv[1], argv[2]);
}
