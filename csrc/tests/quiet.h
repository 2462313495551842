/* SPDX-License-Identifier: MIT */
/* For -Wl,--wrap=msg_error and so on: messages are formatted, counted, and shown to nobody. */
#ifndef TESTS_QUIET_H
#define TESTS_QUIET_H

extern unsigned quiet_messages;

#endif
