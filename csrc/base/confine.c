/* SPDX-License-Identifier: MIT */
#include "base/confine.h"

#include <errno.h>
#include <linux/capability.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/message.h"
#include "base/seccomp_program.h"

#define BIT(number) (1ULL << (number))

/*
 * All memory is locked, including what is mapped later, which is limited to RLIMIT_MEMLOCK without
 * CAP_IPC_LOCK. Source files may belong to other users.
 */
static const uint64_t io_capabilities = BIT(CAP_IPC_LOCK);
static const uint64_t fetch_capabilities = BIT(CAP_IPC_LOCK) | BIT(CAP_DAC_READ_SEARCH);
/*
 * For a program that drops them: other user, all memory locked, and its end, which is that of a
 * process of another user.
 */
static const uint64_t spawn_capabilities = BIT(CAP_IPC_LOCK) | BIT(CAP_SYS_RESOURCE) |
					   BIT(CAP_SETUID) | BIT(CAP_SETGID) | BIT(CAP_KILL);
/*
 * For commands to ublk, and mounts; for PR_SET_IO_FLUSHER, which each thread sets for itself; for
 * maps and caches in directories of other users. CAP_SYS_PTRACE: secret.c asks whether this process
 * has it.
 */
static const uint64_t main_capabilities = BIT(CAP_IPC_LOCK) | BIT(CAP_DAC_READ_SEARCH) |
					  BIT(CAP_DAC_OVERRIDE) | BIT(CAP_SYS_ADMIN) |
					  BIT(CAP_SYS_RESOURCE) | BIT(CAP_SYS_PTRACE) |
					  /* for the thread that starts the fetch process */
					  BIT(CAP_SETUID) | BIT(CAP_SETGID) | BIT(CAP_KILL);

/* Calls that change the machine, other processes, or the own privileges. */
static const unsigned never[] = {
	/* other processes */
	__NR_ptrace,
	__NR_process_vm_readv,
	__NR_process_vm_writev,
	__NR_kcmp,
#ifdef __NR_pidfd_getfd
	__NR_pidfd_getfd,
#endif
	/* the view of the machine */
	__NR_mount,
	__NR_umount2,
	__NR_pivot_root,
	__NR_chroot,
	__NR_setns,
#ifdef __NR_move_mount
	__NR_move_mount,
	__NR_open_tree,
	__NR_fsopen,
	__NR_fsconfig,
	__NR_fsmount,
	__NR_fspick,
#endif
#ifdef __NR_mount_setattr
	__NR_mount_setattr,
#endif
	__NR_open_by_handle_at,
	__NR_fanotify_init,
	/* the kernel */
	__NR_init_module,
	__NR_finit_module,
	__NR_delete_module,
	__NR_kexec_load,
#ifdef __NR_kexec_file_load
	__NR_kexec_file_load,
#endif
	__NR_bpf,
	__NR_perf_event_open,
	__NR_userfaultfd,
	__NR_syslog,
	__NR_reboot,
	__NR_swapon,
	__NR_swapoff,
	__NR_acct,
	__NR_quotactl,
	__NR_add_key,
	__NR_request_key,
	__NR_keyctl,
	__NR_personality,
#ifdef __NR_iopl
	__NR_iopl,
	__NR_ioperm,
	__NR_modify_ldt,
#endif
	/* clocks and names */
	__NR_settimeofday,
	__NR_clock_settime,
	__NR_adjtimex,
	__NR_clock_adjtime,
	__NR_sethostname,
	__NR_setdomainname,
	/* the ownership of files */
	__NR_fchownat,
	__NR_setxattr,
	__NR_lsetxattr,
	__NR_fsetxattr,
	__NR_mknodat,
#ifdef __NR_mknod
	__NR_mknod,
	__NR_chown,
	__NR_lchown,
#endif
};

static const unsigned users[] = {
	__NR_setuid,	__NR_setgid,   __NR_setreuid, __NR_setregid,  __NR_setresuid,
	__NR_setresgid, __NR_setfsuid, __NR_setfsgid, __NR_setgroups, __NR_capset,
};

static const unsigned programs[] = {
	__NR_execve,
	__NR_execveat,
};

/* Calls that only threads need which open files, or use the network. */
static const unsigned opening[] = {
	__NR_openat,
#ifdef __NR_openat2
	__NR_openat2,
#endif
	__NR_unlinkat, __NR_linkat,  __NR_symlinkat, __NR_mkdirat, __NR_renameat2, __NR_fchmodat,
	__NR_socket,   __NR_connect, __NR_bind,	     __NR_listen,  __NR_clone,
#ifdef __NR_open
	__NR_open,     __NR_creat,   __NR_unlink,    __NR_link,	   __NR_symlink,   __NR_mkdir,
	__NR_rmdir,    __NR_rename,  __NR_chmod,     __NR_fork,	   __NR_vfork,
#endif
};

static const unsigned namespaces = CLONE_NEWNS | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET |
				   CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;

#ifdef NATIVE_ARCH
static int filter_calls(enum confine_role role)
{
	struct program program;
	int err;

	/*
	 * The flags of clone3() are behind a pointer, so it is refused; the C library then uses
	 * clone(). This happens each time, and is not logged.
	 */
	begin(&program);
#ifdef __NR_clone3
	refuse(&program, __NR_clone3, ENOSYS);
#endif
	answer(&program, SECCOMP_RET_ALLOW);
	err = install(&program, 0);
	if (err)
		return err;
	begin(&program);
	refuse_all(&program, never, COUNT(never));
	if (role != CONFINE_SPAWN)
		refuse_all(&program, users, COUNT(users));
	if (role != CONFINE_HELPERS && role != CONFINE_SPAWN)
		refuse_all(&program, programs, COUNT(programs));
	if (role == CONFINE_IO)
		refuse_all(&program, opening, COUNT(opening));
	/* Allow new threads and processes, but not in new namespaces, nor moving into others. */
	add(&program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_clone, 1, 0));
	add(&program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_unshare, 0, 3));
	load(&program, offsetof(struct seccomp_data, args[0]));
	add(&program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, namespaces, 0, 1));
	answer(&program, SECCOMP_RET_ERRNO | EPERM);
	answer(&program, SECCOMP_RET_ALLOW);
	return install(&program, SECCOMP_FILTER_FLAG_LOG);
}
#else
static int filter_calls(enum confine_role role)
{
	return -ENOSYS;
}
#endif

int confine_keep_capabilities(uint64_t kept)
{
	struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};

	if (syscall(SYS_capget, &header, data))
		return -errno;
	for (unsigned i = 0; i < _LINUX_CAPABILITY_U32S_3; i++) {
		uint32_t part = (uint32_t)(kept >> (32 * i));

		data[i].effective &= part;
		data[i].permitted &= part;
		data[i].inheritable &= part;
	}
	return syscall(SYS_capset, &header, data) ? -errno : 0;
}

void confine_thread(enum confine_role role)
{
	uint64_t kept = role == CONFINE_MAIN  ? main_capabilities :
			role == CONFINE_SPAWN ? spawn_capabilities :
			role == CONFINE_IO    ? io_capabilities :
						fetch_capabilities;
	int err;

	if (role == CONFINE_INHERITED)
		return;
	err = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ? -errno : 0;

	if (!err)
		err = confine_keep_capabilities(kept);
	if (!err && role != CONFINE_MAIN)
		err = filter_calls(role);
	/* Serving is safe without a filter; only one line of defence is missing. */
	if (err)
		msg_warning("a thread is not confined: %s", strerror(-err));
}
