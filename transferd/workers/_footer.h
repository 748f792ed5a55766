/* The footer of an object, as blocks/formats.py describes it, and its own checksum. */
#ifndef TRANSFERD_FOOTER_H
#define TRANSFERD_FOOTER_H
#include "_xxh3.h"

#define FOOTER 128
#define CHECKSUM 24
#define KEY 32
#define DIVIDED 52
#define IDENTITY 56 /* generation, layout, model */
#define SEALS 104   /* of the parts but the last */
#define SEAL 120    /* of the footer itself */

static uint64_t mixed(const unsigned char *data, const unsigned char *key)
{
    __uint128_t product = (__uint128_t)(word(data) ^ word(key)) * (word(data + 8) ^ word(key + 8));
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

#define SEALED_BYTES 120 /* of a footer, before its own checksum: the specification has another way for 97 to 128 bytes */

/* The checksum of the first SEALED_BYTES of a footer. */
static uint64_t of_footer(const unsigned char *data)
{
    uint64_t sum = SEALED_BYTES * P64_1;
    for (int i = 3; i >= 0; i--) {
        sum += mixed(data + 16 * i, secret + 32 * i);
        sum += mixed(data + SEALED_BYTES - 16 * (i + 1), secret + 32 * i + 16);
    }
    sum ^= sum >> 37;
    sum *= MIX;
    return sum ^ (sum >> 32);
}

/* Whether this is the footer of the object that is wanted. */
static int is_wanted(const unsigned char *found, const unsigned char *wanted)
{
    return !memcmp(found, wanted, CHECKSUM) && !memcmp(found + KEY, wanted + KEY, DIVIDED - KEY) &&
           !memcmp(found + IDENTITY, wanted + IDENTITY, SEALS - IDENTITY) && word(found + SEAL) == of_footer(found);
}
#endif
