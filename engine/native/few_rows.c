/* A matrix product for few rows, which is a matter of reading the weights once, as fast as memory gives them.
 *
 * In: rows, and weights packed into panels: COLUMNS outputs side by side, input after input. Out: rows.
 *
 * Invariant: an output is one sum over the inputs, first to last, in blocks of `block` inputs whose sums are added in
 * order; then the bias. So it does not depend on the number of rows, and it has the bits of any other product that adds
 * up in that order. Which block a library has is found out by trying, in engine/linear.py; shapes have been checked in
 * engine/native/few_rows.py.
 */
#include "vectors.h"

enum {
    COLUMNS = WIDTH * LANES,
    ROWS = 6, /* that share each load of a weight; sums of more do not fit the registers */
    PANELS = 4, /* read side by side for a single row: memory serves several streams faster than one */
    AHEAD = 32  /* inputs whose weights are fetched before they are needed */
};

typedef struct {
    const float *x, *panels, *bias;
    float *out;
    int64_t rows, outputs, inputs, block;
} Product;

int64_t panel_columns(void) { return COLUMNS; }

/* panels [outputs / COLUMNS, rounded up][inputs][COLUMNS] of weights [outputs, inputs]; what is beyond the outputs is 0. */
void pack_panels(const float *weights, float *panels, int64_t outputs, int64_t inputs)
{
    for (int64_t first = 0; first < outputs; first += COLUMNS)
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t column = first; column < first + COLUMNS; column++)
                *panels++ = column < outputs ? weights[column * inputs + k] : 0.0f;
}

/* `rows` rows from `row` on by `panels` panels from `panel` on. */
INLINE void multiply(const Product *in, int64_t row, const int rows, int64_t panel, const int panels)
{
    const float *x = in->x + row * in->inputs, *weights = in->panels + panel * in->inputs * COLUMNS;
    Vector sums[PANELS][ROWS][WIDTH], part[PANELS][ROWS][WIDTH];
    for (int64_t from = 0; from < in->inputs; from += in->block) {
        const int64_t to = from + in->block < in->inputs ? from + in->block : in->inputs;
        UNROLL for (int p = 0; p < panels; p++) UNROLL for (int i = 0; i < rows; i++) UNROLL for (int w = 0; w < WIDTH; w++)
            part[p][i][w] = all(0.0f);
        for (int64_t k = from; k < to; k++)
            UNROLL for (int p = 0; p < panels; p++)
            {
                const float *at = weights + (p * in->inputs + k) * COLUMNS;
                Vector weight[WIDTH];
                UNROLL for (int w = 0; w < WIDTH; w++) weight[w] = load(at + w * LANES);
                UNROLL for (int w = 0; w < WIDTH; w++) __builtin_prefetch(at + AHEAD * COLUMNS + w * LANES);
                UNROLL for (int i = 0; i < rows; i++)
                {
                    Vector input = all(x[i * in->inputs + k]);
                    UNROLL for (int w = 0; w < WIDTH; w++) part[p][i][w] = fused(input, weight[w], part[p][i][w]);
                }
            }
        UNROLL for (int p = 0; p < panels; p++) UNROLL for (int i = 0; i < rows; i++) UNROLL for (int w = 0; w < WIDTH; w++)
            sums[p][i][w] = from ? sums[p][i][w] + part[p][i][w] : part[p][i][w];
    }
    for (int p = 0; p < panels; p++)
        for (int i = 0; i < rows; i++)
            for (int64_t w = 0; w < WIDTH; w++) {
                const int64_t column = (panel + p) * COLUMNS + w * LANES, left = in->outputs - column;
                if (left <= 0)
                    break;
                Vector sum = in->bias ? sums[p][i][w] + load_part(in->bias, column, left, 0) : sums[p][i][w];
                store_part(in->out, (row + i) * in->outputs + column, left, sum, 0);
            }
}

/* out [rows, outputs] = x [rows, inputs] times the weights, plus `bias` [outputs] unless it is null. */
void multiply_few_rows(const Product *in)
{
    const int64_t panels = (in->outputs + COLUMNS - 1) / COLUMNS;
    int64_t panel = 0;
    if (in->rows < 1)
        return;
    if (in->rows == 1)
        for (; panel + PANELS <= panels; panel += PANELS) multiply(in, 0, 1, panel, PANELS);
    if (in->rows <= 3)
        for (; panel + 2 <= panels; panel += 2) switch (in->rows) {
            case 1: multiply(in, 0, 1, panel, 2); break;
            case 2: multiply(in, 0, 2, panel, 2); break;
            default: multiply(in, 0, 3, panel, 2); break;
            }
    for (; panel < panels; panel++) {
        int64_t row = 0;
        for (; row + ROWS <= in->rows; row += ROWS) multiply(in, row, ROWS, panel, 1);
        switch (in->rows - row) {
        case 5: multiply(in, row, 5, panel, 1); break;
        case 4: multiply(in, row, 4, panel, 1); break;
        case 3: multiply(in, row, 3, panel, 1); break;
        case 2: multiply(in, row, 2, panel, 1); break;
        case 1: multiply(in, row, 1, panel, 1); break;
        default: break;
        }
    }
}
