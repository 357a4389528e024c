/* One step of GPT-2 in one call: token ids in, logits out, for texts of different lengths. A step reads any number of new
 * tokens of each text, a whole prompt for example; every token sees those before it.
 *
 * A step is a sequence of phases, for example a product or attention, which threads share: see model.h. The order of a sum
 * depends only on its length: a row has the same bits in any batch, with its text at once or in pieces, and by any number
 * of threads.
 *
 * With up to SHARED rows a step takes as long as reading the weights, and memory is fastest when it is read in one sequence:
 * a chunk reads a contiguous piece of a weight, and asks for the next lines of that piece while it computes. With more rows
 * it takes as long as its products: a chunk takes all inputs of a strip of outputs, whose sums stay in a cache, and with
 * more than FEW a slab of weights stays there while all rows pass.
 *
 * Each file uses those before it: simd.h, model.h, products.h, kernel.c. The whole is compiled once for each level of
 * instructions, under different names.
 *
 * R rows, each a new token, C width of the residual stream, H heads, D = C / H, K inputs of a product, V vocabulary.
 */
#include "products.h"

enum { PHASES = 14, OTHERS = 4 }; /* of a layer, and beside the layers, at most */
enum { TALL = 8 * ROWS };          /* rows whose attention is computed together */

/* Attention. ----------------------------------------------------------------------------------------------------- */

/* Return the keys of a row's head; its values are value_stride values further. */
INLINE char *keys_of(const struct worker *me, long layer, long r, long h) {
    const struct rows *rows = me->step->rows;
    const long first = layer * rows->layer_stride + rows->slots[r] * rows->slot_stride + h * rows->head_stride;
    return (char *)rows->cache + (rows->is_half ? 2 : 4) * first;
}

static void widen(const uint16_t *half, long count, float *wide) {
    for (long i = 0; i < count; i++) wide[i] = value_at(half, i, 1);
}

static void copy_to_cache(const float *from, void *cache, long first, long count, int64_t is_half) {
    if (is_half)
        for (long d = 0; d < count; d++) ((uint16_t *)cache)[first + d] = to_half(from[d]);
    else memcpy((float *)cache + first, from, sizeof(float) * count);
}

/* Write a row's new keys and values to its column. A phase before attention, since later tokens of its text read them. */
static void store_kv_chunk(struct worker *me, const void *job, long r) {
    const struct model *model = me->step->model;
    const struct rows *rows = me->step->rows;
    const long width = model->width / model->heads, first = rows->columns[r] * width;
    for (long h = 0; h < model->heads; h++) {
        const float *q = me->step->qkv + r * 3 * model->width + h * width;
        char *keys = keys_of(me, *(const long *)job, r, h);
        copy_to_cache(q + model->width, keys, first, width, rows->is_half);
        copy_to_cache(q + 2 * model->width, keys, rows->value_stride + first, width, rows->is_half);
    }
}

/* Scores (rows, step) of a few keys, for queries q (rows, q_step). */
INLINE void score(int rows, const float *q, long q_step, const char *keys, long width, float *scores, long step, int count,
                  int is_half) {
    const long whole = width / LANES * LANES;
    vec products[ROWS][4];
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < 4; s++) products[r][s] = (vec){0};
    for (long d = 0; d < whole; d += LANES) {
        vec key[4];
        for (int s = 0; s < count; s++) key[s] = vec_at(keys, s * width + d, is_half);
        for (int r = 0; r < rows; r++)
            for (int s = 0; s < count; s++)
                products[r][s] = fused(products[r][s], *(const stored *)(q + r * q_step + d), key[s]);
    }
    for (int r = 0; r < rows; r++) {
        float *y = scores + r * step;
        store_totals(y, products[r], count);
        for (int s = 0; s < count; s++)
            for (long d = whole; d < width; d++)
                y[s] = fused_one(y[s], q[r * q_step + d], value_at(keys, s * width + d, is_half));
    }
}

/* Replace scores by e^(scale (score - the largest)), and return their sum. */
static float softmax_numerators(float *scores, long count, float scale) {
    const long whole = count / LANES * LANES;
    float most = -INFINITY, rest = 0;
    vec sum = {0};
#pragma omp simd reduction(max : most)
    for (long s = 0; s < count; s++) most = scores[s] > most ? scores[s] : most;
    for (long s = 0; s < count; s++) scores[s] = exponential((scores[s] - most) * scale);
    for (long s = 0; s < whole; s += LANES) sum += *(const stored *)(scores + s);
    for (long s = whole; s < count; s++) rest += scores[s];
    return total(sum) + rest;
}

/* y (rows, vecs) = weights (rows, step) times rows of values. The first row sees count of them, each next one more. */
INLINE void weighted_sum(int rows, const float *weights, long step, const char *values, long width, long count, float *y,
                         long y_step, int vecs, int is_half, const char *next) {
    vec sum[ROWS][4], value[4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vecs; v++) sum[r][v] = (vec){0};
    for (long s = 0, size = width * (is_half ? 2 : 4); s < count; s++) {
        if (rows == 1) prefetch(next + s * size, size);
        for (int v = 0; v < vecs; v++) value[v] = vec_at(values, s * width + v * LANES, is_half);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vecs; v++) sum[r][v] = fused(sum[r][v], weights[r * step + s] - (vec){0}, value[v]);
    }
    for (int r = 0; r < rows; r++) {
        for (long s = count; s < count + r; s++)
            for (int v = 0; v < vecs; v++)
                sum[r][v] = fused(sum[r][v], weights[r * step + s] - (vec){0}, vec_at(values, s * width + v * LANES, is_half));
        for (int v = 0; v < vecs; v++) *(stored *)(y + r * y_step + v * LANES) = sum[r][v];
    }
}

/* y (rows, y_step) = the values that rows of one text see, mixed by their scores: the first sees count columns, each next
 * one more. For one row values are prefetched while keys are read, and then next. */
INLINE void attend_in(int rows, const float *q, long q_step, const char *keys, const char *values, long count, float *scores,
                      long step, float *y, long y_step, float scale, long width, int is_half, const char *next) {
    const long whole = width / LANES * LANES, size = is_half ? 2 : 4, all = count + rows - 1;
    const int most = rows == 1 ? 4 : VECS;
    for (long s = 0, some; s < all; s += some) {
        some = all - s < most ? 1 : most;
        const char *some_keys = keys + s * width * size;
        if (rows == 1) prefetch(values + s * width * size, some * width * size);
        /* GPT-2's width as a constant: the sums stay in registers. */
        if (some > 1 && width == 64) score(rows, q, q_step, some_keys, 64, scores + s, step, most, is_half);
        else if (some > 1) score(rows, q, q_step, some_keys, width, scores + s, step, most, is_half);
        else score(rows, q, q_step, some_keys, width, scores + s, step, 1, is_half);
    }
    float sums[ROWS];
    for (int r = 0; r < rows; r++) sums[r] = softmax_numerators(scores + r * step, count + r, scale);
    for (long d = 0, vecs; d < whole; d += vecs * LANES) {
        vecs = whole - d >= most * LANES ? most : 1;
        const char *some = values + d * size;
        if (vecs > 1) weighted_sum(rows, scores, step, some, width, count, y + d, y_step, most, is_half, next);
        else weighted_sum(rows, scores, step, some, width, count, y + d, y_step, 1, is_half, next);
    }
    for (int r = 0; r < rows; r++, y += y_step, scores += step) {
        for (long d = whole; d < width; d++) {
            y[d] = 0;
            for (long s = 0; s < count + r; s++) y[d] = fused_one(y[d], scores[s], value_at(values, s * width + d, is_half));
        }
        for (long d = 0; d < width; d++) y[d] /= sums[r];
    }
}

/* A head of a row; or of TALL rows, of which those of one text are read together. */
static void attention_chunk(struct worker *me, const void *job, long chunk) {
    const struct model *model = me->step->model;
    const struct rows *rows = me->step->rows;
    const int is_many = me->count > FEW;
    const long layer = *(const long *)job, heads = model->heads, width = model->width / heads, step = me->longest;
    const long tall = is_many ? TALL : 1, blocks = (me->count + tall - 1) / tall;
    const long first = (is_many ? chunk % blocks : chunk / heads) * tall, h = is_many ? chunk / blocks : chunk % heads;
    const long last = first + tall < me->count ? first + tall : me->count;
    /* Where this thread probably goes on. */
    const long later = chunk + me->step->threads < blocks * heads ? chunk + me->step->threads : chunk;
    const char *next = keys_of(me, layer, row_of(me, is_many ? first : later / heads), later % heads);
    const float scale = model->h[layer].score_scale;
    for (long i = first, run; i < last; i += run) {
        const long r = row_of(me, i), q_step = 3 * model->width;
        for (run = 1; i + run < last && row_of(me, i + run) == r + run; run++)
            if (rows->slots[r + run] != rows->slots[r] || rows->columns[r + run] != rows->columns[r] + run) break;
        const char *keys = keys_of(me, layer, r, h), *values = keys + rows->value_stride * (rows->is_half ? 2 : 4);
        const int is_wide = rows->is_half && run > ROWS; /* widened once for all rows */
        if (is_wide) {
            const long count = (rows->columns[r] + run) * width;
            widen((const uint16_t *)keys, count, me->kv), widen((const uint16_t *)values, count, me->kv + count);
            keys = (const char *)me->kv, values = (const char *)(me->kv + count);
        }
        for (long j = r, many; j < r + run; j += many) {
            const float *q = me->step->qkv + j * q_step + h * width;
            float *y = me->step->mixed + j * model->width + h * width;
            const long count = rows->columns[j] + 1;
            many = height(r + run - j);
            if (rows->is_half && !is_wide)
                WITH_ROWS(many, attend_in, q, q_step, keys, values, count, me->scores, step, y, model->width, scale, width, 1, next)
            else
                WITH_ROWS(many, attend_in, q, q_step, keys, values, count, me->scores, step, y, model->width, scale, width, 0, next)
        }
    }
}

/* The step. ------------------------------------------------------------------------------------------------------ */

static void embed_chunk(struct worker *me, const void *job, long r) {
    const struct model *model = me->step->model;
    const struct rows *rows = me->step->rows;
    const long width = model->width, token = rows->tokens[r] * width, position = rows->columns[r] * width;
    (void)job;
    for (long i = 0; i < width; i++)
        me->step->x[r * width + i] =
            value_at(model->wte, token + i, model->is_half) + value_at(model->wpe, position + i, model->is_half);
}

static void widen_chunk(struct worker *me, const void *job, long chunk) {
    const struct vector *vector = &me->step->model->vectors[chunk];
    (void)job;
    widen(vector->half, vector->count, vector->wide);
}

static void run_step(struct worker *me) {
    const struct step *step = me->step;
    const struct model *model = step->model;
    if (model->vector_count) parallel_for(me, model->vector_count, widen_chunk, NULL);
    parallel_for(me, me->count, embed_chunk, NULL);
    for (long i = 0; i < model->layers; i++) {
        const struct layer *layer = &model->h[i];
        multiply(me, &layer->c_attn, &layer->ln_1, step->x, step->qkv, STORE);
        parallel_for(me, me->count, store_kv_chunk, &i);
        if (i == model->layers - 1) me->count = step->rows->outputs, me->taken = step->rows->output_rows;
        if (!me->count) return; /* other rows need only the keys and values of the last layer */
        const long tall = me->count > FEW ? TALL : 1;
        parallel_for(me, (me->count + tall - 1) / tall * model->heads, attention_chunk, &i);
        multiply(me, &layer->attn_proj, NULL, step->mixed, step->x, ADD);
        multiply(me, &layer->c_fc, &layer->ln_2, step->x, step->hidden, ACTIVATE);
        multiply(me, &layer->mlp_proj, NULL, step->hidden, step->x, ADD);
    }
    multiply(me, &model->head, &model->ln_f, step->x, step->rows->logits, LOGITS);
}

/* Memory: a part for all, then one for each thread. Returns its size where there is none yet. */
static char *carve(char **memory, long bytes) {
    char *taken = *memory;
    *memory += padded(bytes, 64);
    return taken;
}

static long layout_memory(struct step *step, struct worker *me, long number, char *memory, long longest) {
    const struct model *model = step->model;
    const long rows = step->rows->count, few = rows < FEW ? rows : FEW, many = rows > FEW ? rows : 0;
    const long shared = rows < SHARED ? rows : SHARED;
    const long phases = PHASES * model->layers + OTHERS, float_row = sizeof(float) * rows;
    const long widest = model->width > model->inner ? model->width : model->inner, part = part_of(widest);
    const long outputs = 3 * model->width > model->inner ? 3 * model->width : model->inner;
    const long wide = many && step->rows->is_half ? model->width / model->heads : 0; /* values that are widened */
    char *start = memory;
    step->counters = (struct counter *)carve(&memory, sizeof(struct counter) * phases);
    step->x = (float *)carve(&memory, float_row * model->width);
    step->qkv = (float *)carve(&memory, float_row * 3 * model->width);
    step->mixed = (float *)carve(&memory, float_row * model->width);
    step->hidden = (float *)carve(&memory, float_row * model->inner);
    step->sums = (float *)carve(&memory, sizeof(float) * (PARTS * shared + few) * (padded(outputs, SLAB) + SLAB));
    step->operand = (float *)carve(&memory, sizeof(float) * many * pitch_of(widest, 1));
    step->scales = (float *)carve(&memory, sizeof(float) * many * (padded(widest, BLOCK) / BLOCK));
    for (long i = 0; i <= number; i++) {
        *me = (struct worker){.step = step, .longest = padded(longest, LANES)};
        me->row = (float *)carve(&memory, sizeof(float) * widest);
        me->scores = (float *)carve(&memory, sizeof(float) * ROWS * me->longest);
        me->kv = (float *)carve(&memory, sizeof(float) * 2 * wide * me->longest);
        me->operand = (float *)carve(&memory, sizeof(float) * few * pitch_of(widest, 1));
        me->scales = (float *)carve(&memory, sizeof(float) * few * (padded(widest, BLOCK) / BLOCK));
        me->part = (float *)carve(&memory, sizeof(float) * (few * (WIDEST + SLAB) + many * SLAB));
        me->packed = (float *)carve(&memory, many ? sizeof(float) * SLAB * (INT8_KEPT + (part > KEPT ? part : KEPT)) : 0);
    }
    return memory - start;
}

/* Bytes that a step works in; they must begin at a multiple of 64. */
long NAMED(minigpt_memory, LEVEL)(const struct model *model, const struct rows *rows, long threads, long longest) {
    struct step step = {.model = model, .rows = rows, .threads = threads};
    struct worker me;
    return layout_memory(&step, &me, threads - 1, NULL, longest);
}

struct call { /* of a function that threads run together */
    const struct model *model;
    const struct rows *rows;
    long threads, longest;
    char *memory;
    const struct matrix *matrix; /* of a product, and its inputs and outputs */
    const float *in;
    float *out;
    struct int8_block *panels; /* of a matrix that is rounded, and the number of slabs that threads have taken */
    atomic_long slabs;
};

static void step_thread(long number, void *job) {
    const struct call *call = job;
    struct step step = {.model = call->model, .rows = call->rows, .threads = call->threads};
    struct worker me;
    layout_memory(&step, &me, number, call->memory, call->longest);
    me.count = call->rows->count;
    if (call->matrix) multiply(&me, call->matrix, NULL, call->in, call->out, LOGITS);
    else run_step(&me);
}

void NAMED(minigpt_step, LEVEL)(const struct model *model, const struct rows *rows, long threads, long longest,
                                char *memory) {
    struct call call = {.model = model, .rows = rows, .threads = threads, .longest = longest, .memory = memory};
    memset(memory, 0, sizeof(struct counter) * (PHASES * model->layers + OTHERS));
    together(threads, step_thread, &call);
}

/* A product alone, without its bias. */
long NAMED(minigpt_product_memory, LEVEL)(const struct matrix *matrix, long count, long threads) {
    struct model model = {.width = matrix->in, .heads = 1};
    struct rows rows = {.count = count, .outputs = count};
    return NAMED(minigpt_memory, LEVEL)(&model, &rows, threads, 0);
}

void NAMED(minigpt_product, LEVEL)(const struct matrix *matrix, const float *in, float *out, long count, long threads,
                                   char *memory) {
    struct model model = {.width = matrix->in, .heads = 1};
    struct rows rows = {.count = count, .outputs = count};
    struct call call = {.model = &model, .rows = &rows, .threads = threads, .memory = memory,
                        .matrix = matrix, .in = in, .out = out};
    memset(memory, 0, sizeof(struct counter) * OTHERS);
    together(threads, step_thread, &call);
}

/* Round PANEL outputs and BLOCK inputs. A block with NaN or infinity gets the scale NaN. */
static void round_block(float values[restrict BLOCK][PANEL], struct int8_block *restrict block) {
    static const int order[4] = {0, 2, 1, 3};
    float most[PANEL] = {0}, zeros[PANEL] = {0}, zero = 0;
    for (long k = 0; k < BLOCK; k++)
        for (long o = 0; o < PANEL; o++) {
            float size = fabsf(values[k][o]);
            most[o] = size > most[o] ? size : most[o];
            zeros[o] += 0 * size;
        }
    for (long o = 0; o < PANEL; o++) {
        zero += zeros[o];
        block->scale[o] = zeros[o] + most[o] / 127;
        most[o] = block->scale[o] > FLT_MIN ? block->scale[o] : FLT_MIN;
    }
    for (long g = 0; zero == 0 && g < BLOCK / 4; g++) {
        uint32_t packed[PANEL] = {0};
        for (int i = 0; i < 4; i++)
            for (long o = 0; o < PANEL; o++)
                packed[o] |= (uint32_t)(uint8_t)(int32_t)rintf(values[4 * g + order[i]][o] / most[o]) << 8 * i;
        memcpy(block->weight[g], packed, sizeof packed);
    }
}

static void round_slab(const struct matrix *m, struct int8_block *panels, long slab) {
    const int is_half = m->form == HALF_COLUMNS || m->form == HALF_ROWS;
    const int by_rows = m->form == FLOAT_ROWS || m->form == HALF_ROWS;
    const long blocks = padded(m->in, BLOCK) / BLOCK, k_step = by_rows ? 1 : m->out, o_step = by_rows ? m->in : 1;
    for (long b = 0; b < blocks; b++)
        for (long first = slab; first < m->out && first < slab + SLAB; first += PANEL) {
            const long n = m->in - b * BLOCK < BLOCK ? m->in - b * BLOCK : BLOCK;
            const long outs = m->out - first < PANEL ? m->out - first : PANEL;
            float values[BLOCK][PANEL] __attribute__((aligned(64))) = {0};
            const char *from = (const char *)m->weight + (is_half ? 2 : 4) * (first * o_step + b * BLOCK * k_step);
            if (by_rows)
                for (long o = 0; o < outs; o++)
                    for (long k = 0; k < n; k++) values[k][o] = value_at(from, o * o_step + k, is_half);
            else
                for (long k = 0; k < n; k++)
                    for (long o = 0; o < outs; o++) values[k][o] = value_at(from, k * k_step + o, is_half);
            round_block(values, &panels[first / PANEL * blocks + b]);
        }
}

static void round_thread(long number, void *job) {
    struct call *call = job;
    (void)number;
    for (long slab; (slab = atomic_fetch_add(&call->slabs, 1) * SLAB) < call->matrix->out;)
        round_slab(call->matrix, call->panels, slab);
}

/* Round a matrix of floating-point numbers to INT8_PANELS. */
void NAMED(minigpt_round, LEVEL)(const struct matrix *matrix, struct int8_block *panels, long threads) {
    struct call call = {.matrix = matrix, .panels = panels};
    together(threads, round_thread, &call);
}

#if defined(DISPATCH) /* in one of the levels: of which sources the library is, and which level this processor has */
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
uint32_t minigpt_sources(void) { return SOURCES; } /* their CRC-32, which kernel.py compares */

int minigpt_supports(const char *level) {
#if defined(__x86_64__)
    unsigned a = 0, b, c, d; /* of which some compilers do not know the name */
    if (!strcmp(level, "avxvnni"))
        return minigpt_supports("avx2") && __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1 << 4;
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(level, "bf16")) return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(level, "vnni")) return avx512 && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(level, "avx512")) return avx512;
    if (!strcmp(level, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#elif defined(__APPLE__)
    if (!strcmp(level, "dotprod")) return 1; /* as every Mac with ARM */
#elif defined(__aarch64__) && defined(__linux__)
    if (!strcmp(level, "dotprod")) return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#endif
    return !strcmp(level, "portable");
}
#endif
