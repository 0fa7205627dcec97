/* Preloaded between a program and the C library: counts the file operations below one directory, and makes one of them
 * fail, fall short, lie, hang or be the process's last. The orders and the counts lie in a small shared file, so that a
 * parent reads them after its child was killed. Control: faultshim.py, which has the same layout.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/io_uring.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define SHIM_OPEN (1u << 0)
#define SHIM_READ (1u << 1)
#define SHIM_WRITE (1u << 2)
#define SHIM_ALLOCATE (1u << 3)
#define SHIM_RENAME (1u << 4)
#define SHIM_UNLINK (1u << 5)
#define SHIM_MKDIR (1u << 6)
#define SHIM_SYNC (1u << 7)
#define SHIM_TRUNCATE (1u << 8)
#define SHIM_STAT (1u << 9)

enum action { COUNT, FAIL, KILL_BEFORE, KILL_AFTER, KILL_MID, SHORT, END, FLIP, DROP, STALE, HANG };

#define SHIM_LOG_LINES 512
#define SHIM_LOG_CHARS 96

struct shim_control {
    atomic_uint armed;   /* acts and counts only while not 0 */
    uint32_t mask;       /* operations that count */
    uint32_t nth;        /* the first counted operation acted on, from 1 */
    uint32_t times;      /* how many in a row are acted on; 0: all that follow */
    uint32_t action;
    int32_t error;       /* errno of FAIL */
    uint32_t random;     /* which bit FLIP turns */
    atomic_uint seen;    /* counted operations */
    atomic_uint fired;   /* operations acted on */
    atomic_uint hanging; /* threads held by HANG now */
    atomic_uint release; /* not 0: HANG lets go */
    uint32_t spare;
    char prefix[PATH_MAX]; /* paths that begin with it count */
    char infix[256];       /* and that hold this; empty: all */
    char log[SHIM_LOG_LINES][SHIM_LOG_CHARS];
};

static struct shim_control *control;

/* Use another control file (a forked child its own); NULL: act on nothing. Returns 0 or -1. */
int faultshim_attach(const char *path) {
    control = NULL;
    if (!path) return 0;
    int fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) return -1;
    void *at = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (at == MAP_FAILED) return -1;
    control = at;
    return 0;
}

size_t faultshim_control_bytes(void) { return sizeof(struct shim_control); }

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("FAULTSHIM_CONTROL");
    if (path) faultshim_attach(path);
}

static void fd_path(int fd, char out[PATH_MAX]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, out, PATH_MAX - 1);
    out[n > 0 ? n : 0] = 0;
}

static void full_path(int dirfd, const char *path, char out[PATH_MAX]) {
    if (path[0] == '/' || dirfd == AT_FDCWD) {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    char base[PATH_MAX];
    fd_path(dirfd, base);
    snprintf(out, PATH_MAX, "%.*s/%.*s", PATH_MAX / 2 - 2, base, PATH_MAX / 2 - 2, path);
}

/* The action for this operation, COUNT where it is to go through. */
static enum action decide(uint32_t op, const char *name, const char *path) {
    struct shim_control *c = control;
    if (!c || !atomic_load(&c->armed) || !(c->mask & op)) return COUNT;
    if (strncmp(path, c->prefix, strlen(c->prefix)) || (c->infix[0] && !strstr(path, c->infix))) return COUNT;
    uint32_t number = atomic_fetch_add(&c->seen, 1) + 1;
    size_t length = strlen(path), tail = length > SHIM_LOG_CHARS - 16 ? length - (SHIM_LOG_CHARS - 16) : 0;
    snprintf(c->log[(number - 1) % SHIM_LOG_LINES], SHIM_LOG_CHARS, "%-10s %s", name, path + tail);
    if (c->action == COUNT || number < c->nth || (c->times && number >= c->nth + c->times)) return COUNT;
    atomic_fetch_add(&c->fired, 1);
    return (enum action)c->action;
}

static void die(void) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
}

static void hold(void) {
    struct shim_control *c = control;
    atomic_fetch_add(&c->hanging, 1);
    while (!atomic_load(&c->release)) {
        struct timespec pause_s = {0, 1000000};
        nanosleep(&pause_s, NULL);
    }
    atomic_fetch_sub(&c->hanging, 1);
}

/* An operation with no partial outcome: CALL runs it, result is its return value. */
#define WHOLE(OP, NAME, PATH, CALL)                     \
    do {                                                \
        enum action act = decide(OP, NAME, PATH);       \
        if (act == FAIL) {                              \
            errno = control->error;                     \
            return -1;                                  \
        }                                               \
        if (act == KILL_BEFORE || act == KILL_MID) die(); \
        if (act == HANG) hold();                        \
        if (act == DROP) return 0;                      \
        long result = (CALL);                           \
        if (act == KILL_AFTER) die();                   \
        return (int)result;                             \
    } while (0)

/* Opening */

static int shim_open(int dirfd, const char *path, int flags, mode_t mode) {
    char full[PATH_MAX];
    full_path(dirfd, path, full);
    enum action act = decide(SHIM_OPEN, flags & O_CREAT ? "create" : "open", full);
    if (act == FAIL) {
        errno = control->error;
        return -1;
    }
    if (act == KILL_BEFORE || act == KILL_MID) die();
    if (act == HANG) hold();
    int fd = (int)syscall(SYS_openat, dirfd, path, flags, mode);
    if (act == KILL_AFTER) die();
    return fd;
}

#define WITH_MODE(FLAGS, LAST)                           \
    mode_t mode = 0;                                     \
    if ((FLAGS) & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) { \
        va_list args;                                    \
        va_start(args, LAST);                            \
        mode = va_arg(args, mode_t);                     \
        va_end(args);                                    \
    }

int open(const char *path, int flags, ...) { WITH_MODE(flags, flags) return shim_open(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { WITH_MODE(flags, flags) return shim_open(AT_FDCWD, path, flags, mode); }
int openat(int dirfd, const char *path, int flags, ...) { WITH_MODE(flags, flags) return shim_open(dirfd, path, flags, mode); }
int openat64(int dirfd, const char *path, int flags, ...) { WITH_MODE(flags, flags) return shim_open(dirfd, path, flags, mode); }
int __open_2(const char *path, int flags) { return shim_open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return shim_open(AT_FDCWD, path, flags, 0); }
int __openat_2(int dirfd, const char *path, int flags) { return shim_open(dirfd, path, flags, 0); }
int __openat64_2(int dirfd, const char *path, int flags) { return shim_open(dirfd, path, flags, 0); }
int creat(const char *path, mode_t mode) { return shim_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
DIR *opendir(const char *path) {
    int fd = shim_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    return fd < 0 ? NULL : fdopendir(fd);
}

/* Looking */

static int shim_stat(int dirfd, const char *name, struct stat *out, int flags) {
    char path[PATH_MAX];
    full_path(dirfd, name, path);
    WHOLE(SHIM_STAT, "stat", path, syscall(SYS_newfstatat, dirfd, name, out, flags));
}
int stat(const char *name, struct stat *out) { return shim_stat(AT_FDCWD, name, out, 0); }
int lstat(const char *name, struct stat *out) { return shim_stat(AT_FDCWD, name, out, AT_SYMLINK_NOFOLLOW); }
int fstatat(int dirfd, const char *name, struct stat *out, int flags) { return shim_stat(dirfd, name, out, flags); }
int stat64(const char *name, struct stat64 *out) { return shim_stat(AT_FDCWD, name, (struct stat *)out, 0); }
int lstat64(const char *name, struct stat64 *out) {
    return shim_stat(AT_FDCWD, name, (struct stat *)out, AT_SYMLINK_NOFOLLOW);
}
int fstatat64(int dirfd, const char *name, struct stat64 *out, int flags) {
    return shim_stat(dirfd, name, (struct stat *)out, flags);
}

static int shim_access(int dirfd, const char *name, int mode) {
    char path[PATH_MAX];
    full_path(dirfd, name, path);
    WHOLE(SHIM_STAT, "access", path, syscall(SYS_faccessat, dirfd, name, mode));
}
int access(const char *name, int mode) { return shim_access(AT_FDCWD, name, mode); }
int faccessat(int dirfd, const char *name, int mode, int flags) {
    (void)flags;
    return shim_access(dirfd, name, mode);
}

/* Moving bytes: every call ends in one vectored call at an offset, or at the file's position where offset is -1. */

static size_t total_bytes(const struct iovec *iov, int count) {
    size_t total = 0;
    for (int i = 0; i < count; i++) total += iov[i].iov_len;
    return total;
}

/* The first `bytes` of iov in `out`; returns the number of vectors. */
static int cut(const struct iovec *iov, int count, size_t bytes, struct iovec *out) {
    int used = 0;
    for (; used < count && bytes; used++) {
        out[used] = iov[used];
        if (out[used].iov_len > bytes) out[used].iov_len = bytes;
        bytes -= out[used].iov_len;
    }
    return used;
}

static void flip_bit(const struct iovec *iov, int count, size_t bytes) {
    if (!bytes) return;
    size_t at = control->random % (bytes * 8);
    for (int i = 0; i < count; i++) {
        if (at / 8 < iov[i].iov_len) {
            ((unsigned char *)iov[i].iov_base)[at / 8] ^= (unsigned char)(1u << (at % 8));
            return;
        }
        at -= iov[i].iov_len * 8;
    }
}

static ssize_t read_at(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    if (offset < 0) return syscall(SYS_readv, fd, iov, count);
    return syscall(SYS_preadv2, fd, iov, count, (long)offset, (long)(sizeof(long) == 8 ? 0 : offset >> 31), flags);
}

static ssize_t write_at(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    if (offset < 0) return syscall(SYS_writev, fd, iov, count);
    return syscall(SYS_pwritev2, fd, iov, count, (long)offset, (long)(sizeof(long) == 8 ? 0 : offset >> 31), flags);
}

/* Half of a transfer; whole sectors, so that direct I/O accepts it. */
static size_t half(size_t bytes) { return bytes >= 8192 ? bytes / 2 / 4096 * 4096 : bytes / 2; }

static enum action decide_fd(uint32_t op, const char *name, int fd) {
    char path[PATH_MAX];
    if (!control || !atomic_load(&control->armed)) return COUNT;
    fd_path(fd, path);
    return decide(op, name, path);
}

static ssize_t act_read(enum action act, int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    struct iovec part[count > 0 ? count : 1];
    size_t total = total_bytes(iov, count);
    switch (act) {
    case FAIL: errno = control->error; return -1;
    case END: return 0;
    case STALE: return (ssize_t)total;
    case KILL_BEFORE: case KILL_MID: die(); break;
    case HANG: hold(); break;
    case SHORT: return read_at(fd, part, cut(iov, count, half(total), part), offset, flags);
    default: break;
    }
    ssize_t result = read_at(fd, iov, count, offset, flags);
    if (act == FLIP && result > 0) flip_bit(iov, count, (size_t)result);
    if (act == KILL_AFTER) die();
    return result;
}

static ssize_t act_write(enum action act, int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    struct iovec part[count > 0 ? count : 1];
    size_t total = total_bytes(iov, count);
    switch (act) {
    case FAIL: errno = control->error; return -1;
    case DROP: return (ssize_t)total; /* claimed, never written */
    case KILL_BEFORE: die(); break;
    case HANG: hold(); break;
    case SHORT: return write_at(fd, part, cut(iov, count, half(total), part), offset, flags);
    case KILL_MID:
        write_at(fd, part, cut(iov, count, half(total), part), offset, flags);
        die();
        break;
    case FLIP: { /* a flipped copy, so that the caller's memory stays as it was */
        unsigned char *copy = NULL;
        if (posix_memalign((void **)&copy, 4096, total)) break;
        size_t at = 0;
        for (int i = 0; i < count; i++) {
            memcpy(copy + at, iov[i].iov_base, iov[i].iov_len);
            at += iov[i].iov_len;
        }
        struct iovec one = {copy, total};
        flip_bit(&one, 1, total);
        ssize_t result = write_at(fd, &one, 1, offset, flags);
        free(copy);
        return result;
    }
    default: break;
    }
    ssize_t result = write_at(fd, iov, count, offset, flags);
    if (act == KILL_AFTER) die();
    return result;
}

static ssize_t shim_read(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    return act_read(decide_fd(SHIM_READ, "read", fd), fd, iov, count, offset, flags);
}

static ssize_t shim_write(int fd, const struct iovec *iov, int count, off_t offset, int flags) {
    return act_write(decide_fd(SHIM_WRITE, "write", fd), fd, iov, count, offset, flags);
}

#define ONE(BUFFER, BYTES) struct iovec one = {(void *)(uintptr_t)(BUFFER), (BYTES)}

ssize_t read(int fd, void *b, size_t n) { ONE(b, n); return shim_read(fd, &one, 1, -1, 0); }
ssize_t readv(int fd, const struct iovec *v, int c) { return shim_read(fd, v, c, -1, 0); }
ssize_t pread(int fd, void *b, size_t n, off_t o) { ONE(b, n); return shim_read(fd, &one, 1, o, 0); }
ssize_t pread64(int fd, void *b, size_t n, off_t o) { ONE(b, n); return shim_read(fd, &one, 1, o, 0); }
ssize_t preadv(int fd, const struct iovec *v, int c, off_t o) { return shim_read(fd, v, c, o, 0); }
ssize_t preadv64(int fd, const struct iovec *v, int c, off_t o) { return shim_read(fd, v, c, o, 0); }
ssize_t preadv2(int fd, const struct iovec *v, int c, off_t o, int f) { return shim_read(fd, v, c, o, f); }
ssize_t preadv64v2(int fd, const struct iovec *v, int c, off_t o, int f) { return shim_read(fd, v, c, o, f); }
ssize_t write(int fd, const void *b, size_t n) { ONE(b, n); return shim_write(fd, &one, 1, -1, 0); }
ssize_t writev(int fd, const struct iovec *v, int c) { return shim_write(fd, v, c, -1, 0); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t o) { ONE(b, n); return shim_write(fd, &one, 1, o, 0); }
ssize_t pwrite64(int fd, const void *b, size_t n, off_t o) { ONE(b, n); return shim_write(fd, &one, 1, o, 0); }
ssize_t pwritev(int fd, const struct iovec *v, int c, off_t o) { return shim_write(fd, v, c, o, 0); }
ssize_t pwritev64(int fd, const struct iovec *v, int c, off_t o) { return shim_write(fd, v, c, o, 0); }
ssize_t pwritev2(int fd, const struct iovec *v, int c, off_t o, int f) { return shim_write(fd, v, c, o, f); }
ssize_t pwritev64v2(int fd, const struct iovec *v, int c, off_t o, int f) { return shim_write(fd, v, c, o, f); }
ssize_t __read_chk(int fd, void *b, size_t n, size_t room) { (void)room; return read(fd, b, n); }
ssize_t __pread_chk(int fd, void *b, size_t n, off_t o, size_t room) { (void)room; return pread(fd, b, n, o); }
ssize_t __pread64_chk(int fd, void *b, size_t n, off_t o, size_t room) { (void)room; return pread(fd, b, n, o); }

/* Space, names, durability */

static int shim_allocate(int fd, int mode, off_t offset, off_t length) {
    char path[PATH_MAX];
    fd_path(fd, path);
    WHOLE(SHIM_ALLOCATE, "fallocate", path, syscall(SYS_fallocate, fd, mode, (long)offset, (long)length));
}
int fallocate(int fd, int mode, off_t o, off_t n) { return shim_allocate(fd, mode, o, n); }
int fallocate64(int fd, int mode, off_t o, off_t n) { return shim_allocate(fd, mode, o, n); }
int posix_fallocate(int fd, off_t o, off_t n) { return shim_allocate(fd, 0, o, n) ? errno : 0; }
int posix_fallocate64(int fd, off_t o, off_t n) { return shim_allocate(fd, 0, o, n) ? errno : 0; }

static int shim_truncate_fd(int fd, off_t length) {
    char path[PATH_MAX];
    fd_path(fd, path);
    WHOLE(SHIM_TRUNCATE, "truncate", path, syscall(SYS_ftruncate, fd, (long)length));
}
int ftruncate(int fd, off_t n) { return shim_truncate_fd(fd, n); }
int ftruncate64(int fd, off_t n) { return shim_truncate_fd(fd, n); }

static int shim_rename(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    char path[PATH_MAX];
    full_path(to_dir, to, path);
    WHOLE(SHIM_RENAME, "rename", path, syscall(SYS_renameat2, from_dir, from, to_dir, to, flags));
}
int rename(const char *from, const char *to) { return shim_rename(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int fd, const char *from, int td, const char *to) { return shim_rename(fd, from, td, to, 0); }
int renameat2(int fd, const char *from, int td, const char *to, unsigned f) { return shim_rename(fd, from, td, to, f); }

static int shim_link(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    char path[PATH_MAX];
    full_path(to_dir, to, path);
    WHOLE(SHIM_RENAME, "link", path, syscall(SYS_linkat, from_dir, from, to_dir, to, flags));
}
int link(const char *from, const char *to) { return shim_link(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int fd, const char *from, int td, const char *to, int f) { return shim_link(fd, from, td, to, f); }

static int shim_unlink(int dirfd, const char *name, int flags) {
    char path[PATH_MAX];
    full_path(dirfd, name, path);
    WHOLE(SHIM_UNLINK, "unlink", path, syscall(SYS_unlinkat, dirfd, name, flags));
}
int unlink(const char *name) { return shim_unlink(AT_FDCWD, name, 0); }
int unlinkat(int dirfd, const char *name, int flags) { return shim_unlink(dirfd, name, flags); }
int rmdir(const char *name) { return shim_unlink(AT_FDCWD, name, AT_REMOVEDIR); }

static int shim_mkdir(int dirfd, const char *name, mode_t mode) {
    char path[PATH_MAX];
    full_path(dirfd, name, path);
    WHOLE(SHIM_MKDIR, "mkdir", path, syscall(SYS_mkdirat, dirfd, name, mode));
}
int mkdir(const char *name, mode_t mode) { return shim_mkdir(AT_FDCWD, name, mode); }
int mkdirat(int dirfd, const char *name, mode_t mode) { return shim_mkdir(dirfd, name, mode); }

static int shim_sync(int fd, long number) {
    char path[PATH_MAX];
    fd_path(fd, path);
    WHOLE(SHIM_SYNC, "fsync", path, syscall(number, fd));
}
int fsync(int fd) { return shim_sync(fd, SYS_fsync); }
int fdatasync(int fd) { return shim_sync(fd, SYS_fdatasync); }

/* io_uring, by raw system calls: what a program queues is looked at before the kernel is told of it. An entry that is to
 * be acted on is acted on here, and becomes one that moves nothing and ends with that result (Linux 6.10 on; before,
 * nothing that passes through a ring is counted or acted on). */

#define NOP_ENDS_WITH_LEN (1u << 0) /* IORING_NOP_INJECT_RESULT */
#define MOST_RINGS 1024

static struct io_uring_params rings[MOST_RINGS]; /* by descriptor; no entries: not a ring */

static int can_strike_rings(void) {
    static atomic_int known; /* 1: yes, -1: no */
    if (!atomic_load(&known)) {
        struct utsname host;
        int major = 0, minor = 0;
        int read_both = !uname(&host) && sscanf(host.release, "%d.%d", &major, &minor) == 2;
        atomic_store(&known, read_both && (major > 6 || (major == 6 && minor >= 10)) ? 1 : -1);
    }
    return atomic_load(&known) > 0;
}

static void strike_entry(struct io_uring_sqe *entry) {
    if (entry->opcode != IORING_OP_READV && entry->opcode != IORING_OP_WRITEV) return;
    int writes = entry->opcode == IORING_OP_WRITEV;
    enum action act = decide_fd(writes ? SHIM_WRITE : SHIM_READ, writes ? "write" : "read", entry->fd);
    if (act == COUNT) return;
    const struct iovec *iov = (const struct iovec *)(uintptr_t)entry->addr;
    ssize_t result = (writes ? act_write : act_read)(act, entry->fd, iov, (int)entry->len, (off_t)entry->off, 0);
    uint64_t owner = entry->user_data;
    int32_t ends_with = result < 0 ? -errno : (int32_t)result;
    memset(entry, 0, sizeof *entry);
    entry->opcode = IORING_OP_NOP;
    entry->rw_flags = NOP_ENDS_WITH_LEN;
    entry->len = (uint32_t)ends_with;
    entry->user_data = owner;
}

static void *map_ring(int fd, size_t bytes, off_t what) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, what);
}

static void strike_ring(int fd, uint32_t num_told) {
    const struct io_uring_params *p = &rings[fd];
    size_t queue_bytes = p->sq_off.array + p->sq_entries * sizeof(uint32_t);
    size_t entries_bytes = p->sq_entries * sizeof(struct io_uring_sqe);
    char *queue = map_ring(fd, queue_bytes, IORING_OFF_SQ_RING);
    struct io_uring_sqe *entries = map_ring(fd, entries_bytes, IORING_OFF_SQES);
    if (queue == MAP_FAILED || (void *)entries == MAP_FAILED) abort();
    uint32_t head = *(uint32_t *)(queue + p->sq_off.head), mask = *(uint32_t *)(queue + p->sq_off.ring_mask);
    const uint32_t *array = (const uint32_t *)(queue + p->sq_off.array);
    for (uint32_t i = 0; i < num_told; i++) strike_entry(&entries[array[(head + i) & mask]]);
    munmap(queue, queue_bytes);
    munmap(entries, entries_bytes);
}

long syscall(long number, ...) {
    static long (*_Atomic next)(long, ...);
    if (!next) next = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list args;
    va_start(args, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(args, long);
    va_end(args);
    struct shim_control *c = control;
    if (number == SYS_io_uring_enter && c && atomic_load(&c->armed) && (c->mask & (SHIM_READ | SHIM_WRITE)) &&
        a[0] >= 0 && a[0] < MOST_RINGS && rings[a[0]].sq_entries && can_strike_rings())
        strike_ring((int)a[0], (uint32_t)a[1]);
    long result = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    if (number == SYS_io_uring_setup && result >= 0 && result < MOST_RINGS)
        rings[result] = *(const struct io_uring_params *)a[1];
    return result;
}
