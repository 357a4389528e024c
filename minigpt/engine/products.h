/* The products of a step: all rows, normalized first, times a weight in one of five forms, and what comes after.
 *
 * Every form computes sums of its outputs for all rows. A sum's order depends on the number of inputs only: one chain for
 * each part of the inputs, and then the parts in their order.
 */
#ifndef PRODUCTS_H
#define PRODUCTS_H
#include "model.h"

enum { SLAB = 64, STRIPE = 32, PIECE = 512 }; /* outputs; inputs; outputs that are finished together */
enum { PARTS = 8 };                           /* of the inputs, at most */
enum { FEW = 24, BATCH = 32 };                /* rows; more than FEW are many, and a chunk prepares BATCH of them */
enum { KEPT = 768 };                          /* units of a slab that are packed together */
enum { STREAMS = 8, EARLY = 512 };            /* inputs that are read together; columns to prefetch ahead */
enum { SHARED = 8, WIDEST = 1024 };           /* rows in float32 for which threads share parts of inputs; outputs of a chunk */
enum { SHARE = 16, FAR = 16, SOON = 16 };     /* outputs that stay in a cache; slabs, and rows of outputs, to prefetch ahead */
enum { EAGER = 128 };                         /* rows up to which the next slab's weights are prefetched */
enum after { STORE, ADD, ACTIVATE, LOGITS };  /* LOGITS: out is (R, padded), and takes the sums as they are */

static void normalize(const struct norm *norm, const float *x, float *y, long width, int is_first) {
    const long whole = width / LANES * LANES;
    float mean = 0, variance = 0;
    vec sum = {0}, squares = {0};
    if (norm->kind != RMS) {
        for (long i = 0; i < whole; i += LANES) sum += *(const stored *)(x + i);
        mean = total(sum);
        for (long i = whole; i < width; i++) mean += x[i];
        mean /= width;
    }
    for (long i = 0; i < whole; i += LANES) {
        const vec centred = *(const stored *)(x + i) - mean;
        squares = fused(squares, centred, centred);
    }
    variance = total(squares);
    for (long i = whole; i < width; i++) variance = fused_one(variance, x[i] - mean, x[i] - mean);
    variance /= width;
    float deviation = sqrtf(variance + norm->eps);
    if (norm->kind == STD_EPS) deviation = sqrtf(variance) + norm->eps;
    if (norm->kind == FROZEN) deviation = norm->constants[is_first];
    /* PyTorch's own norm is NaN or constant there. */
    float factor = variance > FLT_MAX && norm->kind != FROZEN ? NAN : 1.0f / deviation;
    for (long i = 0; i < width; i++) y[i] = (x[i] - mean) * factor;
    if (norm->scale)
        for (long i = 0; i < width; i++) y[i] *= norm->scale[i];
    if (norm->shift)
        for (long i = 0; i < width; i++) y[i] += norm->shift[i];
}

static void activate(float *x, long count, int64_t kind) {
    if (kind == GELU_TANH) /* 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)) */
        for (long i = 0; i < count; i++)
            x[i] = x[i] / (1.0f + exponential(-1.5957691216f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
    else if (kind == GELU)
        for (long i = 0; i < count; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
    else if (kind == RELU)
        for (long i = 0; i < count; i++) x[i] = x[i] > 0 || x[i] != x[i] ? x[i] : 0.0f;
    else if (kind == SILU)
        for (long i = 0; i < count; i++) x[i] = x[i] / (1.0f + exponential(-x[i]));
    else
        for (long i = 0; i < count; i++) x[i] = tanhf(x[i]);
}

struct product {
    const struct matrix *matrix;
    const struct norm *norm; /* of the input, or NULL */
    const float *in;         /* (rows of the step, K) */
    float *sums;             /* (parts, R, step) */
    float *out;              /* (rows of the step, out) */
    float *operand, *scales; /* of the worker, or of all for many rows */
    int64_t rows, pitch, is_many;
    int64_t is_own;          /* the sums are a thread's own, and only of one slab */
    int64_t is_last;         /* a chunk's sums are whole, and the chunk does what comes after, too */
    int64_t part, parts;     /* inputs of a part, and parts that threads share */
    int64_t chunk, step;     /* outputs of a chunk, and from row to row of the sums */
    enum after after;
};

/* Return where a row's sums begin, from an output on. */
INLINE float *sums_of(const struct product *p, long r, long from) {
    return p->sums + r * p->step + (p->is_own ? from % SLAB : from);
}

#if defined(__AVX512BF16__)
enum { HAS_DOT = 1 }; /* instructions that multiply pairs of bfloat16: inputs are bfloat16 too */
#else
enum { HAS_DOT = 0 };
#endif

/* Weights to prefetch while a tile reads lines of weights: some bytes at each line. Tiles that take turns at the same lines
 * share them, so that memory is asked at an even pace. */
struct ahead {
    const char *next;
    long step, bytes, from, to;
};

INLINE struct ahead turn(const char *next, long step, long bytes, long lines, long row, long many, long rows) {
    return (struct ahead){next, step, bytes, lines * row / rows, lines * (row + many) / rows};
}

INLINE void prefetch_at(const struct ahead *a, long line) {
    if (line >= a->from && line < a->to) prefetch(a->next + line * a->step, a->bytes);
}

/* Return sum + weights * inputs; with is_dot, of the pairs of bfloat16 that the lanes hold. */
INLINE vec add_product(vec sum, vec weights, vec inputs, int is_dot) {
#if defined(__AVX512BF16__)
    if (is_dot) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)inputs);
#endif
    (void)is_dot;
    return fused(sum, weights, inputs);
}

/* How many of the rows a tile takes: at most ROWS, and all tiles about the same. */
INLINE long height(long rows) {
    const long tiles = (rows + ROWS - 1) / ROWS;
    return (rows + tiles - 1) / tiles;
}

enum tiling { GO_ON, BEGIN, ADD_PART }; /* the sums of a tile continue those in memory, replace them, or are added to them */

/* sums (rows, columns) = x (rows, x_step) times w (units, columns). A unit is one input in float32 or two in bfloat16. */
INLINE void tile(int rows, const float *x, long x_step, const float *w, long w_step, float *sums, long step, long units,
                 int is_dot, enum tiling tiling, struct ahead ahead) {
    vec sum[ROWS][VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) sum[r][v] = tiling == GO_ON ? (vec)*(stored *)(sums + r * step + v * LANES) : (vec){0};
    for (long k = 0; k < units; k++) {
        for (int i = 0; i <= is_dot; i++) prefetch_at(&ahead, k * (1 + is_dot) + i);
        for (int r = 0; r < rows; r++) {
            const vec input = x[r * x_step + k] - (vec){0}; /* compilers would add 0 */
            for (int v = 0; v < VECS; v++)
                sum[r][v] = add_product(sum[r][v], *(const stored *)(w + k * w_step + v * LANES), input, is_dot);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECS; v++) {
            stored *y = (stored *)(sums + r * step + v * LANES);
            if (tiling == ADD_PART) sum[r][v] += *y;
            *y = sum[r][v];
        }
}

/* Copy weights of n inputs and some outputs to where the tile reads them, as STRIPE inputs (units, SLAB), with zeros behind the
 * last ones. A function of its own: the tile behind it would get too few registers. */
static __attribute__((noinline)) void pack(const char *w, long w_step, long n, long outs, float *units, int is_half) {
    const int is_dot = is_half && HAS_DOT;
    const long size = is_half ? 2 : 4, unit = 1 + is_dot;
    if (n < STRIPE || outs < SLAB) {
        memset(units, 0, sizeof(float) * STRIPE / unit * SLAB);
        for (long i = 0; i < n; i++)
            for (long j = 0; j < outs; j++) {
                if (is_dot) ((uint16_t *)units)[(i / 2 * SLAB + j) * 2 + i % 2] = ((const uint16_t *)w)[i * w_step + j];
                else units[i * SLAB + j] = value_at(w, i * w_step + j, is_half);
            }
        return;
    }
    for (long i = 0; i < STRIPE / unit; i++, w += unit * w_step * size, units += SLAB) {
#if defined(__AVX512BF16__)
        for (long j = 0; is_dot && j < SLAB; j += 2 * LANES) {
            const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                                 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
            const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
            const __m512i one = _mm512_loadu_si512(w + j * size), two = _mm512_loadu_si512(w + (w_step + j) * size);
            _mm512_storeu_si512(units + j, _mm512_permutex2var_epi16(one, low, two));
            _mm512_storeu_si512(units + j + LANES, _mm512_permutex2var_epi16(one, high, two));
        }
#endif
        for (long j = 0; !is_dot && j < SLAB; j += LANES) *(stored *)(units + j) = vec_at(w, j, is_half);
    }
}

/* Some vectors of sums (rows, step) += x (rows, x_step) times some inputs of w. The weights stay in registers. */
INLINE void add_inputs(long rows, const float *x, long x_step, const char *w, long w_step, float *sums, long step, int inputs,
                       int vecs, int is_half) {
    vec weights[GROUP][2], sum[2];
    for (int i = 0; i < inputs; i++) {
        if (vecs == 2) two_vecs_at(w, i * w_step, weights[i], is_half);
        else weights[i][0] = vec_at(w, i * w_step, is_half);
    }
    for (long r = 0; r < rows; r++) {
        stored *y = (stored *)(sums + r * step);
        for (int v = 0; v < vecs; v++) sum[v] = y[v];
        for (int i = 0; i < inputs; i++) {
            const vec input = x[r * x_step + i] - (vec){0};
            for (int v = 0; v < vecs; v++) sum[v] = fused(sum[v], weights[i][v], input);
        }
        for (int v = 0; v < vecs; v++) y[v] = sum[v];
    }
}

/* Return the place far units behind w, for a thread that goes on at later after the left units. */
INLINE const char *reached(const char *w, long far, long unit, long left, const char *later) {
    return far < left ? w + far * unit : later + (far - left) * unit;
}

/* sums (rows, columns) = x (rows, units) times w (units, columns), for columns that have left units. Memory is read in so many
 * streams, each a row of w. Afterwards the thread probably goes on at later. */
INLINE void stream(long rows, const float *x, long x_step, const char *w, long w_step, float *sums, long step, long units,
                   long columns, int is_half, int streams, long left, const char *later) {
    const int vecs = is_half ? 2 : LINE_VECS;
    const long size = is_half ? 2 : 4, width = vecs * LANES, whole = columns / width * width;
    for (long r = 0; r < rows; r++) memset(sums + r * step, 0, sizeof(float) * columns);
    for (long k = 0, some; k < units; k += some, w += some * w_step * size) {
        some = units - k < streams ? 1 : streams;
        for (long c = 0; some == streams && c < whole; c += width) {
            if (c * size % LINE == 0) { /* behind the end of a row begins the next one of its stream */
                long far = 0, column = c + EARLY;
                for (; column >= columns; column -= columns) far += streams;
                const char *next = reached(w, far, w_step * size, left - k, later) + column * size;
                for (int i = 0; i < streams; i++) prefetch(next + i * w_step * size, LINE);
            }
            for (int i = 0; i < streams; i += GROUP)
                add_inputs(rows, x + k + i, x_step, w + (i * w_step + c) * size, w_step, sums + c, step, GROUP, vecs, is_half);
        }
        for (long c = 0; some == 1 && c < whole; c += width)
            add_inputs(rows, x + k, x_step, w + c * size, w_step, sums + c, step, 1, vecs, is_half);
        for (long r = 0; r < rows; r++)
            for (int i = 0; i < some; i++)
                for (long c = whole; c < columns; c++)
                    sums[r * step + c] =
                        fused_one(sums[r * step + c], x[r * x_step + k + i], value_at(w, i * w_step + c, is_half));
    }
    for (long r = 0; is_half && r < rows; r++) straighten(sums + r * step, whole);
}

/* The same by instructions for pairs of bfloat16. A stripe of a few inputs is read SLAB outputs at a time. */
INLINE void stripes(long rows, const float *x, long x_step, const char *w, long w_step, float *sums, long step, long units,
                    long columns, long left, const char *later) {
    const long stripe = STRIPE, size = sizeof(uint16_t);
    float packed[STRIPE / 2 * SLAB] __attribute__((aligned(64)));
    for (long r = 0; r < rows; r++) memset(sums + r * step, 0, sizeof(float) * padded(columns, SLAB));
    for (long k = 0; k < units; k += stripe, w += stripe * w_step * size)
        for (long c = 0; c < columns; c += SLAB) {
            const long n = units - k < stripe ? units - k : stripe, outs = columns - c < SLAB ? columns - c : SLAB;
            pack(w + c * size, w_step, n, outs, packed, 1);
            long far = 0, column = c + FAR * SLAB;
            for (; column >= columns; column -= padded(columns, SLAB)) far += stripe;
            const char *next = reached(w, far, w_step * size, left - k, later) + column * size;
            for (long r = 0, many; r < rows; r += many) {
                many = height(rows - r);
                struct ahead ahead = turn(next, w_step * size, SLAB * size, n, r, many, rows);
                for (long v = 0; v < SLAB; v += VECS * LANES, ahead.bytes = 0)
                    WITH_ROWS(many, tile, x + r * x_step + k / 2, x_step, packed + v, SLAB, sums + r * step + c + v, step,
                              (n + 1) / 2, 1, GO_ON, ahead);
            }
        }
}

/* Sums of a part of the inputs, from k on, for weights in columns. At input last the thread probably goes on at later. */
INLINE void add_part(const struct product *p, long k, long from, long count, float *sums, long step, long last,
                     const char *later, int is_half, int streams) {
    const struct matrix *m = p->matrix;
    const long units = m->in - k < p->part ? m->in - k : p->part, unit = 1 + (is_half && HAS_DOT), left = last - k;
    const char *w = (const char *)m->weight + (k * m->out + from) * (is_half ? 2 : 4);
    const float *x = p->operand + k / unit;
    if (is_half && HAS_DOT) stripes(p->rows, x, p->pitch, w, m->out, sums, step, units, count, left, later);
    else if (p->rows == 1) stream(1, x, p->pitch, w, m->out, sums, step, units, count, is_half, streams, left, later);
    else stream(p->rows, x, p->pitch, w, m->out, sums, step, units, count, is_half, streams, left, later);
}

/* Sums for weights in columns: of one part of the inputs where threads share the parts, else of all parts. */
INLINE void columns_chunk(struct worker *me, const struct product *p, long chunk, long from, long count, int is_half) {
    const struct matrix *m = p->matrix;
    const long size = is_half ? 2 : 4, threads = me->step->threads, rows = p->rows, step = p->chunk + SLAB;
    const char *w = (const char *)m->weight;
    float *sums = p->sums + from;
    if (p->parts > 1) {
        const long part = chunk % p->parts, next = (part + threads) % p->parts, last = (part + 1) * p->part;
        const char *later = w + (next * p->part * m->out + from) * size;
        add_part(p, part * p->part, from, count, sums + part * rows * p->step, p->step, last, later, is_half, STREAMS);
        return;
    }
    const long next = from + threads * p->chunk;
    const char *later = w + (next < m->out ? next : from) * size;
    add_part(p, 0, from, count, sums, p->step, m->in, later, is_half, 2 * STREAMS);
    for (long k = p->part; k < m->in; k += p->part) {
        add_part(p, k, from, count, me->part, step, m->in, later, is_half, 2 * STREAMS);
        for (long r = 0; r < rows; r++)
            for (long i = 0; i < count; i++) sums[r * p->step + i] += me->part[r * step + i];
    }
}

/* Sums of a slab of outputs for many rows, for weights in columns. As many parts as stay in the cache are packed together. */
INLINE void slab_chunk(struct worker *me, const struct product *p, long from, int is_half) {
    const struct matrix *m = p->matrix;
    const int is_dot = is_half && HAS_DOT;
    const long unit = 1 + is_dot, stripe = STRIPE, part = p->part / unit, size = is_half ? 2 : 4; /* part in units */
    const long outs = m->out - from < SLAB ? m->out - from : SLAB, kept = part > KEPT ? part : KEPT / part * part;
    const struct ahead none = {0};
    for (long k = 0, last; k < m->in; k = last) {
        last = k + kept * unit < m->in ? k + kept * unit : m->in;
        for (long i = k; i < last; i += stripe) {
            for (long j = i + stripe; j < i + 2 * stripe && j < last; j++)
                prefetch((const char *)m->weight + (j * m->out + from) * size, outs * size);
            const char *w = (const char *)m->weight + (i * m->out + from) * size;
            pack(w, m->out, last - i < stripe ? last - i : stripe, outs, me->packed + (i - k) / unit * SLAB, is_half);
        }
        const long later = from + me->step->threads * SLAB; /* the slab that this thread probably packs next */
        const char *next = (const char *)m->weight + (last < m->in ? last * m->out + from : later) * size;
        const long ahead = p->rows > EAGER ? 0 : last < m->in ? m->in - last : later < m->out ? m->in : 0;
        for (long r = 0, many; r < p->rows; r += many) {
            many = height(p->rows - r);
            for (long u = k / unit, end = (last + unit - 1) / unit, count; u < end; u += count) {
                count = end - u < part ? end - u : part;
                const float *x = p->operand + r * p->pitch + u, *w = me->packed + (u - k / unit) * SLAB;
                float *y = sums_of(p, r, from);
                const long j = u * unit - k, n = count * unit; /* of which each tile asks for a share */
                for (long i = j + n * r / p->rows; i < j + n * (r + many) / p->rows && i < ahead; i++)
                    prefetch(next + i * m->out * size, SLAB * size);
                for (long v = 0; v < SLAB; v += VECS * LANES)
                    if (u) WITH_ROWS(many, tile, x, p->pitch, w + v, SLAB, y + v, p->step, count, is_dot, ADD_PART, none)
                    else WITH_ROWS(many, tile, x, p->pitch, w + v, SLAB, y + v, p->step, count, is_dot, BEGIN, none)
            }
        }
    }
}

/* y (rows, outs) = x (rows, n) times rows of w. */
INLINE void dots(int rows, const char *x, long x_step, const char *w, float *y, long step, long n, int outs, int is_half,
                 struct ahead ahead) {
    const int is_dot = is_half && HAS_DOT;
    const long lanes = LANES * (1 + is_dot), whole = n / lanes * lanes, size = is_half ? 2 : 4, x_size = is_dot ? 2 : 4;
    vec sum[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outs; o++) sum[r][o] = (vec){0};
    for (long k = 0; k < whole; k += lanes) {
        prefetch_at(&ahead, k / lanes);
        vec weights[4];
        for (int o = 0; o < outs; o++) weights[o] = vec_at(w + (o * n + k) * size, 0, is_half && !is_dot);
        for (int r = 0; r < rows; r++) {
            const vec inputs = *(const stored *)(x + r * x_step + k * x_size);
            for (int o = 0; o < outs; o++) sum[r][o] = add_product(sum[r][o], weights[o], inputs, is_dot);
        }
    }
    for (int r = 0; r < rows; r++) {
        store_totals(y + r * step, sum[r], outs);
        for (int o = 0; o < outs; o++)
            for (long k = whole; k < n; k++)
                y[r * step + o] =
                    fused_one(y[r * step + o], value_at(x + r * x_step, k, is_dot), value_at(w, o * n + k, is_half));
    }
}

/* Sums for weights in rows, as many outputs at a time as there are registers for. SHARE outputs
 * stay in a cache until all rows have passed. */
INLINE void rows_chunk(const struct product *p, long from, long count, int is_half) {
    const struct matrix *m = p->matrix;
    const int is_dot = is_half && HAS_DOT;
    const long rows = p->rows, size = is_half ? 2 : 4, lanes = LANES * (1 + is_dot), share = p->is_many ? SLAB : SHARE;
    const long x_size = sizeof(float) * p->pitch;
    for (long first = from, last; first < from + count; first = last) {
        last = first + share < from + count ? first + share : from + count;
        for (long r = 0, many; r < rows; r += many) {
            many = height(rows - r);
            for (long o = first, outs; o < last; o += outs) {
                const long most = many <= 3 ? 4 : many == 4 && VECS < 3 ? 3 : VECS;
                outs = last - o < most ? 1 : most;
                const long line = lanes * outs * size;
                const char *x = (const char *)p->operand + r * x_size, *w = (const char *)m->weight + o * m->in * size;
                const struct ahead ahead = turn(w + share * m->in * size, line, line, m->in / lanes, r, many, rows);
                float *y = sums_of(p, r, o);
                if (outs == 1) WITH_ROWS(many, dots, x, x_size, w, y, p->step, m->in, 1, is_half, ahead)
                else if (outs == 4) WITH_ROWS(many, dots, x, x_size, w, y, p->step, m->in, 4, is_half, ahead)
                else if (outs == 3) dots(4, x, x_size, w, y, p->step, m->in, 3, is_half, ahead);
                else WITH_ROWS(many, dots, x, x_size, w, y, p->step, m->in, VECS, is_half, ahead)
            }
        }
    }
}

/* Return sum + weights * inputs, of the two numbers of 16 bits that each lane holds. */
INLINE ivec add_pairs(ivec sum, ivec weights, ivec inputs) {
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weights, (__m512i)inputs);
#elif defined(__AVX512BW__)
    return sum + (ivec)_mm512_madd_epi16((__m512i)weights, (__m512i)inputs);
#elif defined(__AVXVNNI__)
    return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)inputs);
#elif defined(__AVX2__)
    return sum + (ivec)_mm256_madd_epi16((__m256i)weights, (__m256i)inputs);
#elif defined(__SSE2__)
    return sum + (ivec)_mm_madd_epi16((__m128i)weights, (__m128i)inputs);
#else
    return sum + (weights << 16 >> 16) * (inputs << 16 >> 16) + (weights >> 16) * (inputs >> 16);
#endif
}

#if defined(__ARM_FEATURE_DOTPROD)
enum { HAS_BYTES = 1 }; /* instructions that multiply four pairs of bytes */
#else
enum { HAS_BYTES = 0 };
#endif

/* whole (rows, panels) += x (rows, x_step) times a block of each panel. A unit of x is two inputs in 16 bits; with HAS_BYTES
 * it is four high bytes of the block, and after those of all groups four low bytes less 128. */
INLINE void int8_sums(int rows, const int32_t *x, long x_step, const struct int8_block *w, long blocks,
                      ivec whole[ROWS][2 * PANEL / LANES], int panels, int from, int to) {
    const int vecs = panels * PANEL / LANES;
#if defined(__ARM_FEATURE_DOTPROD)
    int32x4_t weights[2 * PANEL / LANES] = {0}; /* their sum, of which the low bytes are short 128 times */
    for (int half = 0; half < 2; half++) {
        for (int g = 0; g < BLOCK / 4; g++)
            for (int v = 0; v < vecs; v++) {
                const struct int8_block *block = &w[v * LANES / PANEL * blocks];
                const int8x16_t four = vld1q_s8(block->weight[g][v * LANES % PANEL]);
                if (!half && g >= from && g < to) __builtin_prefetch(block[panels * blocks].weight[g][v * LANES % PANEL], 0, 2);
                if (half) weights[v] = vdotq_s32(weights[v], four, vdupq_n_s8(1));
                for (int r = 0; r < rows; r++) {
                    const int32_t inputs = x[r * x_step + half * BLOCK / 4 + g];
                    whole[r][v] = (ivec)vdotq_s32((int32x4_t)whole[r][v], four, vreinterpretq_s8_s32(vdupq_n_s32(inputs)));
                }
            }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) whole[r][v] = half ? whole[r][v] + ((ivec)weights[v] << 7) : whole[r][v] << 8;
    }
#else
    for (int g = 0; g < BLOCK / 4; g++)
        for (int v = 0; v < vecs; v++) {
            const struct int8_block *block = &w[v * LANES / PANEL * blocks];
            const svec four = *(const svec *)block->weight[g][v * LANES % PANEL];
            if (g >= from && g < to) __builtin_prefetch(block[panels * blocks].weight[g][v * LANES % PANEL], 0, 2);
            const ivec first = (ivec)(four << 8 >> 8), second = (ivec)(four >> 8);
            for (int r = 0; r < rows; r++) {
                const int32_t *inputs = x + r * x_step + 2 * g;
                whole[r][v] = add_pairs(whole[r][v], first, (ivec){0} + inputs[0]);
                whole[r][v] = add_pairs(whole[r][v], second, (ivec){0} + inputs[1]);
            }
        }
#endif
}

/* sums (rows, panels) = x (rows, x_step) times panels of int8. */
INLINE void int8_tile(int rows, const int32_t *x, long x_step, const float *scales, long blocks, const struct int8_block *w,
                      float *sums, long step, int panels, int from, int to) {
    const int vecs = panels * PANEL / LANES;
    vec sum[ROWS][2 * PANEL / LANES];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) sum[r][v] = (vec){0};
    for (long b = 0; b < blocks; b++) {
        ivec whole[ROWS][2 * PANEL / LANES];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) whole[r][v] = (ivec){0};
        int8_sums(rows, x + b * BLOCK / 2, x_step, w + b, blocks, whole, panels, from, to);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) {
                const stored *scale = (const stored *)&w[v * LANES / PANEL * blocks + b].scale[v * LANES % PANEL];
                sum[r][v] = fused(sum[r][v], __builtin_convertvector(whole[r][v], vec), *scale * scales[r * blocks + b]);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) *(stored *)(sums + r * step + v * LANES) = sum[r][v];
}

static void int8_chunk(const struct product *p, long from, long count) {
    const long rows = p->rows, blocks = padded(p->matrix->in, BLOCK) / BLOCK;
    for (long c = 0; c < count; c += PANEL) {
        const struct int8_block *w = (const struct int8_block *)p->matrix->weight + (from + c) / PANEL * blocks;
        const int is_pair = (int)LANES == PANEL && count - c > PANEL; /* enough registers, and panels */
        for (long r = 0, many; r < rows; r += many) {
            const int32_t *x = (const int32_t *)p->operand + r * p->pitch;
            float *sums = sums_of(p, r, from + c);
            many = height(rows - r);
            const int first = BLOCK / 4 * r / rows, last = BLOCK / 4 * (r + many) / rows; /* of a block, to prefetch */
            const float *scales = p->scales + r * blocks;
            if (is_pair) WITH_ROWS(many, int8_tile, x, p->pitch, scales, blocks, w, sums, p->step, 2, first, last)
            else WITH_ROWS(many, int8_tile, x, p->pitch, scales, blocks, w, sums, p->step, 1, first, last)
        }
        if (is_pair) c += PANEL;
    }
}

/* Where an instruction multiplies pairs and adds them up, there is time to widen weights in each tile. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
enum { WIDENS = 0 };
#else
enum { WIDENS = 1 };
#endif
enum { UNITS = BLOCK / 2, INT8_KEPT = KEPT / UNITS }; /* of a block; blocks of a slab that are packed together */
typedef int32_t packed_block[1 + UNITS][SLAB]; /* scales, and pairs of weights in 16 bits */

/* Widen some blocks of a slab's panels, so that tiles need not, as int8_sums does. */
static void widen_panels(const struct int8_block *w, long blocks, long count, long outs, packed_block *packed) {
    for (long o = 0; o < outs; o += LANES)
        for (long b = 0; b < count; b++) {
            const struct int8_block *block = &w[o / PANEL * blocks + b];
            *(stored *)&packed[b][0][o] = *(const stored *)&block->scale[o % PANEL];
            for (long g = 0; g < BLOCK / 4; g++) {
                const svec four = *(const svec *)block->weight[g][o % PANEL];
                *(pairs *)&packed[b][1 + 2 * g][o] = (pairs)(four << 8 >> 8);
                *(pairs *)&packed[b][2 + 2 * g][o] = (pairs)(four >> 8);
            }
        }
}

/* sums (rows, 2 LANES) += x (rows, x_step) times packed blocks, with the bits of int8_tile. */
INLINE void packed_tile(int rows, const int32_t *x, long x_step, const float *scales, long scales_step,
                        const packed_block *packed, long blocks, long from, float *sums, long step, int is_first) {
    vec sum[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = is_first ? (vec){0} : (vec)*(stored *)(sums + r * step + v * LANES);
    for (long b = 0; b < blocks; b++) {
        ivec whole[ROWS][2];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) whole[r][v] = (ivec){0};
        for (long u = 0; u < UNITS; u++)
            for (int r = 0; r < rows; r++) {
                const ivec inputs = (ivec){0} + x[r * x_step + b * UNITS + u];
                for (int v = 0; v < 2; v++)
                    whole[r][v] = add_pairs(whole[r][v], (ivec)*(const pairs *)&packed[b][1 + u][from + v * LANES], inputs);
            }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) {
                const vec scale = *(const stored *)&packed[b][0][from + v * LANES] * scales[r * scales_step + b];
                sum[r][v] = fused(sum[r][v], __builtin_convertvector(whole[r][v], vec), scale);
            }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 2; v++) *(stored *)(sums + r * step + v * LANES) = sum[r][v];
}

/* Sums of a slab of outputs for many rows: see slab_chunk. */
static void int8_slab_chunk(struct worker *me, const struct product *p, long from, long outs) {
    const long blocks = padded(p->matrix->in, BLOCK) / BLOCK;
    const struct int8_block *w = (const struct int8_block *)p->matrix->weight + from / PANEL * blocks;
    packed_block *packed = (packed_block *)me->packed;
    for (long b = 0, some; b < blocks; b += some) {
        some = blocks - b < INT8_KEPT ? blocks - b : INT8_KEPT;
        widen_panels(w + b, blocks, some, outs, packed);
        for (long r = 0, many; r < p->rows; r += many) {
            many = height(p->rows - r);
            const int32_t *x = (const int32_t *)p->operand + r * p->pitch + b * UNITS;
            const float *scales = p->scales + r * blocks + b;
            float *y = sums_of(p, r, from);
            for (long c = 0; c < outs; c += 2 * LANES)
                WITH_ROWS(many, packed_tile, x, p->pitch, scales, blocks, packed, some, c, y + c, p->step, b == 0)
        }
    }
}

/* Round a row to 16 bits, each block by a scale of its own. A block with NaN or infinity gives NaN. */
static void quantize(const float *x, long count, int16_t *units, float *scales) {
    for (long b = 0; b * BLOCK < count; b++, x += BLOCK) {
        const long n = count - b * BLOCK < BLOCK ? count - b * BLOCK : BLOCK;
        float most = 0, zero = 0;
#pragma omp simd reduction(max : most) reduction(+ : zero)
        for (long i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most, zero += 0 * x[i];
        const int is_finite = zero == 0;
        const float factor = most > 0 && is_finite ? INT16_MAX / most : 0;
        int16_t rounded[BLOCK] = {0};
        for (long i = 0; i < n; i++) rounded[i] = (int16_t)rintf(is_finite ? x[i] * factor : 0);
        memcpy(units + b * BLOCK, rounded, sizeof rounded);
        for (long i = 0; HAS_BYTES && i < BLOCK; i++) { /* in the order of the weights: inputs 0, 2, 1, 3 of a group */
            const long place = i % 4 == 1 ? i + 1 : i % 4 == 2 ? i - 1 : i;
            ((int8_t *)(units + b * BLOCK))[place] = (int8_t)(rounded[i] >> 8);
            ((int8_t *)(units + b * BLOCK))[BLOCK + place] = (int8_t)((rounded[i] & 255) - 128);
        }
        scales[b] = is_finite ? most / INT16_MAX : NAN;
    }
}

/* Return the units of a row of so many inputs, and a line more: rows that are a power of two apart share a place in a cache. */
INLINE long pitch_of(long inputs, int unit) { return padded(inputs, BLOCK) / unit + LINE / sizeof(float); }

/* Return the inputs of a part. */
INLINE long part_of(long inputs) { return padded((inputs + PARTS - 1) / PARTS, STRIPE); }

/* Normalize a row and convert it to what the product takes. */
static void prepare(struct worker *me, const struct product *p, long r) {
    const struct matrix *m = p->matrix;
    const long row = row_of(me, r);
    const float *x = p->in + row * m->in;
    float *units = p->operand + r * p->pitch;
    if (p->norm) normalize(p->norm, x, me->row, m->in, me->step->rows->columns[row] == 0), x = me->row;
    if (m->form == INT8_PANELS) quantize(x, m->in, (int16_t *)units, p->scales + r * (padded(m->in, BLOCK) / BLOCK));
    else if (HAS_DOT && (m->form == HALF_COLUMNS || m->form == HALF_ROWS))
        for (long i = 0; i < padded(m->in, 2); i++) ((uint16_t *)units)[i] = i < m->in ? to_half(x[i]) : 0;
    else memcpy(units, x, sizeof(float) * m->in);
}

static void prepare_chunk(struct worker *me, const void *job, long chunk) {
    const struct product *p = job;
    for (long r = chunk * BATCH; r < p->rows && r < (chunk + 1) * BATCH; r++) prepare(me, p, r);
}

/* Add up the parts of a row's sums, and do what comes after the product. */
static void finish(const struct worker *me, const struct product *p, long r, long from, long count) {
    float *sums = sums_of(p, r, from), *out = p->out + row_of(me, r) * p->matrix->out + from;
    for (long part = 1; part < p->parts; part++)
        for (long i = 0; i < count; i++) sums[i] += sums[part * p->rows * p->step + i];
    if (p->matrix->bias)
        for (long i = 0; i < count; i++) sums[i] += p->matrix->bias[from + i];
    if (p->after == ACTIVATE) activate(sums, count, me->step->model->activation);
    for (long i = 0; i < count; i++) out[i] = p->after == ADD ? out[i] + sums[i] : sums[i];
}

static void finish_chunk(struct worker *me, const void *job, long chunk) {
    const struct product *p = job;
    const long width = p->matrix->out, pieces = (width + PIECE - 1) / PIECE, from = chunk % pieces * PIECE;
    const long count = width - from < PIECE ? width - from : PIECE, first = chunk / pieces * BATCH;
    for (long r = first; r < p->rows && r < first + BATCH; r++) finish(me, p, r, from, count);
}

static void product_chunk(struct worker *me, const void *job, long chunk) {
    const struct product *p = job;
    const struct matrix *m = p->matrix;
    const int is_half = m->form == HALF_COLUMNS || m->form == HALF_ROWS;
    const int is_split = m->form == FLOAT_COLUMNS || m->form == HALF_COLUMNS;
    const long from = chunk / p->parts * p->chunk, count = m->out - from < p->chunk ? m->out - from : p->chunk;
    /* Few rows are prepared by every thread for itself: waiting for another thread would take longer. */
    for (long r = me->is_prepared || p->is_many ? p->rows : 0; r < p->rows; r++) prepare(me, p, r);
    me->is_prepared = 1;
    if (m->form == INT8_PANELS && p->is_many && WIDENS) int8_slab_chunk(me, p, from, count);
    else if (m->form == INT8_PANELS) int8_chunk(p, from, count);
    else if (is_split && p->is_many && is_half) slab_chunk(me, p, from, 1);
    else if (is_split && p->is_many) slab_chunk(me, p, from, 0);
    else if (is_split && is_half) columns_chunk(me, p, chunk, from, count, 1);
    else if (is_split) columns_chunk(me, p, chunk, from, count, 0);
    else if (is_half) rows_chunk(p, from, count, 1);
    else rows_chunk(p, from, count, 0);
    for (long r = p->is_last ? 0 : p->rows; r < p->rows; r++) {
        /* Prefetched, since a row of outputs is far from the next one. */
        for (long i = from; p->is_many && r + SOON < p->rows && i < from + count; i += LINE / sizeof(float))
            __builtin_prefetch(p->out + row_of(me, r + SOON) * m->out + i, 1, 2);
        finish(me, p, r, from, count);
    }
}

/* out = what comes after in (normalized) times a matrix. */
static void multiply(struct worker *me, const struct matrix *m, const struct norm *norm, const float *in, float *out,
                     enum after after) {
    const struct step *step = me->step;
    const int is_split = m->form == FLOAT_COLUMNS || m->form == HALF_COLUMNS, is_head = after == LOGITS;
    const int unit = m->form == INT8_PANELS || (HAS_DOT && (m->form == HALF_COLUMNS || m->form == HALF_ROWS)) ? 2 : 1;
    const long rows = me->count, is_many = rows > FEW, part = part_of(m->in);
    /* Where reading takes longest, threads share the parts: each is read in one sequence. Else a thread's sums stay in a cache. */
    const int is_shared = is_split && rows <= (m->form == HALF_COLUMNS && !HAS_DOT ? SHARED / 2 : SHARED);
    const long parts = is_shared ? (m->in + part - 1) / part : 1, pieces = (4 * step->threads + parts - 1) / parts;
    const long wide = padded((m->out + pieces - 1) / pieces, SLAB), most = is_many ? SLAB : is_shared ? wide : WIDEST;
    const long chunk = wide < most ? wide : most;
    const struct product p = {
        .matrix = m, .norm = norm, .in = in,
        .sums = is_head ? out : is_many ? me->part : step->sums, .out = out,
        .operand = is_many ? step->operand : me->operand, .scales = is_many ? step->scales : me->scales,
        .rows = rows, .pitch = pitch_of(m->in, unit), .is_many = is_many, .is_own = is_many && !is_head,
        .is_last = parts == 1 && !is_head,
        .part = part, .parts = parts, .chunk = chunk,
        .step = is_many && !is_head ? SLAB : padded(m->out, SLAB) + (is_head ? 0 : SLAB), .after = after,
    };
    const long batches = (rows + BATCH - 1) / BATCH;
    if (is_many) parallel_for(me, batches, prepare_chunk, &p);
    parallel_for(me, parts * ((m->out + chunk - 1) / chunk), product_chunk, &p);
    if (!is_head && !p.is_last) parallel_for(me, batches * ((m->out + PIECE - 1) / PIECE), finish_chunk, &p);
}

#endif
