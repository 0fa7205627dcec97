/* Operations on whole files. Each returns 0 or an errno, -errno where it says so. */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_MODE 0600
#define DIRECTORY_MODE 0700
#define MKDIR_TRIES 3

/* O_DIRECT where the file system takes it, the page cache where it says EINVAL. O_NOATIME (a first read would write its
 * inode) where the file is ours. */
int open_file(const char *path, int flags, int direct, int *fd)
{
    flags |= O_CLOEXEC;
    do
        *fd = open(path, flags | (direct ? O_DIRECT : 0), FILE_MODE);
    while (*fd < 0 && errno == EINTR);
    if (*fd < 0 && direct && errno == EINVAL)
        return open_file(path, flags & ~O_EXCL, 0, fd); /* Linux makes a file before it refuses O_DIRECT */
    if (*fd < 0 && (flags & O_NOATIME) && errno == EPERM)
        return open_file(path, flags & ~O_NOATIME, direct, fd);
    return *fd < 0 ? errno : 0;
}

int move_span(int fd, span *s, int is_write)
{
    int result;
    do {
        ssize_t moved = is_write ? pwritev(fd, s->parts, s->num_parts, s->offset)
                                 : preadv(fd, s->parts, s->num_parts, s->offset);
        if (moved < 0)
            moved = -errno;
        result = span_next(s, fd, moved);
    } while (result == -EAGAIN);
    return -result;
}

int probe_file(const char *path)
{
    struct stat info;
    if (!lstat(path, &info))
        return 0;
    return errno == ENOTDIR ? ENOENT : errno;
}

int unlink_file(const char *path) { return unlink(path) ? errno : 0; }

static int sync_directory(const char *path)
{
    const int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return errno;
    const int error = fsync(fd) ? errno : 0;
    close(fd);
    return error;
}

/* `path` without its last part, in `directory`. */
static int directory_of(const char *path, char directory[PATH_MAX])
{
    const size_t length = strlen(path);
    if (length >= PATH_MAX)
        return ENAMETOOLONG;
    char copy[PATH_MAX];
    memcpy(copy, path, length + 1);
    const char *name = dirname(copy); /* may be a constant, or lie in copy */
    memmove(directory, name, strlen(name) + 1);
    return 0;
}

/* Makes a directory and its missing parents; with `durable`, writes down that they are there. */
static int make_directories(const char *directory, int durable)
{
    char parent[PATH_MAX];
    int error = directory_of(directory, parent);
    if (error)
        return error;
    if (mkdir(directory, DIRECTORY_MODE)) {
        if (errno == EEXIST)
            return 0;
        if (errno != ENOENT || !strcmp(parent, directory))
            return errno;
        error = make_directories(parent, durable);
        if (error)
            return error;
        if (mkdir(directory, DIRECTORY_MODE) && errno != EEXIST)
            return errno;
    }
    return durable ? sync_directory(parent) : 0;
}

static int make_parents(const char *path, int durable)
{
    char directory[PATH_MAX];
    const int error = directory_of(path, directory);
    return error ? error : make_directories(directory, durable);
}

/* Fills piece by piece, checksum before each, so that the bytes are read while they are in the cache. The header goes
 * last, with the first piece. */
static int write_pieces(worker *w, const transfer *t, int fd)
{
    uint8_t *payload = (uint8_t *)(uintptr_t)t->address; /* NOLINT(performance-no-int-to-ptr) */
    const uint64_t end = record_bytes(t->length), pieces = record_pieces(t->length, RW_PIECE_BYTES);
    memset(payload + t->length, 0, end - RW_PAGE_BYTES - t->length);
    rw_header header = {.payload_bytes = t->length,
                        .created_ns = t->offset,
                        .piece_bytes = RW_PIECE_BYTES,
                        .num_pieces = (uint32_t)pieces};
    memcpy(header.key, t->key, 32);
    memcpy(header.namespace_id, t->namespace_id, 32);
    for (uint64_t piece = pieces; piece-- > 0;) {
        if (t->batch->cut)
            return t->batch->cut;
        const uint64_t start = piece ? piece * RW_PIECE_BYTES : RW_PAGE_BYTES;
        const uint64_t stop = (piece + 1) * RW_PIECE_BYTES < end ? (piece + 1) * RW_PIECE_BYTES : end;
        const struct iovec part = {payload + start - RW_PAGE_BYTES, stop - start};
        header.crcs[piece] = rw_crc32c(0, part.iov_base, part.iov_len);
        span s = {.parts = {part}, .num_parts = 1, .offset = (off_t)start};
        if (!piece) {
            rw_record_pack(&header, w->page);
            s = (span){.parts = {{w->page, RW_PAGE_BYTES}, part}, .num_parts = 2};
        }
        const int error = move_span(fd, &s, 1);
        if (error)
            return error;
        w->since_ns = now_ns(); /* slow, but not stuck */
    }
    return t->batch->cut;
}

static int write_temporary(worker *w, const transfer *t, int fd)
{
    int error;
    do
        error = fallocate(fd, 0, 0, (off_t)record_bytes(t->length)) ? errno : 0;
    while (error == EINTR);
    if (error && error != EOPNOTSUPP && error != ENOSYS)
        return error;
    error = write_pieces(w, t, fd);
    if (!error && t->durable && fsync(fd))
        error = errno;
    return error;
}

static int open_temporary(const transfer *t, int *fd)
{
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW;
    int error = open_file(t->temporary, flags, 1, fd);
    for (int i = 0; error == ENOENT && i < MKDIR_TRIES; i++) {
        error = make_parents(t->temporary, t->durable);
        if (!error)
            error = open_file(t->temporary, flags, 1, fd);
    }
    return error;
}

static int rename_temporary(const transfer *t)
{
    int error = rename(t->temporary, t->path) ? errno : 0;
    for (int i = 0; error == ENOENT && i < MKDIR_TRIES; i++) { /* somebody may remove an empty directory meanwhile */
        error = make_parents(t->path, t->durable);
        if (!error && rename(t->temporary, t->path))
            error = errno;
    }
    return error;
}

/* One worker a record: several that extend one file with O_DIRECT would wait for each other. */
int write_record(worker *w, const transfer *t)
{
    int fd = -1;
    int error = open_temporary(t, &fd);
    if (error)
        return error;
    error = write_temporary(w, t, fd);
    if (close(fd) && !error)
        error = errno; /* NFS tells here what did not reach the server */
    if (!error)
        error = rename_temporary(t);
    if (error) {
        unlink(t->temporary);
        return error;
    }
    if (t->durable) {
        char directory[PATH_MAX];
        error = directory_of(t->path, directory);
        if (!error)
            error = sync_directory(directory);
        if (error)
            unlink(t->path);
    }
    return error;
}
