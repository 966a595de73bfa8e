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
  float* partial;       // PARTIAL: [splits][rows][units * 32]
  u64* best;            // GREEDY: [groups][rows] ranks of the largest logit; of clusters [blocks][rows]
};

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
    if (unit >= job.start[i]) out = job.out[i], start = job.start[i], stride = job.out_stride[i], columns = job.columns[i];
  const int column = padded - start * UNIT_ROWS;
  return {out, static_cast<long long>(row) * stride + column, column, column < columns, stride, columns};
}

// silu(gate) * up of two BF16 values.
__device__ __forceinline__ u16 gated(float gate, float up) {
  return to_bf16(gate * __fdiv_rn(1.0f, 1.0f + expf(-gate)) * up);
}
