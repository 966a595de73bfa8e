// Products with experts' weights, by the work list of experts.cuh: gate and up of all entries in one launch, down in another.
//
// An *item* is an entry and a unit of 32 weight rows (decode.cuh). Items are numbered by entry, then unit; a block has
// consecutive ones, shared out over its teams of PARTS warps. A warp streams its part of an item's K, a window at a time: each
// lane copies its own bytes of weights into its own places of the warp's ring of DEPTH pieces, ahead of use and across the
// borders of items, so that the stream needs no synchronisation. At an item's end the parts' sums are added in order. Parts are
// by the absolute place in K, so that a row's bits depend on neither the rows of its entry nor on who works on it.
//
// Two kinds of launches. Entries of at most 16 rows (Few): a warp copies their windows beside the weights. Entries of up to 32 rows
// (Many), of a long prefill: the block holds all K of an entry's rows in shared memory.
#include "experts.cuh"
#include "job.cuh"

static constexpr int FEW_TILES = 2;  // most column tiles of Few
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

// Stages of a ring. Few: where blocks have 227 KB of shared memory, so many that two blocks of UP leave room for one of DOWN,
// which then loads weights while UP ends.
template <class F, int TILES, bool UP>
__device__ constexpr int depth_of() {
#if __CUDA_ARCH__ == 900 || (__CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200)
  if (TILES == 1) return F::UNIT < 2048 ? (UP ? 4 : 5) : UP ? 2 : F::WINDOW == 64 ? 3 : 4;
  if (TILES == 2) return F::UNIT < 2048 ? 3 : 2;
  return F::UNIT < 2048 ? 6 : 3;
#else
  return 2;
#endif
}

// The items of a block: ``first`` to ``stop`` - 1.
struct Share {
  int first, stop;
};

// A warp, its ring, and the ends of its items.
template <class F, int TILES, bool UP>
struct Warp {
  static constexpr int PARTS = UP ? UP_PARTS : DOWN_PARTS, TEAMS = WARPS / PARTS, TILE_ROWS = TILES * 8;
  static constexpr int WINDOW_BYTES = TILE_ROWS * F::WINDOW * 2;  // of all rows of an entry
  static constexpr int DEPTH = depth_of<F, TILES, UP>(), STAGE = F::UNIT + (TILES <= FEW_TILES ? WINDOW_BYTES : 0);
  static constexpr int RING = WARPS * DEPTH * STAGE, CHUNKS = F::WINDOW / 8;
  static constexpr int BLOCK = F::WINDOW / 4, EXCHANGE = PARTS > 1 ? WARPS * TILES * 1024 : 0;
  static constexpr int SCALES = PARTS >= 4 ? 1 : 2;  // tiles of a unit that a thread finishes

  const Products& job;
  const int* list;  // in shared memory, from entry ``entry0`` on
  int entry0, lane, part, team, begin, end;
  u32 ring, stage, exchange;
  float2 scale[SCALES];

  __device__ __forceinline__ Warp(const Products& j, const int* l, int e, u32 shared)
      : job(j), list(l), entry0(e), lane(threadIdx.x % 32) {
    const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
    part = warp % PARTS, team = warp / PARTS;
    begin = part * job.windows / PARTS, end = (part + 1) * job.windows / PARTS;
    exchange = shared + team * PARTS * TILES * 1024;
    ring = shared + EXCHANGE + warp * (DEPTH * STAGE), stage = ring;
  }

  __device__ __forceinline__ const int* entry(int number) const { return list + entry_at(number - entry0, TILE_ROWS); }
  __device__ __forceinline__ int member(int number) const { return entry(number)[0] & 0xffff; }
  __device__ __forceinline__ int rows(int number) const { return entry(number)[0] >> 16; }

  // This lane's bytes of an item's first piece.
  __device__ __forceinline__ const u8* weights_of(int number, int unit) const {
    const long long piece = static_cast<long long>(member(number) * job.units + unit) * job.windows + begin;
    return job.weights + piece * F::UNIT + lane * 16;
  }

  __device__ __forceinline__ u32 next_stage() {
    const u32 here = stage;
    stage = here == ring + (DEPTH - 1) * STAGE ? ring : here + STAGE;
    copy_wait<DEPTH - 1>();
    return here;
  }

  __device__ __forceinline__ void load_scales(int number, int unit) {
    const float* factors = job.scale + static_cast<long long>(member(number) * job.units + unit) * UNIT_ROWS + lane / 4;
#pragma unroll
    for (int i = 0; i < SCALES; ++i) {
      const int m = SCALES == 1 ? part / 2 % 2 : i;
      scale[i] = {__ldg(factors + m * TILE), __ldg(factors + m * TILE + 8)};
    }
  }

  // The rows of a window, N column tiles of 8: lane (g, t) reads chunks t * BLOCK / 8 + h of row g at h * 512 + 16 * lane, with g xor
  // 1 for h = 1, so that the chunks of a row go to different banks.
  template <int N>
  __device__ __forceinline__ void read_rows(u32 from, u32 (&b)[N][BLOCK / 2]) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int h = 0; h < BLOCK / 8; ++h) {
        const uint4 x = load_shared16(from + (n * (BLOCK / 8) + h) * 512 + (lane * 16 ^ h * 64));
        b[n][4 * h] = x.x, b[n][4 * h + 1] = x.y, b[n][4 * h + 2] = x.z, b[n][4 * h + 3] = x.w;
      }
  }

  template <int N>
  static __device__ __forceinline__ void multiply(float (&sum)[2][TILES][4], const typename F::Words& words,
                                                  const u32 (&b)[N][BLOCK / 2]) {
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

  // Two sums of tile m: weight rows g and g + 8 of row ``row`` of the entry.
  __device__ __forceinline__ void emit(int number, int unit, int m, int row, float low, float high) const {
    if (row >= rows(number)) return;
    const float2 factor = scale[SCALES == 1 ? 0 : m];
    low = __fmul_rn(low, factor.x), high = __fmul_rn(high, factor.y);
    if (UP) {
      const int column = unit * 16 + m * 8 + lane / 4;
      if (column < job.columns)
        static_cast<u16*>(job.out)[(static_cast<long long>(number) * TILE_ROWS + row) * job.columns + column] =
            gated(from_bf16(to_bf16(low)), from_bf16(to_bf16(high)));
    } else {
      const int line = entry(number)[ENTRY_HEAD + row], column = unit * UNIT_ROWS + m * TILE + lane / 4;
      float* to = static_cast<float*>(job.out) +
                  (static_cast<long long>(line >> 8) * job.slots + (line & 255)) * job.columns + column;
      if (column < job.columns) to[0] = low;
      if (column + 8 < job.columns) to[8] = high;
    }
  }

  __device__ __forceinline__ void meet() const {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "n"(32 * PARTS) : "memory");
  }

  // Adds the parts' sums of an item. Pair i * 32 + lane of part p, i = (n, m, j), lies at p * TILES KiB + 8 * (i * 32 + lane).
  __device__ __forceinline__ void finish(int number, int unit, const float (&sum)[2][TILES][4]) {
    const int row = lane % 4 * 2;
    if constexpr (PARTS == 1) {
#pragma unroll
      for (int i = 0; i < 4 * TILES; ++i) {
        const int m = i / 2 % 2, n = i / 4, j = i % 2;
        emit(number, unit, m, n * 8 + row + j, sum[m][n][j], sum[m][n][2 + j]);
      }
    } else {
      meet();  // the pairs of the item before have been read
#pragma unroll
      for (int i = 0; i < 4 * TILES; ++i) {
        const int m = i / 2 % 2, n = i / 4, j = i % 2;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(exchange + part * (TILES * 1024) + i * 256 + lane * 8),
                     "f"(sum[m][n][j]), "f"(sum[m][n][2 + j])
                     : "memory");
      }
      meet();
#pragma unroll
      for (int i = part; i < 4 * TILES; i += PARTS) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int p = 0; p < PARTS; ++p) {
          float2 v;
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(v.x), "=f"(v.y)
                       : "r"(exchange + p * (TILES * 1024) + i * 256 + lane * 8)
                       : "memory");
          low = __fadd_rn(low, v.x), high = __fadd_rn(high, v.y);
        }
        emit(number, unit, i / 2 % 2, i / 4 * 8 + row + i % 2, low, high);
      }
    }
  }
};

// Entries of at most 16 rows: a warp's items follow each other whatever their entries. A stage has a window of weights and of rows.
template <class F, int TILES, bool UP>
struct Few : Warp<F, TILES, UP> {
  using W = Warp<F, TILES, UP>;
  using W::begin, W::end, W::lane, W::job;
  static constexpr int AT_ONCE = 32 / W::CHUNKS, COPIES = W::TILE_ROWS / AT_ONCE, PER_LANE = W::BLOCK / 8;

  struct Cursor {  // what is loaded next
    const u8* weights;
    int item, number, unit, window, rows;
    int x[COPIES];  // elements from job.x of this lane's chunk, of every AT_ONCE'th row
  };

  Share share;
  Cursor load;

  __device__ __forceinline__ Few(const Products& j, const int* l, int e, u32 shared, Share s)
      : W(j, l, e, shared), share(s) {
    load.item = begin == end ? share.stop : share.first + W::team;
    load.number = load.item / job.units, load.unit = load.item % job.units;
    enter();
  }

  __device__ __forceinline__ void enter() {
    if (load.item >= share.stop) return;
    load.weights = W::weights_of(load.number, load.unit);
    load.window = begin, load.rows = W::rows(load.number);
    const int* lines = W::entry(load.number) + ENTRY_HEAD;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) {
      const int row = lane / W::CHUNKS + i * AT_ONCE;
      const int from = !UP ? load.number * W::TILE_ROWS + row : row < load.rows ? lines[row] >> 8 : 0;
      load.x[i] = from * job.x_stride + lane % W::CHUNKS * 8 + begin * F::WINDOW;
    }
  }

  static __device__ __forceinline__ void next(int& number, int& unit, int units) {
    unit += W::TEAMS;
    while (unit >= units) unit -= units, ++number;
  }

  // A window of weights or rows, or both, into a stage. Lane (g, t) reads chunks t * PER_LANE + h of row g at h * 512 + 16 * lane,
  // with g xor 1 for h = 1, so that the chunks of a row go to different banks.
  template <bool WEIGHTS, bool ROWS>
  __device__ __forceinline__ void fill(u32 to) {
    if (load.item >= share.stop) return;
    if (WEIGHTS) F::fetch(to + lane * 16, load.weights, lane);
    if (ROWS) {
      const int row = lane / W::CHUNKS, chunk = lane % W::CHUNKS, h = chunk % PER_LANE;
      const bool inside = load.window * F::WINDOW < job.k - chunk * 8;
      const u32 at = to + F::UNIT + h * 512 + (row * 64 ^ h * 64) + chunk / PER_LANE * 16;
#pragma unroll
      for (int i = 0; i < COPIES; ++i)
        if (row + i * AT_ONCE < load.rows)
          copy16_or_zero_cached(at + i * AT_ONCE / 8 * PER_LANE * 512 + i * AT_ONCE % 8 * 64, job.x + load.x[i],
                                inside);
    }
    load.weights += F::UNIT;
#pragma unroll
    for (int i = 0; i < COPIES; ++i) load.x[i] += F::WINDOW;
    if (++load.window < end) return;
    load.item += W::TEAMS;
    next(load.number, load.unit, job.units);
    enter();
  }

  // Weights of the first stages, which depend on the list alone.
  __device__ __forceinline__ void start_weights() {
    const Cursor start = load;
#pragma unroll 1
    for (int i = 0; i < W::DEPTH; ++i) fill<true, false>(W::ring + i * W::STAGE);
    load = start;
  }

  __device__ __forceinline__ void start_rows() {
#pragma unroll 1
    for (int i = 0; i < W::DEPTH; ++i) {
      fill<false, true>(W::ring + i * W::STAGE);
      copy_commit();
    }
  }

  // A part's sums of an item; N: column tiles.
  template <int N>
  __device__ __forceinline__ void item(float (&sum)[2][TILES][4]) {
#pragma unroll 1
    for (int v = begin; v < end; ++v) {
      const u32 here = W::next_stage();
      __syncwarp();
      u32 b[N][W::BLOCK / 2];
      W::template read_rows<N>(here + F::UNIT, b);
      const typename F::Words words = F::read(here + lane * 16, lane);
      __syncwarp();
      fill<true, true>(here);
      copy_commit();
      W::template multiply<N>(sum, words, b);
    }
  }

  __device__ __forceinline__ void run() {
    int mine = share.first + W::team, number = mine / job.units, unit = mine % job.units;
#pragma unroll 1
    for (; mine < share.stop; mine += W::TEAMS) {
      W::load_scales(number, unit);
      float sum[2][TILES][4] = {};
      if (TILES == 1 || W::rows(number) > 8)
        item<TILES>(sum);
      else
        item<1>(sum);
      W::finish(number, unit, sum);
      next(number, unit, job.units);
    }
  }
};

// Entries of more rows, one after the other: the block's units of an entry are shared out over its teams.
template <class F, int TILES, bool UP>
struct Many : Warp<F, TILES, UP> {
  using W = Warp<F, TILES, UP>;
  using W::begin, W::end, W::lane, W::job;
  static constexpr int PER_LANE = W::BLOCK / 8;

  const u8* weights;  // what is loaded next: this lane's bytes, the piece of its item
  int piece;
  u32 x;                // [windows][rows of the entry], in the order of the products
  int last, last_unit;  // the block's last entry, and the unit behind the block's last one of it
  int number, unit;     // to load next

  __device__ __forceinline__ Many(const Products& j, const int* l, int e, u32 shared, u32 rows, Share share)
      : W(j, l, e, shared), x(rows) {
    const int units = job.units;
    last = share.stop > share.first ? (share.stop - 1) / units : -1, last_unit = (share.stop - 1) % units + 1;
    number = share.first / units, unit = share.first % units + W::team;
    if (begin == end) number = last + 1;
    settle();
  }

  __device__ __forceinline__ int units_of(int entry) const { return entry == last ? last_unit : job.units; }

  // On to an entry in which this team has a unit.
  __device__ __forceinline__ void settle() {
    while (number <= last && unit >= units_of(number)) ++number, unit = W::team;
    if (number <= last) weights = W::weights_of(number, unit), piece = begin;
  }

  __device__ __forceinline__ void fill(u32 to) {
    if (number <= last) {
      F::fetch(to + lane * 16, weights, lane);
      weights += F::UNIT;
      if (++piece == end) {
        unit += W::TEAMS;
        settle();
      }
    }
    copy_commit();
  }

  __device__ __forceinline__ void start() {
#pragma unroll 1
    for (int i = 0; i < W::DEPTH; ++i) fill(W::ring + i * W::STAGE);
  }

  // All rows of an entry to shared memory: 8 rows are a column tile n, lane (g, t) reads chunks t * PER_LANE + h of row g at
  // (n * PER_LANE + h) * 512 + 16 * lane, with g xor 1 for h = 1, so that the chunks of a row go to different banks.
  __device__ __forceinline__ void stage_rows(int entry) const {
    constexpr int AHEAD = 8;
    const int across = job.windows * W::CHUNKS, vectors = W::rows(entry) * across;
    const int* lines = W::entry(entry) + ENTRY_HEAD;
#pragma unroll 1
    for (int v0 = threadIdx.x; v0 < vectors; v0 += AHEAD * THREADS) {
      uint4 found[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int v = v0 + i * THREADS, row = v / across, k = v % across * 8;
        found[i] = {0, 0, 0, 0};
        if (v >= vectors || k >= job.k) continue;
        const int from = UP ? lines[row] >> 8 : entry * W::TILE_ROWS + row;
        found[i] = __ldcg(reinterpret_cast<const uint4*>(job.x + static_cast<long long>(from) * job.x_stride + k));
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int v = v0 + i * THREADS, row = v / across, chunk = v % W::CHUNKS, h = chunk % PER_LANE;
        if (v >= vectors) continue;
        const u32 to = x + v % across / W::CHUNKS * W::WINDOW_BYTES + (row / 8 * PER_LANE + h) * 512 +
                       (row % 8 * 64 ^ h * 64) + chunk / PER_LANE * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(found[i].x), "r"(found[i].y),
                     "r"(found[i].z), "r"(found[i].w)
                     : "memory");
      }
    }
  }

  template <int N>
  __device__ __forceinline__ void item(float (&sum)[2][TILES][4]) {
    u32 from = x + begin * W::WINDOW_BYTES;
#pragma unroll 1
    for (int v = begin; v < end; ++v, from += W::WINDOW_BYTES) {
      const u32 here = W::next_stage();
      const typename F::Words words = F::read(here + lane * 16, lane);
      u32 b[N][W::BLOCK / 2];
      W::template read_rows<N>(from, b);
      fill(here);
      W::template multiply<N>(sum, words, b);
    }
  }

  __device__ __forceinline__ void run(Share share) {
    int at = share.first % job.units + W::team;
#pragma unroll 1
    for (int entry = share.first / job.units; entry <= last; ++entry, at = W::team) {
      __syncthreads();
      stage_rows(entry);
      __syncthreads();
      const int tiles = (W::rows(entry) + 7) / 8, stop = units_of(entry);
#pragma unroll 1
      for (; at < stop; at += W::TEAMS) {
        W::load_scales(entry, at);
        float sum[2][TILES][4] = {};
        if (tiles == 1)
          item<1>(sum);
        else if (tiles == 2)
          item<2>(sum);
        else if (tiles == 3)
          item<3>(sum);
        else
          item<TILES>(sum);
        W::finish(entry, at, sum);
      }
    }
  }
};

// UP: the list comes from the launch before. DOWN: from the one before that, which has ended, so that weights can be asked for
// before the wait.
template <class F, int TILES, bool UP>
__device__ __forceinline__ void run(const Products& job) {
  using W = Warp<F, TILES, UP>;
  extern __shared__ __align__(16) u8 memory[];
  constexpr int RECORD = ENTRY_HEAD + TILES * 8;
  int* list = reinterpret_cast<int*>(memory + W::EXCHANGE + W::RING);
  if (UP) {
    pdl_wait();
    pdl_trigger();
  }
  int entries = job.whole ? 0 : __ldcg(job.list), entry0 = 0;
  if (!job.whole) entry0 = static_cast<int>(static_cast<long long>(blockIdx.x) * entries / gridDim.x);
  const int4* from = reinterpret_cast<const int4*>(job.list + entry0 * RECORD);
  const int vectors = (LIST_HEAD + job.copied * RECORD) / 4;
  for (int i = threadIdx.x; i < vectors; i += THREADS) reinterpret_cast<int4*>(list)[i] = __ldcg(from + i);
  __syncthreads();
  if (job.whole) entries = list[0];
  const long long items = static_cast<long long>(entries) * job.units;
  const Share share = {static_cast<int>(blockIdx.x * items / gridDim.x),
                       static_cast<int>((blockIdx.x + 1) * items / gridDim.x)};
  const u32 shared = shared_address(memory);
  if constexpr (TILES <= FEW_TILES) {
    Few<F, TILES, UP> warp(job, list, entry0, shared, share);
    warp.start_weights();
    if (!UP) {
      pdl_wait();
      pdl_trigger();
    }
    warp.start_rows();
    warp.run();
  } else {
    Many<F, TILES, UP> warp(job, list, entry0, shared, shared + W::EXCHANGE + W::RING + vectors * 16, share);
    warp.start();
    if (!UP) {
      pdl_wait();
      pdl_trigger();
    }
    warp.run(share);
  }
}

#define EXPERTS(FORMAT, F, ROWS)                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, ROWS <= 16 ? 2 : 1)  \
      experts_up_##FORMAT##_##ROWS(const __grid_constant__ Products job) {   \
    run<F, ROWS / 8, true>(job);                                             \
  }                                                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, ROWS <= 16 ? 2 : 1)  \
      experts_down_##FORMAT##_##ROWS(const __grid_constant__ Products job) { \
    run<F, ROWS / 8, false>(job);                                            \
  }
#define EXPERTS_OF(FORMAT, F) \
  EXPERTS(FORMAT, F, 8)       \
  EXPERTS(FORMAT, F, 16)      \
  EXPERTS(FORMAT, F, 32)

EXPERTS_OF(nvfp4, Nvfp4)
EXPERTS_OF(fp8, Fp8)
EXPERTS_OF(bf16, Bf16)
