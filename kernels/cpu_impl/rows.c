/* Few-row passes on a CPU: linear layers with bf16 weights, attention over a cache plus a tree, and Philox's words.
 *
 * Every output row is computed by the same operations in the same order whatever other rows the pass holds: a row of a
 * tree pass equals plain decoding's row bit for bit, so decoding is exact in bf16 too. Nothing here is a reduction over
 * threads: threads share out independent outputs.
 *
 * Compiled once per machine by rows.py, with GCC's vector extensions (any architecture); OpenMP symbols are
 * resolved by the OpenMP library that PyTorch has already loaded, so that both share one pool of threads.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__FMA__) || defined(__AVX__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_FMA)
#include <arm_neon.h>
#endif

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef uint16_t bf16;
typedef ptrdiff_t ix;

static inline f8 load_f32(const float *p) { f8 v; memcpy(&v, p, 32); return v; }
static inline void store_f32(float *p, f8 v) { memcpy(p, &v, 32); }
static inline f8 load_bf16(const bf16 *p) {
#if defined(__AVX2__) /* one instruction where GCC makes five of the lines below */
    return (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    h8 h; memcpy(&h, p, 16);
    u8 u = __builtin_convertvector(h, u8) << 16;
    f8 v; memcpy(&v, &u, 32);
    return v;
#endif
}
static inline f8 splat(float x) { return (f8){x, x, x, x, x, x, x, x}; } /* 0 + x would be an addition: of -0 it is 0 */
/* a * b + c. Spelled out and contraction turned off: a compiler fuses the same expression in one loop and not in another,
 * and rows would differ. */
static inline f8 fma8(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
    float32x4_t x[2], y[2], z[2];
    memcpy(x, &a, 32), memcpy(y, &b, 32), memcpy(z, &c, 32);
    z[0] = vfmaq_f32(z[0], x[0], y[0]), z[1] = vfmaq_f32(z[1], x[1], y[1]);
    memcpy(&c, z, 32);
    return c;
#else
    return a * b + c;
#endif
}
static inline float widen(bf16 x) { uint32_t u = (uint32_t)x << 16; float f; memcpy(&f, &u, 4); return f; }
static inline bf16 narrow(float x) { /* to nearest, ties to even; NaN stays NaN */
    uint32_t u; memcpy(&u, &x, 4);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
/* narrow() of eight numbers, each above 16 zero bits, as in a widened number. */
static inline u8 narrow8(f8 v) {
    u8 u; memcpy(&u, &v, 32);
    u8 nan = (u8)((u & 0x7fffffff) > 0x7f800000), rounded = u + 0x7fff + ((u >> 16) & 1);
    return ((rounded & ~nan) | (nan & 0x7fc00000)) & 0xffff0000;
}
static inline f8 rounded8(f8 v) { u8 u = narrow8(v); memcpy(&v, &u, 32); return v; }
static inline void store_bf16(bf16 *p, f8 v) {
    h8 h = __builtin_convertvector(narrow8(v) >> 16, h8);
    memcpy(p, &h, 16);
}
static inline f8 larger8(f8 a, f8 b) { /* a > b ? a : b */
#if defined(__AVX__)
    return (f8)_mm256_max_ps((__m256)a, (__m256)b);
#else
    i8 more = a > b, x, y;
    memcpy(&x, &a, 32), memcpy(&y, &b, 32);
    x = (x & more) | (y & ~more);
    memcpy(&a, &x, 32);
    return a;
#endif
}
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif
static inline float sum8(f8 v) { /* ((v0 + v4) + (v2 + v6)) + ((v1 + v5) + (v3 + v7)) */
    v += SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    v += SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
    return v[0];
}
static inline float max8(f8 v) {
    v = larger8(v, SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = larger8(v, SHUFFLE(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    v = larger8(v, SHUFFLE(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
    return v[0];
}

/* e^x for x <= 0, to about 2 ulp; below -87 it is 0 (Cephes' polynomial on the rest after x / ln 2 is rounded). */
static inline f8 exp8(f8 x) {
    f8 scaled = x * 1.44269504088896341f;
    i8 n = __builtin_convertvector(scaled - 0.5f, i8); /* truncation of a negative number: rounds to nearest */
    f8 r = __builtin_convertvector(n, f8);
    f8 zero = {0}, y = fma8(r, zero - 0.693359375f, x);
    y = fma8(r, zero + 2.12194440e-4f, y);
    f8 p = fma8(y, zero + 1.9875691500e-4f, zero + 1.3981999507e-3f);
    p = fma8(p, y, zero + 8.3334519073e-3f);
    p = fma8(p, y, zero + 4.1665795894e-2f);
    p = fma8(p, y, zero + 1.6666665459e-1f);
    p = fma8(p, y, zero + 5.0000001201e-1f);
    p = fma8(p * y, y, y + 1.0f);
    i8 bits = (n + 127) << 23;
    f8 power; memcpy(&power, &bits, 32);
    i8 keep = ~(x <= -87.0f); /* NaN stays NaN */
    f8 result = p * power;
    i8 out; memcpy(&out, &result, 32);
    out &= keep;
    memcpy(&result, &out, 32);
    return result;
}

/* ---- linear: y = residual + bf16(norm(x) w^T + bias), or gated, fp32 sums in eight lanes along k ----
 * Rounded to bf16 wherever separate operations would be, so that fusing changes no more than the order of sums. */

/* Weights are read once, from memory. The processor does not see that the end of one row's stripe leads to the next
 * block's, so it is told: without it a pass of 1 and of 6 rows takes 1.3 times as long (docs/LOG.md). Where a tile meets
 * several blocks of rows, the last one asks for the next tile while it computes. */
enum { LINE = 32, AHEAD = 6144 };

#if defined(__AVX__)
#define HOLD(v) __asm__("" : "+x"(v)) /* loaded once: GCC would read the row again for each of its products */
#else
#define HOLD(v)
#endif
#define BLOCK(M, R)                                                                                                   \
    static void block_##M##_##R(const float *x, const bf16 *w, const bf16 *bias, bf16 *y, ix k, ix n, ix ahead) {     \
        f8 sums[M][R];                                                                                                \
        for (int m = 0; m < M; m++) for (int r = 0; r < R; r++) sums[m][r] = (f8){0};                                 \
        for (ix i = 0; i < k; i += 8) {                                                                               \
            f8 weights[R];                                                                                            \
            for (int r = 0; r < R; r++) {                                                                             \
                weights[r] = load_bf16(w + r * k + i);                                                                \
                if (i % LINE == 0) __builtin_prefetch(w + r * k + i + ahead, 0, 2);                                   \
            }                                                                                                         \
            for (int m = 0; m < M; m++) {                                                                             \
                f8 row = load_f32(x + m * k + i);                                                                     \
                HOLD(row);                                                                                            \
                for (int r = 0; r < R; r++) sums[m][r] = fma8(row, weights[r], sums[m][r]);                           \
            }                                                                                                         \
        }                                                                                                             \
        for (int m = 0; m < M; m++) for (int r = 0; r < R; r++)                                                       \
            y[m * n + r] = narrow(sum8(sums[m][r]) + (bias ? widen(bias[r]) : 0.0f));                                 \
    }
BLOCK(1, 4) BLOCK(2, 4) BLOCK(3, 4) BLOCK(4, 3) BLOCK(5, 2) BLOCK(6, 2)
BLOCK(1, 1) BLOCK(2, 1) BLOCK(3, 1) BLOCK(4, 1) BLOCK(5, 1) BLOCK(6, 1)
typedef void (*block)(const float *, const bf16 *, const bf16 *, bf16 *, ix, ix, ix);
enum { MOST_ROWS = 6, TILE = 48 }; /* the accumulators of 6 x 2 fill the vector registers; TILE is a multiple of all R */
static const block blocks[] = {0, block_1_4, block_2_4, block_3_4, block_4_3, block_5_2, block_6_2};
static const block singles[] = {0, block_1_1, block_2_1, block_3_1, block_4_1, block_5_1, block_6_1};
static const int outputs[] = {0, 4, 4, 4, 3, 2, 2};

typedef struct {
    const bf16 *x, *norm, *w, *bias, *residual; /* x [m, k]; norm [k], bias [n], residual [m, n] may be NULL */
    bf16 *y;                                    /* [m, n], gated [m, n / 2] */
    ix m, n, k, gated;                          /* all contiguous; k a multiple of 8, n of 16 where gated */
    float eps;
} linear;

/* A row in fp32, after RMSNorm where there is one. */
static void prepare(const linear *a, const bf16 *x, float *row) {
    f8 squares = {0};
    for (ix i = 0; i < a->k; i += 8) {
        f8 v = load_bf16(x + i);
        store_f32(row + i, v);
        squares = fma8(v, v, squares);
    }
    if (!a->norm) return;
    float scale = 1.0f / sqrtf(sum8(squares) / a->k + a->eps);
    for (ix i = 0; i < a->k; i += 8) store_f32(row + i, rounded8(load_f32(row + i) * scale * load_bf16(a->norm + i)));
}

/* Rows of the next block, where so many are left: those of 6 and of 4 take the least time a row, of 1 to 3 the most. */
static ix height(ix left) { return left <= MOST_ROWS ? left : left <= 8 ? 4 : left == 9 ? 5 : MOST_ROWS; }

/* One tile of outputs for all rows, block by block. */
static void tile_outputs(const linear *a, const float *rows, bf16 *y, ix start) {
    const ix end = start + TILE < a->n ? start + TILE : a->n, k = a->k, n = a->n;
    for (ix first = 0, count; first < a->m; first += count) {
        count = height(a->m - first);
        const ix ahead = first + count < a->m || first == 0 ? AHEAD : TILE * k;
        ix j = start;
        for (; j + outputs[count] <= end; j += outputs[count])
            blocks[count](rows + first * k, a->w + j * k, a->bias ? a->bias + j : 0, y + first * n + j, k, n, ahead);
        for (; j < end; j++)
            singles[count](rows + first * k, a->w + j * k, a->bias ? a->bias + j : 0, y + first * n + j, k, n, ahead);
        if (a->residual)
            for (ix r = first; r < first + count; r++)
                for (ix i = start; i < end; i++) y[r * n + i] = narrow(widen(a->residual[r * n + i]) + widen(y[r * n + i]));
    }
}

/* silu(first half) * second half of each row. */
static void gate(const bf16 *both, bf16 *y, ix half) {
    f8 zero = {0}, one = zero + 1.0f;
    for (ix i = 0; i < half; i += 8) {
        f8 g = load_bf16(both + i), up = load_bf16(both + half + i);
        i8 positive = g > zero, bits, small;
        f8 e = exp8(g * (__builtin_convertvector(positive, f8) * 2.0f + 1.0f)); /* e^-|g|: a true lane is -1 */
        f8 top = one, below = one + e;
        memcpy(&bits, &top, 32), memcpy(&small, &e, 32);
        bits = (bits & positive) | (small & ~positive);
        memcpy(&top, &bits, 32);
        f8 silu = g * (top / below);
        store_bf16(y + i, rounded8(silu) * up);
    }
}

int linear_bf16(const void *arguments) {
    const linear *a = arguments;
    float *rows = malloc(sizeof(float) * a->m * a->k);
    bf16 *both = a->gated ? malloc(sizeof(bf16) * a->m * a->n) : a->y;
    if (!rows || !both) {
        free(rows);
        if (a->gated) free(both);
        return 1;
    }
    #pragma omp parallel
    {
        #pragma omp for schedule(static)
        for (ix i = 0; i < a->m; i++) prepare(a, a->x + i * a->k, rows + i * a->k);
        #pragma omp for schedule(static)
        for (ix tile = 0; tile < (a->n + TILE - 1) / TILE; tile++) tile_outputs(a, rows, both, tile * TILE);
        if (a->gated) {
            #pragma omp for schedule(static)
            for (ix i = 0; i < a->m; i++) gate(both + i * a->n, a->y + i * a->n / 2, a->n / 2);
        }
    }
    free(rows);
    if (a->gated) free(both);
    return 0;
}

#include "noise.inc"

/* ---- rotation: RoPE of `heads` heads of each row, first half paired with second half ---- */

typedef struct {
    const bf16 *x, *cos, *sin; /* x [m, heads, d], rows `stride` apart; cos [m, d / 2]; sin [m, d], signs included */
    bf16 *y;                   /* [m, heads, d] contiguous */
    ix m, heads, d, stride, period; /* row i is turned by row i % period of cos and sin */
} rotation;

int rotate_bf16(const void *arguments) {
    const rotation *a = arguments;
    const ix half = a->d / 2;
    for (ix row = 0; row < a->m; row++)
        for (ix head = 0; head < a->heads; head++) {
            const bf16 *x = a->x + row * a->stride + head * a->d;
            const bf16 *cos = a->cos + row % a->period * half, *sin = a->sin + row % a->period * a->d;
            bf16 *y = a->y + (row * a->heads + head) * a->d;
            ix i = 0;
            for (; half % 8 == 0 && i < half; i += 8) {
                f8 first = load_bf16(x + i), second = load_bf16(x + half + i), c = load_bf16(cos + i);
                store_bf16(y + i, rounded8(first * c) + second * load_bf16(sin + i));
                store_bf16(y + half + i, rounded8(second * c) + first * load_bf16(sin + half + i));
            }
            for (; i < half; i++) {
                float first = widen(x[i]), second = widen(x[half + i]), c = widen(cos[i]);
                y[i] = narrow(widen(narrow(first * c)) + second * widen(sin[i]));
                y[half + i] = narrow(widen(narrow(second * c)) + first * widen(sin[half + i]));
            }
        }
    return 0;
}

/* ---- rows of a pass to their places in the cache ---- */

typedef struct {
    const char *from;
    char *to;
    const int64_t *lengths; /* [batch]: row r of slot b goes behind the slot's rows, to row lengths[b] + r */
    ix batch, rows, bytes, from_slot, from_row, to_slot, to_row; /* all but the first two in bytes */
} placing;

int append_rows(const void *arguments) {
    const placing *a = arguments;
    for (ix b = 0; b < a->batch; b++)
        for (ix r = 0; r < a->rows; r++)
            memcpy(a->to + b * a->to_slot + (a->lengths[b] + r) * a->to_row, a->from + b * a->from_slot + r * a->from_row, a->bytes);
    return 0;
}

/* ---- attention, for both element types ---- */

#include "attention_common.inc"
#define T_ float
#define LOAD load_f32
#define NARROW(x) (x)
#define NAME(f) f##_f32
#include "attention.inc"
#undef T_
#undef LOAD
#undef NARROW
#undef NAME
#define T_ bf16
#define LOAD load_bf16
#define NARROW narrow
#define NAME(f) f##_bf16
#include "attention.inc"

/* ---- calls that were recorded (program.py), made again in order; what the first that fails returns, or 0 ---- */

typedef struct {
    int (*function)(const void *);
    const void *arguments;
} call;

int make_calls(const call *calls, ix count) {
    int failed = 0;
    for (ix i = 0; i < count && !failed; i++) failed = calls[i].function(calls[i].arguments);
    return failed;
}
