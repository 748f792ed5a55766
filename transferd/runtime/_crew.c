/* Threads that work for the event loop and never need the interpreter (native.py).
 *
 * A thread that needs the GIL waits for the event loop twice for each piece of work, and the event loop for it. These threads
 * take what waits, do it, and note that it has ended; a byte in an eventfd tells the loop. Who waits, and whose turn it is, is
 * as in threads.py: owners take turns, and between two items of one work others have theirs. setup.py says for which versions of
 * CPython one build serves.
 */
#define _GNU_SOURCE 1
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_native.h"

#define CREW "transferd.runtime._crew"
#define MOST_THREADS 64
#define STACK 1048576 /* bytes; some calls take the GIL and call Python */

/* One thread's share of a call. work: what waits for the call. begun: a thread has taken it, perhaps not for the last time. last: no
 * other share of the call is left. */
typedef struct Share {
    struct Share *next;
    PyObject *work, *capsule;
    Native *native;
    uint64_t owner;
    int begun, last;
} Share;

typedef struct {
    Share *first, *last;
} Shares;

/* The shares of one owner that wait. */
typedef struct Owner {
    struct Owner *next;
    uint64_t owner;
    Shares waiting;
} Owner;

/* comes: posted for each share that waits, and no condition variable: those of glibc before 2.41 can lose a signal (BZ 25847). first:
 * whose turn is next. wake: the eventfd; told: it has been written since the loop has looked. closed: nothing new comes, and
 * the threads end when nothing waits. over: so many have ended. The lock is never held for long, nor while something needs the GIL. */
typedef struct {
    pthread_mutex_t lock;
    sem_t comes;
    pthread_cond_t ends;
    Owner *first, *last;
    Shares finished;
    int wake, told, count, closed, over;
    struct {
        Share *share;
        double since;
    } running[MOST_THREADS];
} Crew;

typedef struct {
    Crew *crew;
    int number, nice;
} Thread;

static double monotonic(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void append(Shares *shares, Share *share)
{
    share->next = NULL;
    if (shares->first)
        shares->last->next = share;
    else
        shares->first = share;
    shares->last = share;
}

/* Takes out the owner behind `before`, or the first one. */
static Owner *take_out(Crew *crew, Owner *before)
{
    Owner *owner = before ? before->next : crew->first;

    if (before)
        before->next = owner->next;
    else
        crew->first = owner->next;
    if (crew->last == owner)
        crew->last = before;
    return owner;
}

static void put_last(Crew *crew, Owner *owner)
{
    owner->next = NULL;
    if (crew->first)
        crew->last->next = owner;
    else
        crew->first = owner;
    crew->last = owner;
}

/* Takes the next share; its owner has its next turn after all others. */
static Share *take_next(Crew *crew)
{
    Owner *owner = take_out(crew, NULL);
    Share *share = owner->waiting.first;

    owner->waiting.first = share->next;
    if (owner->waiting.first)
        put_last(crew, owner);
    else
        free(owner);
    return share;
}

/* Queues a share: as its owner's last, or, if a thread was at it before, as its owner's next, behind all other owners. Returns 0 if
 * there is no memory. */
static int queue(Crew *crew, Share *share)
{
    Owner *before = NULL, *owner = crew->first;

    for (; owner && owner->owner != share->owner; owner = owner->next)
        before = owner;
    if (owner && share->begun)
        take_out(crew, before);
    else if (!owner) {
        if (!(owner = calloc(1, sizeof *owner)))
            return 0;
        owner->owner = share->owner;
    } else {
        append(&owner->waiting, share);
        return 1;
    }
    put_last(crew, owner);
    if (share->begun && owner->waiting.first) {
        share->next = owner->waiting.first;
        owner->waiting.first = share;
    } else
        append(&owner->waiting, share);
    return 1;
}

static int others_wait(Crew *crew, const Share *share)
{
    pthread_mutex_lock(&crew->lock);
    int others = crew->first && (crew->first->owner != share->owner || crew->first != crew->last);
    pthread_mutex_unlock(&crew->lock);
    return others;
}

/* Moves the owner's waiting shares: those of one call, or all that no thread has begun. */
static void take_waiting(Owner *owner, const Native *native, Shares *taken)
{
    Shares kept = {NULL, NULL};

    for (Share *share = owner->waiting.first, *after; share; share = after) {
        after = share->next;
        if (native ? share->native != native : share->begun)
            append(&kept, share);
        else {
            share->last = --share->native->shares == 0;
            append(taken, share);
        }
    }
    owner->waiting = kept;
}

/* Does items until none is left, or another owner waits. Returns whether none is left. */
static int go_on(Crew *crew, Share *share)
{
    Native *native = share->native;
    Py_ssize_t item;
    int ended = 1;

    while (ended && (item = atomic_fetch_add(&native->taken, 1)) < native->count) {
        native->one(native, item);
        atomic_fetch_add(&native->ended, 1);
        ended = item + 1 == native->count || !others_wait(crew, share);
    }
    if (native->leave)
        native->leave();
    return ended;
}

/* A share has ended, as no item was left: so have those of the call that wait. Only the loop can free them. */
static void finish(Crew *crew, Share *share)
{
    Native *native = share->native;

    for (Owner *before = NULL, *owner = crew->first, *next; owner && native->shares > 1; owner = next) {
        next = owner->next;
        take_waiting(owner, native, &crew->finished);
        if (owner->waiting.first)
            before = owner;
        else
            free(take_out(crew, before));
    }
    share->last = --native->shares == 0;
    append(&crew->finished, share);
}

static void *serve(void *given)
{
    Thread self = *(Thread *)given;
    Crew *crew = self.crew;

    free(given);
    if (self.nice) { /* of this thread alone; the interface is the process's, but Linux's is not */
        id_t thread = (id_t)syscall(SYS_gettid);
        (void)setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + self.nice);
    }
    pthread_mutex_lock(&crew->lock);
    while (crew->first || !crew->closed) {
        pthread_mutex_unlock(&crew->lock);
        (void)!sem_wait(&crew->comes); /* signals are blocked here, so nothing else ends this */
        pthread_mutex_lock(&crew->lock);
        if (!crew->first) /* another share of its call has done all items, or the crew is closed */
            continue;
        Share *share = take_next(crew);
        share->begun = 1;
        crew->running[self.number].share = share;
        crew->running[self.number].since = monotonic();
        pthread_mutex_unlock(&crew->lock);
        int ended = go_on(crew, share);
        pthread_mutex_lock(&crew->lock);
        crew->running[self.number].share = NULL;
        while (!ended && !queue(crew, share)) { /* no memory to give way: go on */
            pthread_mutex_unlock(&crew->lock);
            ended = go_on(crew, share);
            pthread_mutex_lock(&crew->lock);
        }
        if (!ended) {
            sem_post(&crew->comes);
            continue;
        }
        finish(crew, share);
        if (share->last && !crew->told) {
            uint64_t one = 1;
            crew->told = 1;
            /* Not with the lock: the loop wakes at once, and would wait for this thread, which may have to wait for a processor. */
            pthread_mutex_unlock(&crew->lock);
            (void)!write(crew->wake, &one, sizeof one);
            pthread_mutex_lock(&crew->lock);
        }
    }
    crew->over++;
    pthread_cond_signal(&crew->ends);
    pthread_mutex_unlock(&crew->lock);
    return NULL;
}

/* Only once all threads have ended: else they still use it, or the process was forked and has none of them. */
static void free_crew(PyObject *capsule)
{
    Crew *crew = PyCapsule_GetPointer(capsule, CREW);

    if (!crew || pthread_mutex_trylock(&crew->lock) != 0)
        return;
    int over = crew->over == crew->count;
    pthread_mutex_unlock(&crew->lock);
    if (over)
        PyMem_Free(crew);
}

static int start_thread(Crew *crew, const pthread_attr_t *attributes, int nice)
{
    Thread *self = malloc(sizeof *self);
    pthread_t thread;
    sigset_t all, before;

    if (!self)
        return ENOMEM;
    *self = (Thread){crew, crew->count, nice};
    /* Signals are the interpreter's; what this thread itself causes cannot wait. */
    sigfillset(&all);
    sigdelset(&all, SIGBUS), sigdelset(&all, SIGSEGV), sigdelset(&all, SIGFPE), sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, attributes, serve, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed)
        free(self);
    else
        crew->count++;
    return failed;
}

static void close_crew(Crew *crew)
{
    pthread_mutex_lock(&crew->lock);
    crew->closed = 1;
    for (int i = 0; i < crew->count; i++)
        sem_post(&crew->comes);
    pthread_mutex_unlock(&crew->lock);
}

static PyObject *start(PyObject *module, PyObject *args)
{
    pthread_attr_t attributes;
    pthread_condattr_t clock;
    Crew *crew;
    PyObject *capsule;
    int count, wake, nice, failed = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "iii", &count, &wake, &nice))
        return NULL;
    if (count < 1 || count > MOST_THREADS)
        return PyErr_Format(PyExc_ValueError, "1 to %d threads, not %d", MOST_THREADS, count);
    if (!(crew = PyMem_Calloc(1, sizeof *crew)))
        return PyErr_NoMemory();
    if (!(capsule = PyCapsule_New(crew, CREW, free_crew))) {
        PyMem_Free(crew);
        return NULL;
    }
    crew->wake = wake;
    pthread_mutex_init(&crew->lock, NULL);
    sem_init(&crew->comes, 0, 0);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&crew->ends, &clock);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    while (!failed && crew->count < count)
        failed = start_thread(crew, &attributes, nice);
    pthread_attr_destroy(&attributes);
    if (!failed)
        return capsule;
    close_crew(crew); /* none has work, so all end at once */
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&crew->lock);
    while (crew->over < crew->count)
        pthread_cond_wait(&crew->ends, &crew->lock);
    pthread_mutex_unlock(&crew->lock);
    Py_END_ALLOW_THREADS
    Py_DECREF(capsule);
    errno = failed;
    return PyErr_SetFromErrno(PyExc_OSError);
}

static void free_share(Share *share)
{
    Py_DECREF(share->work);
    Py_DECREF(share->capsule);
    PyMem_Free(share);
}

/* The works of these shares, each with its last one. Frees the shares. */
static PyObject *works_of(Shares shares)
{
    PyObject *works = PyList_New(0);
    Share *share = shares.first, *next;

    for (; share; share = next) {
        next = share->next;
        if (works && share->last && PyList_Append(works, share->work) < 0)
            Py_CLEAR(works);
        free_share(share);
    }
    return works;
}

static PyObject *put(PyObject *module, PyObject *args)
{
    PyObject *given, *work, *capsule;
    unsigned long long owner;
    int count;
    Crew *crew;
    Native *native;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOOiK", &given, &work, &capsule, &count, &owner) || !(crew = PyCapsule_GetPointer(given, CREW)) ||
        !(native = PyCapsule_GetPointer(capsule, NATIVE)))
        return NULL;
    if (crew->closed || count < 1 || native->given)
        return PyErr_Format(PyExc_RuntimeError, "these threads are closed, or the call was put before, or is for no thread");
    pthread_mutex_lock(&crew->lock);
    while (native->given < count) {
        Share *share = PyMem_Calloc(1, sizeof *share);
        if (share)
            *share = (Share){.work = work, .capsule = capsule, .native = native, .owner = owner};
        if (!share || !queue(crew, share)) { /* fewer threads than asked for, or none */
            PyMem_Free(share);
            break;
        }
        Py_INCREF(work);
        Py_INCREF(capsule);
        native->given++;
        sem_post(&crew->comes);
    }
    native->shares = native->given;
    pthread_mutex_unlock(&crew->lock);
    if (native->given)
        Py_RETURN_NONE;
    return PyErr_NoMemory();
}

/* Takes shares out of the queue: those of one call, or all that no thread has begun. */
static Shares take_back(Crew *crew, const Native *native)
{
    Shares taken = {NULL, NULL};

    for (Owner *before = NULL, *owner = crew->first, *next; owner; owner = next) {
        next = owner->next;
        take_waiting(owner, native, &taken);
        if (owner->waiting.first)
            before = owner;
        else
            free(take_out(crew, before));
    }
    return taken;
}

static Crew *crew_of(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, CREW);
}

static PyObject *withdraw(PyObject *module, PyObject *args)
{
    PyObject *given, *work;
    Shares taken = {NULL, NULL};
    const Native *native = NULL;
    Crew *crew;
    int waiting = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &given, &work) || !(crew = crew_of(given)))
        return NULL;
    pthread_mutex_lock(&crew->lock);
    for (const Owner *owner = crew->first; owner; owner = owner->next)
        for (const Share *share = owner->waiting.first; share; share = share->next)
            if (share->work == work) {
                waiting += !share->begun;
                native = share->native;
            }
    if (native && waiting == native->given) /* else a thread has begun it */
        taken = take_back(crew, native);
    pthread_mutex_unlock(&crew->lock);
    PyObject *works = works_of(taken);
    Py_ssize_t count = works ? PyList_Size(works) : -1;
    Py_XDECREF(works);
    return count < 0 ? NULL : PyBool_FromLong(count);
}

static PyObject *finished(PyObject *module, PyObject *given)
{
    Crew *crew = crew_of(given);
    uint64_t told;

    (void)module;
    if (!crew)
        return NULL;
    pthread_mutex_lock(&crew->lock);
    (void)!read(crew->wake, &told, sizeof told);
    Shares ended = crew->finished;
    crew->finished.first = NULL;
    crew->told = 0;
    pthread_mutex_unlock(&crew->lock);
    return works_of(ended);
}

static PyObject *running(PyObject *module, PyObject *given)
{
    PyObject *all = PyList_New(0), *one[MOST_THREADS] = {NULL};
    Crew *crew = crew_of(given);
    double since[MOST_THREADS];

    (void)module;
    if (!crew || !all)
        goto failed;
    pthread_mutex_lock(&crew->lock);
    for (int i = 0; i < crew->count; i++)
        if (crew->running[i].share) {
            Py_INCREF(one[i] = crew->running[i].share->work);
            since[i] = crew->running[i].since;
        }
    pthread_mutex_unlock(&crew->lock);
    for (int i = 0; i < crew->count; i++) {
        PyObject *entry = one[i] ? Py_BuildValue("iNd", i, one[i], since[i]) : NULL;
        if (all && one[i] && (!entry || PyList_Append(all, entry) < 0))
            Py_CLEAR(all);
        Py_XDECREF(entry);
    }
    return all;
failed:
    Py_XDECREF(all);
    return NULL;
}

static PyObject *dismiss(PyObject *module, PyObject *given)
{
    Crew *crew = crew_of(given);

    (void)module;
    if (!crew)
        return NULL;
    pthread_mutex_lock(&crew->lock);
    Shares waiting = take_back(crew, NULL);
    pthread_mutex_unlock(&crew->lock);
    close_crew(crew);
    return works_of(waiting);
}

static PyObject *join(PyObject *module, PyObject *args)
{
    PyObject *given;
    Crew *crew;
    double seconds;
    int left;

    (void)module;
    if (!PyArg_ParseTuple(args, "Od", &given, &seconds) || !(crew = crew_of(given)))
        return NULL;
    double at = monotonic() + seconds;
    struct timespec end = {(time_t)at, (long)((at - (double)(time_t)at) * 1e9)};
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&crew->lock);
    while (crew->over < crew->count && pthread_cond_timedwait(&crew->ends, &crew->lock, &end) == 0)
        ;
    left = crew->count - crew->over;
    pthread_mutex_unlock(&crew->lock);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!left);
}

static PyObject *items(PyObject *module, PyObject *capsule)
{
    const Native *native = PyCapsule_GetPointer(capsule, NATIVE);

    (void)module;
    return native ? PyLong_FromSsize_t(native->count) : NULL;
}

static PyObject *ended(PyObject *module, PyObject *capsule)
{
    Native *native = PyCapsule_GetPointer(capsule, NATIVE);

    (void)module;
    return native ? PyLong_FromSsize_t(atomic_load(&native->ended)) : NULL;
}

static PyObject *step(PyObject *module, PyObject *capsule)
{
    Native *native = PyCapsule_GetPointer(capsule, NATIVE);

    (void)module;
    if (!native)
        return NULL;
    Py_ssize_t item = atomic_fetch_add(&native->taken, 1);
    if (item < native->count) {
        Py_BEGIN_ALLOW_THREADS
        native->one(native, item);
        Py_END_ALLOW_THREADS
        atomic_fetch_add(&native->ended, 1);
    }
    return PyBool_FromLong(item + 1 < native->count);
}

static PyObject *leave(PyObject *module, PyObject *capsule)
{
    const Native *native = PyCapsule_GetPointer(capsule, NATIVE);

    (void)module;
    if (!native)
        return NULL;
    if (native->leave) {
        Py_BEGIN_ALLOW_THREADS
        native->leave();
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"start", start, METH_VARARGS,
     "start(threads, eventfd, nice): a crew of threads. The eventfd becomes readable when work has ended; raises OSError"},
    {"put", put, METH_VARARGS,
     "put(crew, work, native, threads, owner): have so many threads do items of a native call until none is left; then `finished` "
     "returns the work. Once for each call"},
    {"withdraw", withdraw, METH_VARARGS, "withdraw(crew, work): whether no thread had begun it; then none will"},
    {"finished", finished, METH_O, "finished(crew): the works that have ended since the last call"},
    {"running", running, METH_O, "running(crew): (thread, work, since when) of each that a thread is at, by time.monotonic"},
    {"dismiss", dismiss, METH_O, "dismiss(crew): accept no more, and let the threads end. The works that no thread will begin"},
    {"join", join, METH_VARARGS, "join(crew, seconds): wait for the threads after `dismiss`. Whether all have ended"},
    {"items", items, METH_O, "items(native): how many items it has, done or not"},
    {"ended", ended, METH_O, "ended(native): how many of them have been done"},
    {"step", step, METH_O, "step(native): do the next item in this thread, if one is left. Whether more are left"},
    {"leave", leave, METH_O, "leave(native): what a thread does that turns to something else after a step"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_crew", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__crew(void)
{
    return PyModule_Create(&module);
}
