/* Blocks that a task lends to I/O threads: _inplace.c makes them, and _files.c has objects made of them, or taken by them,
 * without the GIL. */
#ifndef TRANSFERD_LENT_H
#define TRANSFERD_LENT_H
#include <stddef.h>

#define LENT "transferd.workers._inplace.lent" /* the name of the capsule with a Lent */

/* i: the number of the block among those that are lent. Call `fill` and `take` without the GIL, after `guard->ready`. */
typedef struct Lent Lent;
struct Lent {
    Py_ssize_t count;
    /* Makes the object of a block. near: this core reads it next. 1 if it is made; 0 if the loan has ended, and `data` holds
     * no object; -1 if the block's memory is lost; -2 if this thread cannot be guarded. */
    int (*fill)(Lent *lent, Py_ssize_t i, unsigned char *data, int near);
    /* Copies an object to its block. 1 if the block holds it, and it is right; 0, -1 and -2 as above, and also 0 if the object
     * is not right, which the caller should find out about. Touches the block only if the footer is right. */
    int (*take)(Lent *lent, Py_ssize_t i, const unsigned char *data);
    int (*over)(const Lent *lent); /* whether the loan has ended */
    size_t nbytes;                 /* of an object */
};
#endif
