/* Several threads on one engine: batches of everything, deadlines, cancels, handles given up early. */
#include "check.h"

#include <pthread.h>

enum { NUM_THREADS = 4, NUM_ROUNDS = 60, NUM_RECORDS = 6 };
#define LENGTH ((1u << 20) + 300000u)

typedef struct job {
    rw_engine *engine;
    uint64_t seed;
} job;

static void fill(plan *p, uint64_t *random, uint8_t *memory)
{
    char name[32];
    for (int i = 0; i < 8; i++) {
        snprintf(name, sizeof name, "stress-%d", (int)(next_random(random) % NUM_RECORDS));
        rw_transfer *t;
        switch (next_random(random) % 4) {
        case 0:
            t = plan_read(p, name, LENGTH, RW_TO_SLOT, NULL);
            break;
        case 1:
            t = plan_read(p, name, LENGTH, RW_TO_MEMORY, memory + (size_t)i * (2u << 20));
            break;
        case 2:
            t = plan_add(p, RW_PROBE, name);
            break;
        default:
            t = plan_read(p, "nowhere", LENGTH, RW_TO_SLOT, NULL);
        }
        t->root = (uint8_t)(next_random(random) % 3);
    }
}

/* Waits and takes results, and gives every slot back: the others need them. */
static void finish(rw_batch *b)
{
    rw_result results[8];
    for (int done = 0; !done;) {
        done = rw_wait(b, 2000000) == 1;
        const int n = rw_take(b, results, 8);
        for (int i = 0; i < n; i++)
            if (rw_slot_address(b, results[i].index))
                CHECK(!rw_release(b, results[i].index));
    }
}

static void *run(void *argument)
{
    job *j = argument;
    uint8_t *memory = make_bytes(8 * (2u << 20), j->seed);
    for (int round = 0; round < NUM_ROUNDS; round++) {
        plan p = {.count = 0};
        fill(&p, &j->seed, memory);
        const uint64_t how = next_random(&j->seed) % 4;
        rw_batch *b = plan_submit(&p, j->engine, (int)(how & 1), how == 1 ? (int64_t)(next_random(&j->seed) % 3000000) : -1);
        if (how == 2)
            rw_cancel(b);
        finish(b);
        rw_free(b);
    }
    free(memory);
    return NULL;
}

void check_stress(int kind)
{
    rw_engine *e = open_engine(kind, 3, 4, 2u << 20);
    uint8_t *payload = make_bytes(LENGTH, 1);
    for (int i = 0; i < NUM_RECORDS; i++) {
        plan write = {.count = 0};
        char name[32];
        snprintf(name, sizeof name, "stress-%d", i);
        plan_write(&write, name, LENGTH, payload);
        plan_expect(&write, e, 0); /* one after the other: a payload is one write's until it is final */
    }
    pthread_t threads[NUM_THREADS];
    job jobs[NUM_THREADS];
    for (int i = 0; i < NUM_THREADS; i++) {
        jobs[i] = (job){e, (uint64_t)i * 77 + 5};
        CHECK(!pthread_create(&threads[i], NULL, run, &jobs[i]));
    }
    for (int i = 0; i < NUM_THREADS; i++)
        CHECK(!pthread_join(threads[i], NULL));
    wait_for_slots(e, 4);
    plan unread = {.count = 0};
    plan_read(&unread, "stress-0", LENGTH, RW_TO_SLOT, NULL);
    rw_free(plan_submit(&unread, e, RW_LOAD, -1)); /* given up before it ends: its slot comes back */
    wait_for_slots(e, 4);
    CHECK(rw_engine_close(e, -1) == 0);
    free(payload);
}
