/* SPDX-License-Identifier: MIT */
/*
 * What <linux/ublk_cmd.h> gained after Linux 6.1, whose header Debian 12 has. Values from the
 * kernel's include/uapi/linux/ublk_cmd.h.
 */
#pragma once

#include <linux/ioctl.h>
#include <linux/ublk_cmd.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef UBLK_CMD_GET_DEV_INFO2 /* 6.3: with the path of the character device */
#define UBLK_CMD_GET_DEV_INFO2 0x12
#endif
#ifndef UBLK_U_CMD_GET_FEATURES /* 6.5 */
#define UBLK_U_CMD_GET_FEATURES _IOR('u', 0x13, struct ublksrv_ctrl_cmd)
#endif
#ifndef UBLK_U_CMD_DEL_DEV_ASYNC /* 6.9: does not wait for the last opener */
#define UBLK_U_CMD_DEL_DEV_ASYNC _IOR('u', 0x14, struct ublksrv_ctrl_cmd)
#endif

#ifndef UBLK_U_CMD_UPDATE_SIZE /* 6.16: data[0] is the new size in sectors */
#define UBLK_U_CMD_UPDATE_SIZE _IOWR('u', 0x15, struct ublksrv_ctrl_cmd)
#endif
#ifndef UBLK_U_CMD_QUIESCE_DEV /* 6.16 */
#define UBLK_U_CMD_QUIESCE_DEV _IOWR('u', 0x16, struct ublksrv_ctrl_cmd)
#endif
#ifndef UBLK_U_CMD_TRY_STOP_DEV /* 7.0: STOP_DEV, or -EBUSY while somebody has it open */
#define UBLK_U_CMD_TRY_STOP_DEV _IOWR('u', 0x17, struct ublksrv_ctrl_cmd)
#endif

#ifndef UBLK_F_UNPRIVILEGED_DEV /* 6.3 */
#define UBLK_F_UNPRIVILEGED_DEV (1ULL << 5)
#endif
#ifndef UBLK_F_CMD_IOCTL_ENCODE /* 6.4 */
#define UBLK_F_CMD_IOCTL_ENCODE (1ULL << 6)
#endif
#ifndef UBLK_F_USER_COPY /* 6.5 */
#define UBLK_F_USER_COPY (1ULL << 7)
#endif
#ifndef UBLK_F_ZONED /* 6.6 */
#define UBLK_F_ZONED (1ULL << 8)
#endif
#ifndef UBLK_F_USER_RECOVERY_FAIL_IO /* 6.13 */
#define UBLK_F_USER_RECOVERY_FAIL_IO (1ULL << 9)
#endif
#ifndef UBLK_F_UPDATE_SIZE /* 6.16 */
#define UBLK_F_UPDATE_SIZE (1ULL << 10)
#endif
#ifndef UBLK_F_AUTO_BUF_REG /* 6.16 */
#define UBLK_F_AUTO_BUF_REG (1ULL << 11)
#endif
#ifndef UBLK_F_QUIESCE /* 6.16 */
#define UBLK_F_QUIESCE (1ULL << 12)
#endif

#ifndef UBLK_F_PER_IO_DAEMON /* 6.16 */
#define UBLK_F_PER_IO_DAEMON (1ULL << 13)
#endif
#ifndef UBLK_F_BUF_REG_OFF_DAEMON /* 6.17 */
#define UBLK_F_BUF_REG_OFF_DAEMON (1ULL << 14)
#endif
#ifndef UBLK_F_BATCH_IO /* 7.0 */
#define UBLK_F_BATCH_IO (1ULL << 15)
#endif
#ifndef UBLK_F_INTEGRITY /* 7.0 */
#define UBLK_F_INTEGRITY (1ULL << 16)
#endif
#ifndef UBLK_F_SAFE_STOP_DEV /* 7.0 */
#define UBLK_F_SAFE_STOP_DEV (1ULL << 17)
#endif
#ifndef UBLK_F_NO_AUTO_PART_SCAN /* 7.0 */
#define UBLK_F_NO_AUTO_PART_SCAN (1ULL << 18)
#endif
#ifndef UBLK_F_SHMEM_ZC /* 7.1 */
#define UBLK_F_SHMEM_ZC (1ULL << 19)
#endif

/* 6.5: where in /dev/ublkcN the data of requests are, from UBLKSRV_IO_BUF_OFFSET on. */
#ifndef UBLK_TAG_OFF
#define UBLK_TAG_OFF 25
#endif
#ifndef UBLK_QID_OFF
#define UBLK_QID_OFF 41
#endif
#ifndef UBLK_IO_F_NEED_REG_BUF /* 6.16: its buffer was not registered, as was asked for */
#define UBLK_IO_F_NEED_REG_BUF (1U << 17)
#endif
#ifndef UBLK_AUTO_BUF_REG_FALLBACK /* 6.16: serve it all the same then; else it fails */
#define UBLK_AUTO_BUF_REG_FALLBACK (1 << 0)
#endif

#ifndef UBLK_S_DEV_FAIL_IO /* 6.13 */
#define UBLK_S_DEV_FAIL_IO 3
#endif

_Static_assert(sizeof(struct ublksrv_ctrl_cmd) == 32 &&
		       offsetof(struct ublksrv_ctrl_dev_info, ublksrv_flags) == 32,
	       "the places of what older headers do not name");

/*
 * Since 6.4 a command carries direction and size as an ioctl number does (UBLK_F_CMD_IOCTL_ENCODE);
 * the low byte stays the old opcode, which is what is sent to older kernels.
 */
#define UBLK_ENCODE_CTRL_READ(opcode) ((uint32_t)_IOR('u', opcode, struct ublksrv_ctrl_cmd))
#define UBLK_ENCODE_CTRL_WRITE(opcode) ((uint32_t)_IOWR('u', opcode, struct ublksrv_ctrl_cmd))
#define UBLK_ENCODE_IO(opcode) ((uint32_t)_IOWR('u', opcode, struct ublksrv_io_cmd))
