// The gated delta layer of one pass: prepare (convolution, norms, gates of pending and own rows), recurrence, gated norm.
//
// S [lanes, Hv, Dk, Dv] FP32 and history [lanes, K-1, C] BF16 (oldest first) hold the base. The tape holds the rows of the
// last verify: u [lanes, rows, C] BF16, g and beta [lanes, rows, Hv] FP32; of a lane the first `pending` rows are committed
// but not in S. A pass replays them, then runs its own rows with the same instructions, so replayed bits equal first-run
// bits. S is read once and written once: after the replay, or after the own rows when the pass commits (prefill). With no
// own rows the same kernels are a flush. A verify has own rows in each of its slots (blockIdx.z, control.cuh); prefill and
// flush are of one slot.
//
// Columns of S are independent. Two paths give the same bits: three kernels with scratch between them (prefill, and every
// arch and shape: delta_rows.cuh), and one kernel whose clusters of two blocks are the heads (verify and flush of 128-wide
// heads: delta_cluster.cuh).
#include "blocks.cuh"
#include "cluster.cuh"
#include "control.cuh"

static constexpr int TAPS = 4;   // longest convolution; shorter ones have leading zeros
static constexpr int PARTS = 8;  // partial sums of an output that the recurrence leaves

// BF16 inputs of the convolution: row t < 0 is history, t < pending tape, then own.
struct Line {
  const u16 *history, *tape, *own;
  int pending, channels, own_stride, taps;
  __device__ __forceinline__ const u16* row(int t) const {
    if (t < 0) return history + (u64)(taps - 1 + t) * channels;
    return t < pending ? tape + (u64)t * channels : own + (u64)(t - pending) * own_stride;
  }
};

// ------------------------------------------------------------------------------------ arithmetic that both paths share

template <int E>
__device__ __forceinline__ void read_vector(float (&to)[E], const float* from) {
  if constexpr (E == 4) {
    const float4 x = *(const float4*)from;
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (E == 2) {
    const float2 x = *(const float2*)from;
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = *from;
  }
}

template <int E>
__device__ __forceinline__ void write_vector(float* to, const float (&x)[E]) {
  if constexpr (E == 4) {
    *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
  } else if constexpr (E == 2) {
    *(float2*)to = make_float2(x[0], x[1]);
  } else {
    *to = x[0];
  }
}

template <int E>
struct Raw {  // E channels of a row of BF16 inputs
  u16 x[E];
  __device__ __forceinline__ void load(const u16* p) {
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = __ldcg(p + e);
  }
  __device__ __forceinline__ float at(int e) const { return from_bf16(x[e]); }
};
template <>
struct Raw<2> {
  u32 x;
  __device__ __forceinline__ void load(const u16* p) { x = __ldcg((const u32*)p); }
  __device__ __forceinline__ void load_shared(const u16* p) { x = *(const u32*)p; }
  __device__ __forceinline__ float at(int e) const { return e ? bf16_high(x) : bf16_low(x); }
};
template <>
struct Raw<4> {
  uint2 x;
  __device__ __forceinline__ void load(const u16* p) { x = __ldcg((const uint2*)p); }
  __device__ __forceinline__ void load_shared(const u16* p) { x = *(const uint2*)p; }
  __device__ __forceinline__ float at(int e) const {
    const u32 pair = e < 2 ? x.x : x.y;
    return e % 2 ? bf16_high(pair) : bf16_low(pair);
  }
};

// Weights of E channels, [TAPS, stride] from the first of them.
template <int E>
struct Weights {
  float w[TAPS][E];
  __device__ __forceinline__ void load(const float* first, int stride) {
#pragma unroll
    for (int n = 0; n < TAPS; n++) read_vector(w[n], first + (u64)n * stride);
  }
};

// Convolution and SiLU of E channels; u: the rows t - 3 .. t, of which the last `taps` count.
template <int E>
__device__ __forceinline__ void convolve(float (&x)[E], const Raw<E>* u, const Weights<E>& weights, int taps) {
#pragma unroll
  for (int e = 0; e < E; e++) x[e] = 0.0f;
#pragma unroll
  for (int n = 0; n < TAPS; n++)
    if (n >= TAPS - taps)
#pragma unroll
      for (int e = 0; e < E; e++) x[e] = __fmaf_rn(u[n].at(e), weights.w[n][e], x[e]);
#pragma unroll
  for (int e = 0; e < E; e++) x[e] = silu(x[e]);
}

template <int E>
__device__ __forceinline__ void normalise(float (&x)[E], bool query) {
  // x / sqrt(sum(x^2) + 1e-6), a query also / sqrt(D); a warp has the D = 32 E elements
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < E; e++) squares = __fmaf_rn(x[e], x[e], squares);
  float factor = reciprocal_root_fast(__fadd_rn(lane_sum<32>(squares), 1e-6f));
  if (query) factor = __fmul_rn(factor, reciprocal_root_fast(32 * E));
#pragma unroll
  for (int e = 0; e < E; e++) x[e] = __fmul_rn(x[e], factor);
}

__device__ __forceinline__ float log_decay(u16 a, float rate, float dt_bias) {  // rate: -exp(a_log)
  const float x = __fadd_rn(from_bf16(a), dt_bias);
  return __fmul_rn(rate, x > 20.0f ? x : log1pf(expf(x)));
}

// A token: S <- decay S + k d^T with d = beta (v - decay S^T k); decay S is rounded, then k d is added in one rounding. Its
// output: S^T q. Bits are those of one order of sums over k, whoever has which elements. The terms l of 32 each have the
// elements KE l .. KE l + KE - 1 (KE = Dk / 32) of a column, in a chain; then terms are added that differ in bit 4 of l,
// in bit 3, 2, 1, 0. Of an output the eight sums after bits 4 and 3 are its parts, which Parts adds.

// Of two columns, added in pairs.
__device__ __forceinline__ float2 sum_of_parts(float2 (&p)[PARTS]) {
#pragma unroll
  for (int width = 1; width < PARTS; width *= 2)
#pragma unroll
    for (int i = 0; i < PARTS; i += 2 * width)
      p[i].x = __fadd_rn(p[i].x, p[i + width].x), p[i].y = __fadd_rn(p[i].y, p[i + width].y);
  return p[0];
}

// Parts of outputs in shared memory, without bank conflicts where a lane writes part lane % 8 of column lane / 8.
template <int W>
struct Parts {
  float x[PARTS][W + 4];
  __device__ __forceinline__ float2 sum(int column) const {  // of columns column, column + 1
    float2 p[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) p[i] = *(const float2*)&x[i][column];
    return sum_of_parts(p);
  }
};

// Gated RMS norm, 2 columns a lane. Squares are summed over 64 columns by a warp, then over the head in order.
__device__ __forceinline__ float squares_of_64(const float2& x) {
  return lane_sum<32>(__fmaf_rn(x.y, x.y, __fmul_rn(x.x, x.x)));
}
__device__ __forceinline__ u32 gated_norm(const float2& o, float squares, int dv, float eps, const float2& weight,
                                          const float2& gate) {          // gate: silu(z)
  const float share = __uint_as_float((127u - (31 - __clz(dv))) << 23);  // 1 / dv, a power of two
  const float inverse = reciprocal_root_fast(__fmaf_rn(squares, share, eps));
  return pack_bf16(__fmul_rn(__fmul_rn(__fmul_rn(o.x, inverse), weight.x), gate.x),
                   __fmul_rn(__fmul_rn(__fmul_rn(o.y, inverse), weight.y), gate.y));
}
__device__ __forceinline__ u32 gated_norm(const float2& o, float squares, int dv, float eps, const float2& weight,
                                          u32 z) {
  return gated_norm(o, squares, dv, eps, weight, make_float2(silu(bf16_low(z)), silu(bf16_high(z))));
}

#include "delta_cluster.cuh"
#include "delta_crowded.cuh"
#include "delta_rows.cuh"
