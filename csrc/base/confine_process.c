/* SPDX-License-Identifier: MIT */
#include "base/confine_process.h"

#include <asm/ioctls.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/landlock.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "base/confine.h"
#include "base/seccomp_program.h"

enum {
	NOBODY = 65534, /* the kernel's own number for a user without a number */
	/* What it may allocate: requests, connections, credentials; not the shared memory. */
	DATA_BYTES = 128 << 20,
	STACK_BYTES = 8 << 20,
	THREADS_LEAST = 32, /* workers, and those that libcurl has look names up */
};

/* Calls that are right with any arguments. */
static const unsigned allowed[] = {
	/* its descriptors */
	__NR_read,
	__NR_write,
	__NR_readv,
	__NR_writev,
	__NR_pread64,
	__NR_lseek,
	__NR_close,
	__NR_fstat,
	__NR_newfstatat,
	__NR_statx,
	__NR_readlinkat,
	__NR_faccessat,
	__NR_getdents64,
	__NR_dup,
	__NR_dup3,
	__NR_pipe2,
	__NR_eventfd2,
	__NR_epoll_create1,
	__NR_epoll_ctl,
	__NR_epoll_pwait,
	__NR_ppoll,
	__NR_pselect6,
#ifdef __NR_faccessat2
	__NR_faccessat2,
#endif
#ifdef __NR_epoll_pwait2
	__NR_epoll_pwait2,
#endif
#ifdef __NR_open
	__NR_stat,
	__NR_lstat,
	__NR_access,
	__NR_readlink,
	__NR_poll,
	__NR_select,
	__NR_epoll_wait,
	__NR_dup2,
#endif
	/* sockets, whose kinds filter_sockets() decides */
	__NR_connect,
	__NR_bind,
	__NR_getsockname,
	__NR_getpeername,
	__NR_setsockopt,
	__NR_getsockopt,
	__NR_sendto,
	__NR_recvfrom,
	__NR_sendmsg,
	__NR_recvmsg,
	__NR_sendmmsg,
	__NR_recvmmsg,
	__NR_shutdown,
	/* memory */
	__NR_brk,
	__NR_munmap,
	__NR_mremap,
	__NR_madvise,
	/* threads and signals of its own */
	__NR_futex,
	__NR_set_robust_list,
	__NR_sched_yield,
	__NR_sched_getaffinity,
	__NR_getpid,
	__NR_gettid,
	__NR_getuid,
	__NR_geteuid,
	__NR_getgid,
	__NR_getegid,
	__NR_rt_sigaction,
	__NR_rt_sigprocmask,
	__NR_rt_sigreturn,
	__NR_sigaltstack,
	__NR_restart_syscall,
	__NR_exit,
	__NR_exit_group,
#ifdef __NR_rseq
	__NR_rseq,
#endif
#ifdef __NR_membarrier
	__NR_membarrier,
#endif
	/* time, and numbers at random */
	__NR_clock_gettime,
	__NR_clock_getres,
	__NR_clock_nanosleep,
	__NR_nanosleep,
	__NR_gettimeofday,
#ifdef __NR_time
	__NR_time,
#endif
	__NR_getrandom,
	__NR_uname,
	__NR_sysinfo,
	__NR_getrlimit,
};

/* What libraries try where they have another way. It is refused, which is not logged. */
static const unsigned tried[] = {
#ifdef __NR_clone3
	__NR_clone3,
#endif
#ifdef __NR_io_uring_setup
	__NR_io_uring_setup,
#endif
};

#ifdef NATIVE_ARCH
/* Jumps over the next `count` instructions unless the loaded word is `value`. */
static void unless(struct program *program, unsigned value, unsigned char count)
{
	add(program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, count));
}

/* The same, unless one of these bits is set. */
static void unless_any(struct program *program, unsigned bits, unsigned char count)
{
	add(program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, bits, 0, count));
}

/* Loads the lower half of an argument; all that is looked at here are ints. */
static void load_argument(struct program *program, unsigned number)
{
	load(program, offsetof(struct seccomp_data, args) + 8 * number);
}

static void allow(struct program *program, unsigned number)
{
	unless(program, number, 1);
	answer(program, SECCOMP_RET_ALLOW);
}

/* Allows a call if none of these bits is set in an argument, and fails it otherwise. */
static void allow_without(struct program *program, unsigned number, unsigned argument,
			  unsigned bits, int error)
{
	unless(program, number, 4);
	load_argument(program, argument);
	unless_any(program, bits, 1);
	answer(program, SECCOMP_RET_ERRNO | (unsigned)error);
	answer(program, SECCOMP_RET_ALLOW);
}

/* Allows a call if an argument is one of these, and fails it otherwise. */
static void allow_values(struct program *program, unsigned number, unsigned argument,
			 const unsigned *values, unsigned count, int error)
{
	unless(program, number, (unsigned char)(2 + 2 * count));
	load_argument(program, argument);
	for (unsigned i = 0; i < count; i++)
		allow(program, values[i]);
	answer(program, SECCOMP_RET_ERRNO | (unsigned)error);
}

/* Loads the type of a socket, without what says how its descriptor behaves. */
static void load_type(struct program *program)
{
	load_argument(program, 1);
	add(program, (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K,
						  ~(unsigned)(SOCK_CLOEXEC | SOCK_NONBLOCK)));
}

/* Routes are asked for; what others speak is TCP and UDP. The family was looked at before. */
static void filter_sockets(struct program *program)
{
	unless(program, __NR_socket, 19);
	load_argument(program, 0);
	unless(program, AF_NETLINK, 4);
	load_argument(program, 2);
	allow(program, NETLINK_ROUTE);
	answer(program, SECCOMP_RET_ERRNO | EPROTONOSUPPORT);
	load_type(program);
	add(program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SOCK_STREAM, 2, 0));
	add(program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SOCK_DGRAM, 1, 0));
	answer(program, SECCOMP_RET_ERRNO | EPROTONOSUPPORT);
	load_argument(program, 2);
	allow(program, 0);
	allow(program, IPPROTO_TCP);
	allow(program, IPPROTO_UDP);
	answer(program, SECCOMP_RET_ERRNO | EPROTONOSUPPORT);
	/* NB: a pair of datagram sockets may send to any local socket, such as a log's. */
	unless(program, __NR_socketpair, 7);
	load_argument(program, 0);
	unless(program, AF_UNIX, 4);
	load_type(program);
	allow(program, SOCK_STREAM);
	answer(program, SECCOMP_RET_ERRNO | EAFNOSUPPORT);
}

static int filter_all(void)
{
	static const unsigned families[] = { AF_INET, AF_INET6, AF_NETLINK };
	static const unsigned requests[] = { FIONBIO, FIONREAD, FIOCLEX };
	static const unsigned names[] = { PR_SET_NAME, PR_GET_NAME };
	/* NB: not those that have signals sent, to any process of the same user. */
	static const unsigned commands[] = { F_DUPFD, F_DUPFD_CLOEXEC, F_GETFD,
					     F_SETFD, F_GETFL,	       F_SETFL };
	static const unsigned self[] = { 0 };
	const unsigned writing = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC | O_APPEND | __O_TMPFILE;
	const unsigned own[] = { (unsigned)getpid() };
	struct program program;
	int err;

	begin(&program);
	for (unsigned i = 0; i < COUNT(tried); i++)
		refuse(&program, tried[i], ENOSYS);
	/* NB: no local sockets, so neither a bus nor another service of the machine. */
	allow_values(&program, __NR_socket, 0, families, COUNT(families), EAFNOSUPPORT);
	answer(&program, SECCOMP_RET_ALLOW);
	err = install(&program, 0);
	if (err)
		return err;
	begin(&program);
	for (unsigned i = 0; i < COUNT(allowed); i++)
		allow(&program, allowed[i]);
	for (unsigned i = 0; i < COUNT(tried); i++)
		allow(&program, tried[i]);
	filter_sockets(&program);
	allow_without(&program, __NR_openat, 2, writing & ~(unsigned)O_DIRECTORY, EACCES);
#ifdef __NR_open
	allow_without(&program, __NR_open, 1, writing & ~(unsigned)O_DIRECTORY, EACCES);
#endif
	allow_values(&program, __NR_fcntl, 1, commands, COUNT(commands), EPERM);
	allow_values(&program, __NR_ioctl, 1, requests, COUNT(requests), EPERM);
	allow_values(&program, __NR_prctl, 0, names, COUNT(names), EPERM);
	allow_values(&program, __NR_prlimit64, 0, self, 1, EPERM);
	allow_values(&program, __NR_tgkill, 0, own, 1, EPERM);
	/* Memory that was writable once never becomes executable. */
	allow_without(&program, __NR_mprotect, 2, PROT_EXEC, EPERM);
	/* Nor is memory had that RLIMIT_DATA does not count. */
	unless(&program, __NR_mmap, 9);
	load_argument(&program, 3);
	unless_any(&program, MAP_SHARED | MAP_GROWSDOWN, 1);
	answer(&program, SECCOMP_RET_ERRNO | EPERM);
	load_argument(&program, 2);
	unless_any(&program, PROT_EXEC, 3);
	unless_any(&program, PROT_WRITE, 1);
	answer(&program, SECCOMP_RET_ERRNO | EPERM);
	answer(&program, SECCOMP_RET_ALLOW);
	answer(&program, SECCOMP_RET_ALLOW);
	/* Threads, but no processes. */
	unless(&program, __NR_clone, 4);
	load_argument(&program, 0);
	unless_any(&program, CLONE_THREAD, 1);
	answer(&program, SECCOMP_RET_ALLOW);
	answer(&program, SECCOMP_RET_ERRNO | EPERM);
	answer(&program, SECCOMP_RET_ERRNO | EPERM);
	return install(&program, SECCOMP_FILTER_FLAG_LOG);
}
#else
static int filter_all(void)
{
	return -ENOSYS;
}
#endif

/* Names, certificates, and the libraries that are loaded for them. */
static const char *const readable[] = {
	"/etc",
	"/usr/lib",
	"/usr/lib32",
	"/usr/lib64",
	"/usr/share/ca-certificates",
	"/usr/share/pki",
	"/usr/local/share/ca-certificates",
	"/lib",
	"/lib64",
	"/var/lib/ca-certificates",
	"/run/systemd/resolve",
	"/run/resolvconf",
	"/run/NetworkManager",
	"/run/connman",
	"/dev/null",
	"/dev/urandom",
};

/* What has to be read of names and certificates; some systems have links here to other places. */
static const char *const needed[] = {
	"/etc/resolv.conf",
	"/etc/hosts",
	"/etc/nsswitch.conf",
	"/etc/ssl/certs/ca-certificates.crt",
	"/etc/pki/tls/certs/ca-bundle.crt",
};

/* Of the kernel's interface, whatever version of its header there is. */
enum {
	ABI_WITH_REFER = 2,
	ABI_WITH_TRUNCATE = 3,
	ABI_WITH_NET = 4,
	ABI_WITH_IOCTL = 5,
	ABI_WITH_SCOPES = 6,
	FS_RIGHTS_FIRST = 13,
	BIND_TCP = 1 << 0,
	SCOPES = 1 << 0 | 1 << 1, /* abstract local sockets, and signals */
};

struct ruleset {
	uint64_t fs, net, scoped;
};

static uint64_t bits_below(unsigned number)
{
	return (1ull << number) - 1;
}

static void add_readable(int ruleset, const char *path)
{
	struct landlock_path_beneath_attr rule = {
		.allowed_access = LANDLOCK_ACCESS_FS_READ_FILE | LANDLOCK_ACCESS_FS_READ_DIR,
		.parent_fd = open(path, O_PATH | O_CLOEXEC),
	};

	if (rule.parent_fd < 0)
		return;
	if (syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0)) {
		/* It is no directory. */
		rule.allowed_access = LANDLOCK_ACCESS_FS_READ_FILE;
		syscall(SYS_landlock_add_rule, ruleset, LANDLOCK_RULE_PATH_BENEATH, &rule, 0);
	}
	close(rule.parent_fd);
}

static int restrict_files(void)
{
	long abi = syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION);
	struct ruleset rules = {
		.fs = bits_below(FS_RIGHTS_FIRST + (abi >= ABI_WITH_REFER) +
				 (abi >= ABI_WITH_TRUNCATE) + (abi >= ABI_WITH_IOCTL)),
		.net = abi >= ABI_WITH_NET ? BIND_TCP : 0,
		.scoped = abi >= ABI_WITH_SCOPES ? SCOPES : 0,
	};
	size_t bytes = abi >= ABI_WITH_SCOPES ? sizeof(rules) :
		       abi >= ABI_WITH_NET    ? offsetof(struct ruleset, scoped) :
						offsetof(struct ruleset, net);
	char path[PATH_MAX];
	int ruleset, err;

	if (abi < 1)
		return -ENOSYS;
	ruleset = (int)syscall(SYS_landlock_create_ruleset, &rules, bytes, 0);
	if (ruleset < 0)
		return -errno;
	for (unsigned i = 0; i < COUNT(readable); i++)
		add_readable(ruleset, readable[i]);
	for (unsigned i = 0; i < COUNT(needed); i++) {
		if (realpath(needed[i], path))
			add_readable(ruleset, path);
	}
	err = syscall(SYS_landlock_restrict_self, ruleset, 0) ? -errno : 0;
	close(ruleset);
	return err;
}

static bool are_needed_files_closed(void)
{
	bool closed = false;

	for (unsigned i = 0; i < COUNT(needed); i++) {
		int fd = open(needed[i], O_RDONLY | O_CLOEXEC);

		if (fd >= 0)
			close(fd);
		else if (errno == EACCES)
			closed = true;
	}
	return closed;
}

static int become_nobody(void)
{
	if (geteuid())
		return -EPERM;
	if (setgroups(0, NULL) || setresgid(NOBODY, NOBODY, NOBODY) ||
	    setresuid(NOBODY, NOBODY, NOBODY))
		return -errno;
	return 0;
}

static void *wait_for_ever(void *unused)
{
	for (;;)
		pause();
	return unused;
}

/*
 * Whether that user may have as many threads more as fetching takes: the limit may be a low one that
 * cannot be raised, and others who run as that user count. Only a process that has become that user
 * can tell.
 */
static bool may_nobody_have_threads(void)
{
	pid_t child = fork(), ended;
	int status;

	if (!child) {
		pthread_t thread;
		int err = become_nobody();

		for (unsigned i = 0; i < THREADS_LEAST && !err; i++)
			err = pthread_create(&thread, NULL, wait_for_ever, NULL);
		_exit(err ? 1 : 0);
	}
	if (child < 0)
		return false;
	do {
		ended = waitpid(child, &status, 0);
	} while (ended < 0 && errno == EINTR);
	return ended == child && status == 0;
}

static rlim_t number_in(const char *path)
{
	unsigned long long number = 0;
	FILE *file = fopen(path, "re");

	if (!file)
		return 0;
	if (fscanf(file, "%llu", &number) != 1)
		number = 0;
	fclose(file);
	return number;
}

/*
 * How many threads all processes of that user may have together, those of other servers and of
 * strangers too: half of what the machine can have, so that no process of that user can
 * take all threads from the others.
 */
static rlim_t most_threads(void)
{
	rlim_t threads = number_in("/proc/sys/kernel/threads-max");
	rlim_t numbers = number_in("/proc/sys/kernel/pid_max");
	rlim_t least = threads < numbers ? threads : numbers;

	return least ? least / 2 : RLIM_INFINITY;
}

static int limit(int resource, rlim_t most)
{
	const struct rlimit limits = { most, most };

	return setrlimit((__rlimit_resource_t)resource, &limits);
}

/* It is not worth as much as a server that is kept when memory lacks, and that starts another. */
static void be_ended_first(void)
{
	FILE *file = fopen("/proc/self/oom_score_adj", "r+e");
	int score;

	if (!file)
		return;
	if (fscanf(file, "%d", &score) == 1 && score < 0 && !fseek(file, 0, SEEK_SET))
		fputs("0", file);
	fclose(file);
}

unsigned confine_process(void)
{
	unsigned lacks = 0;

	/*
	 * Raise the limit while this is root, whose threads do not count: a lower one may be
	 * inherited. NB: do it before memory is limited, as stacks of threads count.
	 */
	if (!geteuid() && limit(RLIMIT_NPROC, most_threads()) && !may_nobody_have_threads())
		lacks |= CONFINE_LACKS_USER;
	/* A limit of 0 keeps no program that core_pattern names from its dump; 1 does. */
	limit(RLIMIT_CORE, 1);
	be_ended_first();
	limit(RLIMIT_FSIZE, 0);
	limit(RLIMIT_STACK, STACK_BYTES);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
	limit(RLIMIT_DATA, DATA_BYTES);
#endif
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (restrict_files())
		lacks |= CONFINE_LACKS_LANDLOCK;
	if (!(lacks & CONFINE_LACKS_USER) && become_nobody())
		lacks |= CONFINE_LACKS_USER;
	/* NB: after the change of the user, which would clear it. */
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	if (confine_keep_capabilities(0))
		lacks |= CONFINE_LACKS_CAPABILITIES;
	prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
	if (filter_all())
		lacks |= CONFINE_LACKS_SECCOMP;
	if (are_needed_files_closed())
		lacks |= CONFINE_LACKS_FILES;
	return lacks;
}
