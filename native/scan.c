/* Which records lie below a namespace's directory: names only, never a stat. Two levels: <hh>/<64 hex digits>.rec. */
#include "internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NUM_DIRECTORIES 256u
#define MAX_SCAN_THREADS 64u
#define KEY_DIGITS 64u

typedef struct scan {
    int directory;
    uint64_t *fingerprints;
    uint64_t capacity;
    _Atomic uint64_t count;
    _Atomic uint32_t next; /* directory to read, 0 to 255 */
    _Atomic int error;
} scan;

/* Lower-case hexadecimal digit, or 16 and more. */
static unsigned digit(char c)
{
    if (c >= '0' && c <= '9')
        return (unsigned)(c - '0');
    return c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10 : 16;
}

/* 1 where this is the name of a record in directory `hh`. */
static int parse_name(const char *name, unsigned hh, uint8_t key[32])
{
    if (strlen(name) != KEY_DIGITS + 4 || strcmp(name + KEY_DIGITS, ".rec") != 0)
        return 0;
    for (unsigned i = 0; i < 32; i++) {
        const unsigned high = digit(name[2 * i]), low = digit(name[2 * i + 1]);
        if (high > 15 || low > 15)
            return 0;
        key[i] = (uint8_t)(high << 4 | low);
    }
    return key[0] == hh;
}

static uint64_t little_endian(const uint8_t *p)
{
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | p[i];
    return value;
}

static uint64_t fingerprint(const uint8_t key[32])
{
    const uint64_t tail = little_endian(key + 24);
    const uint64_t value = little_endian(key) ^ (tail << 1 | tail >> 63);
    return value ? value : 1;
}

static void scan_directory(scan *s, unsigned hh)
{
    static const char digits[] = "0123456789abcdef";
    const char name[3] = {digits[hh >> 4], digits[hh & 15], 0};
    const int fd = openat(s->directory, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *entries = fd < 0 ? NULL : fdopendir(fd);
    if (!entries) {
        if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP)
            s->error = errno;
        if (fd >= 0)
            close(fd);
        return;
    }
    uint8_t key[32];
    errno = 0;
    for (struct dirent *entry; (entry = readdir(entries)); errno = 0)
        if (parse_name(entry->d_name, hh, key)) {
            const uint64_t at = s->count++;
            if (at < s->capacity)
                s->fingerprints[at] = fingerprint(key);
        }
    if (errno)
        s->error = errno;
    closedir(entries);
}

static void *scan_some(void *argument)
{
    scan *s = argument;
    for (uint32_t hh; (hh = s->next++) < NUM_DIRECTORIES;)
        scan_directory(s, hh);
    return NULL;
}

int64_t rw_scan(const char *directory, uint32_t num_threads, uint64_t *fingerprints, uint64_t capacity)
{
    scan s = {.fingerprints = fingerprints, .capacity = capacity};
    s.directory = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s.directory < 0)
        return -errno;
    pthread_t threads[MAX_SCAN_THREADS];
    uint32_t started = 0;
    while (started + 1 < num_threads && started < MAX_SCAN_THREADS &&
           !pthread_create(&threads[started], NULL, scan_some, &s))
        started++;
    scan_some(&s);
    while (started)
        pthread_join(threads[--started], NULL);
    close(s.directory);
    return s.error ? -s.error : (int64_t)s.count;
}

uint64_t rw_index_add(uint64_t *table, uint64_t num_slots, const uint64_t *fingerprints, uint64_t n)
{
    const uint64_t mask = num_slots - 1;
    uint64_t added = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t wanted = fingerprints[i] ? fingerprints[i] : 1;
        uint64_t slot = wanted & mask;
        while (table[slot] && table[slot] != wanted)
            slot = (slot + 1) & mask;
        added += !table[slot];
        table[slot] = wanted;
    }
    return added;
}
