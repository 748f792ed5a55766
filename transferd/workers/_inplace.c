/* Copies a piece of an object into the parts of a block, or back, and takes its checksum in the same pass, without the GIL.
 *
 * The slow twin of loads is BlockInPlace._load_in_python, and stores go through a copy plan without this extension.
 * tests/workers/test_in_place_native.py runs both ways over the same objects. setup.py says for which versions of CPython one
 * build serves.
 *
 * An object in memory is copied from there. A large file in the page cache is mapped and copied from there, too; other files
 * are read into a buffer that stays in a core's own cache. What is written goes past the caches, unless the caller wants it kept
 * there: the next to read it is another core or process, and to write a line of memory through them costs reading it first.
 */
#define _GNU_SOURCE 1
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/uio.h>

#include "../tiers/_guard.h"
#include "_mapping.h"
#include "_xxh3.h"

#define MOST_PARTS 1024     /* of one piece: IOV_MAX */
#define READ_AT_ONCE 131072 /* bytes of a file: they fit a core's second cache */
#define LONGEST_END 256     /* bytes of a file that open_file returns: a footer */

/* A piece of a block: parts[i] = (offset in block 0, bytes from block to block, bytes). */
typedef struct {
    Py_buffer state, parts;
    unsigned char *at[MOST_PARTS];
    uint64_t nbytes[MOST_PARTS], total;
    int count;
} Piece;

static void release(Piece *piece)
{
    PyBuffer_Release(&piece->parts);
    PyBuffer_Release(&piece->state);
}

static int open_piece(Piece *piece, uint64_t address, PyObject *parts, uint64_t block, PyObject *state)
{
    if (PyObject_GetBuffer(state, &piece->state, PyBUF_WRITABLE) < 0)
        return -1;
    if (PyObject_GetBuffer(parts, &piece->parts, PyBUF_C_CONTIGUOUS) < 0) {
        PyBuffer_Release(&piece->state);
        return -1;
    }
    const int64_t *part = piece->parts.buf;
    Py_ssize_t row = 3 * (Py_ssize_t)sizeof(int64_t);
    if (piece->state.len != sizeof(State) || piece->parts.itemsize != sizeof(int64_t))
        goto wrong;
    if (piece->parts.len % row || piece->parts.len / row > MOST_PARTS)
        goto wrong;
    piece->count = (int)(piece->parts.len / row);
    piece->total = 0;
    for (int i = 0; i < piece->count; i++, part += 3) {
        if (part[2] <= 0 || part[2] % STRIPE)
            goto wrong;
        piece->at[i] = (unsigned char *)(uintptr_t)(address + (uint64_t)part[0] + (uint64_t)part[1] * block);
        piece->nbytes[i] = (uint64_t)part[2];
        piece->total += piece->nbytes[i];
    }
    const State *so_far = piece->state.buf;
    if (so_far->stripes * STRIPE + piece->total > so_far->nbytes)
        goto wrong;
    if (guard->ready() == 0)
        return 0;
    release(piece);
    return -1;
wrong:
    release(piece);
    PyErr_SetString(PyExc_ValueError, "the state or the parts of a piece are wrong");
    return -1;
}

static PyObject *new_state(PyObject *module, PyObject *args)
{
    unsigned long long nbytes;
    State state;

    (void)module;
    if (!PyArg_ParseTuple(args, "K", &nbytes))
        return NULL;
    if (nbytes <= 240 || nbytes % STRIPE) {
        PyErr_SetString(PyExc_ValueError, "a payload must have more than 240 bytes and be a multiple of 64");
        return NULL;
    }
    begin(&state, nbytes);
    return PyByteArray_FromStringAndSize((const char *)&state, sizeof state);
}

static PyObject *checksum(PyObject *module, PyObject *args)
{
    PyObject *given;
    Py_buffer state;

    (void)module;
    if (!PyArg_ParseTuple(args, "O", &given) || PyObject_GetBuffer(given, &state, PyBUF_SIMPLE) < 0)
        return NULL;
    const State *held = state.buf;
    PyObject *result = NULL;
    if (state.len == sizeof(State) && held->stripes * STRIPE == held->nbytes)
        result = PyLong_FromUnsignedLongLong(digest(held));
    else
        PyErr_SetString(PyExc_ValueError, "the payload has not been read to its end");
    PyBuffer_Release(&state);
    return result;
}

/* Where the next byte of a piece goes. */
typedef struct {
    int part;
    uint64_t done;
} Cursor;

static void scatter(Piece *piece, Cursor *cursor, const unsigned char *from, uint64_t count)
{
    while (count) {
        uint64_t left = piece->nbytes[cursor->part] - cursor->done, some = left < count ? left : count;
        copy_checked(piece->state.buf, piece->at[cursor->part] + cursor->done, from, some, AHEAD, 0);
        from += some;
        count -= some;
        cursor->done += some;
        if (some == left)
            *cursor = (Cursor){cursor->part + 1, 0};
    }
}

/* A copy between a piece and other memory, for the guard. */
typedef struct {
    Piece *piece;
    Cursor cursor;
    unsigned char *memory;
    int kept;
} Copy;

static void scatter_all(void *given)
{
    Copy *copy = given;
    scatter(copy->piece, &copy->cursor, copy->memory, copy->piece->total);
}

static void collect_all(void *given)
{
    const Copy *copy = given;
    Piece *piece = copy->piece;
    unsigned char *to = copy->memory;
    for (int i = 0; i < piece->count; to += piece->nbytes[i++])
        copy_checked(piece->state.buf, to, piece->at[i], piece->nbytes[i], piece->nbytes[i] < AHEAD ? A_BIT_AHEAD : AHEAD,
                     copy->kept);
}

/* Returns the bytes read, or -1 with errno. */
static ssize_t read_now(int fd, unsigned char *into, uint64_t count, uint64_t offset)
{
    struct iovec buffer = {into, count};
    ssize_t got;

    do
        got = preadv2(fd, &buffer, 1, (off_t)offset, RWF_NOWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0 && (errno == EAGAIN || errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL))
        return 0; /* not in memory; or a file system that cannot say so */
    return got;
}

typedef struct {
    Piece *piece;
    int fd, error;
    uint64_t offset, done;
} FileRead;

static void read_all(void *given)
{
    unsigned char buffer[READ_AT_ONCE] __attribute__((aligned(4096))); /* the same part of the stack each time */
    FileRead *read = given;
    Cursor cursor = {0, 0};

    while (read->done < read->piece->total) {
        uint64_t left = read->piece->total - read->done, count = left < READ_AT_ONCE ? left : READ_AT_ONCE;
        ssize_t got = read_now(read->fd, buffer, count, read->offset + read->done);
        read->error = got < 0 ? errno : 0;
        if (got < 0 || (uint64_t)got < count)
            break;
        scatter(read->piece, &cursor, buffer, count);
        read->done += count;
    }
}

static PyObject *read_file(PyObject *module, PyObject *args)
{
    int fd, last, ended;
    unsigned long long offset, address, block;
    PyObject *parts, *state;
    Piece piece;

    (void)module;
    if (!PyArg_ParseTuple(args, "ipKKOKO", &fd, &last, &offset, &address, &parts, &block, &state))
        return NULL;
    if (open_piece(&piece, address, parts, block, state) < 0) {
        if (last)
            close(fd);
        return NULL;
    }

    FileRead read = {&piece, fd, 0, offset, 0};
    Py_BEGIN_ALLOW_THREADS
    ended = guard->run(read_all, &read);
    if (last) /* here, because each return to Python waits for the GIL */
        close(fd);
    Py_END_ALLOW_THREADS

    release(&piece);
    if (ended != 0) {
        set_lost(ended);
        return NULL;
    }
    if (!read.error)
        return PyLong_FromUnsignedLongLong(read.done);
    errno = read.error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *copy_memory(PyObject *module, PyObject *args)
{
    unsigned long long offset, address, block;
    PyObject *given, *parts, *state;
    Py_buffer source;
    Piece piece;
    int ended = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "OKKOKO", &given, &offset, &address, &parts, &block, &state) ||
        PyObject_GetBuffer(given, &source, PyBUF_SIMPLE) < 0)
        return NULL;
    if (open_piece(&piece, address, parts, block, state) < 0) {
        PyBuffer_Release(&source);
        return NULL;
    }
    uint64_t total = piece.total;
    int whole = offset <= (uint64_t)source.len && total <= (uint64_t)source.len - offset;

    Copy copy = {&piece, {0, 0}, (unsigned char *)source.buf + offset, 0};
    Py_BEGIN_ALLOW_THREADS
    if (whole)
        ended = guard->run(scatter_all, &copy);
    Py_END_ALLOW_THREADS

    release(&piece);
    PyBuffer_Release(&source);
    if (ended != 0) {
        set_lost(ended);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(whole ? total : 0);
}

static PyObject *collect(PyObject *module, PyObject *args)
{
    int kept, ended = 0;
    unsigned long long offset, address, block;
    PyObject *given, *parts, *state;
    Py_buffer target;
    Piece piece;

    (void)module;
    if (!PyArg_ParseTuple(args, "OKKOKOp", &given, &offset, &address, &parts, &block, &state, &kept) ||
        PyObject_GetBuffer(given, &target, PyBUF_WRITABLE) < 0)
        return NULL;
    if (open_piece(&piece, address, parts, block, state) < 0) {
        PyBuffer_Release(&target);
        return NULL;
    }
    int fits = offset <= (uint64_t)target.len && piece.total <= (uint64_t)target.len - offset;

    Copy copy = {&piece, {0, 0}, (unsigned char *)target.buf + offset, kept};
    Py_BEGIN_ALLOW_THREADS
    if (fits)
        ended = guard->run(collect_all, &copy);
    Py_END_ALLOW_THREADS

    release(&piece);
    PyBuffer_Release(&target);
    if (ended != 0)
        set_lost(ended);
    else if (fits)
        Py_RETURN_NONE;
    else
        PyErr_SetString(PyExc_ValueError, "the piece does not fit the target");
    return NULL;
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

static PyObject *open_file(PyObject *module, PyObject *args)
{
    int flags, fd = -1, may;
    unsigned long long nbytes, end;
    unsigned char last[LONGEST_END];
    PyObject *path = NULL;
    Mapping *mapping = NULL;
    struct stat status;

    (void)module;
    if (!PyArg_ParseTuple(args, "O&iKK", PyUnicode_FSConverter, &path, &flags, &nbytes, &end))
        return NULL;
    if (guard->ready() < 0) {
        Py_DECREF(path);
        return NULL;
    }
    if (end > LONGEST_END || end > nbytes) {
        Py_DECREF(path);
        PyErr_SetString(PyExc_ValueError, "the end of the file is too long");
        return NULL;
    }
    may = may_map && nbytes >= LARGE_PAGE;
    const char *name = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    fd = cannot_ask ? -1 : open(name, flags);
    if (fd >= 0 && is_all_there(fd, nbytes, &status)) {
        mapping = may ? map_open(fd, nbytes) : NULL;
        if (mapping)
            memcpy(last, (const unsigned char *)mapping->end - end, end);
        if (mapping && mapping->lost) {
            unmap_file(mapping);
            mapping = NULL;
        }
        if (mapping || read_now(fd, last, end, nbytes - end) < (ssize_t)end) {
            close(fd); /* a mapping needs no descriptor */
            fd = -1;
        }
    } else if (fd >= 0) {
        close(fd);
        fd = -1;
    }
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    if (!mapping && fd < 0)
        return Py_BuildValue("iiy#d", 0, -1, "", (Py_ssize_t)0, 0.0);
    double modified = (double)status.st_mtim.tv_sec + (double)status.st_mtim.tv_nsec * 1e-9;
    return Py_BuildValue("iiy#d", mapping ? (int)(mapping - mappings) + 1 : 0, fd, last, (Py_ssize_t)end, modified);
}

/* The mapping of this number, or NULL with an exception. */
static Mapping *mapping_of(int number)
{
    if (number >= 1 && number <= MOST_MAPPINGS && atomic_load(&mappings[number - 1].begin) > 1)
        return &mappings[number - 1];
    PyErr_Format(PyExc_ValueError, "there is no mapping %d", number);
    return NULL;
}

static PyObject *copy_mapped(PyObject *module, PyObject *args)
{
    int number, last;
    unsigned long long offset, address, block;
    PyObject *parts, *state;
    Mapping *mapping;
    Piece piece;
    int ended = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "ipKKOKO", &number, &last, &offset, &address, &parts, &block, &state) ||
        !(mapping = mapping_of(number)))
        return NULL;
    if (open_piece(&piece, address, parts, block, state) < 0) {
        if (last)
            unmap_file(mapping);
        return NULL;
    }
    uint64_t begin = atomic_load(&mapping->begin), length = mapping->end - begin, total = piece.total;
    int whole = offset <= length && total <= length - offset;

    Copy copy = {&piece, {0, 0}, (unsigned char *)begin + offset, 0};
    Py_BEGIN_ALLOW_THREADS
    if (whole)
        ended = guard->run(scatter_all, &copy);
    whole = whole && !mapping->lost;
    if (last)
        unmap_file(mapping);
    Py_END_ALLOW_THREADS

    release(&piece);
    if (ended != 0) {
        set_lost(ended);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(whole ? total : 0);
}

static PyObject *unmap(PyObject *module, PyObject *args)
{
    int number;
    Mapping *mapping;

    (void)module;
    if (!PyArg_ParseTuple(args, "i", &number) || !(mapping = mapping_of(number)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    unmap_file(mapping);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
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

static PyMethodDef methods[] = {
    {"new_state", new_state, METH_VARARGS, "new_state(payload_bytes): of a checksum that has seen nothing"},
    {"checksum", checksum, METH_VARARGS, "checksum(state): of the payload, all of which has been copied"},
    {"copy_memory", copy_memory, METH_VARARGS,
     "copy_memory(source, offset, address, parts, block, state): bytes copied and checked; 0 if the source is too short"},
    {"read_file", read_file, METH_VARARGS,
     "read_file(fd, last, offset, address, parts, block, state): bytes copied and checked, as far as the page cache has them. "
     "last: closes it, too"},
    {"collect", collect, METH_VARARGS,
     "collect(target, offset, address, parts, block, state, kept): the other way, from the parts to the target. kept: what is "
     "written stays in the caches, because this core is the next to read it"},
    {"catch_bus_errors", catch_bus_errors, METH_NOARGS, "catch_bus_errors(): from now on open_file may map files"},
    {"open_file", open_file, METH_VARARGS,
     "open_file(path, flags, nbytes, end): a file of this length, if all of it is in memory: the number of a mapping or 0, a "
     "descriptor or -1, the last `end` bytes, and when it was modified. Neither: find out with system calls what it is"},
    {"copy_mapped", copy_mapped, METH_VARARGS,
     "copy_mapped(mapping, last, offset, address, parts, block, state): bytes copied and checked; 0 if the file lost some. "
     "last: unmaps it, too"},
    {"unmap", unmap, METH_VARARGS, "unmap(mapping)"},
    {"forget_files", forget_files, METH_NOARGS,
     "forget_files(): give back the addresses at which this thread had files mapped; until then the kernel keeps them"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_inplace", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__inplace(void)
{
    if (import_guard() < 0)
        return NULL;
    if (pthread_key_create(&window_of_thread, NULL) != 0) {
        PyErr_SetString(PyExc_ImportError, "this process already has PTHREAD_KEYS_MAX keys of thread-specific data");
        return NULL;
    }
    return PyModule_Create(&module);
}
