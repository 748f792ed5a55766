/* A library for LD_PRELOAD that makes calls of the C library fail, on request, in the real process.
 *
 * faults_arm(call, skip, count, error): of the calls of this name that come, let `skip` pass, then fail the
 * next `count` (-1: all) with errno = error. error 0 on write, pwrite and pread means a short one: half of
 * the bytes. faults_path narrows it to files whose path contains a text; faults_disarm ends all of it.
 * error -1: the call never returns (it sleeps in the kernel until the process ends).
 * Every armed call is counted; faults_hits says how many failed. Names: pthread_create, open, write, pwrite,
 * pread, fsync, rename, mkdir, unlink, ftruncate, fallocate, mmap.
 *
 * TRANSFERD_FAULT="call:skip:count:error" arms one from the environment, for a whole process, and
 * TRANSFERD_FAULT_PATH narrows it.
 */
#define _GNU_SOURCE
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
#include <sys/uio.h>
#include <unistd.h>

enum { NEVER = -1 };

static struct {
    char call[32];
    char path[PATH_MAX];
    int error;
    int armed;
} plan;
static atomic_int skip_left, fail_left, hits;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void faults_arm(const char *call, int skip, int count, int error) {
    pthread_mutex_lock(&lock);
    snprintf(plan.call, sizeof plan.call, "%s", call);
    plan.error = error;
    plan.armed = 1;
    skip_left = skip;
    fail_left = count < 0 ? INT_MAX : count;
    hits = 0;
    pthread_mutex_unlock(&lock);
}

void faults_path(const char *part) { snprintf(plan.path, sizeof plan.path, "%s", part); }
void faults_disarm(void) { plan.armed = 0; plan.path[0] = 0; }
int faults_hits(void) { return hits; }

__attribute__((constructor)) static void from_environment(void) {
    const char *text = getenv("TRANSFERD_FAULT"), *path = getenv("TRANSFERD_FAULT_PATH");
    char call[32];
    int skip, count, error;
    if (path) faults_path(path);
    if (text && sscanf(text, "%31[^:]:%d:%d:%d", call, &skip, &count, &error) == 4)
        faults_arm(call, skip, count, error);
}

/* Does this call fail? path: of the file it is about, NULL for any. */
static int hit(const char *call, const char *path) {
    int fails = 0;
    if (!plan.armed || strcmp(plan.call, call) != 0) return 0;
    if (plan.path[0] && (path == NULL || strstr(path, plan.path) == NULL)) return 0;
    pthread_mutex_lock(&lock);
    if (skip_left > 0) skip_left--;
    else if (fail_left > 0) { fail_left--; hits++; fails = 1; }
    pthread_mutex_unlock(&lock);
    while (fails && plan.error == NEVER) pause();
    return fails;
}

static int hit_file(const char *call, int fd) {
    char link[64], path[PATH_MAX];
    if (!plan.armed || strcmp(plan.call, call) != 0) return 0;
    if (!plan.path[0]) return hit(call, NULL);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return hit(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(result) do { errno = plan.error; return (result); } while (0)

int pthread_create(pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *x) {
    if (hit("pthread_create", NULL)) return plan.error;
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
        if (plan.error) FAIL(-1);
        n = (n + 1) / 2;
    }
    return REAL(write)(fd, data, n);
}

#define PWRITE(name, offset_t) \
    ssize_t name(int fd, const void *data, size_t n, offset_t at) { \
        if (hit_file("pwrite", fd)) { \
            if (plan.error) FAIL(-1); \
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
            if (plan.error) FAIL(-1); \
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
            if (plan.error) FAIL(-1); \
            first = parts[0]; \
            first.iov_len = (first.iov_len + 1) / 2; \
            return REAL(name)(fd, &first, 1, at, flags); \
        } \
        return REAL(name)(fd, parts, count, at, flags); \
    }
PREADV2(preadv2, off_t)
PREADV2(preadv64v2, off64_t)

int fsync(int fd) { if (hit_file("fsync", fd)) FAIL(-1); return REAL(fsync)(fd); }
int rename(const char *from, const char *to) { if (hit("rename", to)) FAIL(-1); return REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { if (hit("mkdir", path)) FAIL(-1); return REAL(mkdir)(path, mode); }
int unlink(const char *path) { if (hit("unlink", path)) FAIL(-1); return REAL(unlink)(path); }

#define SIZED(name, offset_t) \
    int name(int fd, offset_t n) { if (hit_file("ftruncate", fd)) FAIL(-1); return REAL(name)(fd, n); }
SIZED(ftruncate, off_t)
SIZED(ftruncate64, off64_t)

/* posix_fallocate returns its error. */
#define ALLOCATED(name, offset_t) \
    int name(int fd, offset_t at, offset_t n) { \
        if (hit_file("fallocate", fd)) return plan.error; \
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
