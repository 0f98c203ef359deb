/* The steps of a decoder layer that take each row by itself: normalization, rotation with the way into the pool, and
 * the gate of the MLP.
 *
 * In: rows of the packed batch, float32 or bfloat16. Out: rows of the same type.
 *
 * Invariant: the bits of a row are a function of that row (and its position, for the rotation); sums run over fixed
 * lanes, first to last. Everything is computed in float32 and rounded to the model's type where `transformers` does
 * that, so that bfloat16 models see the values that they were trained to see. Shapes, strides and slots have been
 * checked by the caller, engine/native/steps.py.
 */
#include "vectors.h"

/* What a value becomes when it is kept in the model's type between two steps. */
INLINE Vector as_kept(Vector x, const int bfloat16) { return bfloat16 ? widen(narrow_all(x)) : x; }

/* out[row] = weight * (x[row] / sqrt(mean(x[row]^2) + eps)); both may be the same memory. */
INLINE void normalize_row(const void *x, const void *weight, void *out, int64_t at, int64_t to, int64_t width, float eps, const int bfloat16)
{
    Vector sums[4] = {{0}, {0}, {0}, {0}};
    for (int64_t d = 0; d < width; d += 4 * LANES)
        UNROLL for (int i = 0; i < 4; i++)
        {
            int64_t left = width - d - i * LANES;
            if (left > 0) {
                Vector part = load_part(x, at + d + i * LANES, left, bfloat16);
                sums[i] = fused(part, part, sums[i]);
            }
        }
    Vector sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    Vector scale = all(1.0f / sqrtf(sum_of_lanes(sum) / (float)width + eps));
    for (int64_t d = 0; d < width; d += LANES) {
        Vector normal = as_kept(load_part(x, at + d, width - d, bfloat16) * scale, bfloat16);
        store_part(out, to + d, width - d, load_part(weight, d, width - d, bfloat16) * normal, bfloat16);
    }
}

/* `x` is [rows, groups, width], `stride` elements from row to row; `out` [rows, groups, width], dense. */
void normalize(const void *x, const void *weight, void *out, int64_t rows, int64_t groups, int64_t stride, int64_t width, float eps, int64_t bfloat16)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t group = 0; group < groups; group++) {
            int64_t at = row * stride + group * width, to = (row * groups + group) * width;
            if (bfloat16)
                normalize_row(x, weight, out, at, to, width, eps, 1);
            else
                normalize_row(x, weight, out, at, to, width, eps, 0);
        }
}

/* x / (1 + e^-x); below zero as x e^x / (1 + e^x), so that nothing overflows. */
INLINE Vector silu(Vector x)
{
    Bits negative = (Bits)(x < all(0.0f));
    Vector small = exponential(all(0.0f) - (Vector)((Bits)x & 0x7fffffffu)), scaled = x * small;
    return (Vector)((negative & (Bits)scaled) | (~negative & (Bits)x)) / (all(1.0f) + small);
}

INLINE void gate_row(const void *gate_up, void *out, int64_t row, int64_t width, const int bfloat16)
{
    for (int64_t d = 0; d < width; d += LANES) {
        Vector gate = load_part(gate_up, row * 2 * width + d, width - d, bfloat16);
        Vector up = load_part(gate_up, row * 2 * width + width + d, width - d, bfloat16);
        store_part(out, row * width + d, width - d, as_kept(silu(gate), bfloat16) * up, bfloat16);
    }
}

/* out = silu(gate) * up, of [rows, 2 * width]: gate first, then up. */
void gate(const void *gate_up, void *out, int64_t rows, int64_t width, int64_t bfloat16)
{
    for (int64_t row = 0; row < rows; row++)
        if (bfloat16)
            gate_row(gate_up, out, row, width, 1);
        else
            gate_row(gate_up, out, row, width, 0);
}

/* Dimension i of a head is paired with i + half. */
INLINE void rotate_head(void *heads, int64_t at, void *to, int64_t place, const void *cosines, const void *sines, int64_t half, const int bfloat16)
{
    for (int64_t d = 0; d < half; d += LANES) {
        Vector low = load_part(heads, at + d, half - d, bfloat16);
        Vector high = load_part(heads, at + half + d, half - d, bfloat16);
        Vector cosine = load_part(cosines, d, half - d, bfloat16), sine = load_part(sines, d, half - d, bfloat16);
        Vector first = as_kept(low * cosine, bfloat16) - as_kept(high * sine, bfloat16);
        Vector second = as_kept(high * cosine, bfloat16) + as_kept(low * sine, bfloat16);
        store_part(to, place + d, half - d, first, bfloat16);
        store_part(to, place + half + d, half - d, second, bfloat16);
    }
}

INLINE void rotate_token(void *heads, const void *cosines, const void *sines, int64_t slot, void *keys, void *values, int64_t token,
    int64_t queries, int64_t kv_heads, int64_t head_dim, const int bfloat16)
{
    const size_t size = bfloat16 ? 2 : 4;
    const int64_t start = token * (queries + 2 * kv_heads) * head_dim, kept = slot * kv_heads * head_dim;
    const void *cosine = (const char *)cosines + token * head_dim * size, *sine = (const char *)sines + token * head_dim * size;
    for (int64_t head = 0; head < queries; head++) {
        int64_t at = start + head * head_dim;
        rotate_head(heads, at, heads, at, cosine, sine, head_dim / 2, bfloat16);
    }
    for (int64_t head = 0; head < kv_heads; head++)
        rotate_head(heads, start + (queries + head) * head_dim, keys, kept + head * head_dim, cosine, sine, head_dim / 2, bfloat16);
    memcpy((char *)values + kept * size, (const char *)heads + (start + (queries + kv_heads) * head_dim) * size,
        (size_t)(kv_heads * head_dim) * size);
}

/* `heads` is [tokens, queries + 2 * kv_heads, head_dim]: queries, keys, values. Queries are rotated where they are; keys
 * are rotated into `keys` and values copied into `values`, both [slots, kv_heads, head_dim], at each token's slot.
 * `cosines` and `sines` are [tokens, head_dim], of which the first half of each row is read. */
void rotate_and_keep(void *heads, const void *cosines, const void *sines, const int64_t *slots, void *keys, void *values, int64_t tokens,
    int64_t queries, int64_t kv_heads, int64_t head_dim, int64_t bfloat16)
{
    for (int64_t token = 0; token < tokens; token++)
        if (bfloat16)
            rotate_token(heads, cosines, sines, slots[token], keys, values, token, queries, kv_heads, head_dim, 1);
        else
            rotate_token(heads, cosines, sines, slots[token], keys, values, token, queries, kv_heads, head_dim, 0);
}
