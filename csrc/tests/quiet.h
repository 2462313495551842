/* SPDX-License-Identifier: MIT */
/* For -Wl,--wrap=msg_error and so on: messages are formatted, counted, and shown to nobody. */
#pragma once

extern unsigned quiet_messages;
