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

#include "../tiers/_guard.h"
#include "../workers/_footer.h"
#include "../workers/_lent.h"
#include "_mapping.h"
#include "_warm.h"

#define UNIT 4096           /* bytes; of direct I/O, as in file_io.py */
#define FETCHED_BYTES 524288 /* fewer bytes are read from the disk as fast without `fetch` */

/* One object of a call. position: in the caller's batch. number: of its block among the lent ones. temporary, spare: of a
 * store; spare is NULL if no file is to be written over. */
typedef struct {
    PyObject *path, *temporary, *spare;
    Py_buffer data;
    Py_ssize_t position, number;
} Object;

/* The objects of a call. lent: NULL if no blocks are. callable: what makes or takes an object that `lent` does not; NULL if the
 * objects stay in the caller's memory. busy: see Lent in base.py. */
typedef struct {
    Object *object;
    Py_ssize_t count;
    Lent *lent;
    PyObject *callable;
    Py_buffer busy;
} Call;

static void close_call(Call *call)
{
    for (Py_ssize_t i = 0; call->object && i < call->count; i++) {
        Object *one = call->object + i;
        if (one->data.obj)
            PyBuffer_Release(&one->data);
        Py_XDECREF(one->path);
        Py_XDECREF(one->temporary);
        Py_XDECREF(one->spare);
    }
    PyMem_Free(call->object);
    if (call->busy.obj)
        PyBuffer_Release(&call->busy);
}

static int open_object(Object *one, PyObject *order, int flags)
{
    PyObject *given, *spare = Py_None;

    if (!PyArg_ParseTuple(order, "O&Onn|O&O", PyUnicode_FSConverter, &one->path, &given, &one->position, &one->number,
                          PyUnicode_FSConverter, &one->temporary, &spare)) {
        one->path = one->temporary = NULL; /* the converters have released theirs */
        return -1;
    }
    if (spare != Py_None && !PyUnicode_FSConverter(spare, &one->spare)) {
        one->spare = NULL;
        return -1;
    }
    return PyObject_GetBuffer(given, &one->data, flags);
}

/* blocks, callable, busy: None for none. flags: of the buffers. */
static int open_call(Call *call, PyObject *orders, PyObject *blocks, PyObject *callable, PyObject *busy, int flags)
{
    call->callable = callable == Py_None ? NULL : callable;
    call->count = PyList_Size(orders);
    if (blocks != Py_None && !(call->lent = PyCapsule_GetPointer(blocks, LENT)))
        return -1;
    if (busy && PyObject_GetBuffer(busy, &call->busy, PyBUF_SIMPLE) < 0)
        return -1;
    if (!(call->object = PyMem_Calloc((size_t)call->count + 1, sizeof *call->object))) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < call->count; i++) {
        Object *one = call->object + i;
        if (open_object(one, PyList_GetItem(orders, i), flags) < 0)
            return -1;
        if (call->lent && (one->number < 0 || one->number >= call->lent->count || (size_t)one->data.len != call->lent->nbytes ||
                           (call->busy.len && one->number >= call->busy.len))) {
            PyErr_SetString(PyExc_ValueError, "an object is of none of the lent blocks, or of another length");
            return -1;
        }
    }
    return guard->ready();
}

static int is_busy(const Call *call, const Object *one)
{
    return call->busy.len && ((const volatile char *)call->busy.buf)[one->number];
}

/* Calls the callable with an object's position, its bytes and perhaps one more argument: whether it returned a true value, or -1
 * with an exception. */
static int called(const Call *call, const Object *one, void *data, int flags, PyObject *more)
{
    PyObject *view = PyMemoryView_FromMemory(data, one->data.len, flags), *answer = NULL, *released;
    int result;

    if (!view)
        return -1;
    answer = more ? PyObject_CallFunction(call->callable, "nOO", one->position, view, more)
                  : PyObject_CallFunction(call->callable, "nO", one->position, view);
    result = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (result >= 0) {
        released = PyObject_CallMethod(view, "release", NULL);
        result = released ? result : -1;
        Py_XDECREF(released);
    }
    Py_DECREF(view);
    return result;
}

/* How far `put` came. */
enum { NAMED, NOT_RETIRED, NOT_OPENED, UNFIT, NOT_FILLED, NOT_NAMED };

/* spare: the file to overwrite; NULL: make one. direct: how many of the first bytes go past the page cache. directory_mode: of
 * a directory that is made because there is none; 0: none is made. syncs: wait for the medium before the file gets its name. */
typedef struct {
    const char *spare, *temporary, *path;
    const unsigned char *data;
    long long nbytes, direct;
    int flags, mode, directory_mode, allocates, syncs;
} Order;

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

/* Makes the directory of a file. */
static void make_directory(const Order *order, const char *path)
{
    char directory[4096];
    const char *end = strrchr(path, '/');

    if (!end || !order->directory_mode || (size_t)(end - path) >= sizeof directory)
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

static PyObject *store(PyObject *module, PyObject *args)
{
    PyObject *orders, *blocks, *callable;
    Call call = {NULL};
    Order order = {NULL};
    int near, good = 1;
    Py_ssize_t done = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!OOpiiipp", &PyList_Type, &orders, &blocks, &callable, &near, &order.flags, &order.mode,
                          &order.directory_mode, &order.allocates, &order.syncs))
        return NULL;
    if (open_call(&call, orders, blocks, callable, NULL, callable == Py_None ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) {
        close_call(&call);
        return NULL;
    }
    PyThreadState *thread = PyEval_SaveThread();
    for (; done < call.count; done++) {
        const Object *one = call.object + done;
        good = call.callable ? call.lent && call.lent->fill(call.lent, one->number, one->data.buf, near) == 1 : 1;
        if (!good) {
            PyEval_RestoreThread(thread);
            good = called(&call, one, one->data.buf, PyBUF_WRITE, near ? Py_True : Py_False);
            thread = PyEval_SaveThread();
        }
        if (good <= 0)
            break;
        order.spare = one->spare ? PyBytes_AsString(one->spare) : NULL;
        order.temporary = PyBytes_AsString(one->temporary);
        order.path = PyBytes_AsString(one->path);
        order.data = one->data.buf;
        order.nbytes = one->data.len;
        order.direct = order.flags & O_DIRECT ? order.nbytes / UNIT * UNIT : 0;
        if (!put_whole(&order))
            break;
    }
    PyEval_RestoreThread(thread);
    close_call(&call);
    return good < 0 ? NULL : PyLong_FromSsize_t(done);
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

/* Has a loaded object taken: 1, or 0 if not, -1 with an exception, -2 if the file lost some of its bytes meanwhile. */
static int pass_on(const Call *call, const Object *one, Load *order, PyThreadState **thread)
{
    unsigned char *data = order->mapping ? (unsigned char *)atomic_load(&order->mapping->begin) : order->data;
    int taken = call->lent && !is_busy(call, one) && call->lent->take(call->lent, one->number, data) == 1, lost = 0;

    if (!taken) {
        PyEval_RestoreThread(*thread);
        taken = called(call, one, data, PyBUF_READ, NULL);
        *thread = PyEval_SaveThread();
    }
    if (order->mapping) {
        lost = order->mapping->lost;
        unmap_file(order->mapping);
    }
    return lost && taken >= 0 ? -2 : taken;
}

static PyObject *load(PyObject *module, PyObject *args)
{
    PyObject *orders, *blocks, *callable, *busy, *answers;
    Call call = {NULL};
    Load order = {NULL};
    unsigned long long first, end, tail;
    int failed = 0, taken = 1;
    Py_ssize_t done = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!OOOi(KKK)", &PyList_Type, &orders, &blocks, &callable, &busy, &order.flags, &first, &end, &tail))
        return NULL;
    if (!(answers = PyList_New(0)) || open_call(&call, orders, blocks, callable, busy, PyBUF_WRITABLE) < 0)
        goto failed;
    order.begin = first, order.end = end, order.tail = tail;
    order.maps = call.callable != NULL;
    PyThreadState *thread = PyEval_SaveThread();
    while (done < call.count) {
        Object *one = call.object + done;
        if (call.lent && !is_busy(&call, one) && call.lent->over(call.lent))
            break; /* nobody waits for it */
        order.data = one->data.buf;
        order.nbytes = (size_t)one->data.len;
        failed = load_one(PyBytes_AsString(one->path), &order);
        if (failed)
            break;
        taken = call.callable ? pass_on(&call, one, &order, &thread) : 1;
        if (taken < 0)
            break;
        one->number = taken; /* from here on, the answer */
        done++;
    }
    PyEval_RestoreThread(thread);
    if (taken == -1)
        goto failed;
    for (Py_ssize_t i = 0; i < done; i++)
        if (PyList_Append(answers, call.object[i].number ? Py_True : Py_False) < 0)
            goto failed;
    close_call(&call);
    return Py_BuildValue("Ni", answers, failed > 0 ? failed : 0);
failed:
    close_call(&call);
    Py_XDECREF(answers);
    return NULL;
}

static PyObject *forget_files(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    if (pthread_getspecific(window_of_thread)) {
        Py_BEGIN_ALLOW_THREADS
        close_window();
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
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
    {"store", store, METH_VARARGS,
     "store(orders, lent, fill, near, flags, mode, directory mode, allocates, syncs): store objects up to the first with which anything "
     "is unusual: how many. orders: (path, memory, position, number, temporary path, path of a file to write over or None)"},
    {"load", load, METH_VARARGS,
     "load(orders, lent, take, busy, flags, (begin, end, tail)): load objects up to the first with which anything is unusual: "
     "whether each was taken, and EIO if the disk cannot read the next one. orders: (path, memory, position, number). begin, end, "
     "tail: what is wanted of each object: from begin to end, and the last `tail` bytes"},
    {"load_warm", load_warm, METH_VARARGS,
     "load_warm(orders, flags): whether the page cache has each object, and it is the right one; then its pieces are filled. "
     "orders: (path, pieces, footer without checksums)"},
    {"warm_readers", warm_readers, METH_VARARGS, "warm_readers(threads): threads for begin_warm, which run until end_warm"},
    {"begin_warm", begin_warm, METH_VARARGS,
     "begin_warm(readers, orders, flags, ended): have the threads do what load_warm does; finished_warm returns the answers"},
    {"finished_warm", finished_warm, METH_O,
     "finished_warm(readers): wait until something is read: (ended, answers) of each call. Empty after end_warm"},
    {"end_warm", end_warm, METH_O, "end_warm(readers): wait until all that was begun is read, and end the threads"},
    {"forget_files", forget_files, METH_NOARGS,
     "forget_files(): give back the addresses at which this thread had files mapped; until then the kernel keeps them"},
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
