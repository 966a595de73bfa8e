// Sums of several blocks, and the end of a GREEDY launch (SM90 and later).
#pragma once
#include "cluster.cuh"

__device__ __forceinline__ void add(Float4& to, const Float4& more) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to.v[i] = __fadd_rn(to.v[i], more.v[i]);
}

// Order of BF16 logits as unsigned integers above 0.
__device__ __forceinline__ u32 order_of(u16 logit) {
  const u32 bits = logit == 0x8000u ? 0u : logit;  // -0 equals 0
  return bits & 0x8000u ? ~bits & 0xFFFFu : bits | 0x8000u;
}

// ids[row] = id of the largest rank over the blocks of a GREEDY launch. One block of 256 threads a row.
__device__ __forceinline__ void best_of_blocks(const u64* best, int* ids, int blocks, int rows) {
  __shared__ u64 tops[8];
  wait_for_inputs();
  let_next_start();
  u64 top = 0;
  for (int i = threadIdx.x; i < blocks; i += 256) {
    const u64 other = best[i * rows + blockIdx.x];
    top = other > top ? other : top;
  }
  for (int bit = 16; bit > 0; bit /= 2) {
    const u64 other = __shfl_xor_sync(0xffffffffu, top, bit);
    top = other > top ? other : top;
  }
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < 8; ++i) top = tops[i] > top ? tops[i] : top;
  ids[blockIdx.x] = static_cast<int>(~static_cast<u32>(top));
}
