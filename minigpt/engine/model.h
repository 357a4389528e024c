/* The model and the rows of a step as engine/step.py passes them: engine/structs.py mirrors these structs. And a step, whose
 * phases threads share: they take chunks of a phase one at a time, so a thread that the system has suspended delays one chunk
 * and not the whole phase.
 *
 * R rows, each a new token, C width of the residual stream, K inputs of a product, V vocabulary.
 */
#ifndef MODEL_H
#define MODEL_H
#include "simd.h"

enum { BLOCK = 64, PANEL = 16 }; /* of int8: inputs that share a scale, and outputs that lie together */
enum form { FLOAT_COLUMNS, HALF_COLUMNS, FLOAT_ROWS, HALF_ROWS, INT8_PANELS }; /* columns: (in, out); rows: (out, in) */
enum norm_kind { LAYER_NORM, RMS, STD_EPS, FROZEN };
enum activation { GELU_TANH, GELU, RELU, SILU, TANH };

struct matrix {
    const void *weight;
    const float *bias; /* or NULL */
    int64_t in, out, form;
};
struct norm {
    const float *scale, *shift; /* or NULL */
    int64_t kind;
    float eps;
    const float *constants; /* of FROZEN: what it divides rows by, and those at position 0 */
};
struct vector { /* in bfloat16, and where a step writes it in float32, so that it is read anew in every step */
    const uint16_t *half;
    float *wide;
    int64_t count;
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
    int64_t vector_count;
    const struct vector *vectors;
};
struct rows {
    int64_t count;
    const int64_t *tokens, *slots, *columns; /* slot: the text's place in the cache, which begins at its column 0 */
    int64_t outputs;
    const int64_t *output_rows; /* (outputs), rows whose logits are computed */
    void *cache;
    int64_t is_half; /* the cache is bfloat16 */
    int64_t layer_stride, value_stride, slot_stride, head_stride; /* in values */
    float *logits; /* (outputs, V padded to a multiple of SLAB) */
};

struct int8_block { /* of PANEL outputs and BLOCK inputs, in groups of four inputs */
    float scale[PANEL];
    int8_t weight[BLOCK / 4][PANEL][4]; /* inputs 0, 2, 1, 3: every other one is the low half of 16 bits */
};
/* A step, and its threads. ---------------------------------------------------------------------------------------- */

enum { SPINS = 4000 }; /* pauses before a waiting thread yields its core */

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
    float *sums;                     /* (parts, R, outputs) of a product of few rows */
    float *operand, *scales;         /* of many rows, as a worker's for few */
};
struct worker { /* a thread's own memory */
    const struct step *step;
    long phase;
    long longest; /* columns of a text */
    int is_prepared;
    long count;           /* of the rows that phases take */
    const int64_t *taken; /* which rows of the step; NULL: all */
    float *row;           /* one normalized row */
    float *scores;        /* (ROWS, columns) of one head */
    float *kv;            /* (2, columns, C / H) keys and values of one head, widened for many rows */
    float *operand;       /* (R, pitch), in units: one float32, two bfloat16, or two integers of 16 bits */
    float *scales;        /* (R, blocks) of int8 */
    float *part;          /* (R, outputs of a chunk), sums of a part of the inputs; of a slab for many rows */
    float *packed;        /* (units, SLAB), weights for many rows */
};

/* Return which row of the step is the i-th that phases take. */
INLINE long row_of(const struct worker *me, long i) { return me->taken ? me->taken[i] : i; }

typedef void thread_function(long number, void *job);

/* Run a function by threads at the same time, numbered from 0: OpenMP's, which are PyTorch's too; without OpenMP new ones.
 * There may be fewer than threads, if the system gives no more: they share chunks, and do not wait for each other. */
#ifdef _OPENMP
static void together(long threads, thread_function *run, void *job) {
#pragma omp parallel num_threads(threads)
    run(omp_get_thread_num(), job);
}
#else
struct helper {
    pthread_t thread;
    thread_function *run;
    void *job;
    long number;
};

static void *help(void *argument) {
    const struct helper *helper = argument;
    helper->run(helper->number, helper->job);
    return NULL;
}

static void together(long threads, thread_function *run, void *job) {
    struct helper helpers[threads];
    long count = 1;
    for (; count < threads; count++) {
        helpers[count] = (struct helper){.run = run, .job = job, .number = count};
        if (pthread_create(&helpers[count].thread, NULL, help, &helpers[count])) break;
    }
    run(0, job);
    while (--count) pthread_join(helpers[count].thread, NULL);
}
#endif

typedef void chunk_function(struct worker *me, const void *job, long chunk);

INLINE void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Run all chunks of a phase together with the other threads, and return when all are done. */
static void parallel_for(struct worker *me, long chunks, chunk_function *run, const void *job) {
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

#endif
