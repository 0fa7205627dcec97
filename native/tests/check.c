/* The test program of `make sanitize`: everything once, under a sanitizer. Behaviour is tested from Python. */
#include "check.h"

#include <ftw.h>
#include <time.h>
#include <unistd.h>

char folder[64];

uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

uint8_t *make_bytes(uint64_t length, uint64_t seed)
{
    const uint64_t room = (length + 4095) / 4096 * 4096;
    uint8_t *bytes = aligned_alloc(4096, room);
    CHECK(bytes);
    seed = seed * 2 + 1;
    for (uint64_t i = 0; i < room; i += 8) {
        const uint64_t word = next_random(&seed);
        memcpy(bytes + i, &word, 8);
    }
    return bytes;
}

static void add_path(plan *p, const char *name, const char *suffix)
{
    const int length = snprintf(p->paths + p->paths_bytes, sizeof p->paths - p->paths_bytes, "%s/%s%s", folder, name, suffix);
    p->paths_bytes += (uint64_t)length + 1;
    CHECK(p->paths_bytes <= sizeof p->paths);
}

rw_transfer *plan_add(plan *p, int kind, const char *name)
{
    CHECK(p->count < ARRAY_LENGTH(p->transfers));
    rw_transfer *t = &p->transfers[p->count++];
    memset(t, 0, sizeof *t);
    t->kind = (uint8_t)kind;
    add_path(p, name, "");
    memcpy(t->key, name, strnlen(name, 32));
    return t;
}

rw_transfer *plan_read(plan *p, const char *name, uint64_t length, int target, void *address)
{
    rw_transfer *t = plan_add(p, RW_READ_RECORD, name);
    t->target = (uint8_t)target;
    t->address = (uint64_t)(uintptr_t)address;
    t->length = length;
    return t;
}

void plan_write(plan *p, const char *name, uint64_t length, void *address)
{
    rw_transfer *t = plan_add(p, RW_WRITE_RECORD, name);
    add_path(p, name, ".tmp");
    t->address = (uint64_t)(uintptr_t)address;
    t->length = length;
}

rw_batch *plan_submit(const plan *p, rw_engine *e, int priority, int64_t deadline_ns)
{
    rw_batch *b = NULL;
    uint32_t bad = 0;
    const int found = rw_submit(e, p->transfers, p->count, p->paths, p->paths_bytes, (uint32_t)priority, deadline_ns, &b, &bad);
    CHECK(!found);
    return b;
}

void plan_expect(const plan *p, rw_engine *e, int expected)
{
    rw_batch *b = plan_submit(p, e, RW_LOAD, -1);
    int32_t results[ARRAY_LENGTH(p->transfers)];
    CHECK(rw_wait(b, -1) == 1);
    CHECK(!rw_results(b, results));
    for (uint32_t i = 0; i < p->count; i++) {
        if (results[i] != expected)
            fprintf(stderr, "transfer %u ended with %d, not %d\n", i, results[i], expected);
        CHECK(results[i] == expected);
    }
    rw_free(b);
}

rw_engine *open_engine(int kind, uint32_t workers, uint32_t num_slots, uint64_t slot_bytes)
{
    const rw_config config = {.kind = (uint32_t)kind,
                              .num_workers = workers,
                              .ring_bytes = num_slots * slot_bytes,
                              .slot_bytes = slot_bytes};
    rw_engine *e = NULL;
    CHECK(!rw_engine_open(&config, &e));
    return e;
}

/* Polls: a slot comes back when an abandoned read returns, and nothing tells of it. Fails after a minute. */
void wait_for_slots(rw_engine *e, uint32_t free_slots)
{
    rw_usage usage = {0};
    for (int i = 0; i < 60000; i++) {
        CHECK(!rw_engine_usage(e, &usage));
        if (usage.free_slots == free_slots)
            return;
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
    CHECK(usage.free_slots == free_slots);
}

static int remove_entry(const char *path, const struct stat *info, int type, struct FTW *where)
{
    (void)info, (void)type, (void)where;
    return remove(path);
}

int main(void)
{
    snprintf(folder, sizeof folder, "/tmp/rewarm-check-XXXXXX");
    CHECK(mkdtemp(folder));
    check_pure_parts();
    const rw_config uring = {.kind = RW_URING, .num_workers = 1};
    rw_engine *e = NULL;
    const int error = rw_engine_open(&uring, &e);
    if (error)
        printf("io_uring is not tested: %s\n", strerror(-error));
    else
        CHECK(!rw_engine_close(e, -1));
    for (int kind = RW_THREADS; kind <= (error ? RW_THREADS : RW_URING); kind++) {
        check_engine(kind);
        check_stress(kind);
    }
    CHECK(!nftw(folder, remove_entry, 16, FTW_DEPTH | FTW_PHYS));
    puts("all checks passed");
    return 0;
}
