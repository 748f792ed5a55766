/* Objects that the page cache has, read to an engine's memory with their checksums: in one call, or by threads of their own.
 *
 * No call waits for a disk. What cannot be read so, or is not right, is the daemon's to load (adapters/common/read_leases.py).
 */
#define NOWAIT 8     /* RWF_NOWAIT: what the page cache has, and no wait for the disk */
#define PIECE 262144 /* bytes that are still in a core's own cache when they are checked */
#define AT_ONCE_PIECES 64
#define MOST_READERS 64
#define READERS "transferd.storage._files.readers" /* of the capsule */

/* One object of a call. footer: the one that it must have, without checksums. */
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

/* The objects of one call. NULL with an exception if an order is none. */
static WarmObject *open_all_warm(PyObject *orders, Py_ssize_t *count)
{
    Py_ssize_t opened = 0;
    WarmObject *object;

    *count = PyList_Size(orders);
    if (!(object = PyMem_Calloc((size_t)*count + 1, sizeof *object))) {
        PyErr_NoMemory();
        return NULL;
    }
    for (; opened < *count; opened++)
        if (open_warm(object + opened, PyList_GetItem(orders, opened)) < 0) {
            for (; opened >= 0; opened--)
                close_warm(object + opened);
            PyMem_Free(object);
            return NULL;
        }
    return object;
}

/* Whether each object was found; the objects are given back. */
static PyObject *answers_of_warm(WarmObject *object, Py_ssize_t count)
{
    PyObject *answers = PyList_New(count);

    for (Py_ssize_t i = 0; i < count; i++) {
        if (answers)
            PyList_SetItem(answers, i, PyBool_FromLong(object[i].found));
        close_warm(object + i);
    }
    PyMem_Free(object);
    return answers;
}

static PyObject *load_warm(PyObject *module, PyObject *args)
{
    WarmObject *object;
    PyObject *orders;
    Py_ssize_t count;
    int flags;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!i", &PyList_Type, &orders, &flags) || !(object = open_all_warm(orders, &count)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < count; i++)
        object[i].found = load_one_warm(object + i, flags);
    Py_END_ALLOW_THREADS
    return answers_of_warm(object, count);
}

/* Objects that the threads of a WarmReaders read, as begin_warm was given them. taken: by a thread. left: not read yet. ended: what
 * finished_warm returns with the answers. */
typedef struct WarmRequest {
    struct WarmRequest *next;
    WarmObject *object;
    Py_ssize_t count, taken, left;
    int flags;
    PyObject *ended;
} WarmRequest;

typedef struct {
    WarmRequest *first, *last;
} WarmQueue;

/* Threads that never need the interpreter: it may be busy with the next requests while they read. They take object by object, of the
 * oldest request first. closed: they end once nothing waits. over: they have ended. */
typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t comes, done;
    WarmQueue waiting, finished;
    pthread_t thread[MOST_READERS];
    int count, closed, over;
} WarmReaders;

static void append_warm(WarmQueue *queue, WarmRequest *request)
{
    request->next = NULL;
    if (queue->first)
        queue->last->next = request;
    else
        queue->first = request;
    queue->last = request;
}

static void *read_requests(void *given)
{
    WarmReaders *readers = given;

    pthread_mutex_lock(&readers->lock);
    while (readers->waiting.first || !readers->closed) {
        WarmRequest *request = readers->waiting.first;
        if (!request) {
            pthread_cond_wait(&readers->comes, &readers->lock);
            continue;
        }
        WarmObject *one = request->object + request->taken++;
        if (request->taken == request->count)
            readers->waiting.first = request->next;
        if (readers->waiting.first)
            pthread_cond_signal(&readers->comes);
        pthread_mutex_unlock(&readers->lock);
        one->found = load_one_warm(one, request->flags);
        pthread_mutex_lock(&readers->lock);
        if (!--request->left) {
            append_warm(&readers->finished, request);
            pthread_cond_signal(&readers->done);
        }
    }
    pthread_mutex_unlock(&readers->lock);
    return NULL;
}

/* Only after end_warm: else threads still use it, or the process ends, or was forked and has none of them. */
static void free_readers(PyObject *capsule)
{
    WarmReaders *readers = PyCapsule_GetPointer(capsule, READERS);

    if (readers && readers->over)
        PyMem_Free(readers);
}

static PyObject *warm_readers(PyObject *module, PyObject *args)
{
    WarmReaders *readers;
    int count, failed = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "i", &count))
        return NULL;
    if (!(readers = PyMem_Calloc(1, sizeof *readers)))
        return PyErr_NoMemory();
    pthread_mutex_init(&readers->lock, NULL);
    pthread_cond_init(&readers->comes, NULL);
    pthread_cond_init(&readers->done, NULL);
    for (; readers->count < count && readers->count < MOST_READERS; readers->count++)
        if ((failed = pthread_create(&readers->thread[readers->count], NULL, read_requests, readers)))
            break;
    if (!readers->count) {
        PyMem_Free(readers);
        errno = failed;
        return failed ? PyErr_SetFromErrno(PyExc_OSError) : PyErr_Format(PyExc_ValueError, "no threads");
    }
    return PyCapsule_New(readers, READERS, free_readers);
}

static PyObject *begin_warm(PyObject *module, PyObject *args)
{
    PyObject *capsule, *orders, *ended;
    WarmReaders *readers;
    WarmRequest *request;
    int flags;

    (void)module;
    if (!PyArg_ParseTuple(args, "OO!iO", &capsule, &PyList_Type, &orders, &flags, &ended) ||
        !(readers = PyCapsule_GetPointer(capsule, READERS)))
        return NULL;
    if (readers->closed)
        return PyErr_Format(PyExc_RuntimeError, "the readers are closed");
    if (!(request = PyMem_Calloc(1, sizeof *request)))
        return PyErr_NoMemory();
    if (!(request->object = open_all_warm(orders, &request->count))) {
        PyMem_Free(request);
        return NULL;
    }
    request->left = request->count;
    request->flags = flags;
    Py_INCREF(request->ended = ended);
    pthread_mutex_lock(&readers->lock); /* nobody holds it for long, or needs the GIL meanwhile */
    append_warm(request->count ? &readers->waiting : &readers->finished, request);
    pthread_cond_signal(request->count ? &readers->comes : &readers->done);
    pthread_mutex_unlock(&readers->lock);
    Py_RETURN_NONE;
}

static PyObject *finished_warm(PyObject *module, PyObject *capsule)
{
    WarmReaders *readers = PyCapsule_GetPointer(capsule, READERS);
    WarmRequest *request, *next;
    PyObject *all;

    (void)module;
    if (!readers || !(all = PyList_New(0)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&readers->lock);
    while (!readers->finished.first && !readers->over)
        pthread_cond_wait(&readers->done, &readers->lock);
    request = readers->finished.first;
    readers->finished.first = NULL;
    pthread_mutex_unlock(&readers->lock);
    Py_END_ALLOW_THREADS
    for (; request; request = next) {
        PyObject *answers = answers_of_warm(request->object, request->count);
        PyObject *one = answers ? Py_BuildValue("NN", request->ended, answers) : NULL;
        next = request->next;
        PyMem_Free(request);
        if (!one || PyList_Append(all, one) < 0)
            PyErr_Clear(); /* no memory for a list of a few entries: the process is lost */
        Py_XDECREF(one);
    }
    return all;
}

static PyObject *end_warm(PyObject *module, PyObject *capsule)
{
    WarmReaders *readers = PyCapsule_GetPointer(capsule, READERS);

    (void)module;
    if (!readers)
        return NULL;
    if (!readers->closed) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(&readers->lock);
        readers->closed = 1;
        pthread_cond_broadcast(&readers->comes);
        pthread_mutex_unlock(&readers->lock);
        for (int i = 0; i < readers->count; i++)
            pthread_join(readers->thread[i], NULL);
        pthread_mutex_lock(&readers->lock);
        readers->over = 1;
        pthread_cond_signal(&readers->done);
        pthread_mutex_unlock(&readers->lock);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}
