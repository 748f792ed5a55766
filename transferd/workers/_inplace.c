/* Copies a piece of an object into the parts of a block, or back, and takes its checksum in the same pass, without the GIL.
 *
 * Without this extension, blocks go through staging and a copy plan. setup.py says for which versions of CPython one build
 * serves.
 *
 * What is written goes past the caches, unless the caller wants it kept there: the next to read it is another core or process,
 * and to write a line of memory through them costs reading it first.
 */
#define _GNU_SOURCE 1
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "../tiers/_guard.h"
#include "_xxh3.h"

#define MOST_PARTS 1024 /* of one piece: IOV_MAX */

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
    if (!so_far->count || so_far->count > MOST_ENDS || so_far->stripes + piece->total / STRIPE > so_far->ends[so_far->count - 1])
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

static PyObject *new_state(PyObject *module, PyObject *ends)
{
    State state;

    (void)module;
    begin(&state);
    if (!PyTuple_Check(ends) || !PyTuple_Size(ends) || PyTuple_Size(ends) > MOST_ENDS)
        goto wrong;
    for (uint64_t before = 0; state.count < (uint64_t)PyTuple_Size(ends); state.count++) {
        unsigned long long end = PyLong_AsUnsignedLongLong(PyTuple_GetItem(ends, (Py_ssize_t)state.count));
        if (PyErr_Occurred())
            return NULL;
        if (end <= 240 || end % STRIPE || end / STRIPE <= before)
            goto wrong;
        before = state.ends[state.count] = end / STRIPE;
    }
    return PyByteArray_FromStringAndSize((const char *)&state, sizeof state);
wrong:
    PyErr_SetString(PyExc_ValueError, "1 to 8 ends, ascending, of more than 240 bytes and multiples of 64");
    return NULL;
}

static PyObject *checksums(PyObject *module, PyObject *given)
{
    Py_buffer state;
    Py_ssize_t reached = 0;
    PyObject *result = NULL;

    (void)module;
    if (PyObject_GetBuffer(given, &state, PyBUF_SIMPLE) < 0)
        return NULL;
    const State *held = state.buf;
    if (state.len == sizeof(State) && held->count <= MOST_ENDS) {
        while (reached < (Py_ssize_t)held->count && held->ends[reached] <= held->stripes)
            reached++;
        result = PyTuple_New(reached);
        for (Py_ssize_t i = 0; result && i < reached; i++) {
            PyObject *one = PyLong_FromUnsignedLongLong(held->sealed[i]);
            if (!one)
                Py_CLEAR(result);
            else
                PyTuple_SetItem(result, i, one);
        }
    } else
        PyErr_SetString(PyExc_ValueError, "this is no state");
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

static PyMethodDef methods[] = {
    {"new_state", new_state, METH_O,
     "new_state(ends): of checksums that have seen nothing: of what is before each of these bytes of the payload. The last is "
     "its length"},
    {"checksums", checksums, METH_O, "checksums(state): of what is before each end, as far as has been copied"},
    {"copy_memory", copy_memory, METH_VARARGS,
     "copy_memory(source, offset, address, parts, block, state): bytes copied and checked; 0 if the source is too short"},
    {"collect", collect, METH_VARARGS,
     "collect(target, offset, address, parts, block, state, kept): the other way, from the parts to the target. kept: what is "
     "written stays in the caches, because this core is the next to read it"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_inplace", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__inplace(void)
{
    if (import_guard() < 0)
        return NULL;
    return PyModule_Create(&module);
}
