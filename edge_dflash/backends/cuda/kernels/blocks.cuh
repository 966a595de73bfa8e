// The order in which linear_hopper.cu multiplies activations: a tensor of 16 rows in blocks of 64 k, 2 KiB each, so that its
// part for a block of threads is copied as it lies. linear_wide.cu has the same of 32, 64 or 128 rows.
//
// A row of a block is 128 bytes, eight chunks of four pairs of k: chunk p of row r, at place p ^ r % 8, has of each lane t of
// decode.cuh its pair p. So weights and x meet in one order of K, that of the windows of a format: step j takes chunks 2j and
// 2j + 1. A row stride below 0 means such a tensor: it is minus the WINDOW; of more than 16 rows, minus 256 for each besides.
#pragma once
#include "prelude.cuh"

static constexpr int BLOCK_K = 64, BLOCK_ROWS = 16, X_BYTES = BLOCK_ROWS * BLOCK_K * 2;

// Rows of a tensor in blocks.
__device__ __forceinline__ int block_rows(int stride) { return stride > -256 ? BLOCK_ROWS : -stride >> 8; }

// Where element (row, k) lies, in elements; k + 1 of an even k comes right after it.
__device__ __forceinline__ u64 element_at(int stride, int row, int k) {
  if (stride >= 0) return static_cast<u64>(row) * stride + k;
  const bool wide = (-stride & 255) == 64;
  const int t = wide ? k / 16 % 4 : k / 8 % 4, pair = wide ? k / 2 % 8 : k / 32 % 2 * 4 + k / 2 % 4;
  return k / BLOCK_K * (block_rows(stride) * BLOCK_K) + row * BLOCK_K + (pair ^ row % 8) * 8 + t * 2 + k % 2;
}

// Elements from (row, k) to (row, k + distance), a multiple of BLOCK_K.
__device__ __forceinline__ int elements_to(int stride, int distance) {
  return stride < 0 ? distance * block_rows(stride) : distance;
}
