/* Files whose bytes are all in the page cache, mapped to be copied from.
 *
 * A read copies through the kernel, and a checksum reads the copy again. A mapping is read once, and not copied by the kernel
 * at all. It costs calls of its own, and is worth them only where a file's pages are as large as the CPU's large pages: to map
 * and unmap the 512 small pages of 2 MiB takes two to three times as long as to copy them. Which pages a file has depends on how
 * it was written or read, and on the memory that was free then. PAGEMAP_SCAN tells (Linux 6.7).
 *
 * Nothing may stop the process or make it wait:
 *
 * - cachestat(2) says whether all pages are there, so no page fault waits for a disk. (Linux 6.5 or newer; otherwise, or for
 *   files of other users, nothing is mapped.) Then the page table is filled, and the kernel does not take a page that it has
 *   just put there before it has looked at it twice.
 * - To read behind the end of a file that somebody has truncated, or what a disk cannot read any more, is a SIGBUS. The
 *   handler of _guard.c then has zeros put in the place of the rest of that mapping (put_zeros), which notes that it is lost.
 */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef SYS_cachestat
#define SYS_cachestat 451 /* on every architecture */
#endif

/* linux/fs.h, which older systems have without this. */
typedef struct {
    uint64_t start, end, categories;
} PageRegion;
typedef struct {
    uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
    uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
} PageScan;
#define SCAN_PAGEMAP _IOWR('f', 16, PageScan)
#define PAGE_IS_LARGE (1 << 6)

#define LARGE_PAGE 2097152 /* bytes; a shorter file has none, and reading it is as fast */
#define MOST_MAPPINGS 64   /* at a time: more than there are I/O threads */
#define WINDOW_BYTES (16 * (uint64_t)LARGE_PAGE)

/* Addresses at which one thread maps files, one behind the other and each at a multiple of a large page. They are given back
 * together, because to give some back interrupts every core that runs a thread of this process.
 *
 * taken: by a thread. reserved: where the addresses begin, NULL if there are none. users: mappings in it that are in use. */
typedef struct {
    atomic_int taken, users;
    unsigned char *reserved, *next, *end;
} Window;

/* begin: 0 if the entry is free, 1 while it is filled in. lost: some of its bytes are zeros instead of the file's.
 * window: NULL for a file that is mapped outside. */
typedef struct {
    _Atomic uintptr_t begin;
    uintptr_t end;
    volatile sig_atomic_t lost;
    Window *window;
} Mapping;

/* No __thread variables: the C library allocates them when a thread first uses one, and aborts if there is no memory. */
static Window windows[MOST_MAPPINGS];
static pthread_key_t window_of_thread;

static Mapping mappings[MOST_MAPPINGS];
static int may_map; /* guarded by the GIL */
static int pagemap = -1; /* /proc/self/pagemap; -1 without it */
static _Atomic int cannot_ask; /* the kernel has no cachestat (Linux 6.5), so no file is known to be in memory */

/* Whether this address is in a mapped file. Then there are zeros now in the place of the rest of that mapping. */
static int put_zeros(uintptr_t at)
{
    for (int i = 0; i < MOST_MAPPINGS; i++) {
        uintptr_t begin = atomic_load(&mappings[i].begin);
        if (begin <= 1 || at < begin || at >= mappings[i].end)
            continue;
        void *page = (void *)(at & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1));
        mappings[i].lost = 1;
        return mmap(page, mappings[i].end - (uintptr_t)page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page;
    }
    return 0;
}

/* How many of the file's first bytes the page cache does not have; all if the kernel cannot tell. */
static uint64_t not_in_memory(int fd, uint64_t nbytes)
{
    struct {
        uint64_t offset, nbytes;
    } range = {0, nbytes};
    struct {
        uint64_t cached, dirty, written_back, evicted, recently_evicted;
    } pages;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

    if (cannot_ask)
        return nbytes;
    if (syscall(SYS_cachestat, fd, &range, &pages, 0) < 0) {
        if (errno == ENOSYS)
            cannot_ask = 1;
        return nbytes;
    }
    return pages.cached >= (nbytes + page - 1) / page ? 0 : nbytes - pages.cached * page;
}

/* Gives back the addresses of this thread, unless a mapping is still in use. */
static void close_window(void)
{
    Window *window = pthread_getspecific(window_of_thread);

    if (!window || atomic_load(&window->users))
        return;
    if (window->reserved)
        munmap(window->reserved, (size_t)(window->end - window->reserved));
    pthread_setspecific(window_of_thread, NULL);
    atomic_store(&window->taken, 0);
}

/* The window of this thread, or NULL if there is none left or no memory. */
static Window *open_window(void)
{
    uint64_t page = LARGE_PAGE;
    Window *window = pthread_getspecific(window_of_thread);

    for (int i = 0; !window && i < MOST_MAPPINGS; i++) {
        int is_free = 0;
        if (!atomic_compare_exchange_strong(&windows[i].taken, &is_free, 1))
            continue;
        void *at = mmap(NULL, WINDOW_BYTES + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at != MAP_FAILED && pthread_setspecific(window_of_thread, &windows[i]) == 0) {
            window = &windows[i];
            window->reserved = at;
            window->end = window->reserved + WINDOW_BYTES + page;
            window->next = (unsigned char *)(((uintptr_t)at + page - 1) / page * page);
            break;
        }
        if (at != MAP_FAILED)
            munmap(at, WINDOW_BYTES + page);
        atomic_store(&windows[i].taken, 0);
        break;
    }
    return window;
}

/* Where this thread maps its next file, and in which window; NULL, and no window, if it does not fit. */
static void *next_in_window(uint64_t nbytes, Window **window)
{
    uint64_t page = LARGE_PAGE, rounded = (nbytes + page - 1) / page * page;

    *window = NULL;
    if (rounded > WINDOW_BYTES)
        return NULL;
    for (int tries = 0; tries < 2; tries++) {
        Window *mine = open_window();
        if (mine && mine->reserved && rounded <= (uint64_t)(mine->end - mine->next)) {
            *window = mine;
            mine->next += rounded;
            return mine->next - rounded;
        }
        close_window(); /* it is full */
    }
    return NULL;
}

/* Whether the CPU has a large page at these addresses, the first of which is in the page table. */
static int is_large(const unsigned char *at)
{
    PageRegion found;
    PageScan scan = {.size = sizeof scan, .start = (uintptr_t)at, .end = (uintptr_t)at + LARGE_PAGE};

    scan.vec = (uintptr_t)&found;
    scan.vec_len = 1;
    scan.category_mask = scan.return_mask = PAGE_IS_LARGE;
    return ioctl(pagemap, SCAN_PAGEMAP, &scan) > 0;
}

/* Maps an open file that begins with a large page, and fills the page table. */
static int map_pages(Mapping *mapping, int fd, uint64_t nbytes)
{
    Window *window;
    void *wanted = next_in_window(nbytes, &window);
    void *at = mmap(wanted, nbytes, PROT_READ, MAP_SHARED | (wanted ? MAP_FIXED : 0), fd, 0);

    if (at == MAP_FAILED) {
        if (window)
            window->reserved = NULL; /* given up, not given back: it may have a hole now, whose addresses are anyone's */
        return -1;
    }
    if (madvise(at, 1, MADV_POPULATE_READ) < 0 || !is_large(at) || madvise(at, nbytes, MADV_POPULATE_READ) < 0) {
        if (!window)
            munmap(at, nbytes);
        return -1;
    }
    mapping->window = window;
    if (window)
        atomic_fetch_add(&window->users, 1);
    mapping->end = (uintptr_t)at + nbytes;
    mapping->lost = 0;
    atomic_store(&mapping->begin, (uintptr_t)at);
    return 0;
}

/* A mapping of an open file that is all there, or NULL if it is in small pages, which are better read. */
static Mapping *map_open(int fd, uint64_t nbytes)
{
    for (int i = 0; i < MOST_MAPPINGS; i++) {
        uintptr_t is_free = 0;
        if (!atomic_compare_exchange_strong(&mappings[i].begin, &is_free, 1))
            continue;
        if (map_pages(&mappings[i], fd, nbytes) == 0)
            return &mappings[i];
        atomic_store(&mappings[i].begin, 0);
        break;
    }
    return NULL;
}

static void unmap_file(Mapping *mapping)
{
    uintptr_t begin = atomic_load(&mapping->begin), end = mapping->end;
    Window *window = mapping->window;

    atomic_store(&mapping->begin, 0); /* first: then the addresses may be anyone's */
    if (window)
        atomic_fetch_sub(&window->users, 1);
    else
        munmap((void *)begin, end - begin);
}
