/* A library for LD_PRELOAD that makes calls of the C library fail, on request, in the real process.
 *
 * faults_arm(calls, skip, count, error): of the calls of these names (one, or several with commas) that come, let
 * `skip` pass, then fail the next `count` (-1: all) with errno = error. faults_path narrows it to files whose path
 * contains a text; faults_disarm ends all of it. faults_hits says how many failed. In place of an errno:
 *
 *    0  on write, pwrite and pread a short one: half of the bytes
 *   -1  the call never returns (it sleeps in the kernel until the process ends)
 *   -2  the call hangs until the fault is disarmed, then it is made
 *   -3  the call takes `delay_ms` longer
 *
 * Names: pthread_create, open, write, pwrite, pread, fsync, rename, mkdir, rmdir, unlink, ftruncate, fallocate, mmap, opendir, stat.
 *
 * TRANSFERD_FAULT="calls:skip:count:error" arms one from the environment, for a whole process, and
 * TRANSFERD_FAULT_PATH narrows it. TRANSFERD_FAULT_PAGE names a file of sizeof(struct plan) bytes that is the plan:
 * whoever maps it, too, arms and disarms a process from outside, and steps its wall clock by wall_s seconds.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NEVER = -1, HANGS = -2, SLOW = -3 };

/* tests/support/native/page.py has the same fields in the same order. */
struct plan {
    char calls[64];
    char path[1024];
    int error;
    int delay_ms;
    atomic_int armed, skip_left, fail_left, hits;
    atomic_int wall_s, wall_reads;
};
static struct plan of_process, *plan = &of_process;

void faults_disarm(void) { plan->armed = 0; plan->path[0] = 0; }
void faults_path(const char *part) { snprintf(plan->path, sizeof plan->path, "%s", part); }
int faults_hits(void) { return plan->hits; }

void faults_arm(const char *calls, int skip, int count, int error) {
    plan->armed = 0;
    snprintf(plan->calls, sizeof plan->calls, "%s", calls);
    plan->error = error;
    plan->skip_left = skip;
    plan->fail_left = count < 0 ? INT_MAX : count;
    plan->hits = 0;
    plan->armed = 1;
}

__attribute__((constructor)) static void from_environment(void) {
    const char *text = getenv("TRANSFERD_FAULT"), *path = getenv("TRANSFERD_FAULT_PATH");
    const char *page = getenv("TRANSFERD_FAULT_PAGE");
    char calls[64];
    int skip, count, error, fd = page ? open(page, O_RDWR | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *shared = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (shared != MAP_FAILED) plan = shared;
        close(fd);
    }
    if (path && *path) faults_path(path);
    if (text && sscanf(text, "%63[^:]:%d:%d:%d", calls, &skip, &count, &error) == 4)
        faults_arm(calls, skip, count, error);
}

static int names(const char *call) {
    size_t length = strlen(call);
    for (const char *at = plan->calls; (at = strstr(at, call)); at += length)
        if ((at == plan->calls || at[-1] == ',') && (at[length] == 0 || at[length] == ',')) return 1;
    return 0;
}

static int takes(atomic_int *left) {
    int seen = *left;
    while (seen > 0)
        if (atomic_compare_exchange_weak(left, &seen, seen - 1)) return 1;
    return 0;
}

/* Does this call fail? path: of the file it is about, NULL for any. */
static int hit(const char *call, const char *path) {
    if (!plan->armed || !names(call)) return 0;
    if (plan->path[0] && (path == NULL || strstr(path, plan->path) == NULL)) return 0;
    if (takes(&plan->skip_left) || !takes(&plan->fail_left)) return 0;
    plan->hits++;
    struct timespec moment = {0, 2000000};
    struct timespec delay = {plan->delay_ms / 1000, plan->delay_ms % 1000 * 1000000};
    while (plan->error == NEVER) pause();
    while (plan->error == HANGS && plan->armed) nanosleep(&moment, NULL);
    if (plan->error == SLOW) nanosleep(&delay, NULL);
    return plan->error >= 0;
}

static int hit_file(const char *call, int fd) {
    char link[64], path[PATH_MAX];
    if (!plan->armed || !names(call)) return 0;
    if (!plan->path[0]) return hit(call, NULL);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return hit(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(result) do { errno = plan->error; return (result); } while (0)

int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) {
    if (hit("pthread_create", NULL)) return plan->error;
    return REAL(pthread_create)(t, a, f, x);
}

static int opened(int (*real)(const char *, int, ...), const char *path, int flags, mode_t mode) {
    if (hit("open", path)) FAIL(-1);
    return real(path, flags, mode);
}
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return opened(REAL(name), path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int fd, const void *data, size_t n) {
    if (hit_file("write", fd)) {
        if (plan->error) FAIL(-1);
        n = (n + 1) / 2;
    }
    return REAL(write)(fd, data, n);
}

#define PWRITE(name, offset_t) \
    ssize_t name(int fd, const void *data, size_t n, offset_t at) { \
        if (hit_file("pwrite", fd)) { \
            if (plan->error) FAIL(-1); \
            n = (n + 1) / 2; \
        } \
        return REAL(name)(fd, data, n, at); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

/* preadv, of one buffer as the store uses it: short reads too. */
#define PREADV(name, offset_t) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t at) { \
        struct iovec first; \
        if (count > 0 && hit_file("pread", fd)) { \
            if (plan->error) FAIL(-1); \
            first = parts[0]; \
            first.iov_len = (first.iov_len + 1) / 2; \
            return REAL(name)(fd, &first, 1, at); \
        } \
        return REAL(name)(fd, parts, count, at); \
    }
PREADV(preadv, off_t)
PREADV(preadv64, off64_t)

#define PREADV2(name, offset_t) \
    ssize_t name(int fd, const struct iovec *parts, int count, offset_t at, int flags) { \
        struct iovec first; \
        if (count > 0 && hit_file("pread", fd)) { \
            if (plan->error) FAIL(-1); \
            first = parts[0]; \
            first.iov_len = (first.iov_len + 1) / 2; \
            return REAL(name)(fd, &first, 1, at, flags); \
        } \
        return REAL(name)(fd, parts, count, at, flags); \
    }
PREADV2(preadv2, off_t)
PREADV2(preadv64v2, off64_t)

int fsync(int fd) { if (hit_file("fsync", fd)) FAIL(-1); return REAL(fsync)(fd); }
int rename(const char *from, const char *to) {
    char both[2 * PATH_MAX];
    snprintf(both, sizeof both, "%s\n%s", from, to);
    if (hit("rename", both)) FAIL(-1);
    return REAL(rename)(from, to);
}
DIR *opendir(const char *path) { if (hit("opendir", path)) FAIL(NULL); return REAL(opendir)(path); }

#define STATTED(name, kind) \
    int name(const char *path, struct kind *into) { if (hit("stat", path)) FAIL(-1); return REAL(name)(path, into); }
STATTED(stat, stat)
STATTED(lstat, stat)
STATTED(stat64, stat64)
STATTED(lstat64, stat64)
int mkdir(const char *path, mode_t mode) { if (hit("mkdir", path)) FAIL(-1); return REAL(mkdir)(path, mode); }
int rmdir(const char *path) { if (hit("rmdir", path)) FAIL(-1); return REAL(rmdir)(path); }
int unlink(const char *path) { if (hit("unlink", path)) FAIL(-1); return REAL(unlink)(path); }

#define SIZED(name, offset_t) \
    int name(int fd, offset_t n) { if (hit_file("ftruncate", fd)) FAIL(-1); return REAL(name)(fd, n); }
SIZED(ftruncate, off_t)
SIZED(ftruncate64, off64_t)

/* posix_fallocate returns its error. */
#define ALLOCATED(name, offset_t) \
    int name(int fd, offset_t at, offset_t n) { \
        if (hit_file("fallocate", fd)) return plan->error; \
        return REAL(name)(fd, at, n); \
    }
ALLOCATED(posix_fallocate, off_t)
ALLOCATED(posix_fallocate64, off64_t)

#define MAPPED(name, offset_t) \
    void *name(void *at, size_t n, int protection, int flags, int fd, offset_t offset) { \
        if (hit("mmap", NULL)) FAIL(MAP_FAILED); \
        return REAL(name)(at, n, protection, flags, fd, offset); \
    }
MAPPED(mmap, off_t)
MAPPED(mmap64, off64_t)

static time_t stepped(void) { plan->wall_reads++; return plan->wall_s; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int done = REAL(clock_gettime)(clock, now);
    if (done == 0 && plan->wall_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += stepped();
    return done;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int done = REAL(gettimeofday)(now, zone);
    if (done == 0 && plan->wall_s) now->tv_sec += stepped();
    return done;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
