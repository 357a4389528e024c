/* The products of a decoding step: all rows times a weight in one of five forms. Part of kernel.c, which includes it.
 *
 * Every form computes sums of its outputs for all rows. A sum's order depends on the number of inputs only.
 */
struct product {
    const struct matrix *matrix;
    const struct norm *norm; /* of the input, or NULL */
    const float *in;         /* (R, K) */
    float *sums;             /* (parts, R, step) */
    float *out;              /* (R, out) */
    int64_t part, parts;     /* inputs of a part, and their number */
    int64_t chunk, step;     /* outputs of a chunk, and from row to row of the sums */
    enum after after;
};

#if defined(__AVX512BF16__)
enum { HAS_DOT = 1 }; /* instructions that multiply pairs of bfloat16: inputs are bfloat16 too */
#else
enum { HAS_DOT = 0 };
#endif

INLINE void fetch(const char *next, long lines) {
    for (long i = 0; next && i < lines; i++) __builtin_prefetch(next + i * LINE, 0, 2);
}

/* Return sum + weights * inputs; with is_dot, of the pairs of bfloat16 that the lanes hold. */
INLINE vec add_product(vec sum, vec weights, vec inputs, int is_dot) {
#if defined(__AVX512BF16__)
    if (is_dot) return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)inputs);
#endif
    (void)is_dot;
    return sum + weights * inputs;
}

INLINE vec weights_at(const void *w, long i, int is_half) {
    if (!is_half) return *(const vec *)((const float *)w + i);
    return (vec)(__builtin_convertvector(*(const hvec *)((const uint16_t *)w + i), ivec) << 16);
}

/* Load the weights of input k for two vectors of outputs; with is_dot, those of inputs k and k + 1 as pairs. */
INLINE void load_columns(vec found[2], const void *w, long w_step, long k, long n, int v, int is_half, int is_dot) {
#if defined(__AVX512BF16__)
    if (is_dot) {
        const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                             37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        const uint16_t *row = (const uint16_t *)w + k * w_step + v * LANES;
        __m512i one = _mm512_loadu_si512(row);
        __m512i two = k + 1 < n ? _mm512_loadu_si512(row + w_step) : _mm512_setzero_si512();
        found[0] = (vec)_mm512_permutex2var_epi16(one, low, two);
        found[1] = (vec)_mm512_permutex2var_epi16(one, high, two);
        return;
    }
#endif
    (void)n, (void)is_dot;
    for (int i = 0; i < 2; i++) found[i] = weights_at(w, k * w_step + (v + i) * LANES, is_half);
}

/* Return input k in every lane; with is_dot, the pair of inputs k and k + 1. */
INLINE vec input_at(const char *x, long k, int is_dot) {
    if (is_dot) return (vec)((ivec){0} + *(const int_unaligned *)(x + 2 * k));
    return (vec){0} + *(const float *)(x + 4 * k);
}

/* sums (rows, vecs) += x (rows, n) times w (n, vecs). Inlined with constant rows and vecs, so sums stay in registers. */
INLINE void tile(const char *x, long x_step, const void *w, long w_step, float *sums, long step, long n, int rows,
                 int vecs, int is_half, const char *next) {
    const int is_dot = is_half && HAS_DOT, lines = SLAB * (is_half ? 2 : 4) / LINE;
    vec sum[8][VECS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) sum[r][v] = (vec){0};
    for (long k = 0; k < n; k += 1 + is_dot) {
        fetch(next ? next + k * lines * LINE : NULL, lines * (1 + is_dot));
        for (int v = 0; v < vecs; v += 2) {
            vec weights[2];
            load_columns(weights, w, w_step, k, n, v, is_half, is_dot);
            for (int r = 0; r < rows; r++) {
                vec input = input_at(x, r * x_step + k, is_dot);
                for (int i = 0; i < 2; i++) sum[r][v + i] = add_product(sum[r][v + i], weights[i], input, is_dot);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) *(vec *)(sums + r * step + v * LANES) += sum[r][v];
}

/* Multiply all rows by one slab of a stripe: n inputs, SLAB outputs. */
INLINE void slab(const char *x, long x_step, const char *w, long w_step, float *sums, long step, long n, long rows,
                 int is_half, const char *next) {
    const long size = is_half ? 2 : 4, x_size = is_half && HAS_DOT ? 2 : 4;
    for (long r = 0; r < rows; next = NULL) {
        const char *inputs = x + r * x_step * x_size;
        float *y = sums + r * step;
        if (rows - r >= 8) {
            tile(inputs, x_step, w, w_step, y, step, n, 8, VECS / 2, is_half, next);
            tile(inputs, x_step, w + SLAB / 2 * size, w_step, y + SLAB / 2, step, n, 8, VECS / 2, is_half, NULL);
            r += 8;
        } else if (rows - r >= 4) {
            tile(inputs, x_step, w, w_step, y, step, n, 4, VECS, is_half, next);
            r += 4;
        } else {
            tile(inputs, x_step, w, w_step, y, step, n, 1, VECS, is_half, next);
            r += 1;
        }
    }
}

/* Sums of a part of the inputs, for weights in columns. They are read in stripes of a few inputs. */
INLINE void columns_chunk(struct worker *me, const struct product *p, long part, long from, long count, int is_half) {
    const struct matrix *m = p->matrix;
    const long rows = me->step->rows->count, size = is_half ? 2 : 4, x_size = is_half && HAS_DOT ? 2 : 4;
    const long x_step = padded(m->in, BLOCK), last = (part + 1) * p->part < m->in ? (part + 1) * p->part : m->in;
    float *sums = p->sums + part * rows * p->step + from, tail[STRIPE * SLAB];
    for (long r = 0; r < rows; r++) memset(sums + r * p->step, 0, sizeof(float) * padded(count, SLAB));
    for (long k = part * p->part; k < last; k += STRIPE) {
        const char *w = (const char *)m->weight + (k * m->out + from) * size, *x = me->operand + k * x_size;
        const char *next = count == m->out ? w + STRIPE * m->out * size : NULL; /* is contiguous with this stripe */
        const long n = last - k < STRIPE ? last - k : STRIPE, whole = count / SLAB * SLAB;
        for (long c = 0; c < whole; c += SLAB)
            slab(x, x_step, w + c * size, m->out, sums + c, p->step, n, rows, is_half,
                 next ? next + c * STRIPE * size : NULL);
        if (whole < count) { /* the last columns, with zeros behind them */
            memset(tail, 0, sizeof tail);
            for (long i = 0; i < n; i++)
                memcpy((char *)tail + i * SLAB * size, w + (i * m->out + whole) * size, (count - whole) * size);
            slab(x, x_step, (const char *)tail, SLAB, sums + whole, p->step, n, rows, is_half, NULL);
        }
    }
}

INLINE float total_of(vec sum) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)sum);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += sum[i];
    return total;
#endif
}

/* y (rows, outs) = x (rows, n) times rows of w. */
INLINE void dots(const char *x, long x_step, const char *w, float *y, long step, long n, int rows, int outs,
                 int is_half, const char *next) {
    const int is_dot = is_half && HAS_DOT;
    const long lanes = LANES * (1 + is_dot), whole = n / lanes * lanes, size = is_half ? 2 : 4;
    vec sum[4][4] = {0};
    for (long k = 0; k < whole; k += lanes) {
        fetch(next ? next + k * outs * size : NULL, lanes * outs * size / LINE);
        for (int o = 0; o < outs; o++) {
            const char *place = w + (o * n + k) * size;
            vec weights = is_dot ? *(const vec *)place : weights_at(place, 0, is_half);
            for (int r = 0; r < rows; r++) {
                const char *inputs = x + (r * x_step + k) * (is_dot ? 2 : 4);
                sum[r][o] = add_product(sum[r][o], weights, *(const vec *)inputs, is_dot);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < outs; o++) {
            float total = total_of(sum[r][o]);
            for (long k = whole; k < n; k++) total += value_at(x, r * x_step + k, is_dot) * value_at(w, o * n + k, is_half);
            y[r * step + o] = total;
        }
}

/* Sums for weights in rows: four outputs of four rows at a time, or one of one row, which reads memory in sequence. */
INLINE void rows_chunk(struct worker *me, const struct product *p, long from, long count, int is_half) {
    const struct matrix *m = p->matrix;
    const long rows = me->step->rows->count, size = is_half ? 2 : 4, x_size = is_half && HAS_DOT ? 2 : 4;
    const long x_step = padded(m->in, BLOCK);
    for (long o = 0, outs; o < count; o += outs) {
        const char *w = (const char *)m->weight + (from + o) * m->in * size;
        outs = rows >= 4 && count - o >= 4 ? 4 : 1;
        for (long r = 0, many; r < rows; r += many) {
            const char *x = me->operand + r * x_step * x_size;
            float *y = p->sums + r * p->step + from + o;
            many = outs == 4 && rows - r >= 4 ? 4 : 1;
            if (many == 4) dots(x, x_step, w, y, p->step, m->in, 4, 4, is_half, r ? NULL : w + 4 * m->in * size);
            else for (long i = 0; i < outs; i++) dots(x, 0, w + i * m->in * size, y + i, 0, m->in, 1, 1, is_half, NULL);
        }
    }
}

/* A group of four inputs: sums (PANEL) += x times weights, in whole numbers. */
INLINE void add_products(int32_t sums[PANEL], const uint8_t weight[PANEL][4], const int8_t *x) {
#if defined(__AVX512VNNI__)
    __m512i inputs = _mm512_set1_epi32(*(const int_unaligned *)x);
    *(__m512i *)sums = _mm512_dpbusd_epi32(*(__m512i *)sums, _mm512_loadu_si512(weight), inputs);
#else
    for (int o = 0; o < PANEL; o++)
        for (int i = 0; i < 4; i++) sums[o] += weight[o][i] * x[i];
#endif
}

/* y (rows, PANEL) = x times a panel; x is coarse steps and fine ones, 254 to a coarse one. */
INLINE void int8_tile(const int8_t *x, long x_step, const float *scales, const int32_t *offsets, long blocks,
                      const struct int8_block *w, float *y, long step, int rows) {
    float sum[4][PANEL] __attribute__((aligned(64))) = {0};
    for (long b = 0; b < blocks; b++) {
        int32_t whole[4][2][PANEL] __attribute__((aligned(64)));
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < PANEL; o++) {
                whole[r][0][o] = offsets[2 * (r * blocks + b)];
                whole[r][1][o] = offsets[2 * (r * blocks + b) + 1];
            }
        for (int g = 0; g < BLOCK / 4; g++)
            for (int r = 0; r < rows; r++)
                for (int fine = 0; fine < PAIR; fine++)
                    add_products(whole[r][fine], w[b].weight[g], x + (r * PAIR + fine) * x_step + b * BLOCK + 4 * g);
        for (int r = 0; r < rows; r++)
            for (int o = 0; o < PANEL; o++) {
                float both = whole[r][0][o] + whole[r][1][o] * (1.0f / 254);
                sum[r][o] += both * (scales[r * blocks + b] * w[b].scale[o]);
            }
    }
    for (int r = 0; r < rows; r++) memcpy(y + r * step, sum[r], sizeof sum[r]);
}

static void int8_chunk(struct worker *me, const struct product *p, long from, long count) {
    const long rows = me->step->rows->count, blocks = padded(p->matrix->in, BLOCK) / BLOCK, x_step = blocks * BLOCK;
    for (long c = 0; c < count; c += PANEL) {
        const struct int8_block *w = (const struct int8_block *)p->matrix->weight + (from + c) / PANEL * blocks;
        for (long r = 0, many; r < rows; r += many) {
            const int8_t *x = (const int8_t *)me->operand + r * PAIR * x_step;
            const float *scales = me->scales + r * blocks;
            const int32_t *offsets = me->offsets + 2 * r * blocks;
            float *y = p->sums + r * p->step + from + c;
            many = rows - r >= 4 ? 4 : 1;
            if (many == 4) int8_tile(x, x_step, scales, offsets, blocks, w, y, p->step, 4);
            else int8_tile(x, x_step, scales, offsets, blocks, w, y, p->step, 1);
        }
    }
}

/* Round a row to eight bits by blocks, and once more what that leaves over. A block with NaN or infinity gives NaN. */
static void quantize(const float *x, long count, int8_t *parts, long x_step, float *scales, int32_t *offsets) {
    for (long b = 0; b * BLOCK < x_step; b++) {
        const long n = count - b * BLOCK < BLOCK ? count - b * BLOCK : BLOCK;
        float most = 0, zero = 0;
        for (long i = 0; i < n; i++) most = fmaxf(most, fabsf(x[b * BLOCK + i])), zero += 0 * x[b * BLOCK + i];
        const int finite = zero == 0;
        const float factor = most > 0 ? 127 / most : 0;
        int32_t coarse_sum = 0, fine_sum = 0;
        for (long i = 0; i < BLOCK; i++) {
            float scaled = i < n && finite ? x[b * BLOCK + i] * factor : 0, coarse = rintf(scaled);
            float fine = rintf((scaled - coarse) * 254);
            parts[b * BLOCK + i] = (int8_t)coarse, coarse_sum += (int32_t)coarse;
            parts[x_step + b * BLOCK + i] = (int8_t)fine, fine_sum += (int32_t)fine;
        }
        scales[b] = finite ? most / 127 : NAN;
        offsets[2 * b] = -128 * coarse_sum, offsets[2 * b + 1] = -128 * fine_sum; /* weights are 128 more than they are */
    }
}

/* Normalize all rows and convert them to what the product takes. Every thread does this for itself: waiting for another
 * thread would take longer. */
static void prepare(struct worker *me, const struct product *p) {
    const struct matrix *m = p->matrix;
    const long x_step = padded(m->in, BLOCK), blocks = x_step / BLOCK;
    for (long r = 0; r < me->step->rows->count; r++) {
        const float *x = p->in + r * m->in;
        if (p->norm) normalize(p->norm, x, me->row, m->in), x = me->row;
        if (m->form == INT8_PANELS)
            quantize(x, m->in, (int8_t *)me->operand + r * PAIR * x_step, x_step, me->scales + r * blocks,
                     me->offsets + 2 * r * blocks);
        else if (HAS_DOT && (m->form == HALF_COLUMNS || m->form == HALF_ROWS)) {
            uint16_t *halves = (uint16_t *)me->operand + r * x_step;
            for (long i = 0; i < m->in; i++) halves[i] = to_half(x[i]);
            memset(halves + m->in, 0, 2 * (x_step - m->in));
        } else memcpy((float *)me->operand + r * x_step, x, sizeof(float) * m->in);
    }
    me->is_prepared = 1;
}

static void product_chunk(struct worker *me, const void *job, long chunk) {
    const struct product *p = job;
    const struct matrix *m = p->matrix;
    const long part = chunk % p->parts, from = chunk / p->parts * p->chunk;
    const long count = m->out - from < p->chunk ? m->out - from : p->chunk;
    if (!me->is_prepared) prepare(me, p);
    if (m->form == FLOAT_COLUMNS) columns_chunk(me, p, part, from, count, 0);
    else if (m->form == HALF_COLUMNS) columns_chunk(me, p, part, from, count, 1);
    else if (m->form == FLOAT_ROWS) rows_chunk(me, p, from, count, 0);
    else if (m->form == HALF_ROWS) rows_chunk(me, p, from, count, 1);
    else int8_chunk(me, p, from, count);
}

/* Add up the parts of a piece of the outputs, and do what comes after the product. */
static void finish_chunk(struct worker *me, const void *job, long piece) {
    const struct product *p = job;
    const long rows = me->step->rows->count, width = p->matrix->out, from = piece * PIECE;
    const long count = width - from < PIECE ? width - from : PIECE;
    for (long r = 0; r < rows; r++) {
        float *sums = p->sums + r * p->step + from, *out = p->out + r * width + from;
        for (long part = 1; part < p->parts; part++)
            for (long i = 0; i < count; i++) sums[i] += sums[part * rows * p->step + i];
        if (p->matrix->bias)
            for (long i = 0; i < count; i++) sums[i] += p->matrix->bias[from + i];
        if (p->after == ACTIVATE) activate(sums, count, me->step->model->activation);
        for (long i = 0; i < count; i++) out[i] = p->after == ADD ? out[i] + sums[i] : sums[i];
    }
}

/* out = what comes after in (normalized) times a matrix. */
static void multiply(struct worker *me, const struct matrix *m, const struct norm *norm, const float *in, float *out,
                     enum after after) {
    const int is_split = m->form == FLOAT_COLUMNS || m->form == HALF_COLUMNS, is_head = after == LOGITS;
    const long part = is_split ? padded((m->in + PARTS - 1) / PARTS, STRIPE) : m->in, parts = (m->in + part - 1) / part;
    const long pieces = (4 * me->step->threads + parts - 1) / parts;
    const long chunk = padded((m->out + pieces - 1) / pieces, SLAB);
    struct product p = {m, norm, in, is_head ? out : me->step->partial, out, part, parts, chunk, padded(m->out, SLAB), after};
    together(me, parts * ((m->out + chunk - 1) / chunk), product_chunk, &p);
    if (!is_head) together(me, (m->out + PIECE - 1) / PIECE, finish_chunk, &p);
}
