/* rw_submit: checks a batch, copies it into one allocation, queues it. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PAYLOAD ((uint64_t)RW_MAX_PIECES * RW_PIECE_BYTES - RW_PAGE_BYTES)
#define MAX_LENGTH (1ull << 50) /* sums of two stay far from the end of the numbers */

static const void *at(uint64_t address) { return (const void *)(uintptr_t)address; /* NOLINT */ }

static int planes_are_wrong(const rw_transfer *t)
{
    const int64_t *blocks = at(t->blocks);
    const uint64_t pages = (uint64_t)t->num_planes * ((uint64_t)t->skip_blocks + t->num_blocks);
    if (!t->page_bytes || t->page_bytes > MAX_PAYLOAD || pages > MAX_PAYLOAD || pages * t->page_bytes != t->length)
        return 1;
    for (uint32_t i = 0; i < t->num_blocks; i++)
        if (blocks[i] < 0)
            return 1;
    return 0;
}

static int transfer_is_wrong(const rw_transfer *t, uint64_t slot_bytes)
{
    switch (t->kind) {
    case RW_READ:
    case RW_WRITE:
        return !t->address || t->length > MAX_LENGTH || t->offset > MAX_LENGTH;
    case RW_READ_RECORD:
        if (!t->length || t->length > MAX_PAYLOAD || t->target > RW_TO_SLOT)
            return 1;
        if (t->target == RW_TO_MEMORY)
            return !t->address || t->address % RW_PAGE_BYTES != 0;
        if (record_bytes(t->length) > slot_bytes)
            return 1;
        return t->target == RW_TO_BLOCKS && planes_are_wrong(t);
    case RW_WRITE_RECORD:
        return !t->length || t->length > MAX_PAYLOAD || !t->address || t->address % RW_PAGE_BYTES != 0;
    default:
        return t->kind != RW_PROBE && t->kind != RW_UNLINK;
    }
}

static uint32_t num_paths(const rw_transfer *t) { return t->kind == RW_WRITE_RECORD ? 2 : 1; }

/* 0, or -EINVAL with the index of what is wrong. */
static int check_batch(const rw_transfer *transfers, uint32_t n, const char *paths, uint64_t paths_bytes,
                       uint64_t slot_bytes, uint32_t *bad)
{
    uint64_t wanted = 0, found = 0;
    for (uint32_t i = 0; i < n; i++) {
        wanted += num_paths(&transfers[i]);
        if (transfer_is_wrong(&transfers[i], slot_bytes)) {
            *bad = i;
            return -EINVAL;
        }
    }
    for (uint64_t i = 0; i < paths_bytes; i++)
        found += !paths[i];
    *bad = n;
    return found != wanted || (paths_bytes && paths[paths_bytes - 1]) ? -EINVAL : 0;
}

/* What one transfer needs beside its struct: 8-byte words first, checksums after. */
static uint64_t extra_bytes(const rw_transfer *t)
{
    uint64_t bytes = 0;
    if (t->kind == RW_READ_RECORD) {
        bytes += 2 * sizeof(uint32_t) * record_pieces(t->length, RW_PIECE_BYTES);
        if (t->target == RW_TO_BLOCKS)
            bytes += 8ull * t->num_planes + 8ull * t->num_blocks;
    }
    return bytes;
}

static void *carve(uint8_t **arena, uint64_t bytes)
{
    void *start = *arena;
    *arena += bytes;
    return start;
}

static void *carve_copy(uint8_t **arena, const void *bytes, uint64_t length)
{
    return length ? memcpy(carve(arena, length), bytes, length) : *arena;
}

static void fill_transfer(transfer *t, const rw_transfer *from, uint8_t **arena)
{
    t->address = from->address;
    t->length = from->length;
    t->offset = from->offset;
    t->slot = t->fd = -1;
    t->kind = from->kind;
    t->target = from->target;
    t->durable = from->durable;
    t->root = from->root;
    memcpy(t->key, from->key, 32);
    memcpy(t->namespace_id, from->namespace_id, 32);
    if (t->kind == RW_READ_RECORD) {
        const uint64_t pieces = record_pieces(t->length, RW_PIECE_BYTES);
        if (t->target == RW_TO_BLOCKS) {
            t->page_bytes = from->page_bytes;
            t->num_planes = from->num_planes;
            t->num_blocks = from->num_blocks;
            t->skip_blocks = from->skip_blocks;
            t->planes = carve_copy(arena, at(from->planes), 8ull * t->num_planes);
            t->blocks = carve_copy(arena, at(from->blocks), 8ull * t->num_blocks);
        }
        t->found = carve(arena, pieces * sizeof *t->found);
        t->expected = carve(arena, pieces * sizeof *t->expected);
    }
    t->num_units = num_units_of(t);
}

static rw_batch *make_batch(rw_engine *e, const rw_transfer *transfers, uint32_t n, const char *paths,
                            uint64_t paths_bytes)
{
    uint64_t bytes = sizeof(rw_batch) + n * (sizeof(transfer) + sizeof(int) + sizeof(uint32_t)) + paths_bytes;
    for (uint32_t i = 0; i < n; i++)
        bytes += extra_bytes(&transfers[i]);
    rw_batch *b = calloc(1, bytes);
    if (!b)
        return NULL;
    uint8_t *arena = (uint8_t *)(b + 1);
    b->engine = e;
    b->count = b->open_count = n;
    b->references = n + 1;
    b->event_fd = -1;
    b->transfers = carve(&arena, n * sizeof *b->transfers);
    for (uint32_t i = 0; i < n; i++)
        fill_transfer(&b->transfers[i], &transfers[i], &arena);
    b->results = carve(&arena, n * sizeof *b->results);
    b->ended = carve(&arena, n * sizeof *b->ended);
    const char *path = carve_copy(&arena, paths, paths_bytes);
    for (uint32_t i = 0; i < n; i++) {
        transfer *t = &b->transfers[i];
        t->batch = b;
        t->index = i;
        t->path = path;
        path += strlen(path) + 1;
        if (t->kind == RW_WRITE_RECORD) {
            t->temporary = path;
            path += strlen(path) + 1;
        }
    }
    make_condition(&b->done);
    return b;
}

int rw_submit(rw_engine *e, const rw_transfer *transfers, uint32_t n, const char *paths, uint64_t paths_bytes,
              uint32_t priority, int64_t deadline_ns, rw_batch **batch, uint32_t *bad)
{
    if (is_foreign(e))
        return -ECHILD;
    *bad = n;
    const int error = priority > RW_STORE ? -EINVAL : check_batch(transfers, n, paths, paths_bytes, e->slot_bytes, bad);
    if (error)
        return error;
    rw_batch *b = make_batch(e, transfers, n, paths, paths_bytes);
    if (!b)
        return -ENOMEM;
    const int64_t now = b->submitted_ns = b->idle_ns = b->done_ns = now_ns();
    b->deadline_ns = deadline_ns < 0 || deadline_ns > NO_DEADLINE - now ? NO_DEADLINE : now + deadline_ns;
    pthread_mutex_lock(&e->lock);
    if (e->is_closed) {
        pthread_mutex_unlock(&e->lock);
        b->references = 1;
        batch_unref(b);
        return -ESHUTDOWN;
    }
    for (uint32_t i = 0; i < n; i++) {
        b->transfers[i].priority = (uint8_t)priority;
        b->transfers[i].sequence = e->next_sequence++;
        queue_insert(e, &b->transfers[i]);
    }
    if (n) {
        b->next_live = e->live;
        if (e->live)
            e->live->previous_live = b;
        e->live = b;
        watch_by(e, b->deadline_ns);
        queue_wake(e);
    }
    pthread_mutex_unlock(&e->lock);
    *batch = b;
    return 0;
}
