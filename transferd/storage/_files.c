/* Puts an object's file in its place, or reads or maps one, in one call without the GIL.
 *
 * As five calls, each would wait for the GIL when it returns, and with two threads those waits cost as much as the bytes of
 * an object of a few hundred KiB. The slow twins are put_file.py and `read` in file_io.py; the tests of the file
 * backend run both. setup.py says for which versions of CPython one build serves.
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
#include "../workers/_xxh3.h"
#include "_mapping.h"

#define UNIT 4096           /* bytes; of direct I/O, as in file_io.py */
#define FETCHED_BYTES 524288 /* bytes that are better brought from the disk by `fetch` in file_io.py first */

/* How far a call came: Reached in put_file.py. */
enum { NAMED, NOT_RETIRED, NOT_OPENED, UNFIT, NOT_FILLED, NOT_NAMED };

/* spare: the file to overwrite; NULL: make one. direct: how many of the first bytes go past the page cache. */
typedef struct {
    const char *spare, *temporary, *path;
    const unsigned char *data;
    long long nbytes, direct;
    int flags, mode, allocates, syncs;
} Order;

static int fill(const Order *order, int fd)
{
    long long done = 0;
    int flags, failed = 0;

    if (order->allocates && !order->spare && order->nbytes) {
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
    if (order->syncs)
        do
            failed = fsync(fd);
        while (failed < 0 && errno == EINTR);
    return failed;
}

/* How far it came, and then `error` says why not further. */
static int put(const Order *order, int *error)
{
    struct stat found;
    int fd, filled;

    if (order->spare && rename(order->spare, order->temporary) < 0) {
        *error = errno;
        return NOT_RETIRED;
    }
    /* To open a FIFO would wait for who reads it. */
    do
        fd = open(order->temporary, order->flags | (order->spare ? O_NONBLOCK : O_CREAT | O_EXCL), order->mode);
    while (fd < 0 && errno == EINTR);
    if (fd < 0) {
        *error = errno;
        return NOT_OPENED;
    }
    if (order->spare && fstat(fd, &found) < 0) {
        *error = errno;
        close(fd);
        return NOT_OPENED;
    }
    if (order->spare && (!S_ISREG(found.st_mode) || found.st_nlink != 1 || found.st_size != order->nbytes)) {
        close(fd);
        return UNFIT;
    }
    filled = fill(order, fd);
    if (filled < 0)
        *error = errno;
    if (close(fd) < 0 && filled == 0 && errno != EINTR) { /* a file system on another machine may fail here */
        *error = errno;
        return NOT_FILLED;
    }
    if (filled < 0)
        return NOT_FILLED;
    if (rename(order->temporary, order->path) < 0) {
        *error = errno;
        return NOT_NAMED;
    }
    return NAMED;
}

static PyObject *put_file(PyObject *module, PyObject *args)
{
    PyObject *spare, *temporary = NULL, *path = NULL, *given, *result = NULL;
    Py_buffer data;
    Order order = {NULL};
    int reached, error = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "OO&O&OLiipp", &spare, PyUnicode_FSConverter, &temporary, PyUnicode_FSConverter, &path, &given,
                          &order.direct, &order.flags, &order.mode, &order.allocates, &order.syncs))
        return NULL; /* the converters have released theirs */
    if (spare == Py_None)
        spare = NULL;
    else if (!PyUnicode_FSConverter(spare, &spare)) {
        spare = NULL;
        goto released;
    }
    if (PyObject_GetBuffer(given, &data, PyBUF_SIMPLE) < 0)
        goto released;
    order.spare = spare ? PyBytes_AsString(spare) : NULL;
    order.temporary = PyBytes_AsString(temporary);
    order.path = PyBytes_AsString(path);
    order.data = data.buf;
    order.nbytes = data.len;
    if (order.direct >= 0 && order.direct <= order.nbytes) {
        Py_BEGIN_ALLOW_THREADS
        reached = put(&order, &error);
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("ii", reached, error);
    } else {
        PyErr_SetString(PyExc_ValueError, "more bytes are to go past the page cache than there are");
    }
    PyBuffer_Release(&data);
released:
    Py_XDECREF(spare);
    Py_DECREF(temporary);
    Py_DECREF(path);
    return result;
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

/* maps: whether the file may be mapped. fetched: whether it was brought into the page cache just now. begin, end, tail: what
 * is wanted lies from begin to end, and from tail on; the rest may be left out. */
typedef struct {
    unsigned char *data;
    size_t nbytes, begin, end, tail;
    int flags, maps, fetched;
    Mapping *mapping;
    struct stat found;
} Load;

/* Maps the file if that is better, otherwise reads it. Returns as read_direct does. */
static int load(const char *path, Load *order)
{
    int failed = -1, fd = open(path, order->flags);

    if (fd < 0)
        return -1;
    if (fstat(fd, &order->found) == 0 && S_ISREG(order->found.st_mode) && (size_t)order->found.st_size == order->nbytes) {
        if (order->flags & O_DIRECT)
            failed = read_direct(fd, order->data, order->nbytes);
        else {
            uint64_t missing = order->nbytes < FETCHED_BYTES ? 0 : not_in_memory(fd, order->nbytes);
            if (order->maps && may_map && !missing && order->nbytes >= LARGE_PAGE)
                order->mapping = map_open(fd, order->nbytes);
            if (order->mapping)
                failed = 0;
            else if (order->fetched || missing < FETCHED_BYTES)
                failed = read_cached(fd, order->data, order->begin, order->end);
            if (!failed && !order->mapping)
                failed = read_cached(fd, order->data, order->tail, order->nbytes);
        }
    }
    close(fd); /* a mapping needs no descriptor */
    return failed;
}

static PyObject *load_file(PyObject *module, PyObject *args)
{
    PyObject *path = NULL, *given, *view;
    Py_buffer data;
    Load order = {NULL};
    unsigned long long begin, end, tail;
    int failed;

    (void)module;
    if (!PyArg_ParseTuple(args, "O&Oipp(KKK)", PyUnicode_FSConverter, &path, &given, &order.flags, &order.maps, &order.fetched,
                          &begin, &end, &tail))
        return NULL;
    if (PyObject_GetBuffer(given, &data, PyBUF_WRITABLE) < 0 || (order.maps && guard->ready() < 0)) {
        Py_DECREF(path);
        return NULL;
    }
    order.data = data.buf;
    order.nbytes = (size_t)data.len;
    order.begin = begin, order.end = end < order.nbytes ? end : order.nbytes, order.tail = tail;
    const char *name = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    failed = load(name, &order);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    Py_DECREF(path);
    if (failed > 0) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (failed)
        Py_RETURN_NONE;
    double modified = (double)order.found.st_mtim.tv_sec + (double)order.found.st_mtim.tv_nsec * 1e-9;
    if (!order.mapping)
        return Py_BuildValue("dOi", modified, Py_None, 0);
    view = PyMemoryView_FromMemory((char *)atomic_load(&order.mapping->begin), (Py_ssize_t)order.nbytes, PyBUF_READ);
    if (!view) {
        unmap_file(order.mapping);
        return NULL;
    }
    return Py_BuildValue("dNi", modified, view, (int)(order.mapping - mappings) + 1);
}

#define NOWAIT 8      /* RWF_NOWAIT: what the page cache has, and no wait for the disk */
#define PIECE 262144  /* bytes that are still in a core's own cache when they are checked */
#define MOST_FOOTER 256

#define AT_ONCE_PIECES 64

/* Reads what the page cache has of the file, from `at` on. Waits for no disk. */
static ssize_t read_warm(int fd, const struct iovec *to, int count, size_t at)
{
    return syscall(SYS_preadv2, fd, to, (unsigned long)count, (unsigned long)at, 0UL, NOWAIT);
}

/* Reads an object that the page cache has to the payload's pieces, with its checksum, and to `footer`. Whether it has. */
static int warm_object(const char *path, int flags, const Py_buffer *pieces, size_t nbytes, unsigned char *footer, size_t end,
                       uint64_t *checksum)
{
    struct iovec some[AT_ONCE_PIECES + 1];
    size_t at = 0, from = 0; /* in the file; in the piece */
    State state;
    int fd = open(path, flags);

    if (fd < 0)
        return 0;
    begin(&state);
    state.count = 1;
    state.ends[0] = nbytes / STRIPE;
    while (at < nbytes) {
        size_t room = PIECE;
        int count = 0, last;
        for (; at + PIECE - room < nbytes && room && count < AT_ONCE_PIECES; count++) {
            size_t left = (size_t)pieces->len - from;
            some[count].iov_base = (char *)pieces->buf + from;
            some[count].iov_len = left < room ? left : room;
            room -= some[count].iov_len;
            from += some[count].iov_len;
            if (from == (size_t)pieces->len)
                pieces++, from = 0;
        }
        last = at + PIECE - room == nbytes;
        some[count].iov_base = footer;
        some[count].iov_len = end + 1; /* a longer file is another object */
        if (read_warm(fd, some, count + last, at) != (ssize_t)(PIECE - room + (last ? end : 0)))
            break;
        for (int i = 0; i < count; i++)
            copy_checked(&state, some[i].iov_base, some[i].iov_base, some[i].iov_len, A_BIT_AHEAD, 1);
        at += PIECE - room;
    }
    close(fd);
    *checksum = state.sealed[0];
    return at == nbytes;
}

static PyObject *load_warm(PyObject *module, PyObject *args)
{
    PyObject *path = NULL, *given, *result = NULL;
    unsigned char footer[MOST_FOOTER + 1];
    Py_buffer *pieces = NULL;
    Py_ssize_t count, taken = 0, odd = 0;
    size_t nbytes = 0;
    uint64_t checksum;
    int flags, end, found;

    (void)module;
    if (!PyArg_ParseTuple(args, "O&Oii", PyUnicode_FSConverter, &path, &given, &flags, &end))
        return NULL;
    count = PySequence_Size(given);
    if (count < 0)
        goto released;
    if (!(pieces = PyMem_Malloc((size_t)(count + 1) * sizeof *pieces))) {
        PyErr_NoMemory();
        goto released;
    }
    for (; taken < count; taken++) {
        PyObject *one = PySequence_GetItem(given, taken);
        int failed = !one || PyObject_GetBuffer(one, &pieces[taken], PyBUF_WRITABLE) < 0;
        Py_XDECREF(one); /* the buffer holds it */
        if (failed)
            goto released;
        nbytes += (size_t)pieces[taken].len;
        odd |= pieces[taken].len % STRIPE | !pieces[taken].len;
    }
    const char *name = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    found = end >= 0 && end <= MOST_FOOTER && nbytes > 240 && !odd /* shorter ones have another checksum */
            && warm_object(name, flags, pieces, nbytes, footer, (size_t)end, &checksum);
    Py_END_ALLOW_THREADS
    result = found ? Py_BuildValue("Ny#", PyLong_FromUnsignedLongLong(checksum), (char *)footer, (Py_ssize_t)end)
                   : (Py_INCREF(Py_None), Py_None);
released:
    while (taken)
        PyBuffer_Release(&pieces[--taken]);
    PyMem_Free(pieces);
    Py_DECREF(path);
    return result;
}

static PyObject *unmap(PyObject *module, PyObject *args)
{
    int number, lost;

    (void)module;
    if (!PyArg_ParseTuple(args, "i", &number))
        return NULL;
    if (number < 1 || number > MOST_MAPPINGS || atomic_load(&mappings[number - 1].begin) <= 1)
        return PyErr_Format(PyExc_ValueError, "there is no mapping %d", number);
    lost = mappings[number - 1].lost;
    if (mappings[number - 1].window)
        unmap_file(&mappings[number - 1]); /* takes no system call */
    else {
        Py_BEGIN_ALLOW_THREADS
        unmap_file(&mappings[number - 1]);
        Py_END_ALLOW_THREADS
    }
    return PyBool_FromLong(lost);
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
    {"put_file", put_file, METH_VARARGS,
     "put_file(spare, temporary, path, data, direct, flags, mode, allocates, syncs): how far it came, and an errno; see "
     "put_file.py"},
    {"load_file", load_file, METH_VARARGS,
     "load_file(path, data, flags, maps, fetched, (begin, end, tail)): read a file of exactly this length, at least from begin to "
     "end and from tail on, or map it: when it was modified, a view of the mapping or None, and its number. None: find out with system calls what it is, or fetch it. OSError: the disk "
     "cannot read it"},
    {"load_warm", load_warm, METH_VARARGS,
     "load_warm(path, pieces, flags, end): fill `pieces` from a file that the page cache has, and that has `end` bytes more: "
     "the pieces' checksum and these bytes; None if there is no such file, or not all of it is in the page cache"},
    {"unmap", unmap, METH_VARARGS, "unmap(mapping): whether the file lost some of its bytes while it was mapped"},
    {"forget_files", forget_files, METH_NOARGS,
     "forget_files(): give back the addresses at which this thread had files mapped; until then the kernel keeps them"},
    {"catch_bus_errors", catch_bus_errors, METH_NOARGS, "catch_bus_errors(): from now on load_file may map files"},
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
