// y[rows, N] = x[rows, K] W[N, K]^T for 1..16 or 1..32 rows: weights are streamed once, decoded in registers and
// multiplied on the tensor cores as the A operand; activations are the B operand.
//
// Work is units of 32 weight rows (decode.cuh). A block owns consecutive units over one *split* of K and takes up to
// UNITS of them in one *pass*; its 8 warps share the windows of the split. Each lane copies its own bytes of weights and
// activations into its own places of a two-stage ring in shared memory, so that the stream needs no synchronisation:
//
//   warp's ring:  [stage 0: UNITS x weights, activations] [stage 1: same]     step s uses stage s % 2
//   a stage is refilled (for step s + 2) as soon as it has been read into registers
//
// A warp takes its windows from a start that differs from block to block: if all blocks asked for the same activations at
// the same time, the few L2 slices that hold them would bound the launch. At the end of a pass the warps' partial sums are
// added in the order of the warps. The order of a sum depends on K, the splits and the block that owns the weight row:
// never on the activation rows.
#include "job.cuh"

// Not for SM110, where linear_cluster.cu runs; SM90 has both, for comparison.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 1000 || __CUDA_ARCH__ >= 1200

static constexpr int WARPS = 8, THREADS = 32 * WARPS, STAGES = 2;

__device__ __forceinline__ int first_unit(const Job& job, int group) {
  return static_cast<int>(static_cast<long long>(group) * job.units / job.groups);
}

// Where a lane's next copies come from: one unit count and window of the warp's list (pass after pass).
struct Cursor {
  const u8* weights;              // this lane's bytes of the pass's first unit
  int x;                          // elements from job.x
  int unit, count, window, left;  // first unit and number of units of the pass; steps left
};

template <class F, int ROWS, int UNITS>
struct Stream {
  static constexpr int COLUMN_TILES = ROWS / 8, HALVES = ROWS / 16, BLOCK = F::WINDOW / 4, CHUNKS = F::WINDOW / 8;
  static constexpr int X_BYTES = ROWS * F::WINDOW * 2;

  const Job& job;
  const int lane, warp;
  int base, more_until, first, stop;  // passes before unit ``more_until`` have base + 1 units; windows first .. stop-1
  int origin;                         // the window that a pass begins with
  u32 ring, stage_bytes, exchange;
  int unit_stride;  // bytes; a unit has less than 2^31
  Cursor load;
  u32 best[HALVES];  // order of the largest logit, then the complement of its tile's number in the block

  __device__ __forceinline__ Stream(const Job& j, int group, int unit0, int units, int split, u32 shared)
      : job(j), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {
    const int begin = split * j.windows / j.splits, end = (split + 1) * j.windows / j.splits;
    first = begin + (end - begin) * warp / WARPS;
    stop = begin + (end - begin) * (warp + 1) / WARPS;
    origin = stop > first ? first + group % (stop - first) : first;
    const int passes = (units + j.per_pass - 1) / j.per_pass;
    base = passes ? units / passes : 0;
    more_until = unit0 + (passes ? units % passes : 0) * (base + 1);
    stage_bytes = j.per_pass * F::UNIT + X_BYTES;
    exchange = shared;
    ring = shared + WARPS * 1024 + warp * STAGES * stage_bytes;
    unit_stride = j.windows * F::UNIT;
    load.weights = j.weights + static_cast<long long>(unit0) * unit_stride + origin * F::UNIT + lane * 16;
    load.x = (first_row(ROWS) + lane / CHUNKS) * j.x_stride + (lane % CHUNKS) * 8 + origin * F::WINDOW;
    load.unit = unit0, load.count = base + (unit0 < more_until);
    load.window = origin, load.left = passes * (stop - first);
#pragma unroll
    for (int i = 0; i < HALVES; ++i) best[i] = 0;
  }

  // The warp copies the window of x by whole rows (full sectors) to where the fragments' lanes read: 8 rows are a column
  // tile n, lane (g, t) reads chunks t * BLOCK / 8 + h of row g at (n * BLOCK / 8 + h) * 512 + 16 * lane, with g xor 1
  // for h = 1 so that the 8 chunks of a row go to different banks.
  __device__ __forceinline__ void fetch_x(u32 stage) const {
    if (load.left <= 0) return;
    constexpr int PER_LANE = BLOCK / 8, ROWS_AT_ONCE = 32 / CHUNKS;
    const int row = lane / CHUNKS, chunk = lane % CHUNKS, h = chunk % PER_LANE;
    const bool inside = load.window * F::WINDOW < job.k - chunk * 8;
    const u32 to = stage + job.per_pass * F::UNIT + h * 512 + ((row * 64) ^ (h * 64)) + chunk / PER_LANE * 16;
    const u16* from = job.x + load.x;
#pragma unroll
    for (int i = 0; i < ROWS / ROWS_AT_ONCE; ++i)
      copy16_or_zero_cached(to + i * ROWS_AT_ONCE / 8 * PER_LANE * 512 + i * ROWS_AT_ONCE % 8 * 64,
                            from + i * ROWS_AT_ONCE * job.x_stride, inside);
  }

  __device__ __forceinline__ void advance(Cursor& c) const {
    --c.left;
    c.weights += F::UNIT;
    c.x += F::WINDOW;
    if (++c.window == stop) {
      c.window = first;
      c.weights -= (stop - first) * F::UNIT;
      c.x -= (stop - first) * F::WINDOW;
    }
    if (c.window == origin) {
      c.weights += c.count * unit_stride;
      c.unit += c.count;
      c.count = base + (c.unit < more_until);
    }
  }

  // Weights of the first steps: nothing here depends on earlier kernels.
  __device__ __forceinline__ void start_weights() {
    Cursor c = load;
    for (int s = 0; s < STAGES; ++s) {
      for (int p = 0; p < UNITS; ++p)
        if (c.left > 0 && p < c.count)
          F::fetch(ring + s * stage_bytes + p * F::UNIT + lane * 16, c.weights + p * unit_stride, lane);
      advance(c);
    }
  }

  __device__ __forceinline__ void start_activations() {
    for (int s = 0; s < STAGES; ++s) {
      fetch_x(ring + s * stage_bytes);
      copy_commit();
      advance(load);
    }
  }

  __device__ __forceinline__ void refill(u32 mine, int p) const {
    if (load.left > 0 && p < load.count) F::fetch(mine + p * F::UNIT, load.weights + p * unit_stride, lane);
  }

  __device__ __forceinline__ void next_step(u32& stage) {
    copy_commit();
    advance(load);
    stage = stage_bytes - stage;
  }

  // One pass over P units from ``unit``. ``stage`` is the ring offset of the current step.
  template <int P>
  __device__ __forceinline__ void pass(int unit, u32& stage) {
    float sum[P * 2][COLUMN_TILES][4];
#pragma unroll
    for (int i = 0; i < P * 2 * COLUMN_TILES * 4; ++i) (&sum[0][0][0])[i] = 0.0f;
#pragma unroll 1
    for (int left = stop - first; left > 0; --left) {
      copy_wait<STAGES - 1>();
      __syncwarp();
      const u32 here = ring + stage, mine = here + lane * 16;
      u32 b[COLUMN_TILES][BLOCK / 2];
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
        for (int h = 0; h < BLOCK / 8; ++h) {
          const uint4 v =
              load_shared16(here + job.per_pass * F::UNIT + (n * (BLOCK / 8) + h) * 512 + (lane * 16 ^ h * 64));
          b[n][4 * h] = v.x, b[n][4 * h + 1] = v.y, b[n][4 * h + 2] = v.z, b[n][4 * h + 3] = v.w;
        }
      typename F::Words words[P];  // all at once where registers allow: then nothing below waits for memory
#pragma unroll
      for (int p = 0; p < (F::EAGER ? P : 1); ++p) words[p] = F::read(mine + p * F::UNIT, lane);
      __syncwarp();
      fetch_x(here);
#pragma unroll
      for (int p = 0; p < (F::EAGER ? P : 1); ++p) refill(mine, p);
      if (F::EAGER) next_step(stage);
#pragma unroll
      for (int p = 0; p < P; ++p) {
        if (!F::EAGER && p > 0) {
          words[p] = F::read(mine + p * F::UNIT, lane);
          refill(mine, p);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int h = 0; h < F::STEPS / 2; ++h) {
            u32 a[2][4];
            F::fragments(words[p], m, h, a);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
              for (int n = 0; n < COLUMN_TILES; ++n)
                mma<false>(sum[2 * p + m][n], a[j], b[n][4 * h + 2 * j], b[n][4 * h + 2 * j + 1]);
          }
      }
      if (!F::EAGER) next_step(stage);
    }
#pragma unroll 1
    for (int i = 0; i < P * 2 * HALVES; ++i) {
#pragma unroll
      for (int m = 0; m < P * 2; ++m)
#pragma unroll
        for (int h = 0; h < HALVES; ++h)
          if (i == m * HALVES + h) hand_over(sum[m][2 * h], sum[m][2 * h + 1]);
      finish_tile(unit, i / HALVES, i % HALVES);
    }
  }

  // Puts a warp's sums of one tile (16 weight rows x 16 activation rows) into its 1 KiB of the exchange. Row r, weight row
  // m: r even and odd apart and m xor 8 in every other pair, so that neither these writes nor the reads along m meet in a bank.
  __device__ __forceinline__ void hand_over(const float (&low)[4], const float (&high)[4]) {
    const int g = lane / 4, t = lane % 4;
    const u32 at = exchange + warp * 1024 + t * 64 + (g ^ (8 * (t / 2))) * 4;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 to = (at + ((i & 1) * 8 + n * 4) * 64) ^ (32 * (i / 2));
        store_shared4(to, n ? high[i] : low[i]);
      }
  }

  // Adds the warps' sums of tile ``m`` of the pass, rows of half ``h``, in the order of the warps.
  __device__ __forceinline__ void finish_tile(int unit, int m, int h) {
    __syncthreads();
    const int slot = threadIdx.x / 16, column = threadIdx.x % 16;
    const u32 from = exchange + slot * 64 + (column ^ (8 * ((slot & 3) / 2))) * 4;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) total += __uint_as_float(load_shared4(from + w * 1024));
    __syncthreads();
    emit(total, h, first_row(ROWS) + h * 16 + row_of(slot), unit + m / 2, m % 2 * TILE + column);
  }

  // Activation row of a slot of 16 sums: even rows first.
  static __device__ __forceinline__ int row_of(int slot) { return (slot & 7) * 2 + slot / 8; }

  // Epilogue of one sum: activation row ``row``, weight row ``inner`` of ``unit``.
  __device__ __forceinline__ void emit(float sum, int half, int row, int unit, int inner) {
    const int padded = unit * UNIT_ROWS + inner;
    if (job.mode == PARTIAL) {
      const long long width = static_cast<long long>(job.units) * UNIT_ROWS;
      job.partial[(static_cast<long long>(blockIdx.x % job.splits) * gridDim.y * ROWS + row) * width + padded] = sum;
      return;
    }
    u16 y = to_bf16(sum * __ldg(job.scale + padded));
    if (job.mode == SWIGLU) {
      const float gate = from_bf16(y), up = __shfl_down_sync(ALL, gate, 8);
      const int column = unit * 16 + inner / 16 * 8 + inner % 8;
      if (inner % 16 < 8 && column < job.columns[0])
        job.out[0][static_cast<long long>(row) * job.out_stride[0] + column] = gated(gate, up);
      return;
    }
    const Place at = place_of(job, unit, padded, row);
    if (!at.inside) return;
    if (job.mode == RESIDUAL) y = sum_of(job.residual[at.offset], y);
    if (job.mode == GREEDY) {
      const int unit0 = first_unit(job, blockIdx.x / job.splits);
      const u32 found = order_of(y) << 16 | (0xFFFFu - ((unit - unit0) * 2 + inner / TILE));
#pragma unroll
      for (int i = 0; i < HALVES; ++i) best[i] = i == half && found > best[i] ? found : best[i];
      if (at.out == nullptr) return;
    }
    at.out[at.offset] = y;
  }

  __device__ __forceinline__ void store_best(int group, int unit0) {
#pragma unroll
    for (int h = 0; h < HALVES; ++h) {
      const int tile = 0xFFFF - (best[h] & 0xFFFFu), id = unit0 * UNIT_ROWS + tile * TILE + threadIdx.x % 16;
      const u64 top = largest_rank<8>(best[h] == 0 ? 0 : rank_of(best[h] >> 16, id));
      if (threadIdx.x % 16 == 0) *best_at(job, group, ROWS, h * 16 + row_of(threadIdx.x / 16)) = top;
    }
  }

  __device__ __forceinline__ void run(int unit, int end) {
    start_weights();
    pdl_trigger();
    pdl_wait();
    start_activations();
    u32 stage = 0;
    while (unit < end) {
      const int count = base + (unit < more_until);
      if (UNITS == 2 && count == 2)
        pass<UNITS>(unit, stage);
      else
        pass<1>(unit, stage);
      unit += count;
    }
  }
};

template <class F, int ROWS, int UNITS>
__device__ __forceinline__ void run_job(const Job& job, int block) {
  extern __shared__ __align__(16) u8 memory[];
  const int group = block / job.splits;
  const int unit = first_unit(job, group), end = first_unit(job, group + 1);
  Stream<F, ROWS, UNITS> stream(job, group, unit, end - unit, block % job.splits, shared_address(memory));
  stream.run(unit, end);
  if (job.mode == GREEDY) stream.store_best(group, unit);
}

// Blocks of 16 rows leave half an SM to the next launch, where launches overlap.
#if __CUDA_ARCH__ >= 900
#define BLOCKS_PER_SM(ROWS) ((ROWS) == 16 ? 2 : 1)
#else
#define BLOCKS_PER_SM(ROWS) 1
#endif

// A launch runs ``main``; blocks past main.groups * main.splits run ``side``, a BF16 stack with the same input.
#define LINEAR(NAME, FORMAT, ROWS, UNITS)                                        \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM(ROWS))     \
      NAME(const __grid_constant__ Job main, const __grid_constant__ Job side) { \
    const int blocks = main.groups * main.splits;                                \
    if (static_cast<int>(blockIdx.x) < blocks)                                   \
      run_job<FORMAT, ROWS, UNITS>(main, blockIdx.x);                            \
    else                                                                         \
      run_job<Bf16, ROWS, 1>(side, blockIdx.x - blocks);                         \
  }

LINEAR(linear_nvfp4_16, Nvfp4, 16, 2)
LINEAR(linear_nvfp4_32, Nvfp4, 32, 2)
LINEAR(linear_fp8_16, Fp8, 16, 2)
LINEAR(linear_fp8_32, Fp8, 32, 2)
LINEAR(linear_bf16_16, Bf16, 16, 2)
LINEAR(linear_bf16_32, Bf16, 32, 2)

// ids[row] = id of the largest rank over the groups of a GREEDY launch. One warp a row.
extern "C" __global__ void linear_greedy(const u64* best, int* ids, int groups, int rows) {
  best_of_blocks<32>(best, ids, groups, rows);
}
#endif
