// The vision tower but for its linears: patches of a picture, positions, LayerNorm, what follows a linear, and attention
// of all patches of one picture. Rows are BF16, arithmetic FP32, every result rounded once.
#include "norm.cuh"

static constexpr int THREADS = NORM_THREADS;

// -------------------------------------------------------------------------------------------------------- rows

struct Channels {
  float mean[4], spread[4];  // in levels
};

// Out row = (level - mean) / spread of the patch levels [channels, area], each channel `times` times: a still picture
// fills all its time slots.
extern "C" __global__ void __launch_bounds__(THREADS)
    tower_patches(const u8* levels, u16* out, int channels, int area, int times, int stride, const Channels by) {
  pdl_wait();
  pdl_trigger();
  const u8* from = levels + (u64)blockIdx.x * channels * area;
  u16* to = out + (u64)blockIdx.x * stride;
  for (int i = threadIdx.x; i < channels * area; i += THREADS) {
    const int channel = i / area;
    const u16 value = to_bf16(__fdiv_rn(__fsub_rn((float)from[i], by.mean[channel]), by.spread[channel]));
    for (int t = 0; t < times; t++) to[(channel * times + t) * area + i % area] = value;
  }
}

// x += the sum of four rows of a table, by their shares: positions [4] of each patch, and their weights [4].
extern "C" __global__ void __launch_bounds__(THREADS)
    tower_positions(u16* x, const u16* table, const int* corners, const float* shares, int columns, int stride) {
  pdl_wait();
  pdl_trigger();
  const int* corner = corners + 4 * blockIdx.x;
  const float* share = shares + 4 * blockIdx.x;
  u16* row = x + (u64)blockIdx.x * stride;
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    float sum = 0.0f;
    for (int n = 0; n < 4; n++)
      sum = __fadd_rn(sum, __fmul_rn(from_bf16(table[(u64)corner[n] * columns + i]), share[n]));
    row[i] = to_bf16(__fadd_rn(from_bf16(row[i]), from_bf16(to_bf16(sum))));
  }
}

// Sum over the block's threads, the same bits in all; `sums` is free again behind the next barrier.
__device__ __forceinline__ float block_sum(float* sums, float x) {
  x = lane_sum<32>(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
  for (int i = 0; i < THREADS / 32; i++) total = __fadd_rn(total, sums[i]);
  return total;
}

// LayerNorm: out = (x - mean) / sqrt(variance + eps) * weight + bias.
extern "C" __global__ void __launch_bounds__(THREADS)
    tower_norm(const u16* x, const float* weight, const float* bias, u16* out, int columns, int x_stride,
               int out_stride, float eps) {
  __shared__ float sums[THREADS / 32];
  pdl_wait();
  pdl_trigger();
  const u16* row = x + (u64)blockIdx.x * x_stride;
  u16* to = out + (u64)blockIdx.x * out_stride;
  float sum = 0.0f, squares = 0.0f;
  for (int i = threadIdx.x; i < columns; i += THREADS) sum = __fadd_rn(sum, from_bf16(row[i]));
  const float mean = __fdiv_rn(block_sum(sums, sum), (float)columns);
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    const float away = __fsub_rn(from_bf16(row[i]), mean);
    squares = __fmaf_rn(away, away, squares);
  }
  const float variance = __fdiv_rn(block_sum(sums, squares), (float)columns);
  const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, eps)));
  for (int i = threadIdx.x; i < columns; i += THREADS)
    to[i] = to_bf16(__fmaf_rn(__fmul_rn(__fsub_rn(from_bf16(row[i]), mean), inverse), weight[i], bias[i]));
}

enum Activation { NONE = 0, GELU_TANH = 1, GELU_ERF = 2 };

__device__ __forceinline__ float gelu_tanh(float x) {
  const float inner = 0.7978845608028654f * __fmaf_rn(0.044715f * x * x, x, x);
  return 0.5f * x * (1.0f + tanhf(inner));
}
__device__ __forceinline__ float gelu_erf(float x) { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }

// What follows a linear: y = [residual +] activation(x + bias), rounded after each step as the ops are.
extern "C" __global__ void __launch_bounds__(THREADS) tower_finish(const u16* x, const float* bias, const u16* residual,
                                                                   u16* out, int columns, int stride, int activation) {
  pdl_wait();
  pdl_trigger();
  const u64 first = (u64)blockIdx.x * stride;
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    float y = from_bf16(to_bf16(__fadd_rn(from_bf16(x[first + i]), bias[i])));
    if (activation == GELU_TANH) y = from_bf16(to_bf16(gelu_tanh(y)));
    if (activation == GELU_ERF) y = from_bf16(to_bf16(gelu_erf(y)));
    out[first + i] = to_bf16(residual ? __fadd_rn(from_bf16(residual[first + i]), y) : y);
  }
}

// -------------------------------------------------------------------------------------------------------- attention

// Turns queries and keys of [rows, 3 * heads * dim] in place: dims j and j + dim / 2 by the angle of column j of
// cosine and sine [rows, dim / 2].
extern "C" __global__ void __launch_bounds__(THREADS)
    tower_turn(u16* qkv, const float* cosine, const float* sine, int heads, int dim, int stride) {
  pdl_wait();
  pdl_trigger();
  const int half = dim / 2;
  u16* row = qkv + (u64)blockIdx.x * stride;
  for (int i = threadIdx.x; i < 2 * heads * half; i += THREADS) {
    const int j = i % half;
    u16* low = row + i / half * dim + j;
    const float c = cosine[(u64)blockIdx.x * half + j], s = sine[(u64)blockIdx.x * half + j];
    const float a = from_bf16(low[0]), b = from_bf16(low[half]);
    low[0] = to_bf16(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)));
    low[half] = to_bf16(__fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
  }
}

static constexpr int WARPS = 4, QUERIES = 16 * WARPS, KEYS = 64;

// STEPS: steps of 16 dims that hold a head, the last of which may be filled up with zeros.
template <int STEPS>
struct Heads {
  static constexpr int DIMS = 16 * STEPS, STRIDE = 2 * DIMS + 16;  // bytes of a row in shared memory: no bank conflicts
  static constexpr int TILE = KEYS * STRIDE, BYTES = 4 * TILE;     // two tiles of keys, two of values

  // Starts copying 64 rows from `first` on; zeros beyond `rows`.
  static __device__ __forceinline__ void fetch(u32 to, const u16* from, int first, int rows, int stride, int dim) {
    const int chunks = dim / 8;
    for (int i = threadIdx.x; i < KEYS * chunks; i += 32 * WARPS) {
      const int row = i / chunks, chunk = i % chunks, there = first + row < rows;
      copy16_or_zero(to + row * STRIDE + 16 * chunk, from + (u64)(there ? first + row : 0) * stride + 8 * chunk, there);
    }
  }

  // The last 8 dims of every row of all tiles, where a head has 8 fewer than fit.
  static __device__ __forceinline__ void clear(u32 memory, int dim) {
    if (dim == DIMS) return;
    for (int i = threadIdx.x; i < 4 * KEYS * 4; i += 32 * WARPS)
      store_shared4(memory + i / 4 * STRIDE + 2 * dim + 4 * (i % 4), 0.0f);
  }

  static __device__ __forceinline__ void run(const u16* qkv, u16* out, int rows, int heads, int dim, int stride,
                                             int out_stride, float scale) {
    extern __shared__ __align__(16) u8 memory[];
    const u32 keys = shared_address(memory), values = keys + 2 * TILE;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u16 *q = qkv + blockIdx.y * dim, *k = q + heads * dim, *v = k + heads * dim;
    const int tiles = (rows + KEYS - 1) / KEYS, row0 = blockIdx.x * QUERIES + warp * 16 + g;
    pdl_wait();
    pdl_trigger();
    clear(keys, dim);
    fetch(keys, k, 0, rows, stride, dim), fetch(values, v, 0, rows, stride, dim);
    copy_commit();
    u32 query[STEPS][4];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = row0 + 8 * (i % 2), column = 16 * s + 2 * t + 8 * (i / 2);
        query[s][i] = row < rows && column < dim ? *(const u32*)(q + (u64)row * stride + column) : 0u;
      }
    float sum[2 * STEPS][4] = {}, most[2] = {NEG_INF, NEG_INF}, total[2] = {0.0f, 0.0f};
    for (int tile = 0; tile < tiles; tile++) {
      const u32 at = tile % 2 * TILE, next = TILE - at;
      if (tile + 1 < tiles) {
        fetch(keys + next, k, (tile + 1) * KEYS, rows, stride, dim);
        fetch(values + next, v, (tile + 1) * KEYS, rows, stride, dim);
      }
      copy_commit();
      copy_wait<1>();
      __syncthreads();
      float score[KEYS / 8][4] = {};
      scores(score, query, keys + at, lane);
      softmax(score, most, total, sum, tile * KEYS + 2 * t, rows, scale);
      weigh(sum, score, values + at, lane);
      __syncthreads();
    }
    store(sum, total, out, row0, rows, dim, out_stride, t);
  }

  static __device__ __forceinline__ void scores(float (&score)[KEYS / 8][4], const u32 (&query)[STEPS][4], u32 keys,
                                                int lane) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int n = 0; n < KEYS / 16; n++) {  // matrices: keys 0..7 and 8..15, each with dims 0..7 and 8..15
        u32 b[4];
        load_matrices(b, keys + (16 * n + lane / 16 * 8 + lane % 8) * STRIDE + 32 * s + lane / 8 % 2 * 16);
        mma<false>(score[2 * n], query[s], b[0], b[1]);
        mma<false>(score[2 * n + 1], query[s], b[2], b[3]);
      }
  }

  // Scores become probabilities over the largest score so far; what was summed before shrinks with it.
  static __device__ __forceinline__ void softmax(float (&score)[KEYS / 8][4], float (&most)[2], float (&total)[2],
                                                 float (&sum)[2 * STEPS][4], int key, int rows, float scale) {
    float top[2] = {most[0], most[1]};
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        score[n][i] = key + 8 * n + i % 2 < rows ? score[n][i] * scale : NEG_INF;
        top[i / 2] = fmaxf(top[i / 2], score[n][i]);
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(ALL, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(ALL, top[r], 2));
      const float keep = exp2_fast(most[r] - top[r]);
      most[r] = top[r], total[r] *= keep;
#pragma unroll
      for (int d = 0; d < 2 * STEPS; d++) sum[d][2 * r] *= keep, sum[d][2 * r + 1] *= keep;
    }
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        score[n][i] = exp2_fast(score[n][i] - top[i / 2]);
        total[i / 2] += score[n][i];
      }
  }

  static __device__ __forceinline__ void weigh(float (&sum)[2 * STEPS][4], const float (&score)[KEYS / 8][4],
                                               u32 values, int lane) {
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      const u32 a[4] = {pack_bf16(score[2 * n][0], score[2 * n][1]), pack_bf16(score[2 * n][2], score[2 * n][3]),
                        pack_bf16(score[2 * n + 1][0], score[2 * n + 1][1]),
                        pack_bf16(score[2 * n + 1][2], score[2 * n + 1][3])};
#pragma unroll
      for (int s = 0; s < STEPS; s++) {  // matrices: dims 0..7 and 8..15, each with keys 0..7 and 8..15
        u32 b[4];
        load_matrices_transposed(b, values + (16 * n + lane % 16) * STRIDE + 32 * s + lane / 16 * 16);
        mma<false>(sum[2 * s], a, b[0], b[1]);
        mma<false>(sum[2 * s + 1], a, b[2], b[3]);
      }
    }
  }

  static __device__ __forceinline__ void store(const float (&sum)[2 * STEPS][4], float (&total)[2], u16* out, int row0,
                                               int rows, int dim, int out_stride, int t) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      total[r] += __shfl_xor_sync(ALL, total[r], 1);
      total[r] += __shfl_xor_sync(ALL, total[r], 2);
      const int row = row0 + 8 * r;
      u16* to = out + (u64)row * out_stride + blockIdx.y * dim;
#pragma unroll
      for (int d = 0; d < 2 * STEPS; d++) {
        const int column = 8 * d + 2 * t;
        if (row < rows && column < dim)
          *(u32*)(to + column) = pack_bf16(__fdiv_rn(sum[d][2 * r], total[r]), __fdiv_rn(sum[d][2 * r + 1], total[r]));
      }
    }
  }
};

// qkv [rows, 3 * heads * dim] with queries and keys turned; out [rows, heads * dim]. Grid: (tiles of 64 queries, heads).
// scale: of the scores, times log2(e). dim is a multiple of 8, and at most 16 STEPS.
#define ATTEND(STEPS)                                                                                    \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) tower_attend_##STEPS(                         \
      const u16* qkv, u16* out, int rows, int heads, int dim, int stride, int out_stride, float scale) { \
    Heads<STEPS>::run(qkv, out, rows, heads, dim, stride, out_stride, scale);                            \
  }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)
ATTEND(5)
ATTEND(6)
ATTEND(7)
ATTEND(8)
