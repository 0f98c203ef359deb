/* Causal attention of a packed batch over paged K and V.
 *
 * In: packed queries, one layer's pool of K and V, and for each request its page table, its piece of the queries
 * and how many positions it has in the pool. Out: one output row for each query token and head.
 *
 * Invariant: the bits of an output row are a function of its own query and of the keys and values at the positions
 * that it sees, in order of position. Whatever else is in the batch, where pages lie, how large they are and how a
 * prompt was cut up changes nothing, because for every row, alone or among others,
 *   - keys are taken in blocks of BLOCK positions that start at multiples of BLOCK, whatever the window;
 *   - a score is one sum over the head's dimensions, first to last;
 *   - the running maximum and sum are updated once a block, in the same lanes;
 *   - exactly the values that the row sees are added, first to last. Those that it does not see are not added with
 *     weight zero either: zero times infinity is not zero.
 * For that to hold in the machine code, every multiply-add is written as one (`fused`), and the compiler is told to
 * make no others (-ffp-contract=off).
 *
 * One source for several instruction sets: vectors are GCC's, as wide as the target's registers. Lengths, page ids,
 * strides and types have been checked by the caller, engine/native/kernel.py.
 */
#include <stdlib.h>

#include "vectors.h"

enum {
    GROUP = 6,      /* rows that share each load of a key or value */
    TILE_ROWS = 96, /* rows that share each preparation of a block; a multiple of GROUP */
    BLOCK = 64,     /* positions */
    ALIGNMENT = 64  /* bytes */
};

/* ---- One tile: some query rows of one request that share a KV head ------------------------------------------- */

/* What kernel.py hands over; the order and the types are the same there. */
typedef struct {
    const int32_t *pages;       /* [requests, pages_per_request]: position p is in page p / page_size */
    const int64_t *first_query; /* [requests + 1]: where each request's tokens start in the packed queries */
    const int64_t *lengths;     /* [requests]: positions in the pool, the batch's own included */
    int64_t requests, pages_per_request, page_size;
    int64_t window; /* how many last positions a token sees, itself included */
} Batch;

typedef struct {
    const void *queries; /* [tokens, heads, head_dim], `query_stride` elements from token to token */
    const void *keys;    /* [slots, kv_heads, head_dim] */
    const void *values;
    void *out; /* [tokens, heads, head_dim] */
    int64_t query_stride, heads, kv_heads, head_dim, bfloat16;
    float scale;
} Tensors;

typedef struct {
    int64_t dim;    /* head_dim, rounded up to whole vectors */
    float *queries; /* [TILE_ROWS, dim], scaled */
    float *sums;    /* [TILE_ROWS, dim]: weighted values */
    float *keys;    /* [dim, BLOCK]: this block's, transposed */
    float *copies;  /* [BLOCK, dim]: this block's values, where the pool's own cannot be used as they are */
    const float *values[BLOCK]; /* where each position's value is */
    float weights[GROUP][BLOCK] __attribute__((aligned(ALIGNMENT)));
    Vector totals[TILE_ROWS];  /* sums of weights, by lane */
    float maxima[TILE_ROWS];   /* the largest score so far */
    int64_t first[TILE_ROWS], last[TILE_ROWS]; /* the positions that a row sees */
} Tile;

/* Positions `[from, to)` of one block, counted from its start. */
typedef struct {
    int from, to;
} Span;

INLINE int within_block(int64_t position, int64_t start)
{
    int64_t offset = position - start;
    return offset < 0 ? 0 : offset > BLOCK ? BLOCK : (int)offset;
}

INLINE Span seen(const Tile *tile, int row, int64_t start)
{
    Span span = {within_block(tile->first[row], start), within_block(tile->last[row] + 1, start)};
    return span;
}

/* The steps of a block. Those that take a number of rows are compiled for each number, with all sums in registers. */

/* weights[row][position] = query . key for `rows` rows and the first `positions` of the block, or some more. */
INLINE void score(Tile *tile, const int rows, int row, int positions)
{
    const float *queries = tile->queries + row * tile->dim;
    for (int at = 0; at < positions; at += WIDTH * LANES) {
        Vector sums[GROUP][WIDTH];
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int w = 0; w < WIDTH; w++) sums[i][w] = all(0.0f);
        for (int64_t d = 0; d < tile->dim; d++) {
            Vector keys[WIDTH];
            UNROLL for (int w = 0; w < WIDTH; w++) keys[w] = load(tile->keys + d * BLOCK + at + w * LANES);
            UNROLL for (int i = 0; i < rows; i++)
            {
                Vector query = all(queries[i * tile->dim + d]);
                UNROLL for (int w = 0; w < WIDTH; w++) sums[i][w] = fused(query, keys[w], sums[i][w]);
            }
        }
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int w = 0; w < WIDTH; w++) store(tile->weights[i] + at + w * LANES, sums[i][w]);
    }
}

/* Scores of one row become weights relative to its running maximum; what was summed before is rescaled to it. */
INLINE void weigh(Tile *tile, int row, float *weights, Span span)
{
    enum { VECTORS = BLOCK / LANES };
    Vector scores[VECTORS], top = all(-INFINITY);
    UNROLL for (int v = 0; v < VECTORS; v++) scores[v] = load(weights + v * LANES);
    if (span.from > 0 || span.to < BLOCK) {
        UNROLL for (int v = 0; v < VECTORS; v++)
        {
            Bits at = LANE + (uint32_t)(v * LANES);
            Bits visible = (Bits)(at >= (uint32_t)span.from) & (Bits)(at < (uint32_t)span.to);
            scores[v] = (Vector)((visible & (Bits)scores[v]) | (~visible & (Bits)all(-INFINITY)));
        }
    }
    UNROLL for (int v = 0; v < VECTORS; v++) top = larger(scores[v], top);
    float maximum = largest_lane(top), before = tile->maxima[row];
    if (maximum > before) {
        Vector factor = exponential(all(before - maximum));
        float *sums = tile->sums + row * tile->dim;
        tile->totals[row] *= factor;
        for (int64_t d = 0; d < tile->dim; d += LANES) store(sums + d, load(sums + d) * factor);
        tile->maxima[row] = maximum;
    }
    Vector reference = all(tile->maxima[row]), total = tile->totals[row];
    UNROLL for (int v = 0; v < VECTORS; v++)
    {
        Vector weight = exponential(scores[v] - reference);
        total += weight;
        store(weights + v * LANES, weight);
    }
    tile->totals[row] = total;
}

INLINE void add_columns(
    Tile *tile, const int rows, const int width, int row, const float (*weights)[BLOCK], Span span, int64_t d)
{
    float *sums = tile->sums + row * tile->dim + d;
    Vector sum[GROUP][WIDTH];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int w = 0; w < width; w++) sum[i][w] = load(sums + i * tile->dim + w * LANES);
    for (int j = span.from; j < span.to; j++) {
        const float *value = tile->values[j] + d;
        Vector values[WIDTH];
        UNROLL for (int w = 0; w < width; w++) values[w] = load(value + w * LANES);
        UNROLL for (int i = 0; i < rows; i++)
        {
            Vector weight = all(weights[i][j]);
            UNROLL for (int w = 0; w < width; w++) sum[i][w] = fused(weight, values[w], sum[i][w]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int w = 0; w < width; w++) store(sums + i * tile->dim + w * LANES, sum[i][w]);
}

/* sums[row] += weight * value for `rows` rows that all see `span`. */
INLINE void add_values(Tile *tile, const int rows, int row, const float (*weights)[BLOCK], Span span)
{
    int64_t d = 0;
    for (; d + WIDTH * LANES <= tile->dim; d += WIDTH * LANES) add_columns(tile, rows, WIDTH, row, weights, span, d);
    for (; d < tile->dim; d += LANES) add_columns(tile, rows, 1, row, weights, span, d);
}

static void add_values_of_one(Tile *tile, int row, const float (*weights)[BLOCK], Span span)
{
    if (span.from < span.to)
        add_values(tile, 1, row, weights, span);
}

INLINE void attend_group(Tile *tile, const int rows, int row, int64_t start)
{
    Span spans[GROUP], common = {0, BLOCK};
    int positions = 0;
    UNROLL for (int i = 0; i < rows; i++)
    {
        Span span = spans[i] = seen(tile, row + i, start);
        if (span.from < span.to && span.to > positions)
            positions = span.to;
        common.from = span.from > common.from ? span.from : common.from;
        common.to = span.to < common.to ? span.to : common.to;
    }
    if (positions == 0)
        return;
    score(tile, rows, row, positions);
    for (int i = 0; i < rows; i++)
        if (spans[i].from < spans[i].to)
            weigh(tile, row + i, tile->weights[i], spans[i]);
    if (common.from >= common.to) {
        for (int i = 0; i < rows; i++) add_values_of_one(tile, row + i, tile->weights + i, spans[i]);
        return;
    }
    for (int i = 0; i < rows; i++)
        add_values_of_one(tile, row + i, tile->weights + i, (Span){spans[i].from, common.from});
    add_values(tile, rows, row, tile->weights, common);
    for (int i = 0; i < rows; i++)
        add_values_of_one(tile, row + i, tile->weights + i, (Span){common.to, spans[i].to});
}

/* The block's keys, transposed, and where its values are. Positions from `end` on are not read: the last one stands
 * in for them, and nobody sees it there. */
INLINE void prepare_block(
    Tile *tile, const Batch *batch, const Tensors *in, const int32_t *pages, int64_t kv_head, int64_t start, int64_t end,
    const int bfloat16)
{
    int64_t offsets[BLOCK], page = start / batch->page_size, place = start % batch->page_size;
    const int64_t positions = end - start < BLOCK ? end - start : BLOCK, element = bfloat16 ? 2 : 4;
    for (int64_t j = 0; j < BLOCK; j++) {
        if (j < positions) {
            int64_t slot = (int64_t)pages[page] * batch->page_size + place;
            offsets[j] = (slot * in->kv_heads + kv_head) * in->head_dim;
            if (++place == batch->page_size)
                place = 0, page++;
        } else
            offsets[j] = offsets[positions - 1];
        /* The values are needed when the scores are there, and pages lie anywhere: have them fetched meanwhile. */
        const char *value = (const char *)in->values + offsets[j] * element;
        for (int64_t byte = 0; byte < in->head_dim * element; byte += ALIGNMENT) __builtin_prefetch(value + byte);
    }
    for (int64_t j = 0; j < positions; j += LANES)
        for (int64_t d = 0; d < tile->dim; d += LANES) {
            Vector rows[LANES];
            if (d + LANES <= in->head_dim) {
                UNROLL for (int i = 0; i < LANES; i++) rows[i] = load_whole(in->keys, offsets[j + i] + d, bfloat16);
            } else {
                const int64_t left = in->head_dim - d;
                for (int i = 0; i < LANES; i++) rows[i] = load_part(in->keys, offsets[j + i] + d, left, bfloat16);
            }
            transpose(rows);
            UNROLL for (int i = 0; i < LANES; i++) store(tile->keys + (d + i) * BLOCK + j, rows[i]);
        }
    for (int64_t j = 0; j < positions; j++) {
        if (!bfloat16 && in->head_dim == tile->dim) {
            tile->values[j] = (const float *)in->values + offsets[j];
            continue;
        }
        float *copy = tile->copies + j * tile->dim;
        for (int64_t d = 0; d < tile->dim; d += LANES)
            store(copy + d, load_part(in->values, offsets[j] + d, in->head_dim - d, bfloat16));
        tile->values[j] = copy;
    }
}

/* Row r of a request's KV head is head r % group of token r / group; this does rows `[from, from + rows)`. */
INLINE void attend_tile(
    Tile *tile, const Batch *batch, const Tensors *in, int64_t request, int64_t kv_head, int64_t from, int rows,
    const int bfloat16)
{
    const int64_t group = in->heads / in->kv_heads, first_query = batch->first_query[request];
    const int64_t length = batch->lengths[request], written = length - (batch->first_query[request + 1] - first_query);
    for (int row = 0; row < rows; row++) {
        int64_t token = (from + row) / group, head = kv_head * group + (from + row) % group;
        int64_t at = (first_query + token) * in->query_stride + head * in->head_dim;
        for (int64_t d = 0; d < tile->dim; d += LANES) {
            Vector query = load_part(in->queries, at + d, in->head_dim - d, bfloat16);
            store(tile->queries + row * tile->dim + d, query * all(in->scale));
            store(tile->sums + row * tile->dim + d, all(0.0f));
        }
        tile->last[row] = written + token;
        tile->first[row] = tile->last[row] < batch->window ? 0 : tile->last[row] - batch->window + 1;
        tile->maxima[row] = -INFINITY;
        tile->totals[row] = all(0.0f);
    }
    const int32_t *pages = batch->pages + request * batch->pages_per_request;
    const int64_t end = tile->last[rows - 1] + 1;
    for (int64_t start = tile->first[0] / BLOCK * BLOCK; start < end; start += BLOCK) {
        prepare_block(tile, batch, in, pages, kv_head, start, end, bfloat16);
        int row = 0;
        for (; row + GROUP <= rows; row += GROUP) attend_group(tile, GROUP, row, start);
        switch (rows - row) {
        case 5: attend_group(tile, 5, row, start); break;
        case 4: attend_group(tile, 4, row, start); break;
        case 3: attend_group(tile, 3, row, start); break;
        case 2: attend_group(tile, 2, row, start); break;
        case 1: attend_group(tile, 1, row, start); break;
        default: break;
        }
    }
    for (int row = 0; row < rows; row++) {
        int64_t token = (from + row) / group, head = kv_head * group + (from + row) % group;
        int64_t at = ((first_query + token) * in->heads + head) * in->head_dim;
        const float *sums = tile->sums + row * tile->dim, total = sum_of_lanes(tile->totals[row]);
        for (int64_t d = 0; d < in->head_dim; d++) {
            if (bfloat16)
                ((uint16_t *)in->out)[at + d] = narrow(sums[d] / total);
            else
                ((float *)in->out)[at + d] = sums[d] / total;
        }
    }
}

static void attend_float32(
    Tile *tile, const Batch *batch, const Tensors *in, int64_t request, int64_t head, int64_t from, int rows)
{
    attend_tile(tile, batch, in, request, head, from, rows, 0);
}

static void attend_bfloat16(
    Tile *tile, const Batch *batch, const Tensors *in, int64_t request, int64_t head, int64_t from, int rows)
{
    attend_tile(tile, batch, in, request, head, from, rows, 1);
}

/* ---- The batch ----------------------------------------------------------------------------------------------- */

/* Returns 0, or -1 if there is no memory to work in. */
int paged_attention(const Batch *batch, const Tensors *in)
{
    Tile tile = {.dim = (in->head_dim + LANES - 1) / LANES * LANES};
    const size_t block = (size_t)tile.dim * BLOCK, rows = (size_t)tile.dim * TILE_ROWS; /* floats; whole cache lines */
    float *memory = aligned_alloc(ALIGNMENT, 4 * 2 * (block + rows));
    if (memory == NULL)
        return -1;
    memset(memory, 0, 4 * block); /* lanes of keys that are never filled take part, unseen */
    tile.keys = memory;
    tile.copies = tile.keys + block;
    tile.queries = tile.copies + block;
    tile.sums = tile.queries + rows;
    for (int64_t request = 0; request < batch->requests; request++) {
        const int64_t tokens = batch->first_query[request + 1] - batch->first_query[request];
        const int64_t all_rows = tokens * (in->heads / in->kv_heads);
        for (int64_t head = 0; head < in->kv_heads; head++)
            for (int64_t from = 0; from < all_rows; from += TILE_ROWS) {
                int count = all_rows - from < TILE_ROWS ? (int)(all_rows - from) : TILE_ROWS;
                (in->bfloat16 ? attend_bfloat16 : attend_float32)(&tile, batch, in, request, head, from, count);
            }
    }
    free(memory);
    return 0;
}
