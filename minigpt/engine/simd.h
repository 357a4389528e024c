/* Vectors of float32 at each level of instructions, and what is computed with them alone. */
#ifndef SIMD_H
#define SIMD_H
#include <float.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#include <pthread.h>
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
typedef int32_t pairs __attribute__((vector_size(4 * LANES), aligned(2), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#if defined(__AVX512F__) || defined(__aarch64__)
enum { ROWS = 6, VECS = 4, GROUP = 8 }; /* of a tile: its sums fill 32 registers; inputs whose weights are in registers */
#else
enum { ROWS = 6, VECS = 2, GROUP = 4 }; /* 16 registers */
#endif
enum { LINE = 64, LINE_VECS = LANES < 16 ? 2 : 1 }; /* bytes of a line of a cache; vectors to read of it at a time */

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

/* Read two vectors of neighbours. Of bfloat16 the first takes every other one, which needs no shuffle: straighten undoes it. */
INLINE void two_vecs_at(const void *values, long i, vec two[2], int is_half) {
    if (is_half) {
        const ivec both = *(const pairs *)((const uint16_t *)values + i);
        two[0] = (vec)(both << 16), two[1] = (vec)(both >> 16 << 16);
    } else {
        two[0] = vec_at(values, i, 0), two[1] = vec_at(values, i + LANES, 0);
    }
}

INLINE void straighten(float *values, long count) {
    for (long i = 0; i < count; i += 2 * LANES) {
        float two[2 * LANES];
        memcpy(two, values + i, sizeof two);
        for (int l = 0; l < LANES; l++) values[i + 2 * l] = two[l], values[i + 2 * l + 1] = two[LANES + l];
    }
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
    /* Shifted unsigned: of a NaN the integer is negative. */
    union { uint32_t bits; float value; } power = {(uint32_t)((int32_t)n + 127) << 23};
    return (p * r * r + r + 1.0f) * power.value + over;
}

/* The total of all lanes, from the first to the last. */
INLINE float total(vec sum) {
    float all = 0;
    for (int l = 0; l < LANES; l++) all += sum[l];
    return all;
}

/* Store the total of the lanes of each vector. The order of a total is the same for any count. */
INLINE void store_totals(float *y, const vec *sum, int count) {
#if defined(__AVX512F__)
    __m512 some[4] = {0};
    for (int i = 0; i < count; i++) some[i] = (__m512)sum[i];
    const __m512 one = _mm512_unpacklo_ps(some[0], some[2]) + _mm512_unpackhi_ps(some[0], some[2]);
    const __m512 two = _mm512_unpacklo_ps(some[1], some[3]) + _mm512_unpackhi_ps(some[1], some[3]);
    const __m512 four = _mm512_unpacklo_ps(one, two) + _mm512_unpackhi_ps(one, two); /* every four lanes: all of some */
    const __m256 half = _mm512_castps512_ps256(four) + _mm512_extractf32x8_ps(four, 1);
    const __m128 totals = _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
    if (count == 4) _mm_storeu_ps(y, totals);
    else _mm_mask_storeu_ps(y, (1 << count) - 1, totals);
#elif defined(__AVX__)
    __m256 some[4] = {0};
    for (int i = 0; i < count; i++) some[i] = (__m256)sum[i];
    const __m256 one = _mm256_unpacklo_ps(some[0], some[2]) + _mm256_unpackhi_ps(some[0], some[2]);
    const __m256 two = _mm256_unpacklo_ps(some[1], some[3]) + _mm256_unpackhi_ps(some[1], some[3]);
    const __m256 four = _mm256_unpacklo_ps(one, two) + _mm256_unpackhi_ps(one, two); /* every four lanes: all of some */
    const __m128 totals = _mm256_castps256_ps128(four) + _mm256_extractf128_ps(four, 1);
    for (int i = 0; i < count; i++) y[i] = totals[i];
#else
    for (int i = 0; i < count; i++) {
        y[i] = 0;
        for (int l = 0; l < LANES; l++) y[i] += sum[i][l];
    }
#endif
}

/* Call a tile of so many rows with the number as a constant, so that its sums stay in registers. */
#define WITH_ROWS(rows, function, ...)                   \
    switch (rows) {                                      \
    case 1: function(1, __VA_ARGS__); break;             \
    case 2: function(2, __VA_ARGS__); break;             \
    case 3: function(3, __VA_ARGS__); break;             \
    case 4: function(4, __VA_ARGS__); break;             \
    case 5: function(5, __VA_ARGS__); break;             \
    case 6: function(6, __VA_ARGS__); break;             \
    }

#endif
