/* SPDX-License-Identifier: MIT */
/* For -Wl,--wrap=msg_error and so on: messages are formatted and counted, but not shown. */
#pragma once

extern unsigned quiet_messages;
