/* A step of a small model of random numbers, for every form of weights: prints the logits. It needs no Python. Its argument
 * is the number of threads. */
#include <stdio.h>
#include <stdlib.h>

#include "../../minigpt/engine/kernel.c"

enum { WIDTH = 132, HEADS = 3, INNER = 77, WORDS = 100, LENGTH = 30, COUNT = 7, LAYERS = 2 };
static uint32_t state = 1;

static float next(float size) {
    state = state * 1664525u + 1013904223u;
    return size * ((state >> 8) / 8388608.0f - 1.0f);
}

static void *numbers(long count, float size, int is_half) {
    char *values = calloc(count + 64, 4);
    for (long i = 0; i < count; i++) {
        if (is_half) ((uint16_t *)values)[i] = to_half(next(size));
        else ((float *)values)[i] = next(size);
    }
    return values;
}

static void *panels(long in, long out) {
    const long count = padded(out, PANEL) / PANEL * (padded(in, BLOCK) / BLOCK);
    struct int8_block *blocks = calloc(count, sizeof *blocks);
    for (long b = 0; b < count; b++) {
        for (long o = 0; o < PANEL; o++) blocks[b].scale[o] = 0.001f + fabsf(next(0.001f));
        for (long i = 0; i < PANEL * BLOCK; i++) ((int8_t *)blocks[b].weight)[i] = (int8_t)next(127);
    }
    return blocks;
}

static struct matrix matrix(long in, long out, long form) {
    void *weight = form == INT8_PANELS ? panels(in, out) : numbers(in * out, 0.1f, form == HALF_COLUMNS || form == HALF_ROWS);
    return (struct matrix){weight, numbers(out, 0.1f, 0), in, out, form};
}

static struct norm norm(long kind) {
    static const float constants[] = {0.5f, 2};
    return (struct norm){numbers(WIDTH, 1, 0), numbers(WIDTH, 1, 0), kind, 1e-5f, constants};
}

int main(int count, char **arguments) {
    const long threads = count > 1 ? atol(arguments[1]) : 1;
    for (long form = FLOAT_COLUMNS; form <= INT8_PANELS; form++) {
        const long is_half = form == HALF_COLUMNS || form == HALF_ROWS, size = LENGTH * WIDTH;
        const long head = form < FLOAT_ROWS ? form + FLOAT_ROWS : form; /* the head's weight is always in rows */
        struct layer layers[LAYERS];
        for (long i = 0; i < LAYERS; i++)
            layers[i] = (struct layer){norm(i), norm(i + 2), matrix(WIDTH, 3 * WIDTH, form), matrix(WIDTH, WIDTH, form),
                                       matrix(WIDTH, INNER, form), matrix(INNER, WIDTH, form), 0.15f};
        struct model model = {LAYERS, WIDTH, HEADS, INNER, is_half, form, numbers(WORDS * WIDTH, 1, is_half),
                              numbers(LENGTH * WIDTH, 1, is_half), layers, norm(LAYER_NORM), matrix(WIDTH, WORDS, head)};
        const struct vector vector = {numbers(WIDTH, 1, 1), (float *)model.ln_f.scale, WIDTH};
        if (is_half) model.vector_count = 1, model.vectors = &vector;
        /* A token of each of COUNT texts, which have read others before; then LENGTH tokens of one text. */
        int64_t tokens[LENGTH], slots[LENGTH], columns[LENGTH], output_rows[COUNT];
        float *logits = numbers(COUNT * padded(WORDS, SLAB), 0, 0);
        const int has_half_cache = is_half || form == INT8_PANELS;
        struct rows rows = {.tokens = tokens, .slots = slots, .columns = columns, .outputs = COUNT, .output_rows = output_rows,
                            .cache = numbers(LAYERS * 2 * COUNT * size, 1, has_half_cache), .is_half = has_half_cache,
                            .layer_stride = 2 * COUNT * size, .value_stride = COUNT * size, .slot_stride = size,
                            .head_stride = LENGTH * (WIDTH / HEADS), .logits = logits};
        for (int is_one = 0; is_one <= 1; is_one++) {
            rows.count = is_one ? LENGTH : COUNT;
            for (long r = 0; r < rows.count; r++)
                tokens[r] = 3 * r, slots[r] = is_one ? 0 : r, columns[r] = is_one ? r : LENGTH - 1 - r;
            for (long r = 0; r < COUNT; r++) output_rows[r] = is_one ? 4 * r : r;
            char *memory = aligned_alloc(64, padded(minigpt_memory_portable(&model, &rows, threads, LENGTH), 64));
            minigpt_step_portable(&model, &rows, threads, LENGTH, memory);
            for (long r = 0; r < COUNT; r++)
                for (long o = 0; o < WORDS; o++) printf("%.9g\n", logits[r * padded(WORDS, SLAB) + o]);
        }
    }
}
