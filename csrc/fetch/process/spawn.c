/* SPDX-License-Identifier: MIT */
#include "fetch/process/spawn.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/cleanup.h"
#include "base/fileio.h"
#include "fetch/process/channel.h"

enum { VARIABLES_MAX = 64, FIRST_UNUSED_FD = CHANNEL_PROGRAM_FD + 1, FD_ABOVE = 16 };

/* What libraries look at, carriers, and sanitizers. All others may be secrets. */
static bool is_passed_on(const char *variable)
{
	static const char *const names[] = {
		"http_proxy=",	 "https_proxy=",   "all_proxy=",       "no_proxy=",
		"HTTPS_PROXY=",	 "ALL_PROXY=",	   "NO_PROXY=",	       "RES_OPTIONS=",
		"LOCALDOMAIN=",	 "OPENSSL_CONF=",  "LD_LIBRARY_PATH=", "BTRFS_UBLK_HTTP=",
		"ASAN_OPTIONS=", "UBSAN_OPTIONS=", "TSAN_OPTIONS=",
	};

	for (unsigned i = 0; i < sizeof(names) / sizeof(*names); i++) {
		if (!strncmp(variable, names[i], strlen(names[i])))
			return true;
	}
	return false;
}

static void choose_environment(char *variables[static VARIABLES_MAX])
{
	unsigned count = 0;

	for (char **variable = environ; *variable && count + 1 < VARIABLES_MAX; variable++) {
		if (is_passed_on(*variable))
			variables[count++] = *variable;
	}
	variables[count] = NULL;
}

/* Has numbers that none of the process's own will have. */
static int high(int fd)
{
	int made = fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, FD_ABOVE);

	cleanup_close(&fd);
	return made;
}

static int make_windows(void)
{
	int fd = memory_file("btrfs-ublk-fetch");

	if (fd < 0)
		return fd;
	/* NB: it cannot shrink, or reading it would raise SIGBUS. */
	if (ftruncate(fd, CHANNEL_WINDOWS_BYTES) ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
		int err = -errno;

		close(fd);
		return err;
	}
	return high(fd);
}

static int start(int program_fd, int fd, int windows_fd, pid_t *pid)
{
	/* The file that was there when the server began, whatever there is by now. */
	char path[] = "/proc/self/fd/5", name[] = "btrfs-ublk-fetch";
	char *const arguments[] = { name, NULL };
	char *variables[VARIABLES_MAX];
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attributes;
	sigset_t none;
	int err;

	choose_environment(variables);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
	/* An attacker who owns it must not write to the server's log. */
	posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
#endif
	posix_spawn_file_actions_adddup2(&actions, fd, CHANNEL_FD);
	posix_spawn_file_actions_adddup2(&actions, windows_fd, CHANNEL_WINDOWS_FD);
	posix_spawn_file_actions_adddup2(&actions, program_fd, CHANNEL_PROGRAM_FD);
	posix_spawn_file_actions_addclosefrom_np(&actions, FIRST_UNUSED_FD);
	posix_spawnattr_init(&attributes);
	sigemptyset(&none);
	posix_spawnattr_setsigmask(&attributes, &none);
	posix_spawnattr_setpgroup(&attributes, 0);
	posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETPGROUP);
	err = -posix_spawn(pid, path, &actions, &attributes, arguments, variables);
	posix_spawnattr_destroy(&attributes);
	posix_spawn_file_actions_destroy(&actions);
	return err;
}

int spawn_start(int program_fd, struct spawned *spawned, struct error *error)
{
	_cleanup_close_ int local = -1, remote = -1, windows_fd = -1, program = -1;
	void *windows;
	int fds[2];
	int err;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds))
		return error_set(error, -errno, "cannot make a socket: %s", strerror(errno));
	local = fds[0];
	remote = high(fds[1]);
	windows_fd = make_windows();
	program = fcntl(program_fd, F_DUPFD_CLOEXEC, FD_ABOVE);
	if (remote < 0 || windows_fd < 0 || program < 0)
		return error_set(error, -EMFILE, "cannot share memory with a process");
	windows = mmap(NULL, CHANNEL_WINDOWS_BYTES, PROT_READ, MAP_SHARED, windows_fd, 0);
	if (windows == MAP_FAILED)
		return error_set(error, -errno, "cannot map shared memory: %s", strerror(errno));
	err = start(program, remote, windows_fd, &spawned->pid);
	if (err) {
		munmap(windows, CHANNEL_WINDOWS_BYTES);
		return error_set(error, err, "cannot run btrfs-ublk-fetch: %s", strerror(-err));
	}
	spawned->windows = windows;
	spawned->fd = take_fd(&local);
	return 0;
}

void spawn_end(pid_t pid)
{
	/* Without the right to end it, this would wait until it ends by itself. */
	if (kill(pid, SIGKILL))
		return;
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
}
