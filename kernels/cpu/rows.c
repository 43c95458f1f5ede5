/* Few-row passes on a CPU: linear layers, rotation, attention over a cache and a tree, all layers of a decoder in one
 * job, noise, and the choice of tokens.
 *
 * Every output row is computed by the same operations in the same order, whatever the other rows of the pass. A row
 * of a tree pass equals plain decoding's row bit for bit, so decoding is exact in bf16 too. Nothing is reduced over
 * threads: they divide the outputs among them (threads.inc), and each output is written once.
 *
 * Compiled once per machine by library.py, with GCC's vector extensions (any architecture). There are as many
 * threads as the OpenMP library that PyTorch has loaded would use, but they are our own.
 */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
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
#if defined(__AVX2__) /* one instruction; GCC makes five of the lines below */
    return (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#else
    h8 h; memcpy(&h, p, 16);
    u8 u = __builtin_convertvector(h, u8) << 16;
    f8 v; memcpy(&v, &u, 32);
    return v;
#endif
}
static inline f8 load_bytes(const int8_t *p) {
#if defined(__AVX2__) /* GCC would convert the vector number by number */
    return (f8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return (f8){p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7]};
#endif
}
static inline f8 splat(float x) { return (f8){x, x, x, x, x, x, x, x}; } /* not 0 + x: that turns -0 into 0 */
/* a * b + c. It is spelled out, with contraction turned off, because a compiler fuses the same expression in one loop and
 * not in another, and rows would differ. */
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
/* narrow() of eight numbers; each result is in the upper 16 bits, as in a widened number. */
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
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 8")
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

/* e^x for x <= 0, to about 2 ulp; 0 below -87 (Cephes' polynomial of x minus a multiple of ln 2). */
static inline f8 exp8(f8 x) {
    f8 scaled = x * 1.44269504088896341f;
    i8 n = __builtin_convertvector(scaled - 0.5f, i8); /* truncates, which rounds a negative number to nearest */
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

#include "threads.inc"

/* ---- linear: y = residual + bf16(norm(x) w^T + bias), or gated, with fp32 sums in eight lanes along k ----
 * Results are rounded to the element type wherever separate operations would round, so fusing changes only the order of
 * sums. Rotation: RoPE of `heads` heads of each row. */

/* Weights are read from memory once. The processor does not foresee that the end of one weight row's stripe leads to the
 * next block, so we prefetch: without it a pass of 1 and of 6 rows takes 1.3 times as long (docs/log). If a tile is
 * multiplied with several blocks of rows, the last block prefetches the next tile while it computes. */
enum { AHEAD = 12288 }; /* bytes */

#if defined(__AVX__)
#define HOLD(v) __asm__("" : "+v"(v)) /* keep it in a register: GCC would load the row again for each product */
#else
#define HOLD(v)
#endif
/* MOST_ROWS: rows of a block; accumulators of 6 x 2 fill the vector registers. TILE: outputs of a chunk; a multiple of 8
 * and of every block's number of outputs. TURNED: rows that a chunk of a rotation takes. */
enum { MOST_ROWS = 6, TILE = 48, TURNED = 4 };
#define ROUND_UP(n, step) (((n) + (step) - 1) / (step) * (step))

typedef struct {
    const void *x, *norm, *w, *bias, *residual; /* x [m, k]; norm [k], bias [n], residual [m, n] may be NULL */
    const float *scales;                        /* [n], one for each output of an int8 w; or NULL */
    void *y;                                    /* [m, n], gated [m, n / 2] */
    ix m, n, k, gated;                          /* all contiguous; k a multiple of 8, n of 16 where gated */
    float eps;
} linear;
typedef struct {
    const void *x, *cos, *sin; /* x [m, heads, d], rows `stride` apart; cos [m, d / 2]; sin [m, d], signs included */
    const void *q_norm, *k_norm; /* [d], RMSNorms of the first `queries` heads and of the others; or both NULL */
    void *y;                   /* [m, heads, d] contiguous */
    /* A cache, or NULL. Row r of slot b goes to cache row lengths[b] + r unless that is negative: the rotated heads after
     * the queries to `keys`, and the equally many heads after these in x, unchanged, to `values`. */
    void *keys, *values;
    const int64_t *lengths;
    ix m, heads, d, stride, period; /* row i is rotated by row i % period of cos and sin */
    ix queries, rows, k_slot, k_row, v_slot, v_row; /* rows of a slot; strides of the cache in elements */
    float eps;                      /* of the norms, which need d to be a multiple of 8 */
} rotation;

/* Rows of the next block if `left` are left. Blocks of 6 and of 4 take the least time per row, those of 1 to 3 the most. */
static ix height(ix left) { return left <= MOST_ROWS ? left : left <= 8 ? 4 : left == 9 ? 5 : MOST_ROWS; }

#include "noise.inc"

#include "attention_common.inc"

/* Adds a stage of this type, whose arguments are kept at `place`. */
#define ADD(type, place, ...) ((place) = (type){__VA_ARGS__}, NAME(type)(&(place), p))

/* ---- the layers of a decoder: stages of one job ---- */

typedef struct {
    const void *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias; /* biases and norms of heads may be NULL */
    const void *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    ix window; /* as in attention */
} layer;
typedef struct {
    linear qkv, o, gate_up, down;
    rotation turned;
    attention attended;
} layer_calls;
typedef struct {
    const layer *table;
    layer_calls *calls; /* [layers], memory for the stages' arguments */
    const void *x, *cos, *sin; /* x [batch, rows, hidden] contiguous; the others as in rotation */
    void *y;                   /* like x; not written if the last layer ends before its attention */
    void *projected, *turned;  /* [layers, batch, rows, q, k and v heads, d], and the same of q and k heads, rotated */
    void *rest; /* scratch [layers, batch * rows, heads * d + 2 * hidden + inner]; nothing is overwritten within the job */
    void *keys, *values;    /* [layers, batch, ...], heads contiguous, with the same strides */
    const int64_t *lengths; /* and mask as in attention */
    const uint8_t *mask;
    ix layers, batch, rows, hidden, heads, kv_heads, width, inner, period, ends_early;
    ix cache_layer, cache_slot, cache_row; /* strides in elements */
    float eps, scale; /* of the norms; of attention */
} decoder_layers;

/* ---- a draft's block that also reads the target's cache: stages of one job ---- */

typedef struct {
    const void *w;
    const float *scales;
} matrix; /* as in linear */
typedef struct {
    matrix qkv, self_o, cross_q, cross_o, gate_up, down, head;
    const void *qkv_bias, *cross_q_bias, *self_norm, *cross_norm, *mlp_norm, *final_norm; /* biases and the last may be NULL */
} draft_weights;
typedef struct {
    linear missing, qkv, self_o, cross_q, cross_o, gate_up, down, head;
    rotation missing_turned, turned, cross_turned;
    attention attended, crossed;
} draft_calls;
typedef struct {
    const draft_weights *weights;
    draft_calls *calls; /* memory for the stages' arguments */
    const int64_t *tokens;  /* [batch, rows], the input; slot b's are all at position lengths[b] + offset */
    const void *embeddings, *cos, *sin; /* [words, hidden]; tables of every position, as in rotation */
    void *logits; /* [batch, rows, vocab] */
    void *rest;   /* scratch [batch * rows, 6 * query + 3 * kv + 4 * hidden + inner + 3 * d / 2], query = heads * d, kv = kv_heads * d */
    void *keys, *values;    /* its own cache, of equal strides, heads contiguous; this pass's rows go to `ends` on */
    const int64_t *lengths, *ends; /* as in attention; lengths + before */
    const uint8_t *mask;    /* as in attention */
    const void *target_keys, *target_values; /* of equal strides, heads contiguous */
    const int64_t *target_lengths;
    /* Keys and values of the last n_missing committed tokens are written first, from missing_starts = lengths - n_missing on;
     * history: tokens by position, slots history_slot apart. */
    const int64_t *history, *missing_starts;
    void *missing_rest; /* scratch [batch * n_missing, hidden + 3 * kv + 3 * d / 2] */
    ix batch, rows, before, n_missing, hidden, heads, kv_heads, width, inner, vocab, window;
    ix slot, row, target_slot, target_row, history_slot, offset; /* strides in elements */
    float eps, scale, embedding_scale;
} draft_block;

/* ---- the best tokens of rows of logits; `words` are ids of the draft's vocabulary ---- */

typedef struct {
    const void *logits;     /* [batch, rows, vocab] contiguous */
    const float *divisors;  /* [batch], or NULL; score = logit / divisor + noise */
    const float *noise;     /* [batch, noise_row], or NULL */
    const int64_t *ids;     /* [vocab], the index of a word's noise; NULL: the word itself */
    float *parts;           /* [batch * rows, parts of a row, 2 + 2 * count] */
    float *log_probs;       /* [batch, rows, count], of the softmax over scores; -inf where there are fewer words */
    int64_t *words;         /* likewise */
    ix batch, rows, vocab, count, noise_row;
} best_tokens;

#include "beam.inc"
#include "delta.inc"

/* ---- both element types, by the arithmetic of this machine ---- */

/* For the linear layers. ROW_T: element type of the rows that products read. PART: a vector of STEP numbers of a row,
 * or of weights, of which `left` remain. SUMS: the type that accumulates their products. GIVE: writes R sums plus
 * biases to y. WIDE_4, WIDE_6: outputs of a block of 4, and of 5 or 6, rows. GROUP: outputs that all rows are
 * multiplied with before the next ones. SPREAD_MANY: converts numbers of an int8 weight from i on, in full vectors. */
#define ROW_T float
#define PART f8
#define SUMS f8
#define STEP 8
#define LOAD_WEIGHTS(p, left) LOAD(p)
#define LOAD_ROW load_f32
#define MULTIPLY_ADD fma8
#define GIVE(sums, R, bias, y) for (int r = 0; r < R; r++) (y)[r] = NARROW(sum8(sums[r]) + (bias ? WIDEN(bias[r]) : 0.0f))
#define WIDE_4 3
#define WIDE_6 2
#define GROUP TILE
#define SPREAD_MANY(w, scale, count, to, i)
/* For attention: the function that computes a split in place of `own`. */
#define SPLIT_BY(a, own) own

#define T_ float
#define LOAD load_f32
#define STORE store_f32
#define ROUNDED(v) (v)
#define NARROW(x) (x)
#define WIDEN(x) (x)
#define NAME(f) f##_f32
#include "linear.inc"
#include "attention.inc"
#include "layers.inc"
#include "draft_block.inc"
#include "best_tokens.inc"
#undef T_
#undef LOAD
#undef STORE
#undef ROUNDED
#undef NARROW
#undef WIDEN
#undef NAME

#if defined(__AVX512BF16__)
#include "pairs.inc"
#include "attention_pairs.inc"
int has_pairs = 1;
#else
int has_pairs = 0;
#endif

#define T_ bf16
#define LOAD load_bf16
#define STORE store_bf16
#define ROUNDED rounded8
#define NARROW narrow
#define WIDEN widen
#define NAME(f) f##_bf16
#include "linear.inc"
#include "attention.inc"
#include "layers.inc"
#include "draft_block.inc"
#include "best_tokens.inc"
