/* What the parts of the test program share. */
#ifndef REWARM_CHECK_H
#define REWARM_CHECK_H

#define _GNU_SOURCE
#include "rewarm_io.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                               \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);  \
            abort();                                                                   \
        }                                                                              \
    } while (0)

#define ARRAY_LENGTH(array) (sizeof(array) / sizeof *(array))

extern char folder[64]; /* an empty directory for the test's files */

/* Aligned memory with bytes that follow from `seed`. */
uint8_t *make_bytes(uint64_t length, uint64_t seed);
uint64_t next_random(uint64_t *state);

/* A batch in the making. */
typedef struct plan {
    rw_transfer transfers[64];
    char paths[8192];
    uint32_t count;
    uint64_t paths_bytes;
} plan;

rw_transfer *plan_add(plan *p, int kind, const char *name);
rw_transfer *plan_read(plan *p, const char *name, uint64_t length, int target, void *address);
void plan_write(plan *p, const char *name, uint64_t length, void *address);
rw_batch *plan_submit(const plan *p, rw_engine *e, int priority, int64_t deadline_ns);
/* Submits, waits, and fails where a result is another than expected. */
void plan_expect(const plan *p, rw_engine *e, int expected);

rw_engine *open_engine(int kind, uint32_t workers, uint32_t num_slots, uint64_t slot_bytes);
void wait_for_slots(rw_engine *e, uint32_t free_slots);

void check_pure_parts(void);
void check_engine(int kind);
void check_stress(int kind);

#endif
