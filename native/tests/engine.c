/* One engine: every kind of transfer, damage, deadlines, slots, its end. */
#include "check.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOT_BYTES (6u << 20)
#define NUM_SLOTS 3u

static const uint64_t lengths[] = {1, 4096, 131072, (1u << 20) - 4096, 1u << 20, (5u << 20) + 12345};

static void check_round_trip(rw_engine *e)
{
    for (size_t i = 0; i < ARRAY_LENGTH(lengths); i++) {
        const uint64_t length = lengths[i];
        uint8_t *payload = make_bytes(length, i), *back = make_bytes(length, i + 100);
        plan write = {.count = 0}, read = {.count = 0}, slot = {.count = 0};
        plan_write(&write, "new/deep/record", length, payload);
        write.transfers[0].durable = i % 2;
        plan_expect(&write, e, 0);
        plan_read(&read, "new/deep/record", length, RW_TO_MEMORY, back);
        plan_expect(&read, e, 0);
        CHECK(!memcmp(payload, back, length));
        plan_read(&slot, "new/deep/record", length, RW_TO_SLOT, NULL);
        rw_batch *b = plan_submit(&slot, e, RW_LOAD, -1);
        CHECK(rw_wait(b, -1) == 1);
        const void *there = (const void *)(uintptr_t)rw_slot_address(b, 0);
        CHECK(there && !memcmp(there, payload, length));
        CHECK(rw_release(b, 0) == 0 && rw_release(b, 0) == -EINVAL);
        rw_free(b);
        free(payload);
        free(back);
    }
}

/* What each root brought; a root that nobody named is 0. */
static void check_flow(rw_engine *e)
{
    const uint64_t length = (5u << 20) + 12345;
    uint8_t *payload = make_bytes(length, 3);
    plan write = {.count = 0}, read = {.count = 0};
    rw_flow before, flow;
    CHECK(!rw_engine_flow(e, 200, &before) && !before.bytes && !before.busy_ns);
    plan_write(&write, "flow", length, payload);
    plan_expect(&write, e, 0);
    plan_read(&read, "flow", length, RW_TO_MEMORY, payload)->root = 200;
    plan_expect(&read, e, 0);
    CHECK(!rw_engine_flow(e, 200, &flow) && flow.busy_ns > 0);
    CHECK(flow.bytes == RW_PAGE_BYTES + (length + RW_PAGE_BYTES - 1) / RW_PAGE_BYTES * RW_PAGE_BYTES);
    CHECK(!rw_engine_flow(e, 200, &before) && before.busy_ns == flow.busy_ns);
    CHECK(!rw_engine_flow(e, 0, &flow) && flow.bytes);
    CHECK(rw_engine_flow(e, RW_NUM_ROOTS, &flow) == -EINVAL);
    free(payload);
}

static void check_blocks(rw_engine *e)
{
    enum { PLANES = 3, BLOCKS = 40, CHUNK = 16, PAGE = 40000 };
    uint8_t *planes[PLANES], *before = make_bytes(PLANES * BLOCKS * PAGE, 5), *chunk = make_bytes(PLANES * CHUNK * PAGE, 6);
    uint64_t addresses[PLANES];
    int64_t ids[CHUNK];
    for (int p = 0; p < PLANES; p++) {
        planes[p] = make_bytes(BLOCKS * PAGE, 10 + (uint64_t)p);
        addresses[p] = (uint64_t)(uintptr_t)planes[p];
    }
    for (int i = 0; i < CHUNK; i++)
        ids[i] = i < 5 ? 30 + i : (i * 7) % 30;
    rw_gather(addresses, PLANES, PAGE, ids, CHUNK, chunk);
    plan write = {.count = 0}, read = {.count = 0};
    plan_write(&write, "blocks", PLANES * CHUNK * PAGE, chunk);
    plan_expect(&write, e, 0);
    for (int p = 0; p < PLANES; p++) {
        memcpy(before + p * BLOCKS * PAGE, planes[p], BLOCKS * PAGE);
        memset(planes[p], 0, BLOCKS * PAGE);
    }
    rw_transfer *t = plan_read(&read, "blocks", PLANES * CHUNK * PAGE, RW_TO_BLOCKS, NULL);
    t->planes = (uint64_t)(uintptr_t)addresses;
    t->blocks = (uint64_t)(uintptr_t)(ids + 2);
    t->page_bytes = PAGE;
    t->num_planes = PLANES;
    t->num_blocks = CHUNK - 2;
    t->skip_blocks = 2;
    plan_expect(&read, e, 0);
    for (int p = 0; p < PLANES; p++) {
        for (int i = 2; i < CHUNK; i++)
            CHECK(!memcmp(planes[p] + ids[i] * PAGE, before + (p * BLOCKS + ids[i]) * PAGE, PAGE));
        CHECK(planes[p][ids[0] * PAGE] == 0 && planes[p][ids[1] * PAGE + PAGE - 1] == 0);
        free(planes[p]);
    }
    free(before);
    free(chunk);
}

static void damage(const char *name, off_t at)
{
    char path[128];
    uint8_t byte;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const int fd = open(path, O_RDWR);
    CHECK(fd >= 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 1;
    CHECK(pwrite(fd, &byte, 1, at) == 1);
    close(fd);
}

static void check_damage(rw_engine *e)
{
    const uint64_t length = (3u << 20) + 100;
    uint8_t *payload = make_bytes(length, 1);
    const off_t places[] = {0, 5, 9, 40, 1024, 4000, 4096, (1 << 20) - 1, 1 << 20, 3 << 20, (3 << 20) + 4096 + 200};
    plan write = {.count = 0}, read = {.count = 0}, gone = {.count = 0};
    plan_write(&write, "hurt", length, payload);
    plan_read(&read, "hurt", length, RW_TO_MEMORY, payload);
    plan_read(&read, "hurt", length, RW_TO_SLOT, NULL);
    plan_expect(&write, e, 0);
    for (size_t i = 0; i < ARRAY_LENGTH(places); i++) {
        damage("hurt", places[i]);
        plan_expect(&read, e, EBADMSG);
        damage("hurt", places[i]);
    }
    char path[128];
    snprintf(path, sizeof path, "%s/hurt", folder);
    for (off_t end = 3 << 20; end; end /= 3) {
        CHECK(!truncate(path, end));
        plan_expect(&read, e, EBADMSG);
    }
    plan_add(&gone, RW_UNLINK, "hurt");
    plan_expect(&gone, e, 0);
    plan_expect(&gone, e, ENOENT);
    plan_expect(&read, e, ENOENT);
    gone.transfers[0].kind = RW_PROBE;
    plan_expect(&gone, e, ENOENT);
    free(payload);
}

/* A read through the ring that hangs: final at the deadline, its slot lost until the I/O returns. */
static void check_deadline(rw_engine *e)
{
    uint8_t *payload = make_bytes(4096, 1);
    plan write = {.count = 0}, ring = {.count = 0}, in_place = {.count = 0};
    plan_write(&write, "slow", 4096, payload);
    plan_expect(&write, e, 0);
    CHECK(!rw_test_hold(e, "slow"));
    plan_read(&ring, "slow", 4096, RW_TO_SLOT, NULL);
    plan_read(&in_place, "slow", 4096, RW_TO_MEMORY, payload);
    rw_batch *b = plan_submit(&ring, e, RW_LOAD, 20000000), *c = plan_submit(&in_place, e, RW_LOAD, -1);
    eventfd_t events;
    rw_result result;
    rw_usage usage;
    CHECK(rw_fileno(b) >= 0);
    CHECK(rw_wait(b, -1) == 1 && !eventfd_read(rw_fileno(b), &events));
    CHECK(rw_take(b, &result, 1) == 1 && result.result == ETIMEDOUT && rw_take(b, &result, 1) == 0);
    CHECK(!rw_engine_usage(e, &usage) && usage.lost_slots == 1);
    rw_free(b);
    CHECK(rw_cancel(c) == 0 && rw_wait(c, 1000000) == 0);
    CHECK(!rw_test_hold(e, NULL));
    CHECK(rw_wait(c, -1) == 1);
    CHECK(rw_take(c, &result, 1) == 1 && result.result == ECANCELED);
    rw_free(c);
    wait_for_slots(e, NUM_SLOTS);
    free(payload);
}

static void check_plain(rw_engine *e)
{
    const uint64_t length = (2u << 20) + 8192;
    uint8_t *bytes = make_bytes(length, 1), *back = make_bytes(length, 2);
    char path[128];
    snprintf(path, sizeof path, "%s/plain", folder);
    const int fd = open(path, O_CREAT | O_WRONLY, 0600);
    CHECK(fd >= 0 && !ftruncate(fd, 4 << 20));
    close(fd);
    const uint64_t shifts[] = {0, 4096, 1, 777};
    for (size_t i = 0; i < ARRAY_LENGTH(shifts); i++) {
        plan write = {.count = 0}, read = {.count = 0};
        rw_transfer *w = plan_add(&write, RW_WRITE, "plain"), *r = plan_add(&read, RW_READ, "plain");
        w->length = r->length = length - shifts[i] % 4096;
        w->offset = r->offset = shifts[i];
        w->address = (uint64_t)(uintptr_t)bytes;
        r->address = (uint64_t)(uintptr_t)back;
        plan_expect(&write, e, 0);
        plan_expect(&read, e, 0);
        CHECK(!memcmp(bytes, back, r->length));
        r->offset = 4 << 20;
        plan_expect(&read, e, ENODATA);
    }
    free(bytes);
    free(back);
}

static void check_fork(rw_engine *e)
{
    plan probe = {.count = 0};
    plan_add(&probe, RW_PROBE, "slow");
    rw_batch *b = plan_submit(&probe, e, RW_LOAD, -1), *c;
    uint32_t bad;
    const pid_t child = fork();
    if (!child)
        _exit(rw_done(b) != -ECHILD || rw_submit(e, probe.transfers, 1, probe.paths, probe.paths_bytes, 0, -1, &c, &bad) !=
                                           -ECHILD || rw_engine_close(e, -1) != -ECHILD);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(rw_wait(b, -1) == 1);
    rw_free(b);
}

static void check_misuse(rw_engine *e)
{
    plan p = {.count = 0};
    rw_batch *b;
    uint32_t bad = 0;
    uint8_t *payload = make_bytes(4096, 1);
    plan_read(&p, "x", 4096, RW_TO_MEMORY, payload);
    plan_read(&p, "x", 4096, RW_TO_MEMORY, payload + 1);
    CHECK(rw_submit(e, p.transfers, 2, p.paths, p.paths_bytes, 0, -1, &b, &bad) == -EINVAL && bad == 1);
    CHECK(rw_submit(e, p.transfers, 1, p.paths, p.paths_bytes, 0, -1, &b, &bad) == -EINVAL && bad == 1);
    CHECK(rw_submit(e, p.transfers, 1, p.paths, 1, 0, -1, &b, &bad) == -EINVAL);
    CHECK(rw_submit(e, NULL, 0, NULL, 0, 0, -1, &b, &bad) == 0 && rw_done(b) == 1);
    rw_free(b);
    free(payload);
}

/* Closing while reads hang: the ring stays until they return, nothing in place is left. */
static void check_close(int kind)
{
    rw_engine *e = open_engine(kind, 2, NUM_SLOTS, SLOT_BYTES);
    uint8_t *payload = make_bytes(4096, 1);
    plan read = {.count = 0};
    CHECK(!rw_test_hold(e, "slow"));
    plan_read(&read, "slow", 4096, RW_TO_SLOT, NULL);
    plan_read(&read, "slow", 4096, RW_TO_MEMORY, payload);
    rw_batch *b = plan_submit(&read, e, RW_LOAD, -1), *c;
    uint32_t bad;
    for (rw_usage usage = {.queued = 1}; usage.queued;)
        CHECK(!rw_engine_usage(e, &usage));
    CHECK(rw_engine_close(e, 1000000) == 1);
    CHECK(rw_submit(e, read.transfers, 2, read.paths, read.paths_bytes, 0, -1, &c, &bad) == -ESHUTDOWN);
    CHECK(!rw_test_hold(e, NULL));
    CHECK(rw_wait(b, -1) == 1);
    rw_free(b);
    wait_for_slots(e, NUM_SLOTS);
    CHECK(rw_engine_close(e, -1) == 0);
    free(payload);
}

void check_engine(int kind)
{
    rw_engine *e = open_engine(kind, 4, NUM_SLOTS, SLOT_BYTES);
    check_round_trip(e);
    check_flow(e);
    check_blocks(e);
    check_damage(e);
    check_plain(e);
    check_deadline(e);
    check_misuse(e);
    check_fork(e);
    CHECK(rw_engine_close(e, -1) == 0);
    check_close(kind);
}
