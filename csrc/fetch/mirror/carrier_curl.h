/* SPDX-License-Identifier: MIT */
/*
 * All requests by libcurl. Its handles are kept for a while, set up for the requests of a login to
 * a URL, so that the next such request sets only its range and its deadline.
 */
#pragma once

#include "fetch/mirror/carrier.h"

extern const struct carrier carrier_curl;
