/* SPDX-License-Identifier: MIT */
/* Confines itself to a role (main, io, fetch, helpers), tries calls, and prints "NAME ERRNO"s. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/confine.h"
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
	static const char *const names[] = { "main", "io", "fetch", "helpers" };

	for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		if (!strcmp(name, names[i])) {
			*role = (enum confine_role)i;
			return 0;
		}
	}
	return -EINVAL;
}

int main(int argc, char **argv)
{
	enum confine_role role;

	message_init("confine-shell");
	if (argc != 2 || role_of(argv[1], &role))
		return EXIT_USAGE;
	confine_thread(role);
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
	return EXIT_OK;
}
