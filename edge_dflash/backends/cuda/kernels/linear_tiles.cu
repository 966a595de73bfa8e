// y[rows, N] = x[rows, K] W[N, K]^T for many rows (prefill chunks): the same streaming weights as linear.cu, a tile of
// 128 weight rows x 128 activation rows a block, K in order. Weights are decoded in registers by two warps each.
//
//   stage in shared memory: [4 units of weights][128 rows x WINDOW values of x]; STAGES of them, filled ahead
//   x rows are in 16-byte chunks, chunk c of row r at c ^ (r & 1) where a row has 8, so that fragments load without
//   bank conflicts: lane (g, t) reads its WINDOW / 4 values of row g
#include "job.cuh"
#include "tiles_hopper.cuh"

static constexpr int THREADS = 256, UNITS = 4, COLUMNS = 128, STAGES = 3, TILES = 8;

template <class F>
struct Tile {
  static constexpr int BLOCK = F::WINDOW / 4, CHUNKS = F::WINDOW / 8;
  static constexpr int WEIGHT_BYTES = UNITS * F::UNIT, STAGE_BYTES = WEIGHT_BYTES + COLUMNS * F::WINDOW * 2;

  static __device__ __forceinline__ u32 swizzle(int row, int chunk) {
    return row * CHUNKS * 16 + (CHUNKS == 8 ? chunk ^ (row & 1) : chunk) * 16;
  }

  // Where this thread's copies come from and go to; moves on by one window a step.
  struct Source {
    const u8* weights;  // warps 0..3 copy a unit each
    const u16* x;
    u32 weights_to, x_to;
    int window, k, rows;  // k from this thread's chunk on; rows of x from this thread's first row on

    __device__ __forceinline__ Source(const Job& job, int unit0, int row0, int rows_there) {
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = threadIdx.x / CHUNKS,
                chunk = threadIdx.x % CHUNKS;
      const int unit = unit0 + warp % UNITS;
      weights = job.weights + (unit < job.units ? unit : 0) * static_cast<long long>(job.windows) * F::UNIT + lane * 16;
      weights_to = warp * F::UNIT + lane * 16;
      x = job.x + static_cast<long long>(row0 + row) * job.x_stride + chunk * 8;
      x_to = WEIGHT_BYTES + swizzle(row, chunk);
      k = job.k - chunk * 8;
      rows = rows_there - row0 - row;
      window = 0;
    }

    __device__ __forceinline__ void fetch_weights(u32 stage) {
      if (threadIdx.x < UNITS * 32) F::fetch(stage + weights_to, weights, threadIdx.x % 32);
    }

    __device__ __forceinline__ void advance() {
      weights += F::UNIT;
      ++window;
    }

    __device__ __forceinline__ void fetch_x(u32 stage, int x_stride) {
      constexpr int STEP = THREADS / CHUNKS;  // rows between two chunks of a thread
#pragma unroll
      for (int i = 0; i < COLUMNS / STEP; ++i)
        copy16_or_zero_cached(stage + x_to + i * STEP * CHUNKS * 16, x + window * F::WINDOW + i * STEP * x_stride,
                              window * F::WINDOW < k && i * STEP < rows);
    }
  };

  // ``there``: tiles of 8 rows of this half that anyone wants.
  template <bool ALL>
  static __device__ __forceinline__ void multiply(u32 stage, int lane, int unit, int half, int there,
                                                  float (&sum)[2][TILES][4]) {
    const typename F::Words words = F::read(stage + unit * F::UNIT + lane * 16, lane);
#pragma unroll
    for (int h = 0; h < BLOCK / 8; ++h) {
      u32 a[2][2][4];
      F::fragments(words, 0, h, a[0]);
      F::fragments(words, 1, h, a[1]);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        if (!ALL && n >= there) continue;
        const int row = half * 64 + n * 8 + lane / 4, chunk = (lane % 4) * (BLOCK / 8) + h;
        const uint4 b = load_shared16(stage + WEIGHT_BYTES + swizzle(row, chunk));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma<false>(sum[m][n], a[m][0], b.x, b.y);
          mma<false>(sum[m][n], a[m][1], b.z, b.w);
        }
      }
    }
  }

  // c0 c1: weight row g, activation rows 2t 2t+1; c2 c3: weight row g + 8.
  static __device__ __forceinline__ void store(const Job& job, const float (&sum)[2][TILES][4], int unit, int row0,
                                               int rows) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int padded = unit * UNIT_ROWS + m * TILE + lane / 4;
      const float scale[2] = {__ldg(job.scale + padded), __ldg(job.scale + padded + 8)};
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = row0 + n * 8 + (lane % 4) * 2 + i;
          if (row >= rows) continue;
          const u16 y[2] = {to_bf16(sum[m][n][i] * scale[0]), to_bf16(sum[m][n][2 + i] * scale[1])};
          if (job.mode == SWIGLU) {
            const int column = unit * 16 + m * 8 + lane / 4;
            if (column < job.columns[0])
              job.out[0][static_cast<long long>(row) * job.out_stride[0] + column] =
                  gated(from_bf16(y[0]), from_bf16(y[1]));
            continue;
          }
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const Place at = place_of(job, unit, padded + 8 * s, row);
            if (!at.inside) continue;
            at.out[at.offset] = job.mode == RESIDUAL ? sum_of(job.residual[at.offset], y[s]) : y[s];
          }
        }
    }
  }

  // ``valid``: device count of rows; tiles beyond it are skipped. ``rows`` of x and y exist.
  static __device__ __forceinline__ void run(const Job& job, int rows, const int* valid) {
    extern __shared__ __align__(16) u8 memory[];
    const u32 shared = shared_address(memory);
    const int row0 = blockIdx.x * COLUMNS, unit0 = blockIdx.y * UNITS, warp = threadIdx.x / 32;
    const int unit = warp % UNITS, half = warp / UNITS;
    float sum[2][TILES][4];
#pragma unroll
    for (int i = 0; i < 2 * TILES * 4; ++i) (&sum[0][0][0])[i] = 0.0f;
    Source source(job, unit0, row0, rows), ahead = source;
    for (int s = 0; s < STAGES - 1 && s < job.windows; ++s) {
      ahead.fetch_weights(shared + s * STAGE_BYTES);
      ahead.advance();
    }
    pdl_trigger();
    pdl_wait();
    const int count = valid == nullptr ? rows : min(*valid, rows), there = (count - row0 - half * 64 + 7) / 8;
    if (row0 >= count) return;
    for (int s = 0; s < STAGES - 1; ++s) {
      if (s < job.windows) {
        source.fetch_x(shared + s * STAGE_BYTES, job.x_stride);
        source.advance();
      }
      copy_commit();
    }
    u32 stage = shared, refill = shared + (STAGES - 1) * STAGE_BYTES;
    for (int left = job.windows; left > 0; --left) {
      copy_wait<STAGES - 2>();
      __syncthreads();
      if (left >= STAGES) {
        source.fetch_weights(refill);
        source.fetch_x(refill, job.x_stride);
        source.advance();
      }
      copy_commit();
      if (there >= TILES)
        multiply<true>(stage, threadIdx.x % 32, unit, half, TILES, sum);
      else if (there > 0)
        multiply<false>(stage, threadIdx.x % 32, unit, half, there, sum);
      refill = stage;
      stage = stage + STAGE_BYTES == shared + STAGES * STAGE_BYTES ? shared : stage + STAGE_BYTES;
    }
    if (unit0 + unit < job.units) store(job, sum, unit0 + unit, row0 + half * 64, count);
  }
};

#define TILES_KERNEL(NAME, FORMAT)                                        \
  extern "C" __global__ void __launch_bounds__(THREADS, 1)                \
      NAME(const __grid_constant__ Job job, int rows, const int* valid) { \
    Tile<FORMAT>::run(job, rows, valid);                                  \
  }

TILES_KERNEL(linear_tiles_nvfp4, Nvfp4)
TILES_KERNEL(linear_tiles_fp8, Fp8)
TILES_KERNEL(linear_tiles_bf16, Bf16)
