/* One step of GPT-2 in one call: token ids in, logits out, for texts of different lengths. A step reads any number of new
 * tokens of each text, a whole prompt for example; every token sees those before it.
 *
 * A step is a sequence of phases, for example a product or attention. Threads take chunks of a phase one at a time, so a
 * thread that the system has suspended delays one chunk and not the whole phase. The order of a sum depends only on its
 * length: a row has the same bits in any batch, with its text at once or in pieces, and by any number of threads.
 *
 * With FEW rows a step takes as long as reading the weights, and memory is fastest when it is read in one sequence: a
 * chunk reads a contiguous piece of a weight, and asks for the next lines of that piece while it computes. With more rows
 * it takes as long as its products: a chunk keeps a slab of weights in the cache while all rows pass.
 *
 * engine/kernel.py mirrors the structs. The file is compiled once for each level of instructions, under different names.
 *
 * R rows, each a new token, C width of the residual stream, H heads, D = C / H, K inputs of a product, V vocabulary.
 */
#include <float.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef LEVEL
#define LEVEL portable
#endif
#define JOINED(name, level) name##_##level
#define NAMED(name, level) JOINED(name, level)
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
/* In memory. Sums of these types would not stay in registers: some compilers store them in every round of a loop. */
typedef float stored __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef int16_t svec __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#if defined(__AVX512F__) || defined(__aarch64__)
enum { ROWS = 6, VECS = 4 }; /* of a tile: its sums fill 32 registers */
#else
enum { ROWS = 6, VECS = 2 }; /* 16 registers */
#endif
enum { SLAB = 64, STRIPE = 32, PARTS = 8, PIECE = 512, LINE = 64, SPINS = 4000, SHARE = 16, FAR = 16 };
enum { FEW = 24, KEPT = 768, BATCH = 32 }; /* rows; units of a slab that are packed together; rows of a chunk */
enum { PHASES = 14 }; /* of a layer, at most */
enum { BLOCK = 64, PANEL = 16 }; /* of int8 */
enum form { FLOAT_COLUMNS, HALF_COLUMNS, FLOAT_ROWS, HALF_ROWS, INT8_PANELS }; /* columns: (in, out); rows: (out, in) */
enum norm_kind { LAYER_NORM, RMS, STD_EPS, FROZEN };
enum activation { GELU_TANH, GELU, RELU, SILU, TANH };
enum after { STORE, ADD, ACTIVATE, LOGITS }; /* LOGITS: out is (R, padded), and takes the sums as they are */

struct matrix {
    const void *weight;
    const float *bias; /* or NULL */
    int64_t in, out, form;
};
struct norm {
    const float *scale, *shift; /* or NULL */
    int64_t kind;
    float eps, usual, first; /* of FROZEN: what it divides rows by, and those at position 0 */
};
struct layer {
    struct norm ln_1, ln_2;
    struct matrix c_attn, attn_proj, c_fc, mlp_proj;
    float score_scale;
};
struct model {
    int64_t layers, width, heads, inner, is_half, activation; /* is_half: embeddings are bfloat16 */
    const void *wte, *wpe;
    const struct layer *h;
    struct norm ln_f;
    struct matrix head;
};
struct rows {
    int64_t count;
    const int64_t *tokens, *slots, *columns; /* slot: the text's place in the cache, which begins at its column 0 */
    int64_t outputs;
    const int64_t *wanted; /* (outputs), rows whose logits are computed */
    void *cache;
    int64_t is_half; /* the cache is bfloat16 */
    int64_t layer_stride, value_stride, slot_stride, head_stride; /* in values */
    float *logits; /* (outputs, V padded to a multiple of SLAB) */
};

struct int8_block { /* of PANEL outputs and BLOCK inputs, in groups of four inputs */
    float scale[PANEL];
    int8_t weight[BLOCK / 4][PANEL][4]; /* inputs 0, 2, 1, 3: every other one is the low half of 16 bits */
};
struct counter {
    _Alignas(64) atomic_long next;
    _Alignas(64) atomic_long done;
};
struct step {
    const struct model *model;
    const struct rows *rows;
    long threads;
    struct counter *counters;
    float *x, *qkv, *mixed, *hidden; /* (R, C), (R, 3C), (R, C), (R, inner) */
    float *partial;                  /* (parts, R, outputs): sums of a product before they are added up */
    float *operand, *scales;         /* of many rows, as a worker's for few */
};
struct worker { /* a thread's own memory */
    const struct step *step;
    long phase;
    long longest; /* columns of a text */
    int is_prepared;
    float *row;      /* one normalized row */
    float *scores;   /* (ROWS, columns) of one head */
    float *operand;  /* (R, pitch), in units: one float32, two bfloat16, or two integers of 16 bits */
    float *scales;   /* (R, blocks) of int8 */
    float *packed;   /* (units, SLAB), weights for many rows */
};

INLINE float from_half(uint16_t half) {
    union { uint32_t bits; float value; } as = {(uint32_t)half << 16};
    return as.value;
}

INLINE uint16_t to_half(float value) { /* rounds to even; NaN stays NaN */
    union { float value; uint32_t bits; } as = {value};
    uint32_t rounded = (as.bits + 0x7fff + (as.bits >> 16 & 1)) >> 16;
    return value != value ? 0x7fc0 : rounded;
}

INLINE float value_at(const void *values, long i, int is_half) {
    return is_half ? from_half(((const uint16_t *)values)[i]) : ((const float *)values)[i];
}

INLINE vec vec_at(const void *values, long i, int is_half) {
    if (!is_half) return *(const stored *)((const float *)values + i);
    return (vec)(__builtin_convertvector(*(const hvec *)((const uint16_t *)values + i), ivec) << 16);
}

INLINE void prefetch(const char *next, long bytes) {
    for (long i = 0; i < bytes; i += LINE) __builtin_prefetch(next + i, 0, 2);
}

INLINE long padded(long count, long multiple) { return (count + multiple - 1) / multiple * multiple; }

/* Return sum + a * b, rounded once where the processor can. It leaves no choice to compilers: some round twice in loops that
 * they take for chains, so that the bits of a sum would depend on how many rows a loop takes. */
INLINE vec fused(vec sum, vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
    return sum + a * b;
#endif
}

INLINE float fused_one(float sum, float a, float b) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, sum);
#else
    return sum + a * b;
#endif
}

/* e^x to about one unit in the last place, in a form that compilers vectorize. Above 88 it is infinity. */
INLINE float exponential(float x) {
    const float over = x > 88.0f ? INFINITY : 0.0f;
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    union { int32_t bits; float value; } power = {((int32_t)n + 127) << 23};
    return (p * r * r + r + 1.0f) * power.value + over;
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

/* The total of all lanes, from the first to the last. */
INLINE float total(vec sum) {
    float all = 0;
    for (int l = 0; l < LANES; l++) all += sum[l];
    return all;
}

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
    if (norm->kind == FROZEN) deviation = is_first ? norm->first : norm->usual;
    /* PyTorch's own norm is NaN or constant there. */
    float factor = variance > FLT_MAX && norm->kind != FROZEN ? NAN : 1.0f / deviation;
    for (long i = 0; i < width; i++) y[i] = (x[i] - mean) * factor;
    if (norm->scale)
        for (long i = 0; i < width; i++) y[i] *= norm->scale[i];
    if (norm->shift)
        for (long i = 0; i < width; i++) y[i] += norm->shift[i];
}

/* Threads. ------------------------------------------------------------------------------------------------------- */

typedef void chunk_function(struct worker *me, const void *job, long chunk);

INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Run all chunks of a phase together with the other threads, and return when all are done. */
static void together(struct worker *me, long chunks, chunk_function *run, const void *job) {
    struct counter *counter = &me->step->counters[me->phase++];
    long done = 0;
    me->is_prepared = 0;
    for (long chunk; (chunk = atomic_fetch_add(&counter->next, 1)) < chunks; done++) run(me, job, chunk);
    if (done) atomic_fetch_add(&counter->done, done);
    for (long spins = 0; atomic_load(&counter->done) < chunks; spins++) {
        if (spins < SPINS) pause_briefly();
        else sched_yield(); /* the thread we wait for may need this core */
    }
}

#include "products.h"

/* Attention. ----------------------------------------------------------------------------------------------------- */

/* Return the keys of a row's head; its values are value_stride values further. */
INLINE char *keys_of(const struct worker *me, long layer, long r, long h) {
    const struct rows *rows = me->step->rows;
    const long first = layer * rows->layer_stride + rows->slots[r] * rows->slot_stride + h * rows->head_stride;
    return (char *)rows->cache + (rows->is_half ? 2 : 4) * first;
}

static void copy_to_cache(const float *from, void *cache, long first, long count, int64_t is_half) {
    if (is_half)
        for (long d = 0; d < count; d++) ((uint16_t *)cache)[first + d] = to_half(from[d]);
    else memcpy((float *)cache + first, from, sizeof(float) * count);
}

/* Write a row's new keys and values to its column. A phase before attention, since later tokens of its text read them. */
static void remember_chunk(struct worker *me, const void *job, long r) {
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
static float soften(float *scores, long count, float scale) {
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
INLINE void mix(int rows, const float *weights, long step, const char *values, long width, long count, float *y, long y_step,
                int vecs, int is_half, const char *next) {
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
        if (some > 1) score(rows, q, q_step, some_keys, width, scores + s, step, most, is_half);
        else score(rows, q, q_step, some_keys, width, scores + s, step, 1, is_half);
    }
    float sums[ROWS];
    for (int r = 0; r < rows; r++) sums[r] = soften(scores + r * step, count + r, scale);
    for (long d = 0, vecs; d < whole; d += vecs * LANES) {
        vecs = whole - d >= most * LANES ? most : 1;
        const char *some = values + d * size;
        if (vecs > 1) mix(rows, scores, step, some, width, count, y + d, y_step, most, is_half, next);
        else mix(rows, scores, step, some, width, count, y + d, y_step, 1, is_half, next);
    }
    for (int r = 0; r < rows; r++, y += y_step, scores += step) {
        for (long d = whole; d < width; d++) {
            y[d] = 0;
            for (long s = 0; s < count + r; s++) y[d] = fused_one(y[d], scores[s], value_at(values, s * width + d, is_half));
        }
        for (long d = 0; d < width; d++) y[d] /= sums[r];
    }
}

/* A head of a row; or of ROWS rows, of which those of one text are read together. */
static void attention_chunk(struct worker *me, const void *job, long chunk) {
    const struct model *model = me->step->model;
    const struct rows *rows = me->step->rows;
    const int is_many = rows->count > FEW;
    const long layer = *(const long *)job, heads = model->heads, width = model->width / heads, step = me->longest;
    const long tall = is_many ? ROWS : 1, blocks = (rows->count + tall - 1) / tall, first = (is_many ? chunk % blocks : chunk / heads) * tall;
    const long h = is_many ? chunk / blocks : chunk % heads, last = first + tall < rows->count ? first + tall : rows->count;
    const long later = chunk + me->step->threads < blocks * heads ? chunk + me->step->threads : chunk;
    const char *next = keys_of(me, layer, is_many ? first : later / heads, later % heads); /* where this thread probably goes on */
    const float scale = model->h[layer].score_scale;
    for (long r = first, many; r < last; r += many) {
        for (many = 1; r + many < last; many++)
            if (rows->slots[r + many] != rows->slots[r] || rows->columns[r + many] != rows->columns[r] + many) break;
        const long q_step = 3 * model->width, count = rows->columns[r] + 1;
        const float *q = me->step->qkv + r * q_step + h * width;
        float *y = me->step->mixed + r * model->width + h * width;
        const char *keys = keys_of(me, layer, r, h), *values = keys + rows->value_stride * (rows->is_half ? 2 : 4);
        if (rows->is_half) WITH_ROWS(many, attend_in, q, q_step, keys, values, count, me->scores, step, y, model->width, scale, width, 1, next)
        else WITH_ROWS(many, attend_in, q, q_step, keys, values, count, me->scores, step, y, model->width, scale, width, 0, next)
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

static void run_step(struct worker *me) {
    const struct step *step = me->step;
    const struct model *model = step->model;
    const long rows = step->rows->count, tall = rows > FEW ? ROWS : 1;
    together(me, rows, embed_chunk, NULL);
    for (long i = 0; i < model->layers; i++) {
        const struct layer *layer = &model->h[i];
        multiply(me, &layer->c_attn, &layer->ln_1, step->x, step->qkv, STORE);
        together(me, rows, remember_chunk, &i);
        together(me, (rows + tall - 1) / tall * model->heads, attention_chunk, &i);
        multiply(me, &layer->attn_proj, NULL, step->mixed, step->x, ADD);
        multiply(me, &layer->c_fc, &layer->ln_2, step->x, step->hidden, ACTIVATE);
        multiply(me, &layer->mlp_proj, NULL, step->hidden, step->x, ADD);
    }
    if (step->rows->outputs) multiply(me, &model->head, &model->ln_f, step->x, step->rows->logits, LOGITS);
}

/* Memory: a part for all, then one for each thread. Returns its size where there is none yet. */
static char *take(char **memory, long bytes) {
    char *taken = *memory;
    *memory += padded(bytes, 64);
    return taken;
}

static long place(struct step *step, struct worker *me, long number, char *memory, long longest) {
    const struct model *model = step->model;
    const long rows = step->rows->count, few = rows < FEW ? rows : FEW, many = rows > FEW ? rows : 0;
    const long phases = PHASES * model->layers + 3, float_row = sizeof(float) * rows;
    const long widest = model->width > model->inner ? model->width : model->inner, part = part_of(widest);
    const long outputs = 3 * model->width > model->inner ? 3 * model->width : model->inner;
    char *start = memory;
    step->counters = (struct counter *)take(&memory, sizeof(struct counter) * phases);
    step->x = (float *)take(&memory, float_row * model->width);
    step->qkv = (float *)take(&memory, float_row * 3 * model->width);
    step->mixed = (float *)take(&memory, float_row * model->width);
    step->hidden = (float *)take(&memory, float_row * model->inner);
    step->partial = (float *)take(&memory, sizeof(float) * (PARTS * few + many) * (padded(outputs, SLAB) + SLAB));
    step->operand = (float *)take(&memory, sizeof(float) * many * pitch_of(widest, 1));
    step->scales = (float *)take(&memory, sizeof(float) * many * (padded(widest, BLOCK) / BLOCK));
    for (long i = 0; i <= number; i++) {
        *me = (struct worker){.step = step, .longest = padded(longest, LANES)};
        me->row = (float *)take(&memory, sizeof(float) * widest);
        me->scores = (float *)take(&memory, sizeof(float) * ROWS * me->longest);
        me->operand = (float *)take(&memory, sizeof(float) * few * pitch_of(widest, 1));
        me->scales = (float *)take(&memory, sizeof(float) * few * (padded(widest, BLOCK) / BLOCK));
        me->packed = (float *)take(&memory, many ? sizeof(float) * SLAB * (part > KEPT ? part : KEPT) : 0);
    }
    return memory - start;
}

/* Bytes that a step works in; they must begin at a multiple of 64. */
long NAMED(minigpt_memory, LEVEL)(const struct model *model, const struct rows *rows, long threads, long longest) {
    struct step step = {.model = model, .rows = rows, .threads = threads};
    struct worker me;
    return place(&step, &me, threads - 1, NULL, longest);
}

void NAMED(minigpt_step, LEVEL)(const struct model *model, const struct rows *rows, long threads, long longest,
                                char *memory) {
    memset(memory, 0, sizeof(struct counter) * (PHASES * model->layers + 3));
#pragma omp parallel num_threads(threads)
    {
        struct step step = {.model = model, .rows = rows, .threads = threads};
        struct worker me;
        place(&step, &me, omp_get_thread_num(), memory, longest);
        run_step(&me);
    }
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
    memset(memory, 0, sizeof(struct counter) * 3);
#pragma omp parallel num_threads(threads)
    {
        struct step step = {.model = &model, .rows = &rows, .threads = threads};
        struct worker me;
        place(&step, &me, omp_get_thread_num(), memory, 0);
        multiply(&me, matrix, NULL, in, out, LOGITS);
    }
}

/* Round PANEL outputs and BLOCK inputs. A block with NaN or infinity gets the scale NaN. */
static void round_block(float values[BLOCK][PANEL], struct int8_block *block) {
    static const int order[4] = {0, 2, 1, 3};
    float most[PANEL] = {0}, zero = 0;
    for (long k = 0; k < BLOCK; k++)
        for (long o = 0; o < PANEL; o++) {
            float size = fabsf(values[k][o]);
            most[o] = size > most[o] ? size : most[o], block->scale[o] = k ? block->scale[o] + 0 * size : 0 * size;
        }
    for (long o = 0; o < PANEL; o++) {
        zero += block->scale[o], block->scale[o] += most[o] / 127;
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

/* Round a matrix of floating-point numbers to INT8_PANELS. */
void NAMED(minigpt_round, LEVEL)(const struct matrix *m, struct int8_block *panels, long threads) {
    const int is_half = m->form == HALF_COLUMNS || m->form == HALF_ROWS;
    const int by_rows = m->form == FLOAT_ROWS || m->form == HALF_ROWS;
    const long blocks = padded(m->in, BLOCK) / BLOCK, k_step = by_rows ? 1 : m->out, o_step = by_rows ? m->in : 1;
    (void)threads;
#pragma omp parallel for num_threads(threads) collapse(2)
    for (long slab = 0; slab < m->out; slab += SLAB)
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

#if defined(DISPATCH) /* in one of the levels: of which sources the library is, and which level this processor has */
uint32_t minigpt_sources(void) { return SOURCES; } /* their CRC-32, which kernel.py compares */

int minigpt_supports(const char *level) {
#if defined(__x86_64__)
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!strcmp(level, "bf16")) return avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (!strcmp(level, "vnni")) return avx512 && __builtin_cpu_supports("avx512vnni");
    if (!strcmp(level, "avx512")) return avx512;
    if (!strcmp(level, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !strcmp(level, "portable");
}
#endif
