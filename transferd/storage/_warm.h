/* Objects that the page cache has, read to an engine's memory with their checksums, as many as one call is given.
 *
 * No call waits for a disk. What cannot be read so, or is not right, is the daemon's to load (adapters/common/read_leases.py).
 */
#define NOWAIT 8     /* RWF_NOWAIT: what the page cache has, and no wait for the disk */
#define PIECE 262144 /* bytes that are still in a core's own cache when they are checked */
#define AT_ONCE_PIECES 64

/* One object of a call of `load_warm`. footer: the one that it must have, without checksums. */
typedef struct {
    PyObject *path, *footer;
    Py_buffer *piece;
    Py_ssize_t pieces;
    const char *name;
    const unsigned char *wanted;
    int found; /* the answer */
} WarmObject;

/* Reads what the page cache has of the file, from `at` on. Waits for no disk. */
static ssize_t read_warm(int fd, const struct iovec *to, int count, size_t at)
{
    return syscall(SYS_preadv2, fd, to, (unsigned long)count, (unsigned long)at, 0UL, NOWAIT);
}

/* Reads an object that the page cache has to the payload's pieces. Whether it has, and the object is right. */
static int warm_object(const WarmObject *one, int flags, size_t nbytes)
{
    const Py_buffer *piece = one->piece;
    struct iovec some[AT_ONCE_PIECES + 1];
    unsigned char footer[FOOTER + 1];
    size_t at = 0, from = 0; /* in the file; in the piece */
    State state;
    int fd = open(one->name, flags);

    if (fd < 0)
        return 0;
    begin(&state);
    state.count = 1;
    state.ends[0] = nbytes / STRIPE;
    while (at < nbytes) {
        size_t room = PIECE;
        int count = 0, last;
        for (; at + PIECE - room < nbytes && room && count < AT_ONCE_PIECES; count++) {
            size_t left = (size_t)piece->len - from;
            some[count].iov_base = (char *)piece->buf + from;
            some[count].iov_len = left < room ? left : room;
            room -= some[count].iov_len;
            from += some[count].iov_len;
            if (from == (size_t)piece->len)
                piece++, from = 0;
        }
        last = at + PIECE - room == nbytes;
        some[count].iov_base = footer;
        some[count].iov_len = sizeof footer; /* a longer file is another object */
        if (read_warm(fd, some, count + last, at) != (ssize_t)(PIECE - room + (last ? FOOTER : 0)))
            break;
        for (int i = 0; i < count; i++)
            copy_checked(&state, some[i].iov_base, some[i].iov_base, some[i].iov_len, A_BIT_AHEAD, 1);
        at += PIECE - room;
    }
    close(fd);
    return at == nbytes && is_wanted(footer, one->wanted) && word(footer + CHECKSUM) == state.sealed[0];
}

static void close_warm(WarmObject *one)
{
    while (one->pieces)
        PyBuffer_Release(&one->piece[--one->pieces]);
    PyMem_Free(one->piece);
    Py_XDECREF(one->path);
    Py_XDECREF(one->footer);
}

static int open_warm(WarmObject *one, PyObject *order)
{
    PyObject *pieces;

    if (!PyArg_ParseTuple(order, "O&OS", PyUnicode_FSConverter, &one->path, &pieces, &one->footer)) {
        one->path = one->footer = NULL; /* the converter has released its own */
        return -1;
    }
    Py_INCREF(one->footer);
    if (PyBytes_Size(one->footer) != FOOTER) {
        PyErr_SetString(PyExc_ValueError, "a footer is of another length");
        return -1;
    }
    one->name = PyBytes_AsString(one->path);
    one->wanted = (const unsigned char *)PyBytes_AsString(one->footer);
    Py_ssize_t count = PySequence_Size(pieces);
    if (count < 0)
        return -1;
    if (!(one->piece = PyMem_Malloc((size_t)(count + 1) * sizeof *one->piece))) {
        PyErr_NoMemory();
        return -1;
    }
    while (one->pieces < count) {
        PyObject *given = PySequence_GetItem(pieces, one->pieces);
        int failed = !given || PyObject_GetBuffer(given, &one->piece[one->pieces], PyBUF_WRITABLE) < 0;
        Py_XDECREF(given); /* the buffer holds it */
        if (failed)
            return -1;
        one->pieces++;
    }
    return 0;
}

/* Whether the pieces are filled with the object. Without the GIL. */
static int load_one_warm(const WarmObject *one, int flags)
{
    size_t nbytes = 0;

    for (Py_ssize_t i = 0; i < one->pieces; i++) {
        if (one->piece[i].len % STRIPE || !one->piece[i].len)
            return 0;
        nbytes += (size_t)one->piece[i].len;
    }
    return nbytes > 240 /* shorter ones have another checksum */ && warm_object(one, flags, nbytes);
}

static PyObject *load_warm(PyObject *module, PyObject *args)
{
    PyObject *orders, *answers = NULL;
    Py_ssize_t count, opened = 0;
    int flags, good = 1;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &orders, &flags))
        return NULL;
    count = PyList_Size(orders);
    WarmObject *object = PyMem_Calloc((size_t)count + 1, sizeof *object);
    if (!object)
        return PyErr_NoMemory();
    for (; good && opened < count; opened++)
        good = open_warm(object + opened, PyList_GetItem(orders, opened)) == 0;
    if (good) {
        Py_BEGIN_ALLOW_THREADS
        for (Py_ssize_t i = 0; i < count; i++)
            object[i].found = load_one_warm(object + i, flags);
        Py_END_ALLOW_THREADS
        answers = PyList_New(count);
    }
    for (Py_ssize_t i = 0; i < opened; i++) {
        if (answers)
            PyList_SetItem(answers, i, PyBool_FromLong(object[i].found));
        close_warm(object + i);
    }
    PyMem_Free(object);
    return answers;
}
