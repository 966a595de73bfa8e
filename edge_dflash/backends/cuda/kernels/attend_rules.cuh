// What every attention kernel does alike: the keys that a row sees, how partial results are folded, what is written.
#pragma once
#include "control.cuh"

static constexpr int FAR = 0x3fffffff;
enum Flags { BIDIRECTIONAL = 1, SEQUENTIAL = 2, GATED = 4 };

// Keys that the row at position p sees: first <= key < stop.
struct View {
  int first, stop;
};
__device__ __forceinline__ View view(int p, int keys, int window, int flags) {
  View v;
  v.first = window ? max(0, p - window + 1) : 0;
  v.stop = min(keys, (flags & BIDIRECTIONAL) ? (window ? p + window : FAR) : p + 1);
  return v;
}

__device__ __forceinline__ int valid_rows(const int* rows_there, int rows) {
  return rows_there ? min(early_word(rows_there), rows) : rows;
}

// A row of a head in a warp: lane l has dims 64 i + 2 l + e as x[i][e].
struct Lane {
  float x[4][2];
};
__device__ __forceinline__ void load_row(Lane& row, const u16* source, int pairs, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u32 both = i < pairs ? ((const u32*)source)[i * 32 + lane] : 0u;
    row.x[i][0] = bf16_low(both), row.x[i][1] = bf16_high(both);
  }
}
// Cosines and sines of a position, [half] each: dims j and j + half turn together, the first with the sine negated.
__device__ __forceinline__ void load_turn(Lane& c, Lane& s, const float* cosine, const float* sine, int position,
                                          int half, int lane) {
  cosine += (u64)position * half, sine += (u64)position * half;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int j = i * 64 + lane * 2 + e;
      c.x[i][e] = 1.0f, s.x[i][e] = 0.0f;
      if (j < half) c.x[i][e] = cosine[j], s.x[i][e] = -sine[j];
      if (j >= half && j < 2 * half) c.x[i][e] = cosine[j - half], s.x[i][e] = sine[j - half];
    }
}
__device__ __forceinline__ void load_weight(Lane& w, const float* weight, int pairs, int lane) {  // w or 1 + w
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (i < pairs) {
      const float2 both = *(const float2*)(weight + i * 64 + lane * 2);
      w.x[i][0] = both.x, w.x[i][1] = both.y;
    }
}
// The norm's factor of a row, from the sum of its squares.
__device__ __forceinline__ float sum_of_squares(const Lane& row) {
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) squares = __fmaf_rn(row.x[i][e], row.x[i][e], squares);
  return lane_sum<32>(squares);
}
__device__ __forceinline__ float inverse_of(float squares, int pairs, float eps) {
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)(pairs * 64)), eps)));
}
// Normed values, also to line: 256 floats of shared memory. The turn needs them all there.
__device__ __forceinline__ void norm(Lane& row, const Lane& w, float inverse, float* line, int pairs, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (i < pairs) {
      row.x[i][0] = __fmul_rn(__fmul_rn(row.x[i][0], inverse), w.x[i][0]);
      row.x[i][1] = __fmul_rn(__fmul_rn(row.x[i][1], inverse), w.x[i][1]);
      *(float2*)(line + i * 64 + lane * 2) = make_float2(row.x[i][0], row.x[i][1]);
    }
}
// Turns pair i, of which i * 64 < 2 * half.
__device__ __forceinline__ void turn(Lane& row, int i, const Lane& c, const Lane& s, const float* line, int half,
                                     int lane) {
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int j = i * 64 + lane * 2 + e;
    const float other = line[j < half ? j + half : j - half];
    const float turned = __fadd_rn(__fmul_rn(row.x[i][e], c.x[i][e]), __fmul_rn(other, s.x[i][e]));
    row.x[i][e] = j < 2 * half ? turned : row.x[i][e];
  }
}
// As F16, at most its largest value.
__device__ __forceinline__ u32 query_pair(const float (&x)[2]) {
  u32 pair = pack_f16(x[0], x[1]);
  asm("min.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0x7bff7bffu));
  asm("max.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(0xfbfffbffu));
  return pair;
}

// Codes of a pair over scale = 1 / inverse (rounded): to_e4m3 without branches. The quotient is the rounded one: its
// remainder is added twice (Markstein). Beyond 512 scales it saturates in any case.
__device__ __forceinline__ float quotient(float x, float scale, float inverse) {
  const float a = fminf(fmaxf(x, __fmul_rn(scale, -512.0f)), __fmul_rn(scale, 512.0f));
  float y = __fmul_rn(a, inverse);
  y = __fmaf_rn(__fmaf_rn(-y, scale, a), inverse, y);
  y = __fmaf_rn(__fmaf_rn(-y, scale, a), inverse, y);
  return x != x ? x : copysignf(y, x);
}
__device__ __forceinline__ u16 code_pair(const float (&x)[2], float scale, float inverse) {
#if __CUDA_ARCH__ >= 890
  u16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(codes)
      : "f"(quotient(x[1], scale, inverse)), "f"(quotient(x[0], scale, inverse)));
  return codes;
#else
  return (u16)(to_e4m3(x[0], scale) | to_e4m3(x[1], scale) << 8);
#endif
}

// Folds one split (m_split, l_split, x) into a running result. The weights of the two sides:
struct Fold {
  float m, l, keep, take;
};
__device__ __forceinline__ Fold fold(float m, float l, float m_split, float l_split) {
  Fold f;
  f.m = fmaxf(m, m_split);
  float base = f.m == NEG_INF ? 0.0f : f.m;
  f.keep = exp2_fast(m - base), f.take = exp2_fast(m_split - base);
  f.l = __fmaf_rn(l, f.keep, __fmul_rn(l_split, f.take));
  return f;
}
__device__ __forceinline__ float fold_value(float x, float x_split, const Fold& f) {
  return __fmaf_rn(x, f.keep, __fmul_rn(x_split, f.take));
}
__device__ __forceinline__ float finish(float x, float l, float v_scale) { return __fdiv_rn(__fmul_rn(x, v_scale), l); }

// Two neighbouring dims of an output as BF16, gated or not.
__device__ __forceinline__ u32 result(float x, float y, float l, float v_scale, bool gated, u32 gate) {
  x = finish(x, l, v_scale), y = finish(y, l, v_scale);
  if (gated) x = __fmul_rn(x, sigmoid(bf16_low(gate))), y = __fmul_rn(y, sigmoid(bf16_high(gate)));
  return pack_bf16(x, y);
}
