/* SPDX-License-Identifier: MIT */
/* To be preloaded. The process' first call that has libcurl go on with a transfer fails. */
#include <curl/curl.h>
#include <dlfcn.h>
#include <stdbool.h>

/* <curl/curl.h> may have a macro of that name, which checks types. */
#undef curl_easy_pause

CURLcode curl_easy_pause(CURL *easy, int what)
{
	static bool has_failed;
	CURLcode (*real)(CURL *, int) =
		(CURLcode(*)(CURL *, int))dlsym(RTLD_NEXT, "curl_easy_pause");

	if (!__atomic_exchange_n(&has_failed, true, __ATOMIC_RELAXED))
		return CURLE_OUT_OF_MEMORY;
	return real(easy, what);
}
