/* SPDX-License-Identifier: MIT */
/*
 * Confines itself to a role (main, io, fetch, helpers, spawn), or as the fetch process does
 * (process), tries calls, and prints "NAME ERRNO"s. process FILE...: tries to open these as well.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/confine.h"
#include "base/confine_process.h"
#include "base/message.h"

static void tell(const char *name, long result)
{
	printf("%s %d\n", name, result < 0 ? errno : 0);
	fflush(stdout);
}

static void *do_nothing(void *argument)
{
	return argument;
}

static int start_thread(void)
{
	pthread_t thread;
	int err = pthread_create(&thread, NULL, do_nothing, NULL);

	if (!err)
		return pthread_join(thread, NULL);
	errno = err;
	return -1;
}

/* Runs a program in a child of this thread, which inherits the thread's confinement. */
static int run_true(void)
{
	char path[] = "/bin/true";
	char *const arguments[] = { path, NULL };
	int status = 0;
	pid_t pid = fork();

	if (!pid) {
		execv(path, arguments);
		_exit(errno);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return -1;
	errno = WEXITSTATUS(status);
	return status ? -1 : 0;
}

static int new_namespace(void)
{
	pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);

	if (!pid)
		_exit(0);
	return pid < 0 ? -1 : waitpid(pid, NULL, 0) < 0;
}

static int role_of(const char *name, enum confine_role *role)
{
	static const char *const names[] = { "main", "io", "fetch", "helpers", "spawn" };

	for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (!strcmp(name, names[i])) {
			*role = (enum confine_role)i;
			return 0;
		}
	}
	return -EINVAL;
}

static long pidfd_of(pid_t pid)
{
	return syscall(SYS_pidfd_open, pid, 0);
}

static ssize_t read_memory_of(pid_t pid)
{
	char byte;
	struct iovec here = { &byte, 1 }, there = { &byte, 1 };

	return process_vm_readv(pid, &here, 1, &there, 1, 0);
}

static int executable_memory(void)
{
	void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return page == MAP_FAILED ? -1 : mprotect(page, 4096, PROT_READ | PROT_EXEC);
}

static int map_memory(int flags)
{
	return mmap(NULL, 4096, PROT_READ, flags | MAP_ANONYMOUS, -1, 0) == MAP_FAILED ? -1 : 0;
}

static int listen_to_others(void)
{
	const struct sockaddr_in any = { .sin_family = AF_INET };
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	return bind(fd, (const struct sockaddr *)&any, sizeof(any)) ?: listen(fd, 1);
}

static int fork_and_wait(void)
{
	pid_t pid = fork();

	if (!pid)
		_exit(0);
	return pid < 0 ? -1 : waitpid(pid, NULL, 0) < 0;
}

/* What the others may. `argv`: files to open. */
static void try_more(char **argv)
{
	int pair[2];

	for (; *argv; argv++)
		tell(*argv, open(*argv, O_RDONLY | O_CLOEXEC));
	tell("write", open("/dev/null", O_WRONLY | O_CLOEXEC));
	tell("create", open("confine-shell.new", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
	tell("unlink", unlink("confine-shell.new"));
	tell("mkdir", mkdir("confine-shell.new", 0700));
	tell("fork", fork_and_wait());
	tell("kill", kill(getppid(), 0));
	tell("local-socket", socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
	tell("packets", socket(AF_PACKET, SOCK_RAW | SOCK_CLOEXEC, 0));
	tell("other-protocol", socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_SCTP));
	tell("routes", socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE));
	tell("other-netlink", socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT));
	tell("pair", socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
	tell("datagram-pair", socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, pair));
	tell("signals-of-files", fcntl(STDIN_FILENO, F_SETOWN, getppid()));
	tell("shared-memory", map_memory(MAP_SHARED));
	tell("growing-memory", map_memory(MAP_PRIVATE | MAP_GROWSDOWN));
	tell("listen", listen_to_others());
	tell("memory-file", memfd_create("confine-shell", MFD_CLOEXEC));
	tell("executable", executable_memory());
	tell("descriptors", pidfd_of(getppid()));
	tell("memory-of-others", read_memory_of(getppid()));
	tell("dumpable", prctl(PR_SET_DUMPABLE, 1, 0, 0, 0));
	tell("priority", setpriority(PRIO_PROCESS, 0, -5));
	tell("io_uring", syscall(SYS_io_uring_setup, 1, NULL));
}

int main(int argc, char **argv)
{
	enum confine_role role;
	bool whole;

	message_init("confine-shell");
	whole = argc > 1 && !strcmp(argv[1], "process");
	if (!whole && (argc != 2 || role_of(argv[1], &role)))
		return EXIT_USAGE;
	if (!whole)
		confine_thread(role);
	else
		printf("lacks %u\n", confine_process());
	tell("mmap", mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED ?
			     -1 :
			     0);
	tell("open", open("/dev/null", O_RDONLY | O_CLOEXEC));
	tell("socket", socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
	tell("thread", start_thread());
	tell("program", run_true());
	tell("namespace", new_namespace());
	tell("unshare", unshare(CLONE_NEWNS));
	tell("mount", mount("none", "/", "tmpfs", MS_RDONLY, "size=wrong"));
	tell("ptrace", ptrace(PTRACE_DETACH, 1, NULL, NULL));
	tell("chown", chown("/", 0, 0));
	tell("mknod", mknod("/dev/null", S_IFCHR, 0));
	tell("chroot", chroot("/dev/null"));
	tell("setuid", setuid(getuid()));
	tell("bpf", syscall(SYS_bpf, -1, NULL, 0));
	tell("module", syscall(SYS_delete_module, NULL, 0));
	if (whole)
		try_more(argv + 2);
	return EXIT_OK;
}
