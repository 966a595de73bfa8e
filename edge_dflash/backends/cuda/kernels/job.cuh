// What one launch of a matrix kernel computes: a stack of matrices with a common input, and what becomes of the sums.
#pragma once
#include "decode.cuh"

static constexpr int TILE = 16, UNIT_ROWS = 32, PARTS = 4;

enum Mode { STORE = 0, RESIDUAL = 1, SWIGLU = 2, PARTIAL = 3, GREEDY = 4 };

// One stack of matrices with a common input. Part i holds units start[i] .. start[i+1]-1 and ``columns[i]`` real rows.
struct Job {
  const u8* weights;
  const float* scale;  // [units * 32], applied to the FP32 sum
  const u16* x;        // [rows, k], row stride x_stride
  int k, x_stride, units, windows, splits, groups, per_pass;
  u16* out[PARTS];
  int out_stride[PARTS], start[PARTS], columns[PARTS];
  int mode;
  const u16* residual;  // RESIDUAL: same stride as out[0]
  float* partial;       // PARTIAL: [splits][all rows][units * 32]
  u64* best;            // GREEDY: [groups][all rows] ranks of the largest logit; of clusters [blocks][all rows]
};

// First activation row of this block: a joint pass has more tiles of rows than one, by the second number of the grid.
__device__ __forceinline__ int first_row(int rows) { return blockIdx.y * rows; }

// Where a block leaves the rank of a row, of ``rows`` that it has.
__device__ __forceinline__ u64* best_at(const Job& job, int block, int rows, int row) {
  return job.best + block * static_cast<int>(gridDim.y) * rows + first_row(rows) + row;
}

// Where the output of a weight row goes.
struct Place {
  u16* out;
  long long offset;
  int column;
  bool inside;  // false: the row is padding
  int stride, columns;
};

__device__ __forceinline__ Place place_of(const Job& job, int unit, int padded, int row) {
  u16* out = job.out[0];
  int start = job.start[0], stride = job.out_stride[0], columns = job.columns[0];
#pragma unroll
  for (int i = 1; i < PARTS; ++i)
    if (unit >= job.start[i])
      out = job.out[i], start = job.start[i], stride = job.out_stride[i], columns = job.columns[i];
  const int column = padded - start * UNIT_ROWS;
  return {out, static_cast<long long>(row) * stride + column, column, column < columns, stride, columns};
}

// silu(gate) * up of two BF16 values.
__device__ __forceinline__ u16 gated(float gate, float up) {
  return to_bf16(gate * __fdiv_rn(1.0f, 1.0f + expf(-gate)) * up);
}

// Sum of two BF16 values.
__device__ __forceinline__ u16 sum_of(u16 a, u16 b) { return to_bf16(from_bf16(a) + from_bf16(b)); }

// Order of BF16 logits as unsigned integers above 0.
__device__ __forceinline__ u32 order_of(u16 logit) {
  const u32 bits = logit == 0x8000u ? 0u : logit;  // -0 equals 0
  return bits & 0x8000u ? ~bits & 0xFFFFu : bits | 0x8000u;
}

// Rank of a logit among others: its order, then the complement of its id, so that the largest rank has the lowest id.
__device__ __forceinline__ u64 rank_of(u32 order, u32 id) { return static_cast<u64>(order) << 32 | ~id; }
__device__ __forceinline__ int id_of(u64 rank) { return static_cast<int>(~static_cast<u32>(rank)); }

// Largest of the ranks of the lanes that differ in the bits from `first` down to above `last`.
template <int first, int last = 0>
__device__ __forceinline__ u64 largest_rank(u64 top) {
#pragma unroll
  for (int bit = first; bit > last; bit /= 2) {
    const u64 other = __shfl_xor_sync(ALL, top, bit);
    top = other > top ? other : top;
  }
  return top;
}

// ids[row] = id of the largest rank over the blocks (or groups) of a GREEDY launch. One block of THREADS threads a row.
template <int THREADS>
__device__ __forceinline__ void best_of_blocks(const u64* best, int* ids, int blocks, int rows) {
  __shared__ u64 tops[THREADS / 32];
  pdl_wait();
  pdl_trigger();
  u64 top = 0;
  for (int i = threadIdx.x; i < blocks; i += THREADS) {
    const u64 other = best[i * rows + blockIdx.x];
    top = other > top ? other : top;
  }
  top = largest_rank<16>(top);
  if (THREADS > 32) {
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  for (int i = 1; i < THREADS / 32; ++i) top = tops[i] > top ? tops[i] : top;
  ids[blockIdx.x] = id_of(top);
}
