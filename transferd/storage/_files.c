/* Puts an object's file in its place, or reads one past the page cache, in one call without the GIL.
 *
 * As five calls, each would wait for the GIL when it returns, and with two threads those waits cost as much as the bytes of
 * an object of a few hundred KiB. The slow twins are put_file.py and DirectIO.read in file_io.py; the tests of the file
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
#include <sys/uio.h>
#include <unistd.h>

#define UNIT 4096 /* bytes; of direct I/O, as in file_io.py */

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

/* Reads the whole file past the page cache. -1: it is not a regular file of this length, or not to be read so. EIO: the
 * disk cannot read it, and should not be asked again, because it may have tried for a minute. */
static int get(const char *path, unsigned char *data, size_t nbytes, int flags, struct stat *found)
{
    unsigned char tail[UNIT] __attribute__((aligned(UNIT)));
    size_t whole = nbytes / UNIT * UNIT;
    struct iovec both[] = {{data, whole}, {tail, UNIT}}; /* a read may extend past the end of the file */
    ssize_t got = -1;
    int fd, error = 0;

    if ((uintptr_t)data % UNIT || (fd = open(path, flags)) < 0)
        return -1;
    if (fstat(fd, found) == 0 && S_ISREG(found->st_mode) && (size_t)found->st_size == nbytes)
        if ((got = preadv(fd, whole ? both : both + 1, whole ? 2 : 1, 0)) < 0)
            error = errno;
    close(fd);
    if (got < 0 || (size_t)got != nbytes)
        return error == EIO ? EIO : -1;
    memcpy(data + whole, tail, nbytes - whole);
    return 0;
}

static PyObject *get_file(PyObject *module, PyObject *args)
{
    PyObject *path = NULL, *given;
    Py_buffer data;
    struct stat found;
    int flags, failed;

    (void)module;
    if (!PyArg_ParseTuple(args, "O&Oi", PyUnicode_FSConverter, &path, &given, &flags))
        return NULL;
    if (PyObject_GetBuffer(given, &data, PyBUF_WRITABLE) < 0) {
        Py_DECREF(path);
        return NULL;
    }
    const char *name = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    failed = get(name, data.buf, (size_t)data.len, flags, &found);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    Py_DECREF(path);
    if (failed > 0) {
        errno = failed;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (failed)
        Py_RETURN_NONE;
    return PyFloat_FromDouble((double)found.st_mtim.tv_sec + (double)found.st_mtim.tv_nsec * 1e-9);
}

static PyMethodDef methods[] = {
    {"put_file", put_file, METH_VARARGS,
     "put_file(spare, temporary, path, data, direct, flags, mode, allocates, syncs): how far it came, and an errno; see "
     "put_file.py"},
    {"get_file", get_file, METH_VARARGS,
     "get_file(path, data, flags): read a file of exactly this length with these flags, of which one is O_DIRECT: when it was "
     "modified; None: find out with system calls what it is; OSError: the disk cannot read it"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_files", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__files(void)
{
    return PyModule_Create(&module);
}
