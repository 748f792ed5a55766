/* Copies a piece of an object into the parts of a block, or back, and takes its checksum in the same pass, without the GIL.
 *
 * The slow twin of loads is BlockInPlace._load_in_python, and stores go through a copy plan without this extension.
 * tests/workers/test_in_place_native.py runs both ways over the same objects. Built against the limited API of CPython 3.11,
 * so one build serves every later version.
 *
 * An object in memory is copied from there. A large file in the page cache is mapped and copied from there, too; other files
 * are read into a buffer that stays in a core's own cache. What is written goes past the caches, unless the caller wants it kept
 * there: the next to read it is another core or process, and to write a line of memory through them costs reading it first.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <sys/uio.h>

#include "_mapping.h"
#include "_xxh3.h"

#define UNIT 4096           /* bytes; of direct I/O, as in file_io.py */
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
    if (so_far->stripes * STRIPE + piece->total <= so_far->nbytes)
        return 0;
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

static PyObject *read_file(PyObject *module, PyObject *args)
{
    unsigned char buffer[READ_AT_ONCE] __attribute__((aligned(4096))); /* the same part of the stack each time */
    int fd, last, error = 0;
    unsigned long long offset, address, block;
    PyObject *parts, *state;
    Piece piece;
    Cursor cursor = {0, 0};
    uint64_t done = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "ipKKOKO", &fd, &last, &offset, &address, &parts, &block, &state))
        return NULL;
    if (open_piece(&piece, address, parts, block, state) < 0) {
        if (last)
            close(fd);
        return NULL;
    }

    Py_BEGIN_ALLOW_THREADS
    while (done < piece.total) {
        uint64_t left = piece.total - done, count = left < READ_AT_ONCE ? left : READ_AT_ONCE;
        ssize_t got = read_now(fd, buffer, count, offset + done);
        error = got < 0 ? errno : 0;
        if (got < 0 || (uint64_t)got < count)
            break;
        scatter(&piece, &cursor, buffer, count);
        done += count;
    }
    if (last) /* here, because each return to Python waits for the GIL */
        close(fd);
    Py_END_ALLOW_THREADS

    release(&piece);
    if (!error)
        return PyLong_FromUnsignedLongLong(done);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static PyObject *copy_memory(PyObject *module, PyObject *args)
{
    unsigned long long offset, address, block;
    PyObject *given, *parts, *state;
    Py_buffer source;
    Piece piece;
    Cursor cursor = {0, 0};

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

    Py_BEGIN_ALLOW_THREADS
    if (whole)
        scatter(&piece, &cursor, (const unsigned char *)source.buf + offset, total);
    Py_END_ALLOW_THREADS

    release(&piece);
    PyBuffer_Release(&source);
    return PyLong_FromUnsignedLongLong(whole ? total : 0);
}

static PyObject *collect(PyObject *module, PyObject *args)
{
    int kept;
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

    Py_BEGIN_ALLOW_THREADS
    unsigned char *to = (unsigned char *)target.buf + offset;
    for (int i = 0; fits && i < piece.count; to += piece.nbytes[i++])
        copy_checked(piece.state.buf, to, piece.at[i], piece.nbytes[i], piece.nbytes[i] < AHEAD ? A_BIT_AHEAD : AHEAD, kept);
    Py_END_ALLOW_THREADS

    release(&piece);
    PyBuffer_Release(&target);
    if (fits)
        Py_RETURN_NONE;
    PyErr_SetString(PyExc_ValueError, "the piece does not fit the target");
    return NULL;
}

static PyObject *catch_bus_errors(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    if (set_handler() < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
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
    if (end > LONGEST_END || end > nbytes) {
        Py_DECREF(path);
        PyErr_SetString(PyExc_ValueError, "the end of the file is too long");
        return NULL;
    }
    may = may_map && nbytes >= LARGE_PAGE && set_handler() == 0;
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

/* Reads exactly `count` bytes, or more up to the end of a unit. -1: EINVAL, a shorter file, or an error that is in `error`. */
static int read_past_cache(int fd, const struct iovec *into, int parts, uint64_t count, uint64_t offset, int *error)
{
    ssize_t got;

    do
        got = preadv(fd, into, parts, (off_t)offset);
    while (got < 0 && errno == EINTR);
    *error = got < 0 && errno != EINVAL ? errno : 0; /* EINVAL: this memory or this file is not to be read so */
    return got >= 0 && (uint64_t)got >= count ? 0 : -1;
}

/* Checks an open file, and reads its first bytes into `slot` and all after the payload's last whole unit into `tail`. */
static int begin_direct(int fd, const Py_buffer *slot, uint64_t nbytes, uint64_t end, uint64_t first, unsigned char *tail,
                        struct stat *status, int *error)
{
    uint64_t whole = (nbytes - end) / UNIT * UNIT;
    struct iovec parts[] = {{slot->buf, first < whole ? first : whole}, {tail, 2 * UNIT}};

    *error = 0;
    if (fstat(fd, status) < 0 || !S_ISREG(status->st_mode) || (uint64_t)status->st_size != nbytes)
        return -1;
    if (first < whole) /* the end first, because a wrong object is not worth reading */
        return read_past_cache(fd, parts + 1, 1, nbytes - whole, whole, error) < 0 ||
                       read_past_cache(fd, parts, 1, first, 0, error) < 0 ? -1 : 0;
    if (read_past_cache(fd, whole ? parts : parts + 1, whole ? 2 : 1, nbytes, 0, error) < 0)
        return -1;
    memcpy((unsigned char *)slot->buf + whole, tail, nbytes - end - whole);
    return 0;
}

static PyObject *open_direct(PyObject *module, PyObject *args)
{
    unsigned char tail[2 * UNIT] __attribute__((aligned(UNIT))); /* a footer may lie in two units */
    int flags, fd, begun = -1, error = 0;
    unsigned long long nbytes, end, first;
    PyObject *path = NULL, *given;
    Py_buffer slot;
    struct stat status;

    (void)module;
    if (!PyArg_ParseTuple(args, "O&iKKOK", PyUnicode_FSConverter, &path, &flags, &nbytes, &end, &given, &first))
        return NULL;
    if (PyObject_GetBuffer(given, &slot, PyBUF_WRITABLE) < 0) {
        Py_DECREF(path);
        return NULL;
    }
    if (end > UNIT || end > nbytes || first > nbytes - end || (uint64_t)slot.len < nbytes) {
        PyErr_SetString(PyExc_ValueError, "the end, the first bytes or the slot does not fit the file");
        PyBuffer_Release(&slot);
        Py_DECREF(path);
        return NULL;
    }
    const char *name = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    fd = open(name, flags);
    if (fd >= 0) {
        begun = begin_direct(fd, &slot, nbytes, end, first, tail, &status, &error);
        if (begun < 0 || first == nbytes - end) {
            close(fd);
            fd = -1;
        }
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&slot);
    Py_DECREF(path);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    if (begun < 0)
        return Py_BuildValue("iy#d", -1, "", (Py_ssize_t)0, 0.0);
    double modified = (double)status.st_mtim.tv_sec + (double)status.st_mtim.tv_nsec * 1e-9;
    return Py_BuildValue("iy#d", fd, tail + (nbytes - end) % UNIT, (Py_ssize_t)end, modified);
}

/* The loan of a task's blocks (loan.py) as a word: how many threads hold it, and whether it is over. So a thread can take it
 * between two reads without Python's lock, which it would wait for each time. */
#define OVER (INT64_C(1) << 32)

static int take(_Atomic int64_t *loan)
{
    if (!(atomic_fetch_add(loan, 1) & OVER))
        return 1;
    atomic_fetch_sub(loan, 1);
    return 0;
}

static PyObject *end_loan(PyObject *module, PyObject *args)
{
    PyObject *given;
    Py_buffer word;
    int64_t before;

    (void)module;
    if (!PyArg_ParseTuple(args, "O", &given) || PyObject_GetBuffer(given, &word, PyBUF_WRITABLE) < 0)
        return NULL;
    before = word.len == sizeof(before) ? atomic_fetch_or((_Atomic int64_t *)word.buf, OVER) : -1;
    PyBuffer_Release(&word);
    if (before < 0)
        return PyErr_Format(PyExc_ValueError, "a loan has 8 bytes");
    return PyLong_FromLongLong(before & (OVER - 1));
}

static PyObject *load_direct(PyObject *module, PyObject *args)
{
    int fd, last, error = 0, fits = 0;
    unsigned long long offset, ready, at_once, address, block;
    PyObject *given, *parts, *state, *loan;
    Py_buffer slot, word;
    Piece piece;
    Cursor cursor = {0, 0};
    uint64_t done = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "ipKOKKKOKOO", &fd, &last, &offset, &given, &ready, &at_once, &address, &parts, &block, &state,
                          &loan))
        return NULL;
    if (PyObject_GetBuffer(given, &slot, PyBUF_WRITABLE) < 0)
        goto no_slot;
    if (PyObject_GetBuffer(loan, &word, PyBUF_WRITABLE) < 0)
        goto no_word;
    if (open_piece(&piece, address, parts, block, state) < 0)
        goto no_piece;
    fits = word.len == sizeof(int64_t) && ready <= piece.total && ready <= (uint64_t)slot.len && at_once % UNIT == 0 && at_once &&
           (ready == piece.total || at_once <= (uint64_t)slot.len);

    Py_BEGIN_ALLOW_THREADS
    while (fits && done < piece.total) {
        uint64_t left = piece.total - done, count = left < at_once ? left : at_once;
        struct iovec into = {slot.buf, (count + UNIT - 1) / UNIT * UNIT};
        if (!done && ready)
            count = ready;
        else if (read_past_cache(fd, &into, 1, count, offset + done, &error) < 0)
            break;
        if (!take(word.buf))
            break;
        scatter(&piece, &cursor, slot.buf, count);
        atomic_fetch_sub((_Atomic int64_t *)word.buf, 1);
        done += count;
    }
    if (last && fd >= 0)
        close(fd);
    Py_END_ALLOW_THREADS

    release(&piece);
    PyBuffer_Release(&word);
    PyBuffer_Release(&slot);
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "the loan, the slot or the bytes that are ready do not fit the piece");
    if (!error)
        return PyLong_FromUnsignedLongLong(done);
    errno = error;
    return PyErr_SetFromErrno(PyExc_OSError);

no_piece:
    PyBuffer_Release(&word);
no_word:
    PyBuffer_Release(&slot);
no_slot:
    if (last && fd >= 0)
        close(fd);
    return NULL;
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
    Cursor cursor = {0, 0};

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

    Py_BEGIN_ALLOW_THREADS
    if (whole)
        scatter(&piece, &cursor, (const unsigned char *)begin + offset, total);
    whole = whole && !mapping->lost;
    if (last)
        unmap_file(mapping);
    Py_END_ALLOW_THREADS

    release(&piece);
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
    {"open_direct", open_direct, METH_VARARGS,
     "open_direct(path, flags, nbytes, end, slot, first): a file of this length, past the page cache: a descriptor, or -1 if `first` "
     "is all but its end; its last `end` bytes; when it was modified. The slot has its first bytes. No end: find out with system "
     "calls what it is"},
    {"load_direct", load_direct, METH_VARARGS,
     "load_direct(fd, last, offset, slot, ready, at_once, address, parts, block, state, loan): bytes copied and checked, until the "
     "loan is over. It reads `at_once` bytes at a time to the slot, which has the first `ready` ones, and holds the loan only while "
     "it copies. last: closes it, too"},
    {"end_loan", end_loan, METH_VARARGS, "end_loan(loan): nobody takes it any more; how many threads hold it"},
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
    if (pthread_key_create(&window_of_thread, NULL) != 0) {
        PyErr_SetString(PyExc_ImportError, "this process already has PTHREAD_KEYS_MAX keys of thread-specific data");
        return NULL;
    }
    return PyModule_Create(&module);
}
