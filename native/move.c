/* Units: which bytes of which file go where, and whether they are what they should be. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* A tail shorter than this is read with the piece before it: a record of 1 MiB takes one I/O, not two. */
#define SHORT_TAIL_BYTES (RW_PIECE_BYTES / 8)

/* The byte range of the file that a transfer covers. */
static uint64_t first_byte(const transfer *t) { return t->kind == RW_READ_RECORD ? 0 : t->offset; }

static uint64_t end_byte(const transfer *t)
{
    return t->kind == RW_READ_RECORD ? record_bytes(t->length) : t->offset + t->length;
}

uint32_t num_units_of(const transfer *t)
{
    const uint64_t first = first_byte(t), end = end_byte(t);
    if (!moves_bytes(t) || end - first <= RW_PIECE_BYTES / 8)
        return 1;
    const uint64_t units = (end + RW_PIECE_BYTES - 1) / RW_PIECE_BYTES - first / RW_PIECE_BYTES;
    const uint64_t tail = (end - 1) % RW_PIECE_BYTES + 1;
    return (uint32_t)(units > 1 && tail <= SHORT_TAIL_BYTES ? units - 1 : units);
}

static void unit_range(const unit *u, uint64_t *start, uint64_t *end)
{
    const transfer *t = u->transfer;
    const uint64_t first = first_byte(t), cut = first / RW_PIECE_BYTES * RW_PIECE_BYTES;
    *start = u->number ? cut + u->number * (uint64_t)RW_PIECE_BYTES : first;
    *end = u->number + 1 < t->num_units ? cut + (u->number + 1) * (uint64_t)RW_PIECE_BYTES : end_byte(t);
}

uint64_t unit_bytes(const unit *u)
{
    uint64_t start, end;
    unit_range(u, &start, &end);
    return end - start;
}

static uint8_t *payload_of(const transfer *t)
{
    if (t->slot >= 0)
        return t->batch->engine->ring + (uint64_t)t->slot * t->batch->engine->slot_bytes + RW_PAGE_BYTES;
    return (uint8_t *)(uintptr_t)t->address; /* NOLINT(performance-no-int-to-ptr) */
}

/* Opens the file of a transfer's first unit. */
int unit_open(const unit *u)
{
    transfer *t = u->transfer;
    /* A planted symlink or FIFO is refused, not followed or waited for. */
    const int flags = t->kind == RW_READ_RECORD ? O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOATIME
                                                : (t->kind == RW_READ ? O_RDONLY : O_WRONLY);
    const int direct = t->kind == RW_READ_RECORD || (t->offset | t->length | t->address) % RW_PAGE_BYTES == 0;
    return open_file(t->path, flags, direct, &t->fd);
}

/* The header page goes before the payload in a slot, else to `page`. */
void unit_span(const unit *u, uint8_t *page, span *s)
{
    const transfer *t = u->transfer;
    uint64_t start, end;
    unit_range(u, &start, &end);
    memset(s, 0, sizeof *s);
    s->offset = (off_t)start;
    uint8_t *bytes = payload_of(t) + (start - first_byte(t));
    if (t->kind == RW_READ_RECORD) {
        bytes -= RW_PAGE_BYTES;
        if (!u->number && t->slot < 0) {
            s->parts[s->num_parts++] = (struct iovec){page, RW_PAGE_BYTES};
            bytes += RW_PAGE_BYTES;
            start += RW_PAGE_BYTES;
        }
    }
    s->parts[s->num_parts++] = (struct iovec){bytes, end - start};
}

/* After one call moved `moved` bytes, or failed with -errno: 0 all moved, -EAGAIN call again, else -errno. */
int span_next(span *s, int fd, ssize_t moved)
{
    if (moved == -EINTR || moved == -EAGAIN)
        return -EAGAIN;
    if (moved == -EINVAL && !s->was_refused) {
        /* What this file system wants aligned is not: go on through the page cache. */
        const int flags = fcntl(fd, F_GETFL);
        s->was_refused = 1;
        return flags < 0 || fcntl(fd, F_SETFL, flags & ~O_DIRECT) < 0 ? -errno : -EAGAIN;
    }
    if (moved < 0)
        return (int)moved;
    size_t done = (size_t)moved;
    s->offset += moved;
    while (s->num_parts && done >= s->parts[0].iov_len) {
        done -= s->parts[0].iov_len;
        s->parts[0] = s->parts[1];
        s->num_parts--;
    }
    if (!s->num_parts)
        return 0;
    s->parts[0].iov_base = (uint8_t *)s->parts[0].iov_base + done;
    s->parts[0].iov_len -= done;
    return moved ? -EAGAIN : -ENODATA; /* the file ends before the transfer does */
}

static int check_header(const transfer *t, const uint8_t *page)
{
    rw_header header;
    if (rw_record_parse(page, &header) || memcmp(header.key, t->key, 32) ||
        memcmp(header.namespace_id, t->namespace_id, 32) || header.payload_bytes != t->length ||
        header.piece_bytes != RW_PIECE_BYTES)
        return EBADMSG;
    memcpy(t->expected, header.crcs, header.num_pieces * sizeof *t->expected);
    return 0;
}

/* Takes the checksums of a unit's pieces while they are in the cache; the header's table may come later. */
int unit_check(const unit *u, const uint8_t *page)
{
    const transfer *t = u->transfer;
    if (t->kind != RW_READ_RECORD)
        return 0;
    const uint8_t *file = payload_of(t) - RW_PAGE_BYTES; /* where the file's first byte would lie */
    uint64_t start, end;
    unit_range(u, &start, &end);
    if (!u->number) {
        const int error = check_header(t, t->slot < 0 ? page : file);
        if (error)
            return error;
        start = RW_PAGE_BYTES;
    }
    while (start < end) {
        const uint64_t piece = start / RW_PIECE_BYTES, cut = (piece + 1) * RW_PIECE_BYTES;
        const uint64_t stop = cut < end ? cut : end;
        t->found[piece] = rw_crc32c(0, file + start, stop - start);
        start = stop;
    }
    return 0;
}

/* Pages that one unit scatters: about a piece. */
static uint64_t scatter_pages(const transfer *t)
{
    return t->page_bytes < RW_PIECE_BYTES ? RW_PIECE_BYTES / t->page_bytes : 1;
}

uint32_t num_scatter_units(const transfer *t)
{
    const uint64_t pages = (uint64_t)t->num_planes * t->num_blocks, each = scatter_pages(t);
    return (uint32_t)((pages + each - 1) / each);
}

static uint8_t *page_at(const uint64_t *planes, uint64_t plane, int64_t block, uint64_t page_bytes)
{
    return (uint8_t *)(uintptr_t)(planes[plane] + (uint64_t)block * page_bytes); /* NOLINT */
}

/* How many blocks from i on lie side by side in a plane. */
static uint32_t run_length(const int64_t *blocks, uint32_t i, uint32_t end)
{
    uint32_t n = 1;
    while (i + n < end && blocks[i + n] == blocks[i] + n)
        n++;
    return n;
}

void unit_scatter(const unit *u)
{
    const transfer *t = u->transfer;
    const uint8_t *payload = payload_of(t);
    const uint64_t total = (uint64_t)t->num_planes * t->num_blocks, each = scatter_pages(t);
    uint64_t page = u->number * each;
    const uint64_t stop = page + each < total ? page + each : total;
    while (page < stop) {
        const uint64_t plane = page / t->num_blocks;
        const uint32_t i = (uint32_t)(page % t->num_blocks);
        const uint64_t left = stop - page;
        const uint32_t end = left < t->num_blocks - i ? i + (uint32_t)left : t->num_blocks;
        const uint32_t n = run_length(t->blocks, i, end);
        const uint64_t from = plane * (t->skip_blocks + t->num_blocks) + t->skip_blocks + i;
        memcpy(page_at(t->planes, plane, t->blocks[i], t->page_bytes), payload + from * t->page_bytes,
               n * t->page_bytes);
        page += n;
    }
}

void rw_gather(const uint64_t *planes, uint32_t num_planes, uint64_t page_bytes, const int64_t *blocks,
               uint32_t num_blocks, void *address)
{
    uint8_t *out = address;
    for (uint32_t plane = 0; plane < num_planes; plane++)
        for (uint32_t i = 0; i < num_blocks;) {
            const uint32_t n = run_length(blocks, i, num_blocks);
            memcpy(out, page_at(planes, plane, blocks[i], page_bytes), n * page_bytes);
            out += n * page_bytes;
            i += n;
        }
}
