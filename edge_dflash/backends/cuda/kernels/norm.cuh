// The RMS norm of a row of BF16 values as every kernel computes it, bit for bit: NORM_THREADS threads sum the squares of
// pairs, each in order of the columns, then lanes, then warps in order.
#pragma once
#include "prelude.cuh"

static constexpr int NORM_THREADS = 256;

__device__ __forceinline__ float add_squares(float squares, u32 pair) {
  squares = __fmaf_rn(bf16_low(pair), bf16_low(pair), squares);
  return __fmaf_rn(bf16_high(pair), bf16_high(pair), squares);
}

// Leaves a warp's sum of squares in `sums`, by the first NORM_THREADS threads.
__device__ __forceinline__ void leave_squares(float* sums, float squares) {
  squares = lane_sum<32>(squares);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
}

// 1 / sqrt(mean + eps), once all warps' sums are there.
__device__ __forceinline__ float inverse_root_mean(const float* sums, int columns, float eps) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < NORM_THREADS / 32; i++) total = __fadd_rn(total, sums[i]);
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(total, (float)columns), eps)));
}

__device__ __forceinline__ u32 normed(u32 pair, float inverse, float2 weight) {
  return pack_bf16(__fmul_rn(__fmul_rn(bf16_low(pair), inverse), weight.x),
                   __fmul_rn(__fmul_rn(bf16_high(pair), inverse), weight.y));
}
