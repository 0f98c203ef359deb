/* Vectors as wide as the target's registers, for one source that is compiled for several instruction sets.
 *
 * In: what the compiler says of the target (-march). Out: LANES, WIDTH and the operations of the kernel on `Vector`.
 * Invariant: each of them gives the same bits wherever it is inlined; a multiply-add is one where the target has it
 * and only where `fused` says so (-ffp-contract=off). GCC's vector extension does the rest.
 */
#ifndef PACELINE_VECTORS_H
#define PACELINE_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* ---- What differs between instruction sets ------------------------------------------------------------------- */

/* WIDTH vectors of each of six rows can be summed at once with registers to spare for what is added. */
#if defined(__AVX512F__)
enum { LANES = 16, WIDTH = 4 };
#elif defined(__AVX2__)
enum { LANES = 8, WIDTH = 2 };
#elif defined(__aarch64__)
enum { LANES = 4, WIDTH = 4 };
#else
enum { LANES = 4, WIDTH = 2 };
#endif
typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

#if defined(__AVX512F__)
INLINE Vector fused(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); } /* b if either is not a number */
static const Bits LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
INLINE Vector fused(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vector larger(Vector a, Vector b) { return _mm256_max_ps(a, b); }
static const Bits LANE = {0, 1, 2, 3, 4, 5, 6, 7};
#else
#if defined(__aarch64__)
INLINE Vector fused(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
#else
INLINE Vector fused(Vector a, Vector b, Vector c) { return a * b + c; }
#endif
INLINE Vector larger(Vector a, Vector b)
{
    Bits is = (Bits)(a > b);
    return (Vector)((is & (Bits)a) | (~is & (Bits)b));
}
static const Bits LANE = {0, 1, 2, 3};
#endif

/* ---- Vectors ------------------------------------------------------------------------------------------------- */

INLINE Vector all(float x) { return x - (Vector){0}; }

INLINE Vector load(const float *from)
{
    Vector x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, Vector x) { memcpy(to, &x, sizeof x); }

INLINE Vector widen(Halves x) { return (Vector)(__builtin_convertvector(x, Bits) << 16); }

INLINE Vector load_whole(const void *from, int64_t at, int bfloat16)
{
    if (!bfloat16)
        return load((const float *)from + at);
    Halves x;
    memcpy(&x, (const uint16_t *)from + at, sizeof x);
    return widen(x);
}

/* The first `count` of LANES elements of a float32 or bfloat16 array, then zeros; nothing is read beyond them. */
INLINE Vector load_part(const void *from, int64_t at, int64_t count, int bfloat16)
{
    if (count >= LANES)
        return load_whole(from, at, bfloat16);
    float part[LANES] = {0};
    for (int64_t i = 0; i < count; i++) {
        if (bfloat16) {
            uint32_t bits = (uint32_t)((const uint16_t *)from)[at + i] << 16;
            memcpy(part + i, &bits, sizeof bits);
        } else
            part[i] = ((const float *)from)[at + i];
    }
    return load(part);
}

/* Round to nearest, ties to even; not-a-number stays one. */
INLINE uint16_t narrow(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(bits >> 16 | 0x40u);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

INLINE Halves narrow_all(Vector x)
{
    Bits bits = (Bits)x, number = (Bits)(x == x);
    Bits rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return __builtin_convertvector((number & rounded) | (~number & (bits >> 16 | 0x40u)), Halves);
}

/* The first `count` of LANES elements; nothing is written beyond them. */
INLINE void store_part(void *to, int64_t at, int64_t count, Vector x, int bfloat16)
{
    const Halves halves = narrow_all(x);
    if (count >= LANES) {
        if (bfloat16)
            memcpy((uint16_t *)to + at, &halves, sizeof halves);
        else
            store((float *)to + at, x);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        if (bfloat16)
            ((uint16_t *)to)[at + i] = halves[i];
        else
            ((float *)to)[at + i] = x[i];
    }
}

/* The maximum of all lanes, and their sum, by halves. */
INLINE float largest_lane(Vector x)
{
    UNROLL for (uint32_t step = LANES / 2; step > 0; step /= 2) x = larger(x, __builtin_shuffle(x, LANE ^ step));
    return x[0];
}

INLINE float sum_of_lanes(Vector x)
{
    UNROLL for (uint32_t step = LANES / 2; step > 0; step /= 2) x = x + __builtin_shuffle(x, LANE ^ step);
    return x[0];
}

/* rows[i][j] becomes rows[j][i]: the two halves of the rows are interleaved once for each bit of an index. */
INLINE void transpose(Vector rows[LANES])
{
    const Bits low = (LANE >> 1) + (LANE & 1) * LANES, high = low + LANES / 2;
    UNROLL for (int step = 1; step < LANES; step *= 2)
    {
        Vector next[LANES];
        UNROLL for (int i = 0; i < LANES / 2; i++)
        {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
        }
        UNROLL for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

/* e to the x for x <= 0, within 2 units in the last place; 0 where that would be too small for a normal float. */
INLINE Vector exponential(Vector x)
{
    const Vector lowest = all(-87.3f), to_integer = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    Vector inside = larger(lowest, x);
    Vector shifted = fused(inside, all(1.44269504f), to_integer);
    Vector power = shifted - to_integer;
    Vector rest = fused(power, all(-0.693359375f), inside); /* ln 2 in two parts, the first exact */
    rest = fused(power, all(2.12194440e-4f), rest);
    Vector sum = all(1.9875691500e-4f);
    sum = fused(sum, rest, all(1.3981999507e-3f));
    sum = fused(sum, rest, all(8.3334519073e-3f));
    sum = fused(sum, rest, all(4.1665795894e-2f));
    sum = fused(sum, rest, all(1.6666665459e-1f));
    sum = fused(sum, rest, all(5.0000001201e-1f));
    sum = fused(sum, rest * rest, rest + all(1.0f));
    Bits scale = ((Bits)shifted << 23) + 0x3f800000u;
    return (Vector)((Bits)(sum * (Vector)scale) & ~(Bits)(x < lowest));
}

#endif
