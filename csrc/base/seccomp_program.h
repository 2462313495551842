/* SPDX-License-Identifier: MIT */
/* Programs of seccomp filters: lists of system calls, and what becomes of them. */
#pragma once

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#elif defined(__riscv) && __riscv_xlen == 64
#define NATIVE_ARCH AUDIT_ARCH_RISCV64
#endif

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

#ifdef NATIVE_ARCH
struct program {
	unsigned short length;
	struct sock_filter filter[512];
};

static inline void add(struct program *program, struct sock_filter instruction)
{
	program->filter[program->length++] = instruction;
}

static inline void load(struct program *program, size_t offset)
{
	add(program, (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (unsigned)offset));
}

static inline void answer(struct program *program, unsigned action)
{
	add(program, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action));
}

/* To be called with the call's number loaded. */
static inline void refuse(struct program *program, unsigned number, int error)
{
	add(program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1));
	answer(program, SECCOMP_RET_ERRNO | (unsigned)error);
}

static inline void refuse_all(struct program *program, const unsigned *numbers, size_t count)
{
	for (size_t i = 0; i < count; i++)
		refuse(program, numbers[i], EPERM);
}

static inline int install(const struct program *program, unsigned flags)
{
	const struct sock_fprog all = {
		.len = program->length,
		.filter = (struct sock_filter *)program->filter,
	};

	return syscall(__NR_seccomp, SECCOMP_SET_MODE_FILTER,
		       /* NB: without it, kernels before 5.16 slow the thread down (SSBD). */
		       flags | SECCOMP_FILTER_FLAG_SPEC_ALLOW, &all) ?
		       -errno :
		       0;
}

static inline void begin(struct program *program)
{
	program->length = 0;
	load(program, offsetof(struct seccomp_data, arch));
	add(program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCH, 1, 0));
	answer(program, SECCOMP_RET_ERRNO | EPERM);
	load(program, offsetof(struct seccomp_data, nr));
#ifdef __x86_64__
	/* Calls of x32 have other numbers. */
	add(program, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1));
	answer(program, SECCOMP_RET_ERRNO | EPERM);
#endif
}
#endif
