// y[rows, N] = x[rows, K] W[N, K]^T for up to 32, 64 or 128 rows on Hopper, each row with the bits that linear_hopper.cu gives
// it: a joint pass of several sequences. A weight is read and decoded once for all rows.
//
// Work is *tiles* of 64 weight rows, 2 units (decode.cuh). K is split over blocks of a cluster as there, SPLITS parts; a block
// takes its part for 4 tiles at a time, a *pass*: warpgroup g has tile g, of which warp w decodes 16 weight rows as left
// operand. What 64 k take, x of all rows and the weights of 4 tiles, is a *stage* of a ring in shared memory that four more
// warps fill. A warpgroup takes the four slices of the part one after the other: a slice's sum begins at zero, and is added to
// the sum of the slices before it. The blocks of a cluster send each other what they finish, and add the SPLITS sums in the
// order of the blocks. So every sum has the order that linear_hopper.cu gives it: k in a slice, slices, parts.
//
// ``side`` is a second, BF16 stack on the same x: its tiles, of SIDE_ROWS activation rows each, come after all others.
#include "blocks.cuh"
#include "job.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "wgmma.cuh"

static constexpr int SLICES = 4, GROUPS = 4, TILE_UNITS = 2, WARPS = 16, PRODUCERS = 128,
                     THREADS = 32 * WARPS + PRODUCERS, SIDE_ROWS = 16;
static constexpr u32 FULL = 0, EMPTY = 128, RECEIVED = 256, FREE = 288, BEST = 1024,
                     SUMS_AT = 2048;  // in shared memory
static constexpr u32 SHARED = 232448;

// Shared memory of a block: head, sums of the warpgroups, stages: x, then each unit's weights. Mirrored by wide_splits.py.
template <class F, int ROWS>
struct Room {
  static constexpr int PIECES = BLOCK_K / F::WINDOW;
  static constexpr u32 SUMS = ROWS * 256;  // of a warpgroup
  static constexpr u32 STAGES_AT = SUMS_AT + GROUPS * SUMS;
  static constexpr u32 X = ROWS * 128, UNIT = PIECES * F::UNIT, STAGE = X + GROUPS * TILE_UNITS * UNIT;
  static constexpr int STAGES = (SHARED - STAGES_AT) / STAGE;
  static constexpr bool KEPT = ROWS > 64;  // sums of the slices so far lie in shared memory: there is no other room
  static_assert(STAGES >= 2 && STAGES <= 16 && STAGE % 1024 == 0, "barriers; operands of products are aligned");
};

// ``x``; the compiler counts nothing from it ahead, which would take registers of their own through all products.
template <class T>
__device__ __forceinline__ T late(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where a block is, its part of K, and its tiles.
template <class F, int ROWS, int SPLITS>
struct Block {
  using R = Room<F, ROWS>;
  static constexpr int SIDES = ROWS / SIDE_ROWS;  // tiles of 64 weight rows of the side stack

  u32 shared;
  int split;                // of the block in its cluster
  int first_k, count_k;     // blocks of BLOCK_K of the part
  int tiles, first, count;  // of the main stack; of both stacks, from ``first`` on
  int passes;

  __device__ __forceinline__ Block(const Job& job, int side_units, u32 start) : shared(start) {
    const int clusters = gridDim.x / SPLITS, cluster = blockIdx.x / SPLITS, blocks = (job.k + BLOCK_K - 1) / BLOCK_K;
    split = blockIdx.x % SPLITS;
    first_k = split * blocks / SPLITS, count_k = (split + 1) * blocks / SPLITS - first_k;
    tiles = (late(job.units) + TILE_UNITS - 1) / TILE_UNITS;
    const int all = tiles + (side_units + TILE_UNITS - 1) / TILE_UNITS * SIDES, base = all / clusters,
              rest = all % clusters;
    first = cluster * base + min(cluster, rest), count = base + (cluster < rest);
    passes = (count + GROUPS - 1) / GROUPS;
  }

  // Tiles of a group: of both stacks, of the main one.
  __device__ __forceinline__ int all_of(int group) const { return max(count - group + GROUPS - 1, 0) / GROUPS; }
  __device__ __forceinline__ int tiles_of(int group) const {
    return max(min(count, tiles - first) - group + GROUPS - 1, 0) / GROUPS;
  }

  __device__ __forceinline__ u32 stage(int i) const { return shared + R::STAGES_AT + i * R::STAGE; }
  __device__ __forceinline__ u32 full(int i) const { return shared + FULL + i * 8; }
  __device__ __forceinline__ u32 empty(int i) const { return shared + EMPTY + i * 8; }
  __device__ __forceinline__ u32 received(int group) const { return shared + RECEIVED + group * 8; }
  __device__ __forceinline__ u32 free(int group) const { return shared + FREE + group * 8; }
  __device__ __forceinline__ u32 sums(int group) const { return shared + SUMS_AT + group * R::SUMS; }

  // By one warp.
  __device__ __forceinline__ void init(bool in_blocks) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      for (int i = 0; i < R::STAGES; ++i) {
        barrier_init(full(i), PRODUCERS / 32 + (in_blocks ? 0 : PRODUCERS));
        barrier_init(empty(i), WARPS);
      }
      for (int i = 0; i < GROUPS; ++i) {
        barrier_init(received(i), 1);
        barrier_init(free(i), SPLITS * WARPS / GROUPS);
      }
      barriers_ready();
    }
    for (int row = lane; row < ROWS; row += 32)
      *reinterpret_cast<u64*>(__cvta_shared_to_generic(shared + BEST + row * 8)) = 0;
    __syncwarp();
  }
};

// The stage that is next, and the parity of its barriers.
template <int STAGES>
struct Cursor {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// A tile of the side stack to L2: its warps load it themselves.
template <class F, int ROWS, int SPLITS>
__device__ __forceinline__ void prefetch_side(const Job& job, const Block<F, ROWS, SPLITS>& block, int tile) {
  constexpr int PIECES = BLOCK_K / Bf16::WINDOW;
  const int first = block.first_k * PIECES, windows = min(block.count_k * PIECES, job.windows - first);
  if (tile % block.SIDES > 0 || windows <= 0) return;
#pragma unroll 1
  for (int unit = tile / block.SIDES * TILE_UNITS, i = 0; i < TILE_UNITS && unit < job.units; ++i, ++unit)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                     job.weights + (static_cast<long long>(unit) * job.windows + first) * Bf16::UNIT),
                 "r"(windows * Bf16::UNIT)
                 : "memory");
}

// A warp that fills stages, by its lane 0: the tile of a warpgroup in every pass. What 64 k of a unit take lies in one piece.
template <class F, int ROWS, int SPLITS>
struct Weights {
  using R = Room<F, ROWS>;
  const Job &job, &side;
  const Block<F, ROWS, SPLITS>& block;
  const int group;
  int tile, b = 0;  // of the block, of the tile
  int units = 0;    // that the tile has
  const u8* from = nullptr;

  __device__ __forceinline__ Weights(const Job& main, const Job& more, const Block<F, ROWS, SPLITS>& at, int warp)
      : job(main), side(more), block(at), group(warp), tile(warp) {
    start();
  }

  __device__ __forceinline__ void start() {
    const int unit = (block.first + tile) * TILE_UNITS;
    units = tile < min(block.count, block.tiles - block.first) ? min(TILE_UNITS, job.units - unit) : 0;
    from = job.weights + (static_cast<long long>(unit) * job.windows + block.first_k * R::PIECES) * F::UNIT;
    if (units == 0 && tile < block.count) prefetch_side(side, block, block.first + tile - block.tiles);
  }

  // The next 64 k to stage ``stage``, whose barrier will count ``more`` bytes besides.
  __device__ __forceinline__ void bring(int stage, int more) {
    const u32 to = block.stage(stage) + R::X + group * (TILE_UNITS * R::UNIT), full = block.full(stage);
    const int bytes = min(job.windows - (block.first_k + b) * R::PIECES, R::PIECES) * F::UNIT;
    barrier_expect(full, units * bytes + more);
    if (units > 0) copy_bulk(to, from, bytes, full);
    if (units > 1) copy_bulk(to + R::UNIT, from + static_cast<long long>(job.windows) * F::UNIT, bytes, full);
    from += R::UNIT;
    if (++b < block.count_k) return;
    b = 0, tile += GROUPS;
    start();
  }
};

// Zeros when ``valid`` is false.
__device__ __forceinline__ void copy4_or_zero(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// The warps that fill stages, with weights before the kernels before this one have ended. Of x in blocks each copies a
// quarter of the rows, as they lie; of x in rows, a lane copies a pair of k.
template <class F, int ROWS, int SPLITS>
__device__ __forceinline__ void fill_stages(const Job& job, const Job& side, const Block<F, ROWS, SPLITS>& block) {
  using R = Room<F, ROWS>;
  constexpr int QUARTER = R::X / (PRODUCERS / 32);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(ALL, threadIdx.x / 32, 0) - WARPS,
            all = block.passes * block.count_k, early = min(all, R::STAGES);
  const bool in_blocks = job.x_stride < 0;
  const int more = in_blocks ? QUARTER : 0;
  Cursor<R::STAGES> at;
  Weights<F, ROWS, SPLITS> weights(job, side, block, warp);
  if (lane == 0)
    for (int i = 0; i < early; ++i) weights.bring(i, more);
  pdl_wait();
  int b = 0;
  if (in_blocks) {
    if (lane > 0) return;
    asm volatile("fence.proxy.async.global;" ::: "memory");  // copies see what the kernels before wrote
    const u8* x = reinterpret_cast<const u8*>(job.x) + static_cast<long long>(block.first_k) * R::X + warp * QUARTER;
#pragma unroll 1
    for (int i = 0; i < all; ++i) {
      if (i >= early) {
        barrier_wait(block.empty(at.stage), at.parity ^ 1);
        weights.bring(at.stage, more);
      }
      copy_bulk(block.stage(at.stage) + warp * QUARTER, x + b * R::X, QUARTER, block.full(at.stage));
      if (++b == block.count_k) b = 0;
      at.advance();
    }
    return;
  }
  constexpr int BEHIND = R::STAGES > 3 ? R::STAGES > 4 ? 3 : 2 : 1;  // stages whose copies may be under way
  const int pair = F::WINDOW == 64 ? lane % 8 : lane / 16 * 4 + lane % 4, t = F::WINDOW == 64 ? lane / 8 : lane / 4 % 4;
  Cursor<R::STAGES> there;
  auto arrive = [&] {
    publish();
    barrier_arrive(block.full(there.stage));
    there.advance();
  };
#pragma unroll 1
  for (int i = 0; i < all; ++i) {
    if (i >= early) {
      barrier_wait(block.empty(at.stage), at.parity ^ 1);
      if (lane == 0) weights.bring(at.stage, 0);
      __syncwarp();
    }
    const int k = (block.first_k + b) * BLOCK_K + 2 * lane;
    const u32 to = block.stage(at.stage) + t * 4;
    const u16* from = job.x + (k < job.k ? k : 0);
#pragma unroll 4
    for (int row = warp; row < ROWS; row += PRODUCERS / 32)
      copy4_or_zero(to + row * 128 + (pair ^ row % 8) * 16, from + static_cast<long long>(row) * job.x_stride,
                    k < job.k);
    copy_commit();
    if (i >= BEHIND) copy_wait<BEHIND>(), arrive();
    if (++b == block.count_k) b = 0;
    at.advance();
  }
  copy_wait<0>();
  for (int i = min(all, BEHIND); i > 0; --i) arrive();
}

// 16 k of all rows of x in shared memory as right operand (k_major of wgmma.cuh): ``at`` is a stage, which is aligned.
__device__ __forceinline__ u64 operand(u32 at) {
  return static_cast<u64>(64 | 1u << 30) << 32 | ((at & 0x3FFFF) >> 4 | 1u << 16);
}

// What outlives a tile in a warp that multiplies.
template <class F, int ROWS, int SPLITS>
struct Warp {
  using R = Room<F, ROWS>;
  const Block<F, ROWS, SPLITS>& block;
  int lane, warp, group;  // warp: of the group
  Cursor<R::STAGES> at;
  u32 own;   // in a stage, this lane's bytes of its unit's weights
  int left;  // tiles of both stacks that the group has still to do

  __device__ __forceinline__ explicit Warp(const Block<F, ROWS, SPLITS>& b) : block(b) {
    lane = threadIdx.x % 32;
    const int number = __shfl_sync(ALL, threadIdx.x / 32, 0);
    group = number / 4, warp = number % 4;
    own = R::X + (group * TILE_UNITS + warp / 2) * R::UNIT + lane * 16;
    left = block.all_of(group);
  }

  __device__ __forceinline__ void wait() const { barrier_wait(block.full(at.stage), at.parity); }

  // A stage that this warp has read may be filled again.
  __device__ __forceinline__ void release(u32 empty) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(empty);
  }

  // Tiles done so far.
  __device__ __forceinline__ int number() const { return late(block.all_of(group)) - left; }

  // A pass in which the group has no tile.
  __device__ __forceinline__ void skip() {
#pragma unroll 1
    for (int b = 0; b < block.count_k; ++b) {
      wait();
      release(block.empty(at.stage));
      at.advance();
    }
  }
};

// Where the sums of a thread go: two weight rows (8 apart), activation rows of its column of every eighth.
struct Target {
  bool real;
  int padded, columns;  // columns: that exist from the first one on
  float scale[2];
  u16* out;
  const u16* residual;
  long long offset[2];  // of the two activation rows of group 0; those of the next are ``step`` on
  long long step;
};

// ``tile``: 16 weight rows of unit ``unit``. ``first``: activation row.
template <bool SIDE>
__device__ __forceinline__ Target target_of(const Job& job, int unit, int tile, int lane, int first) {
  Target to;
  to.real = unit < job.units;
  const int u = to.real ? unit : 0, row = first + lane % 4 * 2;
  to.padded = u * UNIT_ROWS + tile * TILE + lane / 4;
  to.scale[0] = __ldg(job.scale + to.padded), to.scale[1] = __ldg(job.scale + to.padded + 8);
  to.residual = !SIDE && job.mode == RESIDUAL ? job.residual : nullptr;
  if (!SIDE && job.mode == SWIGLU) {
    const int column = u * TILE + tile * 8 + lane / 4;
    to.columns = job.columns[0] - column, to.out = job.out[0];
    to.offset[0] = element_at(job.out_stride[0], row, column),
    to.offset[1] = element_at(job.out_stride[0], row + 1, column);
    to.step = job.out_stride[0] < 0 ? 8 * BLOCK_K : 8ll * job.out_stride[0];
  } else {
    const Place at = place_of(job, u, to.padded, row);
    to.columns = at.columns - at.column, to.out = at.out;
    to.offset[0] = at.offset, to.offset[1] = at.offset + at.stride, to.step = 8ll * at.stride;
  }
  return to;
}

// A warp's sums, tiles of one stack. SIDE: of a BF16 stack, SIDE_ROWS rows of x in the order of MAIN.
template <class F, int ROWS, int SPLITS, bool SIDE, class MAIN = F>
struct Stream {
  using R = Room<MAIN, ROWS>;
  static constexpr bool KEPT = R::KEPT && !SIDE;
  static constexpr int PIECES = BLOCK_K / F::WINDOW, OF_TILE = SIDE ? SIDE_ROWS : ROWS, COLUMNS = OF_TILE / 8;
  static constexpr u32 SUMS = OF_TILE * 256;         // of a tile
  static constexpr int PART = 4 * COLUMNS / SPLITS;  // warps' columns (16 x 8 sums) of a tile that a block finishes
  static constexpr int OWN = (PART + 3) / 4;         // of those, a warp's
  static constexpr int AT_ONCE = 4;                  // SIDE: blocks of k whose weights are on the way together

  const Job& job;
  Warp<MAIN, ROWS, SPLITS>& warp;
  float sum[OF_TILE / 2], total[KEPT ? 1 : OF_TILE / 2];

  __device__ __forceinline__ Stream(const Job& j, Warp<MAIN, ROWS, SPLITS>& w) : job(j), warp(w) {}

  // Of piece ``p`` of block ``b``; zeros past the last window.
  __device__ __forceinline__ typename F::Words read(int b, int p) const {
    const u32 from = warp.block.stage(warp.at.stage) + warp.own + p * F::UNIT;
    typename F::Words words = F::read_half(from, warp.lane, warp.warp % 2);
    if constexpr (PIECES > 1) {
      const u32 there = (warp.block.first_k + b) * PIECES + p < job.windows ? ALL : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        words.part[i] = {words.part[i].x & there, words.part[i].y & there, words.part[i].z & there,
                         words.part[i].w & there};
    }
    return words;
  }

  // Left operands of half ``h`` of a block of k. ``words``: of the piece, which has one half or two.
  static __device__ __forceinline__ void decode(int h, const typename F::Words& words, u32 (&a)[2][4]) {
    u32 pair[2][4];
    F::fragments(words, 0, PIECES == 1 ? h : 0, pair);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      a[i / 4][i % 4] = PIECES == 1 ? pair[i / 4][i % 4] : mul_bf16x2(pair[i / 4][i % 4], 0x3F803F80u);
  }

  // Half a block of k: its products run while the other half is decoded.
  __device__ __forceinline__ void half_step(int h, const typename F::Words& words, u64 x, u32 (&a)[2][2][4]) {
    decode(h, words, a[h]);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 2; ++j) Wgmma<ROWS>::multiply(sum, a[h][j], x + 4 * h + 2 * j, 1);
    wgmma_commit();
    wgmma_wait<1>();
    keep(a[1 - h]);
  }

  __device__ __forceinline__ void step(u32 (&a)[2][2][4], int b, u32& before) {
    warp.wait();
    typename F::Words words = read(b, 0);
    const u64 x = operand(warp.block.stage(warp.at.stage));
    half_step(0, words, x, a);
    if (before != 0) warp.release(before);
    before = warp.block.empty(warp.at.stage);
    if (PIECES > 1) words = read(b, 1);
    half_step(1, words, x, a);
    warp.at.advance();
  }

  // The blocks of a slice, of which there is one at least.
  __device__ __forceinline__ void multiply_slice(int b, int stop) {
    u32 a[2][2][4], before = 0;
#pragma unroll 1
    for (; b < stop; ++b) step(a, b, before);
    wgmma_wait<0>();
    keep(a[0]), keep(a[1]), keep(sum);
    warp.release(before);
  }

  __device__ __forceinline__ float (&four(int n))[4] { return *reinterpret_cast<float (*)[4]>(&sum[4 * n]); }

  // The group's tile ``number``: of the stack, 64 weight rows; and its first activation row.
  __device__ __forceinline__ int tile(int number) const {
    const int tile = warp.block.first + warp.group + number * GROUPS;
    return SIDE ? (tile - warp.block.tiles) / warp.block.SIDES : tile;
  }
  __device__ __forceinline__ int row(int number) const {
    const int tile = warp.block.first + warp.group + number * GROUPS;
    return SIDE ? (tile - warp.block.tiles) % warp.block.SIDES * SIDE_ROWS : 0;
  }

  // SIDE: a block's weights, straight from memory: [piece][row g, row g + 8].
  __device__ __forceinline__ void load(uint4 (&to)[2][2], int unit, int b) const {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int window = (warp.block.first_k + b) * 2 + p;
      const uint4* from =
          reinterpret_cast<const uint4*>(job.weights + (static_cast<long long>(unit) * job.windows + window) * F::UNIT +
                                         warp.warp % 2 * 1024 + warp.lane * 16);
      const bool there = unit < job.units && window < job.windows;
#pragma unroll
      for (int i = 0; i < 2; ++i) to[p][i] = there ? __ldg(from + i * 32) : uint4{0, 0, 0, 0};
    }
  }

  __device__ __forceinline__ void side_step(const uint4 (&words)[2][2], int first) {
    warp.wait();
    const int t = warp.lane % 4, row = warp.lane / 4;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      u32 a[2][4];
      Bf16::fragments({{words[p][0], words[p][1], {}, {}}}, 0, 0, a);
      const int half = MAIN::WINDOW == 64 ? t % 2 : p, pair = MAIN::WINDOW == 64 ? p * 2 + t / 2 : t;
      const u32 from = warp.block.stage(warp.at.stage) + (first + row) * 128 + pair * 4;
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n)
          mma<false>(four(n), a[j], load_shared4(from + n * 1024 + ((half * 4 + 2 * j) ^ row) * 16),
                     load_shared4(from + n * 1024 + ((half * 4 + 2 * j + 1) ^ row) * 16));
    }
    warp.release(warp.block.empty(warp.at.stage));
    warp.at.advance();
  }

  __device__ __forceinline__ u32 kept() const {
    return warp.block.sums(warp.group) + (warp.warp * 32 + warp.lane) * 16;
  }

  // The slices so far plus the one that has ended; behind the last one they are in ``sum``.
  __device__ __forceinline__ void fold(int slice) {
    if constexpr (KEPT) {
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        if (slice > 0) {
          const Float4 so_far = load_sums(kept() + n * 2048);
#pragma unroll
          for (int i = 0; i < 4; ++i) four(n)[i] = __fadd_rn(so_far.v[i], four(n)[i]);
        }
        if (slice + 1 < SLICES) store_sums(kept() + n * 2048, four(n));
      }
    } else {
      if (slice > 0)
#pragma unroll
        for (int i = 0; i < OF_TILE / 2; ++i) sum[i] = __fadd_rn(total[i], sum[i]);
#pragma unroll
      for (int i = 0; i < OF_TILE / 2; ++i) total[i] = sum[i];
    }
  }

  // The blocks of a slice of a side stack.
  __device__ __forceinline__ void side_slice(int unit, int first, int b, int stop) {
#pragma unroll 1
    for (; b < stop; b += AT_ONCE) {
      uint4 words[AT_ONCE][2][2];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (b + i < stop) load(words[i], unit, b + i);
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (b + i < stop) side_step(words[i], first);
    }
  }

  // One tile's products. ``sent``: whether sums of the tile before have still to be taken in.
  __device__ __forceinline__ void multiply(bool sent) {
    const int number = warp.number(), unit = SIDE ? tile(number) * TILE_UNITS + warp.warp / 2 : 0, first = row(number);
    int b = 0;
#pragma unroll 1
    for (int slice = 0; slice < SLICES; ++slice) {
      const int stop = warp.block.count_k * (slice + 1) / SLICES;
#pragma unroll
      for (int i = 0; i < OF_TILE / 2; ++i) sum[i] = 0.0f;
      if constexpr (SIDE)
        side_slice(unit, first, b, stop);
      else if (b < stop)
        multiply_slice(b, stop);
      b = stop;
      fold(slice);
      if (sent && slice == 0) take_in(number - 1);
    }
  }

  // The residual of eight activation rows: [weight row], a pair of activation rows.
  __device__ __forceinline__ void load_residual(const Target& to, int n, u32 (&before)[2]) const {
    if (to.residual == nullptr || !to.real) return;
#pragma unroll
    for (int w = 0; w < 2; ++w)
      if (8 * w < to.columns) {
        const u16* from = to.residual + n * to.step + 8 * w;
        before[w] = from[to.offset[0]] | from[to.offset[1]] << 16;
      }
  }

  // ``n``: eight activation rows. ``before``: their residual.
  template <bool RANKED>
  __device__ __forceinline__ void emit(const Target& to, int n, const Float4& s, const u32 (&before)[2]) const {
    const int lane = warp.lane;
    u16 y[2][2];  // [weight row][activation row]
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i / 2][i % 2] = to_bf16(s.v[i] * to.scale[i / 2]);
    const bool real = to.real && to.columns > 0;
    if (!SIDE && job.mode == SWIGLU) {
      if (!real) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) to.out[to.offset[i] + n * to.step] = gated(from_bf16(y[0][i]), from_bf16(y[1][i]));
      return;
    }
    if constexpr (RANKED) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u64 top = real ? rank_of(order_of(y[0][i]), to.padded) : 0;
        const u64 other = real && to.columns > 8 ? rank_of(order_of(y[1][i]), to.padded + 8) : 0;
        top = largest_rank<16, 2>(other > top ? other : top);
        if (lane < 4)
          atomicMax(reinterpret_cast<u64*>(__cvta_shared_to_generic(warp.block.shared + BEST)) + n * 8 + lane * 2 + i,
                    top);
      }
      if (to.out == nullptr) return;
    }
    if (!real) return;
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      if (8 * w >= to.columns) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const long long offset = to.offset[i] + n * to.step + 8 * w;
        u16 z = y[w][i];
        if (to.residual != nullptr) z = sum_of(before[w] >> 16 * i, z);
        to.out[offset] = z;
      }
    }
  }

  __device__ __forceinline__ void emit_any(const Target& to, int n, const Float4& s, const u32 (&before)[2]) const {
    if (!SIDE && job.mode == GREEDY)
      emit<true>(to, n, s, before);
    else
      emit<false>(to, n, s, before);
  }

  // Lets every block of the cluster send sums to this group's part.
  __device__ __forceinline__ void let_send() const {
    __syncwarp();
    if (warp.lane < SPLITS) barrier_arrive(warp.block.free(warp.group), warp.lane);
  }

  // The tile's sums, in ``sum``: to the blocks that finish them.
  //
  // Sums go to a block's part only when its group let them: when it has read those of the tile before, or (KEPT) its own of
  // the slices, which lie in the same place. The last time nobody is told, so that a block may end.
  __device__ __forceinline__ void send_sums(int number) const {
    const auto& block = warp.block;
    const int split = late(block.split);
    const int quarter = late(warp.warp);  // of the tile, 16 weight rows
    const u32 mine = late(block.sums(warp.group)), received = late(block.received(warp.group));
    if (warp.warp == 0 && warp.lane == 0) barrier_expect(received, SUMS);
    if (number == 0) cluster_wait();  // barriers of the other blocks are there
    if constexpr (R::KEPT) let_send();
    if (R::KEPT || number > 0) barrier_wait(block.free(warp.group), (R::KEPT ? number : number - 1) & 1);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      const int column = n * 4 + quarter, other = column / PART;
      Float4 s;
#pragma unroll
      for (int i = 0; i < 4; ++i) s.v[i] = sum[4 * n + i];
      send(address_in(mine + (split * PART + column % PART) * 512 + warp.lane * 16, other), address_in(received, other),
           s);
    }
  }

  // The part of a tile's sums that this block finishes, of all blocks: added, stored.
  __device__ __forceinline__ void take_in(int number) const {
    const int split = late(warp.block.split), quarter = late(warp.warp);
    const u32 mine = late(warp.block.sums(warp.group));
    const int finished = (split * PART + quarter) % 4;  // the quarter of all columns that a warp finishes
    const Target to =
        target_of<SIDE>(job, tile(number) * TILE_UNITS + finished / 2, finished % 2, warp.lane, row(number));
    pdl_wait();
    u32 before[2];
    if (quarter < PART) load_residual(to, (split * PART + quarter) / 4, before);
    barrier_wait_cluster(warp.block.received(warp.group), number & 1);
#pragma unroll 1
    for (int i = 0; i < OWN; ++i) {
      const int c = quarter + 4 * i;
      if (PART < 4 && c >= PART) break;
      if (i > 0) load_residual(to, (split * PART + c) / 4, before);
      const u32 from = mine + c * 512 + warp.lane * 16;
      Float4 s = load_sums(from);
#pragma unroll
      for (int other = 1; other < SPLITS; ++other) add(s, load_sums(from + other * PART * 512));
      emit_any(to, (split * PART + c) / 4, s, before);
    }
    if constexpr (R::KEPT)
      named_barrier<128>(1 + warp.group);  // the next tile's slices go where these sums lay
    else if (warp.left > 0)
      let_send();
  }

  // The tile's sums, in ``sum``, of a part that is all of K: stored.
  __device__ __forceinline__ void store(int number) {
    const Target to =
        target_of<SIDE>(job, tile(number) * TILE_UNITS + warp.warp / 2, warp.warp % 2, warp.lane, row(number));
    pdl_wait();
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      Float4 s;
      u32 before[2];
      load_residual(to, n, before);
#pragma unroll
      for (int i = 0; i < 4; ++i) s.v[i] = four(n)[i];
      emit_any(to, n, s, before);
    }
  }

  // Until so many tiles are left. Other blocks' sums of a tile are taken in while the next one is under way, where they have
  // a place of their own: by then they have come.
  __device__ __forceinline__ void run(int left) {
    bool sent = false;
#pragma unroll 1
    while (warp.left > left) {
      multiply(sent);
      const int number = warp.number();
      --warp.left;
      keep(sum);
      if constexpr (SPLITS == 1) {
        store(number);
      } else {
        send_sums(number);
        if constexpr (R::KEPT)
          take_in(number);
        else
          sent = true;
      }
    }
    if (sent) take_in(warp.number() - 1);
  }
};

template <class F, int ROWS, int SPLITS>
__device__ __forceinline__ void run_blocks(const Job& main, const Job& side) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 shared = __shfl_sync(ALL, shared_address(memory), 0);  // a register: else it is computed again and again
  const Block<F, ROWS, SPLITS> block(main, side.units, shared);
  const int producer = static_cast<int>(threadIdx.x) / 32 - WARPS;
  if (producer >= 0) {
    fewer_registers<32>();
    if (producer == 0) block.init(main.x_stride < 0);
    __syncthreads();
    if (SPLITS > 1) cluster_arrive();
    pdl_trigger();
    fill_stages(main, side, block);
    __syncwarp();
    if (SPLITS > 1) cluster_wait();
    return;
  }
  more_registers<112>();
  Warp<F, ROWS, SPLITS> warp(block);
  __syncthreads();
  if (SPLITS > 1) cluster_arrive();
  pdl_trigger();
  Stream<F, ROWS, SPLITS, false>(main, warp).run(warp.left - block.tiles_of(warp.group));
  const Block<F, ROWS, SPLITS> rest(main, side.units, late(block.shared));  // not kept in registers so far
  if (warp.left > 0) Stream<Bf16, ROWS, SPLITS, true, F>(side, warp).run(0);
  if (rest.all_of(warp.group) < rest.passes) warp.skip();
  if (main.mode == GREEDY) {
    named_barrier<32 * WARPS>(1 + GROUPS);
    const u64* bests = reinterpret_cast<const u64*>(__cvta_shared_to_generic(block.shared + BEST));
    const int row = (warp.group * 4 + warp.warp) * 32 + warp.lane;
    if (row < ROWS) main.best[blockIdx.x * ROWS + row] = bests[row];
  }
}

#define LINEAR(FORMAT, F, ROWS, SPLITS)                                                                              \
  extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(THREADS, 1)                            \
      linear_wide_##FORMAT##_##ROWS##_##SPLITS(const __grid_constant__ Job main, const __grid_constant__ Job side) { \
    run_blocks<F, ROWS, SPLITS>(main, side);                                                                         \
  }
#define LINEAR_ROWS(FORMAT, F, ROWS) \
  LINEAR(FORMAT, F, ROWS, 1)         \
  LINEAR(FORMAT, F, ROWS, 2)         \
  LINEAR(FORMAT, F, ROWS, 4)         \
  LINEAR(FORMAT, F, ROWS, 8)

LINEAR_ROWS(nvfp4, Nvfp4, 32)
LINEAR_ROWS(nvfp4, Nvfp4, 64)
LINEAR_ROWS(nvfp4, Nvfp4, 128)
LINEAR_ROWS(fp8, Fp8, 32)
LINEAR_ROWS(fp8, Fp8, 64)
LINEAR_ROWS(fp8, Fp8, 128)
LINEAR_ROWS(bf16, Bf16, 32)
LINEAR_ROWS(bf16, Bf16, 64)
LINEAR_ROWS(bf16, Bf16, 128)
#endif
