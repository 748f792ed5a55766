/* Copies blocks to their objects, or back, with the checksum and the footer in the same pass, without the GIL.
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
#include <stdatomic.h>
#include "../tiers/_guard.h"
#include "_footer.h"
#include "_lent.h"

#define MEMORY "transferd.workers._inplace.memory"
#define MOST_PARTS 1024 /* of one piece: IOV_MAX */
#define SEALED 3        /* parts whose seals a footer has room for: PARTS in blocks/layout/base.py */

/* Bytes of a block: where those of block 0 lie, bytes from block to block, bytes. */
typedef struct {
    int64_t first, stride, nbytes;
} Part;

/* What is copied under one loan: parts, which are a range of the payload. */
typedef struct {
    uint64_t offset;
    int first, count;
} Piece;

/* Memory of blocks. */
typedef struct {
    uint64_t origin, nbytes; /* its address; of a block's payload */
    uint64_t ends[MOST_ENDS], count; /* of the sealed parts of a payload, in bytes */
    int pieces;
    Piece *piece;
    Part *part;
} Memory;

/* The right of threads to touch a task's blocks: OVER once it has ended, and how many touch one. The memory is a bytearray's. */
typedef _Atomic uint64_t Loan;
#define OVER ((uint64_t)1 << 63)

/* one: the part of the payloads to take, or -1 for all of them. states: with a part, what has been seen of each payload. */
typedef struct {
    Lent lent;
    const Memory *memory;
    PyObject *owner, *loan; /* of the memory; the Loan, which is told when the last thread has left after its end */
    Py_buffer shared;       /* the loan's bytearray */
    int64_t *block;
    unsigned char *footer;  /* of each block, without checksums */
    int one;
    Py_buffer *state;
} Blocks;

static int take_loan(Loan *loan)
{
    uint64_t held = atomic_load(loan);

    while (!(held & OVER))
        if (atomic_compare_exchange_weak(loan, &held, held + 1))
            return 1;
    return 0;
}

static void give_back(Blocks *blocks)
{
    if (atomic_fetch_sub((Loan *)blocks->shared.buf, 1) != (OVER | 1))
        return;
    PyGILState_STATE held = PyGILState_Ensure();
    PyObject *told = PyObject_CallMethod(blocks->loan, "returned", NULL);
    if (!told)
        PyErr_WriteUnraisable(blocks->loan);
    Py_XDECREF(told);
    PyGILState_Release(held);
}

/* A copy of one piece, for the guard. */
typedef struct {
    const Memory *memory;
    const Piece *piece;
    uint64_t block;
    State *state;
    unsigned char *data; /* of the payload */
    int kept;
} Copy;

static unsigned char *place(const Copy *copy, const Part *part)
{
    return (unsigned char *)(uintptr_t)(copy->memory->origin + (uint64_t)part->first + (uint64_t)part->stride * copy->block);
}

static void collect_piece(void *given)
{
    const Copy *copy = given;
    unsigned char *to = copy->data + copy->piece->offset;
    const Part *part = copy->memory->part + copy->piece->first, *end = part + copy->piece->count;

    for (; part < end; to += part++->nbytes)
        copy_checked(copy->state, to, place(copy, part), (uint64_t)part->nbytes, part->nbytes < AHEAD ? A_BIT_AHEAD : AHEAD,
                     copy->kept);
}

static void scatter_piece(void *given)
{
    const Copy *copy = given;
    const unsigned char *from = copy->data + copy->piece->offset;
    const Part *part = copy->memory->part + copy->piece->first, *end = part + copy->piece->count;

    for (; part < end; from += part++->nbytes)
        copy_checked(copy->state, place(copy, part), from, (uint64_t)part->nbytes, AHEAD, 0);
}

/* Copies the pieces from `begin` to `end` (bytes of the payload), each under the loan. Returns as Lent says. */
static int copy_pieces(Blocks *blocks, Copy *copy, uint64_t begin, uint64_t end, void (*one)(void *))
{
    for (int i = 0; i < copy->memory->pieces; i++) {
        copy->piece = copy->memory->piece + i;
        if (copy->piece->offset < begin || copy->piece->offset >= end)
            continue;
        if (!take_loan(blocks->shared.buf))
            return 0;
        int ended = guard->run(one, copy);
        give_back(blocks);
        if (ended)
            return ended > 0 ? -1 : -2;
    }
    return 1;
}

static void start(State *state, const Memory *memory, uint64_t first)
{
    begin(state);
    for (uint64_t i = first; i < memory->count; i++)
        state->ends[state->count++] = memory->ends[i] / STRIPE;
}

static int fill(Lent *lent, Py_ssize_t i, unsigned char *data, int near)
{
    Blocks *blocks = (Blocks *)lent;
    const Memory *memory = blocks->memory;
    State state;
    Copy copy = {memory, NULL, (uint64_t)blocks->block[i], &state, data, near};
    unsigned char *footer = data + memory->nbytes;
    uint32_t divided = memory->count == SEALED;

    start(&state, memory, 0);
    int made = copy_pieces(blocks, &copy, 0, memory->nbytes, collect_piece);
    if (made != 1)
        return made;
    memcpy(footer, blocks->footer + FOOTER * i, FOOTER);
    memcpy(footer + CHECKSUM, &state.sealed[memory->count - 1], sizeof(uint64_t));
    memcpy(footer + DIVIDED, &divided, sizeof divided);
    if (divided)
        memcpy(footer + SEALS, state.sealed, (SEALED - 1) * sizeof(uint64_t));
    uint64_t seal = of_footer(footer);
    memcpy(footer + SEAL, &seal, sizeof seal);
    return 1;
}

static int take(Lent *lent, Py_ssize_t i, const unsigned char *data)
{
    Blocks *blocks = (Blocks *)lent;
    const Memory *memory = blocks->memory;
    State whole, *state = &whole;
    const unsigned char *footer = data + memory->nbytes;
    uint64_t first = 0, end = memory->nbytes, wanted = word(footer + CHECKSUM);
    uint32_t divided;

    if (!is_wanted(footer, blocks->footer + FOOTER * i))
        return 0;
    if (blocks->one >= 0) {
        memcpy(&divided, footer + DIVIDED, sizeof divided);
        if (divided != 1 || memory->count != SEALED)
            return 0;
        state = blocks->state[i].buf;
        first = blocks->one ? memory->ends[blocks->one - 1] : 0;
        end = memory->ends[blocks->one];
        if (state->stripes != first / STRIPE) /* this part was copied before, and was not right */
            return 0;
        if (blocks->one < SEALED - 1)
            wanted = word(footer + SEALS + 8 * blocks->one);
    } else
        start(state, memory, memory->count - 1);
    Copy copy = {memory, NULL, (uint64_t)blocks->block[i], state, (unsigned char *)(uintptr_t)data, 0};
    int taken = copy_pieces(blocks, &copy, first, end, scatter_piece);
    return taken == 1 ? state->sealed[blocks->one >= 0 ? blocks->one : 0] == wanted : taken;
}

static int over(const Lent *lent)
{
    return (atomic_load((Loan *)((const Blocks *)lent)->shared.buf) & OVER) != 0;
}

static void free_memory(PyObject *capsule)
{
    Memory *memory = PyCapsule_GetPointer(capsule, MEMORY);

    PyMem_Free(memory->piece);
    PyMem_Free(memory->part);
    PyMem_Free(memory);
}

/* Reads [(offset, int64 [n, 3])] into the memory. */
static int read_pieces(Memory *memory, PyObject *pieces)
{
    Py_ssize_t row = (Py_ssize_t)sizeof(Part), parts = 0;
    uint64_t done = 0;

    memory->pieces = (int)PyTuple_Size(pieces);
    if (!(memory->piece = PyMem_Calloc((size_t)memory->pieces + 1, sizeof(Piece))))
        return -1;
    for (int i = 0; i < memory->pieces; i++) {
        unsigned long long offset;
        PyObject *table;
        Py_buffer rows;
        if (!PyArg_ParseTuple(PyTuple_GetItem(pieces, i), "KO", &offset, &table) ||
            PyObject_GetBuffer(table, &rows, PyBUF_C_CONTIGUOUS) < 0)
            return -1;
        Py_ssize_t count = rows.len / row;
        int good = rows.itemsize == sizeof(int64_t) && rows.len % row == 0 && count <= MOST_PARTS && offset == done;
        Part *more = good ? PyMem_Realloc(memory->part, (size_t)(parts + count + 1) * sizeof(Part)) : NULL;
        if (more) {
            memory->part = more;
            memory->piece[i] = (Piece){offset, (int)parts, (int)count};
            memcpy(more + parts, rows.buf, (size_t)rows.len);
        }
        PyBuffer_Release(&rows);
        if (good && !more)
            return -1;
        for (Py_ssize_t k = parts; good && k < parts + count; k++) {
            good = more[k].nbytes > 0 && more[k].nbytes % STRIPE == 0;
            done += (uint64_t)more[k].nbytes;
        }
        if (!good) {
            PyErr_SetString(PyExc_ValueError, "the parts of a piece are wrong");
            return -1;
        }
        parts += count;
    }
    if (done == memory->nbytes)
        return 0;
    PyErr_SetString(PyExc_ValueError, "the pieces are not the payload");
    return -1;
}

static PyObject *new_memory(PyObject *module, PyObject *args)
{
    PyObject *ends, *pieces, *capsule;
    unsigned long long origin;

    (void)module;
    if (!PyArg_ParseTuple(args, "KO!O!", &origin, &PyTuple_Type, &ends, &PyTuple_Type, &pieces))
        return NULL;
    Memory *memory = PyMem_Calloc(1, sizeof *memory);
    if (!memory)
        return PyErr_NoMemory();
    if (!(capsule = PyCapsule_New(memory, MEMORY, free_memory))) {
        PyMem_Free(memory);
        return NULL;
    }
    memory->origin = origin;
    if (!PyTuple_Size(ends) || PyTuple_Size(ends) > MOST_ENDS)
        goto wrong;
    for (; memory->count < (uint64_t)PyTuple_Size(ends); memory->count++) {
        unsigned long long end = PyLong_AsUnsignedLongLong(PyTuple_GetItem(ends, (Py_ssize_t)memory->count));
        if (PyErr_Occurred())
            goto failed;
        if (end <= 240 || end % STRIPE || end <= memory->nbytes)
            goto wrong;
        memory->nbytes = memory->ends[memory->count] = end;
    }
    if (read_pieces(memory, pieces) == 0)
        return capsule;
    if (!PyErr_Occurred())
        PyErr_NoMemory();
    goto failed;
wrong:
    PyErr_SetString(PyExc_ValueError, "1 to 8 ends, ascending, of more than 240 bytes and multiples of 64");
failed:
    Py_DECREF(capsule);
    return NULL;
}

static void free_blocks(PyObject *capsule)
{
    Blocks *blocks = PyCapsule_GetPointer(capsule, LENT);

    for (Py_ssize_t i = 0; blocks->state && i < blocks->lent.count; i++)
        if (blocks->state[i].obj)
            PyBuffer_Release(&blocks->state[i]);
    if (blocks->shared.obj)
        PyBuffer_Release(&blocks->shared);
    Py_XDECREF(blocks->owner);
    Py_XDECREF(blocks->loan);
    PyMem_Free(blocks->state);
    PyMem_Free(blocks->block);
    PyMem_Free(blocks->footer);
    PyMem_Free(blocks);
}

/* Borrows a bytearray's memory, which must have this length. */
static int borrow(PyObject *given, Py_buffer *view, size_t nbytes)
{
    if (PyObject_GetBuffer(given, view, PyBUF_WRITABLE) < 0)
        return -1;
    if ((size_t)view->len == nbytes)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "a state or a loan is of another length");
    return -1;
}

static int lend(Blocks *blocks, PyObject *ids, const char *footers, Py_ssize_t nbytes, PyObject *states)
{
    Py_ssize_t count = PyList_Size(ids);
    PyObject *shared = PyObject_GetAttrString(blocks->loan, "shared");
    int borrowed = shared ? borrow(shared, &blocks->shared, sizeof(Loan)) : -1;

    Py_XDECREF(shared);
    if (borrowed < 0)
        return -1;
    if (nbytes != FOOTER * count || (blocks->one >= 0 && (blocks->one >= (int)blocks->memory->count || PyList_Size(states) != count))) {
        PyErr_SetString(PyExc_ValueError, "a footer for each block, and a state if a part is lent");
        return -1;
    }
    blocks->block = PyMem_Calloc((size_t)count + 1, sizeof *blocks->block);
    blocks->footer = PyMem_Malloc((size_t)nbytes + 1);
    blocks->state = PyMem_Calloc((size_t)count + 1, sizeof *blocks->state);
    if (!blocks->block || !blocks->footer || !blocks->state) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(blocks->footer, footers, (size_t)nbytes);
    for (blocks->lent.count = 0; blocks->lent.count < count; blocks->lent.count++) {
        Py_ssize_t i = blocks->lent.count;
        blocks->block[i] = PyLong_AsLongLong(PyList_GetItem(ids, i));
        if (PyErr_Occurred() || (blocks->one >= 0 && borrow(PyList_GetItem(states, i), &blocks->state[i], sizeof(State)) < 0))
            return -1;
    }
    return 0;
}

static PyObject *lend_blocks(PyObject *module, PyObject *args)
{
    PyObject *memory, *loan, *ids, *states, *capsule;
    const char *footers;
    Py_ssize_t nbytes;
    int one;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOO!y#iO!", &memory, &loan, &PyList_Type, &ids, &footers, &nbytes, &one, &PyList_Type, &states))
        return NULL;
    const Memory *of = PyCapsule_GetPointer(memory, MEMORY);
    Blocks *blocks = of ? PyMem_Calloc(1, sizeof *blocks) : NULL;
    if (!blocks)
        return of ? PyErr_NoMemory() : NULL;
    if (!(capsule = PyCapsule_New(blocks, LENT, free_blocks))) {
        PyMem_Free(blocks);
        return NULL;
    }
    blocks->lent = (Lent){0, fill, take, over, of->nbytes + FOOTER};
    blocks->memory = of;
    blocks->one = one;
    Py_INCREF(blocks->owner = memory);
    Py_INCREF(blocks->loan = loan);
    if (lend(blocks, ids, footers, nbytes, states) == 0)
        return capsule;
    Py_DECREF(capsule);
    return NULL;
}

static PyObject *new_state(PyObject *module, PyObject *given)
{
    const Memory *memory = PyCapsule_GetPointer(given, MEMORY);
    State state;

    (void)module;
    if (!memory)
        return NULL;
    start(&state, memory, 0);
    return PyByteArray_FromStringAndSize((const char *)&state, sizeof state);
}

/* The blocks and the data of a call, if they fit. */
static Lent *opened(PyObject *capsule, Py_ssize_t i, PyObject *given, Py_buffer *data, int flags)
{
    Lent *lent = PyCapsule_GetPointer(capsule, LENT);

    if (!lent || PyObject_GetBuffer(given, data, flags) < 0)
        return NULL;
    if (i >= 0 && i < lent->count && (size_t)data->len == lent->nbytes && guard->ready() == 0)
        return lent;
    PyBuffer_Release(data);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "there is no such block, or its object has another length");
    return NULL;
}

static PyObject *ended(int done)
{
    if (done < 0) {
        set_lost(done == -1 ? 1 : -1);
        return NULL;
    }
    return PyBool_FromLong(done);
}

static PyObject *fill_one(PyObject *module, PyObject *args)
{
    PyObject *capsule, *given;
    Py_ssize_t i;
    Py_buffer data;
    int near, done;

    (void)module;
    if (!PyArg_ParseTuple(args, "OnOp", &capsule, &i, &given, &near))
        return NULL;
    Lent *lent = opened(capsule, i, given, &data, PyBUF_WRITABLE);
    if (!lent)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = fill(lent, i, data.buf, near);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return ended(done);
}

static PyObject *take_one(PyObject *module, PyObject *args)
{
    PyObject *capsule, *given;
    Py_ssize_t i;
    Py_buffer data;
    int done;

    (void)module;
    if (!PyArg_ParseTuple(args, "OnO", &capsule, &i, &given))
        return NULL;
    Lent *lent = opened(capsule, i, given, &data, PyBUF_SIMPLE);
    if (!lent)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    done = take(lent, i, data.buf);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return ended(done);
}

static PyObject *end_loan(PyObject *module, PyObject *given)
{
    Py_buffer shared;

    (void)module;
    if (borrow(given, &shared, sizeof(Loan)) < 0)
        return NULL;
    uint64_t held = atomic_fetch_or((Loan *)shared.buf, OVER) & ~OVER;
    PyBuffer_Release(&shared);
    return PyLong_FromUnsignedLongLong(held);
}

static PyMethodDef methods[] = {
    {"new_memory", new_memory, METH_VARARGS,
     "new_memory(address, ends, pieces): memory of blocks. ends: of the sealed parts of a payload, the last of the payload. "
     "pieces: of a payload, in order: its offset, and its parts, int64 [n, 3]: (offset in block 0, bytes from block to block, bytes)"},
    {"new_state", new_state, METH_O, "new_state(memory): of one payload that is taken by parts"},
    {"lend_blocks", lend_blocks, METH_VARARGS,
     "lend_blocks(memory, loan, block ids, footers, part, states): some blocks, for `fill` and `take`. part: which part `take` "
     "copies, with a state for each block; -1 and no states: all"},
    {"fill", fill_one, METH_VARARGS,
     "fill(lent, i, data, near): make the object of the block with this number. False if the loan has ended"},
    {"take", take_one, METH_VARARGS,
     "take(lent, i, data): copy an object to the block with this number. False if the object is not right, or the loan has ended"},
    {"end_loan", end_loan, METH_O, "end_loan(shared): how many threads touch a block. No other one will"},
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
