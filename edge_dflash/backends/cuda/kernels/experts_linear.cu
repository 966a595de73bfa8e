// Products with experts' weights, by the work list of experts.cuh: gate and up of all entries in one launch, down in another.
//
// An *item* is an entry and a unit of 32 weight rows (decode.cuh). Items are numbered by entry, then unit; a block has
// consecutive ones, shared out over its teams of PARTS warps. A warp streams its part of an item's K, a window at a time: each
// lane copies its own bytes of weights and, with others, the entry's rows of the window into a stage of the warp's ring,
// DEPTH stages ahead and across the borders of items, so that warps need no synchronisation until an item's end:
//
//   stage: [weights of a unit and window] [TILES x 8 rows of the window, as in linear.cu]
//
// There the parts' sums are added in order. Parts are by the absolute place in K, so that a row's bits depend on neither the
// rows of its entry nor on who works on it.
#include "experts.cuh"
#include "job.cuh"

static constexpr int WARPS = 8, THREADS = 32 * WARPS, UP_PARTS = 4, DOWN_PARTS = 1;

// ``columns``: of the output of a member. UP: out [entries, tile, columns] BF16 from x [rows, k]. DOWN: out [rows, slots,
// columns] FP32 from x [entries, tile, k].
struct Products {
  const u8* weights;   // members behind each other
  const float* scale;  // [members, units * 32]
  const u16* x;
  void* out;
  const int* list;
  int k, x_stride, units, windows, columns, slots;
  int copied;  // entries of the list that a block copies: all, or at least its own
  int whole;   // whether ``copied`` are all
};

// Stages of a ring: where blocks have 227 KB of shared memory two blocks' rings fit, elsewhere two or one of 99 KB.
template <class F, int TILES>
__device__ constexpr int depth_of() {
#if __CUDA_ARCH__ == 900 || (__CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200)
  return F::UNIT < 2048 ? (TILES == 1 ? 5 : 3) : TILES == 1 ? (F::WINDOW == 64 ? 3 : 4) : F::WINDOW == 64 ? 2 : 3;
#else
  return 2;
#endif
}

// What a warp loads next: a window of an item.
template <class F, int TILES>
struct Cursor {
  static constexpr int CHUNKS = F::WINDOW / 8, AT_ONCE = 32 / CHUNKS, COPIES = TILES * 8 / AT_ONCE;

  const u8* weights;  // this lane's bytes
  int x[COPIES];      // elements from job.x, of this lane's chunk of every AT_ONCE'th row
  int item, entry, unit, window, rows;
};

template <class F, int TILES, bool UP>
struct Warp {
  static constexpr int PARTS = UP ? UP_PARTS : DOWN_PARTS, TEAMS = WARPS / PARTS, TILE_ROWS = TILES * 8;
  static constexpr int DEPTH = depth_of<F, TILES>(), STAGE = F::UNIT + TILE_ROWS * F::WINDOW * 2;
  static constexpr int BLOCK = F::WINDOW / 4, EXCHANGE = PARTS > 1 ? 2 * WARPS * TILES * 1024 : 0;
  static constexpr int SCALES = PARTS >= 4 ? 1 : 2;  // tiles of a unit that a thread finishes
  using Load = Cursor<F, TILES>;

  const Products& job;
  const int* list;  // in shared memory, from entry ``entry0`` on
  int lane, part, team, begin, end, stop, entry0;
  u32 ring, stage, exchange;
  Load load;
  float2 scale[SCALES];

  __device__ __forceinline__ Warp(const Products& j, const int* l, int e, u32 shared, int first, int last)
      : job(j), list(l), lane(threadIdx.x % 32), stop(last), entry0(e) {
    const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
    part = warp % PARTS, team = warp / PARTS;
    begin = part * job.windows / PARTS, end = (part + 1) * job.windows / PARTS;
    exchange = shared + team * PARTS * TILES * 1024;
    ring = shared + EXCHANGE + warp * (DEPTH * STAGE), stage = ring;
    load.item = first + team;
    load.entry = load.item / job.units, load.unit = load.item % job.units;
    if (begin == end) load.item = stop;
    enter();
#pragma unroll 1
    for (int i = 0; i < DEPTH; ++i) fill(ring + i * STAGE);
  }

  __device__ __forceinline__ const int* entry(int number) const { return list + entry_at(number - entry0, TILE_ROWS); }

  // To the first window of the item.
  __device__ __forceinline__ void enter() {
    if (load.item >= stop) return;
    const int* at = entry(load.entry);
    const int member = at[0] & 0xffff;
    load.rows = at[0] >> 16, load.window = begin;
    load.weights = job.weights +
                   (static_cast<long long>(member * job.units + load.unit) * job.windows + begin) * F::UNIT + lane * 16;
#pragma unroll
    for (int i = 0; i < Load::COPIES; ++i) {
      const int row = lane / Load::CHUNKS + i * Load::AT_ONCE;
      const int from = !UP ? load.entry * TILE_ROWS + row : row < load.rows ? at[ENTRY_HEAD + row] >> 8 : 0;
      load.x[i] = from * job.x_stride + lane % Load::CHUNKS * 8 + begin * F::WINDOW;
    }
  }

  // The next window into a stage. x: 8 rows are a column tile n, lane (g, t) reads chunks t * BLOCK / 8 + h of row g.
  __device__ __forceinline__ void fill(u32 to) {
    if (load.item < stop) {
      F::fetch(to + lane * 16, load.weights, lane);
      constexpr int PER_LANE = BLOCK / 8;
      const int row = lane / Load::CHUNKS, chunk = lane % Load::CHUNKS, h = chunk % PER_LANE;
      const bool inside = load.window * F::WINDOW < job.k - chunk * 8;
      const u32 at = to + F::UNIT + h * 512 + ((row * 64) ^ (h * 64)) + chunk / PER_LANE * 16;
#pragma unroll
      for (int i = 0; i < Load::COPIES; ++i)
        if (row + i * Load::AT_ONCE < load.rows)
          copy16_or_zero_cached(at + i * Load::AT_ONCE / 8 * PER_LANE * 512 + i * Load::AT_ONCE % 8 * 64,
                                job.x + load.x[i], inside);
      advance();
    }
    copy_commit();
  }

  __device__ __forceinline__ void advance() {
    load.weights += F::UNIT;
#pragma unroll
    for (int i = 0; i < Load::COPIES; ++i) load.x[i] += F::WINDOW;
    if (++load.window < end) return;
    load.item += TEAMS, load.unit += TEAMS;
    while (load.unit >= job.units) load.unit -= job.units, ++load.entry;
    enter();
  }

  // A part's sums of an item; N: column tiles.
  template <int N>
  __device__ __forceinline__ void multiply(float (&sum)[2][TILES][4]) {
#pragma unroll 1
    for (int v = begin; v < end; ++v) {
      copy_wait<DEPTH - 1>();
      __syncwarp();
      const u32 here = stage;
      stage = here == ring + (DEPTH - 1) * STAGE ? ring : here + STAGE;
      u32 b[N][BLOCK / 2];
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int h = 0; h < BLOCK / 8; ++h) {
          const uint4 x = load_shared16(here + F::UNIT + (n * (BLOCK / 8) + h) * 512 + (lane * 16 ^ h * 64));
          b[n][4 * h] = x.x, b[n][4 * h + 1] = x.y, b[n][4 * h + 2] = x.z, b[n][4 * h + 3] = x.w;
        }
      const typename F::Words words = F::read(here + lane * 16, lane);
      __syncwarp();
      fill(here);
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < F::STEPS / 2; ++h) {
          u32 a[2][4];
          F::fragments(words, m, h, a);
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int n = 0; n < N; ++n) mma<false>(sum[m][n], a[j], b[n][4 * h + 2 * j], b[n][4 * h + 2 * j + 1]);
        }
    }
  }

  // Two sums of tile m: weight rows g and g + 8 of tile row ``row``.
  __device__ __forceinline__ void emit(const int* at, int number, int unit, int m, int row, float low,
                                       float high) const {
    if (row >= at[0] >> 16) return;
    const float2 factor = scale[SCALES == 1 ? 0 : m];
    low = __fmul_rn(low, factor.x), high = __fmul_rn(high, factor.y);
    if (UP) {
      const int column = unit * 16 + m * 8 + lane / 4;
      if (column < job.columns)
        static_cast<u16*>(job.out)[(static_cast<long long>(number) * TILE_ROWS + row) * job.columns + column] =
            gated(from_bf16(to_bf16(low)), from_bf16(to_bf16(high)));
    } else {
      const int line = at[ENTRY_HEAD + row], column = unit * UNIT_ROWS + m * TILE + lane / 4;
      float* to = static_cast<float*>(job.out) +
                  (static_cast<long long>(line >> 8) * job.slots + (line & 255)) * job.columns + column;
      if (column < job.columns) to[0] = low;
      if (column + 8 < job.columns) to[8] = high;
    }
  }

  __device__ __forceinline__ void run(int first) {
    int number = (first + team) / job.units, unit = (first + team) % job.units, turn = 0;
#pragma unroll 1
    for (int item = first + team; item < stop; item += TEAMS) {
      const int* at = entry(number);
      const float* factors =
          job.scale + static_cast<long long>((at[0] & 0xffff) * job.units + unit) * UNIT_ROWS + lane / 4;
#pragma unroll
      for (int i = 0; i < SCALES; ++i) {
        const int m = SCALES == 1 ? part / 2 % 2 : i;
        scale[i] = {__ldg(factors + m * TILE), __ldg(factors + m * TILE + 8)};
      }
      float sum[2][TILES][4] = {};
      if (TILES == 1 || at[0] >> 16 > 8)
        multiply<TILES>(sum);
      else
        multiply<1>(sum);
      finish(at, number, unit, sum, turn);
      unit += TEAMS;
      while (unit >= job.units) unit -= job.units, ++number;
    }
  }

  __device__ __forceinline__ void finish(const int* at, int number, int unit, float (&sum)[2][TILES][4], int& turn) {
    const int row = lane % 4 * 2;
    if constexpr (PARTS == 1) {
#pragma unroll
      for (int i = 0; i < 2 * TILES * 2; ++i) {
        const int m = i / 2 % 2, n = i / 4, j = i % 2;
        emit(at, number, unit, m, n * 8 + row + j, sum[m][n][j], sum[m][n][2 + j]);
      }
    } else {
      // Pair v = (n, m, j, lane) of part p lies at p * TILES KiB + 8 v, in one of two places in turn: a team's barrier of the
      // next item says that this one's pairs have been read.
      const u32 here = exchange + turn * (WARPS * TILES * 1024);
      turn ^= 1;
#pragma unroll
      for (int i = 0; i < 2 * TILES * 2; ++i) {
        const int m = i / 2 % 2, n = i / 4, j = i % 2;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(here + part * (TILES * 1024) + i * 256 + lane * 8),
                     "f"(sum[m][n][j]), "f"(sum[m][n][2 + j])
                     : "memory");
      }
      asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(32 * PARTS) : "memory");
#pragma unroll
      for (int i = part; i < 2 * TILES * 2; i += PARTS) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          float2 v;
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(v.x), "=f"(v.y)
                       : "r"(here + p * (TILES * 1024) + i * 256 + lane * 8)
                       : "memory");
          low = __fadd_rn(low, v.x), high = __fadd_rn(high, v.y);
        }
        emit(at, number, unit, i / 2 % 2, i / 4 * 8 + row + i % 2, low, high);
      }
    }
  }
};

template <class F, int TILES, bool UP>
__device__ __forceinline__ void run(const Products& job) {
  using W = Warp<F, TILES, UP>;
  extern __shared__ __align__(16) u8 memory[];
  constexpr int RECORD = ENTRY_HEAD + TILES * 8;
  int* list = reinterpret_cast<int*>(memory + W::EXCHANGE + WARPS * W::DEPTH * W::STAGE);
  pdl_wait();
  pdl_trigger();
  int entries = job.whole ? 0 : __ldcg(job.list), entry0 = 0;
  if (!job.whole) entry0 = static_cast<int>(static_cast<long long>(blockIdx.x) * entries / gridDim.x);
  const int4* from = reinterpret_cast<const int4*>(job.list + entry0 * RECORD);
  for (int i = threadIdx.x; i < (LIST_HEAD + job.copied * RECORD) / 4; i += THREADS)
    reinterpret_cast<int4*>(list)[i] = __ldcg(from + i);
  __syncthreads();
  if (job.whole) entries = list[0];
  const long long items = static_cast<long long>(entries) * job.units;
  const int first = static_cast<int>(blockIdx.x * items / gridDim.x),
            stop = static_cast<int>((blockIdx.x + 1) * items / gridDim.x);
  W warp(job, list, entry0, shared_address(memory), first, stop);
  warp.run(first);
}

#define EXPERTS(FORMAT, F, TILES)                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                    \
      experts_up_##FORMAT##_##TILES(const __grid_constant__ Products job) {   \
    run<F, TILES / 8, true>(job);                                             \
  }                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                    \
      experts_down_##FORMAT##_##TILES(const __grid_constant__ Products job) { \
    run<F, TILES / 8, false>(job);                                            \
  }

EXPERTS(nvfp4, Nvfp4, 8)
EXPERTS(nvfp4, Nvfp4, 16)
EXPERTS(fp8, Fp8, 8)
EXPERTS(fp8, Fp8, 16)
EXPERTS(bf16, Bf16, 8)
EXPERTS(bf16, Bf16, 16)
