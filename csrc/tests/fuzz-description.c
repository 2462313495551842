/* SPDX-License-Identifier: MIT */
/*
 * fuzz-description: descriptions of sources ("s", then JSON) and of devices ("d", then JSON), which
 * opens nothing. They may be refused with a reason.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_text.h"
#include "lazy/source.h"
#include "server/description.h"
#include "server/segment.h"
#include "tests/fuzz.h"
#include "tests/quiet.h"

static void look_at_source(const char *text, size_t length)
{
	json_t *json = json_text_parse(text, length, JSON_REJECT_DUPLICATES, NULL);
	struct source *source = NULL;
	struct error error = {};
	int err;

	if (!json)
		return;
	err = source_parse(json, &source, &error);
	if (err) {
		fuzz_require(!source, "a source and an error");
		fuzz_require(err == -ENOMEM || *error.text, "refused without a reason");
	} else {
		fuzz_require(source->size && source->unit_bytes >= SOURCE_UNIT_MIN_BYTES &&
				     source->unit_bytes <= SOURCE_UNIT_MAX_BYTES,
			     "another size than allowed");
		fuzz_require(source->mirror_count && source->mirror_count <= SOURCE_MIRRORS_MAX &&
				     source->place_count <= SOURCE_PLACES_MAX,
			     "too many mirrors");
		source_free(source);
	}
	json_decref(json);
}

static void look_at_device(char *text, size_t length)
{
	FILE *file = length ? fmemopen(text, length, "r") : NULL;
	struct engine engine;
	uint64_t end = 0;

	if (!file)
		return;
	quiet_messages = 0;
	if (description_load(file, "it", &engine)) {
		fuzz_require(quiet_messages, "refused without a reason");
	} else {
		for (unsigned i = 0; i < engine.segment_count; i++) {
			fuzz_require(engine.segments[i].offset == end, "a gap");
			end += engine.segments[i].length;
		}
		fuzz_require(end == engine.size, "not all of the device");
		engine_close(&engine);
	}
	fclose(file);
}

static void run(const uint8_t *data, size_t length)
{
	char *text = malloc(length ?: 1); /* of its size, for the address sanitizer */

	if (!text)
		abort();
	if (length > 1) {
		memcpy(text, data + 1, length - 1);
		if (*data == 'd')
			look_at_device(text, length - 1);
		else
			look_at_source(text, length - 1);
	}
	free(text);
}

static const struct fuzzer fuzzer = {
	.name = "fuzz-description",
	.input_bytes = FUZZ_INPUT_BYTES_MAX,
	.run = run,
};
FUZZ_PROGRAM(fuzzer)
