/* Stores objects as files, or loads them, as many as one call is given, without the GIL.
 *
 * Each object's bytes come from a block that its task lends (_lent.h), or go there, or lie in the caller's memory. What does not
 * go as it usually does, ends the call and leaves no trace: the slow twins in Python then do that object and say what is wrong
 * with it (directory.py, file_io.py). The tests of the file backend run both. setup.py says for which versions of
 * CPython one build serves.
 */
#define _GNU_SOURCE 1
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../runtime/_native.h"
#include "../tiers/_guard.h"
#include "../workers/_footer.h"
#include "../workers/_lent.h"
#include "_mapping.h"
#include "_warm.h"

#define UNIT 4096           /* bytes; of direct I/O, as in file_io.py */
#define MOST_SLOTS 64
#define FETCHED_BYTES 524288 /* fewer bytes are read from the disk as fast without `fetch` */

/* How far `put` came. */
enum { NAMED, NOT_RETIRED, NOT_OPENED, UNFIT, NOT_FILLED, NOT_NAMED };

/* spare: the file to overwrite, or NULL. lock: whose identity says that the directory is ours. direct: how many of the first bytes go past
 * the page cache. directory_mode: of a directory that is made if there is none, or 0. syncs: wait for the medium before it is named. */
typedef struct {
    const char *spare, *temporary, *path, *lock;
    unsigned long long device, inode;
    const unsigned char *data;
    long long nbytes, direct;
    int flags, mode, directory_mode, allocates, syncs;
} Order;

static int is_ours(const Order *order)
{
    struct stat found;

    return lstat(order->lock, &found) == 0 && found.st_dev == order->device && found.st_ino == order->inode;
}

/* found: how long the file is. */
static int fill(const Order *order, int fd, long long found)
{
    long long done = 0;
    int flags;

    if (found > order->nbytes && ftruncate(fd, order->nbytes) < 0)
        return -1;
    if (order->allocates && found < order->nbytes) {
        do
            errno = posix_fallocate(fd, 0, order->nbytes);
        while (errno == EINTR);
        if (errno)
            return -1;
    }
    while (done < order->direct && done % UNIT == 0) {
        ssize_t some = pwrite(fd, order->data + done, (size_t)(order->direct - done), done);
        if (some < 0 && errno == EINTR)
            continue;
        if (some < 0 && errno == EINVAL)
            break; /* this memory or this file cannot be used past the page cache */
        if (some < 0)
            return -1;
        done += some;
    }
    if ((order->flags & O_DIRECT) && done < order->nbytes)
        if ((flags = fcntl(fd, F_GETFL)) < 0 || fcntl(fd, F_SETFL, flags & ~O_DIRECT) < 0)
            return -1;
    while (done < order->nbytes) { /* once, except on a nearly full disk */
        ssize_t some = pwrite(fd, order->data + done, (size_t)(order->nbytes - done), done);
        if (some < 0 && errno != EINTR)
            return -1;
        done += some < 0 ? 0 : some;
    }
    return order->syncs ? fsync(fd) : 0;
}

/* Makes a directory, and those above it, if there is none. Returns whether there is one now. */
static int make_directories(char *path, mode_t mode)
{
    char *end;
    int made;

    if (mkdir(path, mode) == 0 || errno == EEXIST)
        return 1;
    if (errno != ENOENT || !(end = strrchr(path, '/')) || end == path)
        return 0;
    *end = 0;
    made = make_directories(path, mode);
    *end = '/';
    return made && (mkdir(path, mode) == 0 || errno == EEXIST);
}

/* Makes the directory of a file, unless the path leads beneath the store: its disk may have gone a moment ago. */
static void make_directory(const Order *order, const char *path)
{
    char directory[4096];
    const char *end = strrchr(path, '/');

    if (!end || !order->directory_mode || (size_t)(end - path) >= sizeof directory || !is_ours(order))
        return;
    memcpy(directory, path, (size_t)(end - path));
    directory[end - path] = 0;
    make_directories(directory, (mode_t)order->directory_mode);
}

static int put(const Order *order)
{
    struct stat found = {.st_size = 0};
    int fd, filled, tries = 0;

    if (order->spare && rename(order->spare, order->temporary) < 0)
        return NOT_RETIRED;
    /* To open a FIFO would wait for who reads it. */
    do {
        fd = open(order->temporary, order->flags | (order->spare ? O_NONBLOCK : O_CREAT | O_EXCL), order->mode);
        if (fd < 0 && errno == ENOENT && !order->spare && !tries++)
            make_directory(order, order->temporary);
        else if (fd >= 0 || errno != EINTR)
            break;
    } while (1);
    if (fd < 0)
        return NOT_OPENED;
    if (order->spare && (fstat(fd, &found) < 0 || !S_ISREG(found.st_mode) || found.st_nlink != 1)) {
        close(fd);
        return UNFIT;
    }
    filled = fill(order, fd, found.st_size);
    if (close(fd) < 0 && errno != EINTR) /* a file system on another machine may fail here */
        filled = -1;
    if (filled < 0)
        return NOT_FILLED;
    if (rename(order->temporary, order->path) == 0)
        return NAMED;
    if (errno != ENOENT) /* else a spare file comes from another directory */
        return NOT_NAMED;
    make_directory(order, order->path);
    return rename(order->temporary, order->path) == 0 ? NAMED : NOT_NAMED;
}

/* Puts an object's file in its place. Returns whether it did; else nothing is at the temporary path. */
static int put_whole(const Order *order)
{
    int reached = put(order);

    if (reached == NOT_FILLED || reached == NOT_NAMED)
        unlink(order->temporary);
    else if (order->spare && (reached == NOT_OPENED || reached == UNFIT))
        (void)!rename(order->temporary, order->spare);
    return reached == NAMED;
}

/* Reads the whole file past the page cache. -1: it is not to be read so, or has become shorter. EIO: the disk cannot read
 * it, and should not be asked again, because it may have tried for a minute. */
static int read_direct(int fd, unsigned char *data, size_t nbytes)
{
    unsigned char tail[UNIT] __attribute__((aligned(UNIT)));
    size_t whole = nbytes / UNIT * UNIT;
    struct iovec both[] = {{data, whole}, {tail, UNIT}}; /* a read may extend past the end of the file */
    ssize_t got;

    if ((uintptr_t)data % UNIT)
        return -1;
    got = preadv(fd, whole ? both : both + 1, whole ? 2 : 1, 0);
    if (got < 0 || (size_t)got != nbytes)
        return got < 0 && errno == EIO ? EIO : -1;
    memcpy(data + whole, tail, nbytes - whole);
    return 0;
}

/* Reads the file from `done` to `end` through the page cache, to the same place in `data`. Returns as read_direct does. */
static int read_cached(int fd, unsigned char *data, size_t done, size_t end)
{
    while (done < end) {
        struct iovec rest = {data + done, end - done};
        ssize_t some = preadv(fd, &rest, 1, (off_t)done);
        if (some < 0 && errno == EINTR)
            continue;
        if (some <= 0)
            return some < 0 && errno == EIO ? EIO : -1;
        done += (size_t)some;
    }
    return 0;
}

/* Has the kernel read a file from the disk into the page cache, in pages as large as it can find.
 *
 * A plain read fills pages of 4 KiB. Large pages take a quarter of the CPU time to fill, and half of the time or less whenever
 * the file is loaded again (docs/files.md). If the kernel or the file system has none, this only begins the same reading. */
static void fetch(int fd, size_t nbytes)
{
    unsigned char *at = mmap(NULL, nbytes, PROT_READ, MAP_SHARED, fd, 0);
    size_t last = (nbytes - 1) / UNIT * UNIT;

    if (at == MAP_FAILED)
        return;
    if (madvise(at, nbytes, MADV_HUGEPAGE) == 0) {
        for (size_t offset = 0; offset < last; offset += LARGE_PAGE) /* each brings the bytes up to the next offset */
            (void)!madvise(at + offset, UNIT, MADV_POPULATE_READ);
        (void)!madvise(at + last, UNIT, MADV_POPULATE_READ);
    }
    munmap(at, nbytes);
}

/* maps: whether the file may be mapped. begin, end, tail: what is wanted lies from begin to end, and in the last `tail` bytes; the
 * rest may be left out. */
typedef struct {
    unsigned char *data;
    size_t nbytes, begin, end, tail;
    int flags, maps;
    Mapping *mapping;
} Load;

/* Maps the file if that is better, otherwise reads it. Returns as read_direct does. */
static int load_one(const char *path, Load *order)
{
    struct stat found;
    int failed = -1, fd = open(path, order->flags);

    order->mapping = NULL;
    if (fd < 0)
        return -1;
    if (fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && (size_t)found.st_size == order->nbytes) {
        if (order->flags & O_DIRECT)
            failed = read_direct(fd, order->data, order->nbytes);
        else {
            uint64_t missing = order->nbytes < FETCHED_BYTES ? 0 : not_in_memory(fd, order->nbytes);
            if (missing >= FETCHED_BYTES) { /* else the kernel would load them in small pages */
                fetch(fd, order->nbytes);
                missing = not_in_memory(fd, order->nbytes);
            }
            if (order->maps && may_map && !missing && order->nbytes >= LARGE_PAGE)
                order->mapping = map_open(fd, order->nbytes);
            size_t end = order->end < order->nbytes ? order->end : order->nbytes;
            size_t tail = order->nbytes > order->tail ? order->nbytes - order->tail : 0;
            failed = order->mapping ? 0 : read_cached(fd, order->data, order->begin, end);
            if (!failed && !order->mapping)
                failed = read_cached(fd, order->data, tail > end ? tail : end, order->nbytes);
        }
    }
    close(fd); /* a mapping needs no descriptor */
    return failed;
}

/* One object of a call. position: in the caller's batch. number: of its block among the lent ones. data: its bytes, unless the call has
 * slots. temporary, spare: of a store; spare is NULL if no file is to be written over. answer: LEFT, or what came of it. */
typedef struct {
    PyObject *path, *temporary, *spare;
    Py_buffer data;
    Py_ssize_t position, number;
    int answer;
} Object;

enum { LEFT = -1, NOT_TAKEN, DONE }; /* or the errno of a disk that cannot read it */

/* Runs of `run` objects, to store or to load. lent: NULL if no blocks are. callable: makes or takes what `lent` does not; NULL if the
 * objects stay in the caller's memory. busy: see Lent in lent.py. slot: those that threads share, one at a time, to make or to read
 * objects in; unused: bits of those that no thread has. lock: its path. */
typedef struct {
    Native native;
    Object *object;
    Py_ssize_t count, run;
    PyObject *blocks, *callable, *lock;
    Lent *lent;
    Py_buffer busy, slot[MOST_SLOTS];
    int slots;
    _Atomic uint64_t unused;
    size_t nbytes; /* of an object in a slot */
    int near;
    Order store;
    Load load;
} Call;

static void close_call(PyObject *capsule)
{
    Call *call = PyCapsule_GetPointer(capsule, NATIVE);

    for (Py_ssize_t i = 0; i < call->count; i++) {
        Object *one = call->object + i;
        if (one->data.obj)
            PyBuffer_Release(&one->data);
        Py_XDECREF(one->path);
        Py_XDECREF(one->temporary);
        Py_XDECREF(one->spare);
    }
    while (call->slots)
        PyBuffer_Release(&call->slot[--call->slots]);
    if (call->busy.obj)
        PyBuffer_Release(&call->busy);
    Py_XDECREF(call->blocks);
    Py_XDECREF(call->callable);
    Py_XDECREF(call->lock);
    PyMem_Free(call->object);
    PyMem_Free(call);
}

/* Whether the buffer is as long as an object in a slot, or at least so. */
static int is_long_enough(const Call *call, const Py_buffer *data, int slot)
{
    return slot ? (size_t)data->len >= call->nbytes : (size_t)data->len == call->nbytes;
}

static int open_object(Call *call, Object *one, PyObject *order, int flags)
{
    PyObject *given, *spare = Py_None;

    one->answer = LEFT;
    if (!PyArg_ParseTuple(order, "O&Onn|O&O", PyUnicode_FSConverter, &one->path, &given, &one->position, &one->number,
                          PyUnicode_FSConverter, &one->temporary, &spare)) {
        one->path = one->temporary = NULL; /* the converters have released theirs */
        return -1;
    }
    if (spare != Py_None && !PyUnicode_FSConverter(spare, &one->spare)) {
        one->spare = NULL;
        return -1;
    }
    if (given != Py_None && PyObject_GetBuffer(given, &one->data, flags) < 0)
        return -1;
    if ((given == Py_None) == (call->slots > 0) && (given == Py_None || is_long_enough(call, &one->data, 0)) &&
        (!call->lent || (one->number >= 0 && one->number < call->lent->count && (!call->busy.len || one->number < call->busy.len))))
        return 0;
    PyErr_SetString(PyExc_ValueError, "an object has no memory, or another length, or is of none of the lent blocks");
    return -1;
}

/* Takes what is the same for stores and loads; the capsule owns the call from then on. blocks, callable: None for none. */
static PyObject *open_call(Call *given, PyObject *orders, PyObject *slots, PyObject *blocks, PyObject *callable, PyObject *busy, int flags)
{
    Call *call = PyMem_Malloc(sizeof *call);
    PyObject *capsule;
    Py_ssize_t count = PyList_Size(orders);

    if (!call)
        return PyErr_NoMemory();
    *call = *given;
    if (!(capsule = PyCapsule_New(call, NATIVE, close_call))) {
        PyMem_Free(call);
        return NULL;
    }
    if (callable != Py_None)
        Py_INCREF(call->callable = callable);
    Py_XINCREF(call->lock);
    if (blocks != Py_None) {
        Py_INCREF(call->blocks = blocks);
        if (!(call->lent = PyCapsule_GetPointer(blocks, LENT)))
            goto failed;
    }
    if (busy && PyObject_GetBuffer(busy, &call->busy, PyBUF_SIMPLE) < 0)
        goto failed;
    for (; call->slots < PyList_Size(slots) && call->slots < MOST_SLOTS; call->slots++) {
        if (PyObject_GetBuffer(PyList_GetItem(slots, call->slots), &call->slot[call->slots], PyBUF_WRITABLE) < 0)
            goto failed;
        call->unused |= (uint64_t)1 << call->slots;
        if (!is_long_enough(call, &call->slot[call->slots], 1)) {
            call->slots++;
            PyErr_SetString(PyExc_ValueError, "a slot is shorter than an object");
            goto failed;
        }
    }
    if (!(call->object = PyMem_Calloc((size_t)count + 1, sizeof *call->object))) {
        PyErr_NoMemory();
        goto failed;
    }
    if (call->run < 1 || (call->lent && call->nbytes != call->lent->nbytes)) {
        PyErr_SetString(PyExc_ValueError, "runs of one object at least, of the length of the lent blocks' objects");
        goto failed;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        call->count++; /* so that it is closed if it is wrong */
        if (open_object(call, call->object + i, PyList_GetItem(orders, i), flags) < 0)
            goto failed;
    }
    call->native.count = (count + call->run - 1) / call->run;
    if (guard->ready() == 0)
        return capsule;
failed:
    Py_DECREF(capsule);
    return NULL;
}

/* A slot that no other thread has: there are as many as threads at work. -1 if the call has none, because each object has memory. */
static int take_slot(Call *call)
{
    uint64_t unused = atomic_load(&call->unused);

    while (unused)
        if (atomic_compare_exchange_weak(&call->unused, &unused, unused & (unused - 1)))
            return __builtin_ctzll(unused);
    return -1;
}

static void return_slot(Call *call, int slot)
{
    if (slot >= 0)
        atomic_fetch_or(&call->unused, (uint64_t)1 << slot);
}

static int is_busy(const Call *call, const Object *one)
{
    return call->busy.len && ((const volatile char *)call->busy.buf)[one->number];
}

/* Whether the callable, which lends no blocks, still wants its objects. */
static int is_wanted_by(PyObject *callable)
{
    PyGILState_STATE held = PyGILState_Ensure();
    PyObject *answer = PyObject_GetAttrString(callable, "wanted");
    int wanted = answer && PyObject_IsTrue(answer) == 1;

    PyErr_Clear();
    Py_XDECREF(answer);
    PyGILState_Release(held);
    return wanted;
}

/* Calls the callable with an object's position, its bytes and perhaps one more argument: whether it returned a true value. What it
 * raises is left to the slow twin, which calls it again. */
static int called(const Call *call, const Object *one, void *data, int flags, PyObject *more)
{
    PyGILState_STATE held = PyGILState_Ensure();
    PyObject *view = PyMemoryView_FromMemory(data, (Py_ssize_t)call->nbytes, flags), *answer = NULL, *released = NULL;
    int result = -1;

    if (view)
        answer = more ? PyObject_CallFunction(call->callable, "nOO", one->position, view, more)
                      : PyObject_CallFunction(call->callable, "nO", one->position, view);
    if (answer && (result = PyObject_IsTrue(answer)) >= 0 && !(released = PyObject_CallMethod(view, "release", NULL)))
        result = -1;
    PyErr_Clear();
    Py_XDECREF(released);
    Py_XDECREF(answer);
    Py_XDECREF(view);
    PyGILState_Release(held);
    return result;
}

/* Brings the new names of a run to the medium: the directory of each, after its last one. If that fails, all of them are removed. */
static int sync_names(const Object *first, const Object *end)
{
    char directory[4096];
    int good = 1;

    for (const Object *one = first; one < end && good; one++) {
        const char *path = PyBytes_AsString(one->path), *slash = strrchr(path, '/'), *next;
        size_t length = slash ? (size_t)(slash - path) : sizeof directory;
        if (one + 1 < end && (next = PyBytes_AsString(one[1].path)) && strncmp(path, next, length + 1) == 0 &&
            !strchr(next + length + 1, '/'))
            continue;
        good = 0;
        if (length >= sizeof directory)
            break;
        memcpy(directory, path, length);
        directory[length] = 0;
        int fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        good = fd >= 0 && fsync(fd) == 0;
        if (fd >= 0)
            close(fd);
    }
    for (const Object *one = first; one < end && !good; one++)
        unlink(PyBytes_AsString(one->path));
    return good;
}

/* Stores a run, up to the first object with which anything is unusual. */
static void store_run(Native *native, Py_ssize_t item)
{
    Call *call = (Call *)native;
    Object *first = call->object + item * call->run, *one = first, *end = call->object + call->count;
    Order order = call->store;
    int slot = take_slot(call), good = 1;

    if (end - first > call->run)
        end = first + call->run;
    order.lock = PyBytes_AsString(call->lock);
    if (!is_ours(&order))
        end = first;
    for (; one < end; one++) {
        unsigned char *data = slot < 0 ? one->data.buf : call->slot[slot].buf;
        if (call->lent)
            good = call->lent->fill(call->lent, one->number, data, call->near) == 1;
        else if (call->callable)
            good = called(call, one, data, PyBUF_WRITE, call->near ? Py_True : Py_False) == 1;
        if (!good)
            break;
        order.spare = one->spare ? PyBytes_AsString(one->spare) : NULL;
        order.temporary = PyBytes_AsString(one->temporary);
        order.path = PyBytes_AsString(one->path);
        order.data = data;
        if (!put_whole(&order))
            break;
    }
    return_slot(call, slot);
    if (!order.syncs || sync_names(first, one))
        while (one > first)
            (--one)->answer = DONE;
}

static PyObject *prepared_store(PyObject *module, PyObject *args)
{
    PyObject *orders, *slots, *blocks, *callable;
    Call call = {.native = {.one = store_run}};
    Order *order = &call.store;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!nnOOpiiippO&KK", &PyList_Type, &orders, &PyList_Type, &slots, &call.nbytes, &call.run, &blocks,
                          &callable, &call.near, &order->flags, &order->mode, &order->directory_mode, &order->allocates, &order->syncs,
                          PyUnicode_FSConverter, &call.lock, &order->device, &order->inode))
        return NULL;
    order->nbytes = (long long)call.nbytes;
    order->direct = order->flags & O_DIRECT ? order->nbytes / UNIT * UNIT : 0;
    PyObject *lock = call.lock, *capsule = open_call(&call, orders, slots, blocks, callable, NULL, PyBUF_SIMPLE);
    Py_DECREF(lock);
    return capsule;
}

/* Has a loaded object taken: 1, 0 if not, or -1 if that is unknown, or the file lost some of its bytes meanwhile. */
static int pass_on(const Call *call, const Object *one, Load *order)
{
    unsigned char *data = order->mapping ? (unsigned char *)atomic_load(&order->mapping->begin) : order->data;
    int taken = call->lent && !is_busy(call, one) && call->lent->take(call->lent, one->number, data) == 1, lost = 0;

    if (!taken)
        taken = called(call, one, data, PyBUF_READ, NULL);
    if (order->mapping) {
        lost = order->mapping->lost;
        unmap_file(order->mapping);
    }
    return lost ? -1 : taken;
}

/* Loads a run, up to the first object with which anything is unusual. */
static void load_run(Native *native, Py_ssize_t item)
{
    Call *call = (Call *)native;
    Object *one = call->object + item * call->run, *end = call->object + call->count;
    Load order = call->load;
    int slot = take_slot(call);

    for (Py_ssize_t i = 0; i < call->run && one < end; i++, one++) {
        if (call->lent ? !is_busy(call, one) && call->lent->over(call->lent) : call->callable && !is_wanted_by(call->callable))
            break; /* nobody waits for it */
        order.data = slot < 0 ? one->data.buf : call->slot[slot].buf;
        int failed = load_one(PyBytes_AsString(one->path), &order);
        if (failed > 0)
            one->answer = failed;
        else if (!failed)
            one->answer = call->callable ? pass_on(call, one, &order) : DONE;
        if (one->answer != DONE && one->answer != NOT_TAKEN)
            break;
    }
    return_slot(call, slot);
}

static PyObject *prepared_load(PyObject *module, PyObject *args)
{
    PyObject *orders, *slots, *blocks, *callable, *busy;
    unsigned long long first, end, tail;
    Call call = {.native = {.one = load_run, .leave = close_window}};

    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!nnOOOi(KKK)", &PyList_Type, &orders, &PyList_Type, &slots, &call.nbytes, &call.run, &blocks,
                          &callable, &busy, &call.load.flags, &first, &end, &tail))
        return NULL;
    call.load.nbytes = call.nbytes;
    call.load.begin = first, call.load.end = end, call.load.tail = tail;
    call.load.maps = callable != Py_None;
    return open_call(&call, orders, slots, blocks, callable, busy, PyBUF_WRITABLE);
}

static PyObject *answers(PyObject *module, PyObject *capsule)
{
    const Call *call = PyCapsule_GetPointer(capsule, NATIVE);
    PyObject *all = call ? PyList_New(call->count) : NULL;

    (void)module;
    for (Py_ssize_t i = 0; all && i < call->count; i++)
        PyList_SetItem(all, i, PyLong_FromLong(call->object[i].answer));
    return all;
}

static PyObject *catch_bus_errors(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    if (guard->ready() < 0)
        return NULL;
    guard->ask_first(put_zeros);
    if (pagemap < 0)
        pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    may_map = pagemap >= 0;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"prepared_store", prepared_store, METH_VARARGS,
     "prepared_store(orders, slots, nbytes, run, lent, fill, near, flags, mode, directory mode, allocates, syncs, lock, its device, its "
     "inode): a native call (_native.h) that stores runs of so many objects. orders: (path, memory or None, position, number, temporary "
     "path, path of a file to write over or None). slots: one for each thread; or none, and each object has memory"},
    {"prepared_load", prepared_load, METH_VARARGS,
     "prepared_load(orders, slots, nbytes, run, lent, take, busy, flags, (begin, end, tail)): a native call that loads them. orders: (path, "
     "memory or None, position, number). begin, end, tail: what is wanted of each: from begin to end, and the last `tail` bytes"},
    {"answers", answers, METH_O,
     "answers(native): for each object 1 if it was stored or taken, 0 if it was not taken, -1 if it is left to the slow twins, or the "
     "errno of a disk that cannot read it"},
    {"load_warm", load_warm, METH_VARARGS,
     "load_warm(orders, flags): whether the page cache has each object, and it is the right one; then its pieces are filled. "
     "orders: (path, pieces, footer without checksums)"},
    {"warm_readers", warm_readers, METH_VARARGS, "warm_readers(threads): threads for begin_warm, which run until end_warm"},
    {"begin_warm", begin_warm, METH_VARARGS,
     "begin_warm(readers, orders, flags, ended): have the threads do what load_warm does; finished_warm returns the answers"},
    {"finished_warm", finished_warm, METH_O,
     "finished_warm(readers): wait until something is read: (ended, answers) of each call. Empty after end_warm"},
    {"end_warm", end_warm, METH_O, "end_warm(readers): wait until all that was begun is read, and end the threads"},
    {"catch_bus_errors", catch_bus_errors, METH_NOARGS, "catch_bus_errors(): from now on `load` may map files"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_files", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__files(void)
{
    if (import_guard() < 0)
        return NULL;
    if (pthread_key_create(&window_of_thread, NULL) != 0) {
        PyErr_SetString(PyExc_ImportError, "this process already has PTHREAD_KEYS_MAX keys of thread-specific data");
        return NULL;
    }
    return PyModule_Create(&module);
}
