// y[rows, N] = x[rows, K] W[N, K]^T for up to 32, 64 or 128 rows on Hopper, each row with the bits that linear_hopper.cu gives
// it: a joint pass of several sequences. A weight is read and decoded once for all rows.
//
// Work is *tiles* of 64 weight rows, 2 units (decode.cuh). K is split over blocks of a cluster as there, SPLITS parts; a block
// takes its part for 4 tiles at a time, a *pass*: warpgroup g has tile g, of which warp w streams and decodes 16 weight rows
// as left operand. Its x, 64 k of all rows a stage, comes through a ring in shared memory that four more warps fill, once for
// all tiles. A warpgroup takes the four slices of the part one after the other: a slice's sum begins at zero, and is added to
// the sum of the slices before it. The blocks of a cluster send each other what they finish, and add the SPLITS sums in the
// order of the blocks. So every sum has the order that linear_hopper.cu gives it: k in a slice, slices, parts.
//
// TWINS 2: a cluster has twice as many blocks, for two passes at a time; blocks with the same part of K each copy half of x,
// to both.
//
// ``side`` is a second, BF16 stack on the same x: its tiles come after all others.
#include "blocks.cuh"
#include "job.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "wgmma.cuh"

static constexpr int SLICES = 4, GROUPS = 4, TILE_UNITS = 2, WARPS = 16, PRODUCERS = 128,
                     THREADS = 32 * WARPS + PRODUCERS;
static constexpr u32 FULL = 0, EMPTY = 64, RECEIVED = 128, FREE = 160, BEST = 1024,
                     STAGES_AT = 2048;  // in shared memory
static constexpr u32 SHARED = 232448;

// Shared memory of a block: head, stages of x, sums of the warpgroups, rings of weights. Mirrored by splits.WideSplits.
template <int ROWS>
struct Room {
  static constexpr int STAGES = ROWS == 32 ? 8 : ROWS == 64 ? 6 : 3;
  static constexpr u32 STAGE = ROWS * 128, SUMS_AT = STAGES_AT + STAGES * STAGE;
  static constexpr u32 SUMS = ROWS * 256;  // of a warpgroup
  static constexpr u32 RINGS_AT = SUMS_AT + GROUPS * SUMS;
  static constexpr bool KEPT = ROWS > 64;  // sums of the slices so far lie in shared memory: there is no other room
};

// A tile of 16 weight rows of a window, in a place of BYTES of the ring. Addresses include 16 * lane.
template <class F>
struct Piece {
  static constexpr int BYTES = F::UNIT / 2;
  static __device__ __forceinline__ void fetch(u32 to, const u8* from, int lane, int m) {
    F::fetch_tile(to, from, lane, m);
  }
  static __device__ __forceinline__ typename F::Words read(u32 at, int lane, int m) {
    return F::read_tile(at, lane, m);
  }
};

template <>
struct Piece<Nvfp4> {
  static constexpr int BYTES = 640;
  static __device__ __forceinline__ void fetch(u32 to, const u8* from, int lane, int m) {
    copy16(to, from + m * 512);
    copy4(to + 512 - lane * 12, from + 1024 - lane * 12);
  }
  static __device__ __forceinline__ Nvfp4::Words read(u32 at, int lane, int m) {
    return {{load_shared16(at), {}}, load_shared4(at + 512 - lane * 12) >> (16 * m)};
  }
};

// ``x``; the compiler counts nothing from it ahead, which would take registers of their own through all products.
template <class T>
__device__ __forceinline__ T late(T x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Where a block is, its part of K, and its tiles.
template <int ROWS, int SPLITS, int TWINS>
struct Block {
  u32 shared;
  int split, twin;          // of the block in its cluster: blocks of a twin are its splits
  int first_k, count_k;     // blocks of BLOCK_K of the part
  int tiles, first, count;  // of the main stack; of both stacks, from ``first`` on
  int passes;

  __device__ __forceinline__ Block(const Job& job, int side_units, u32 start) : shared(start) {
    const int rank = blockIdx.x % (SPLITS * TWINS), clusters = gridDim.x / SPLITS,
              blocks = (job.k + BLOCK_K - 1) / BLOCK_K;
    split = rank % SPLITS, twin = rank / SPLITS;
    first_k = split * blocks / SPLITS, count_k = (split + 1) * blocks / SPLITS - first_k;
    tiles = (late(job.units) + TILE_UNITS - 1) / TILE_UNITS;
    const int all = tiles + (side_units + TILE_UNITS - 1) / TILE_UNITS, base = all / clusters, rest = all % clusters;
    const int cluster = blockIdx.x / (SPLITS * TWINS) * TWINS + twin, lead = cluster - twin;
    first = cluster * base + min(cluster, rest), count = base + (cluster < rest);
    passes = (base + (lead < rest) + GROUPS - 1) / GROUPS;  // twins go together
  }

  // Tiles of a group: of both stacks, of the main one.
  __device__ __forceinline__ int all_of(int group) const { return max(count - group + GROUPS - 1, 0) / GROUPS; }
  __device__ __forceinline__ int tiles_of(int group) const {
    return max(min(count, tiles - first) - group + GROUPS - 1, 0) / GROUPS;
  }

  __device__ __forceinline__ u32 stage(int i) const { return shared + STAGES_AT + i * Room<ROWS>::STAGE; }
  __device__ __forceinline__ u32 full(int i) const { return shared + FULL + i * 8; }
  __device__ __forceinline__ u32 empty(int i) const { return shared + EMPTY + i * 8; }
  __device__ __forceinline__ u32 received(int group) const { return shared + RECEIVED + group * 8; }
  __device__ __forceinline__ u32 free(int group) const { return shared + FREE + group * 8; }
  __device__ __forceinline__ u32 sums(int group) const {
    return shared + Room<ROWS>::SUMS_AT + group * Room<ROWS>::SUMS;
  }

  // In shared memory of the block of the same twin with another split.
  __device__ __forceinline__ u32 of_split(u32 at, int other) const { return address_in(at, twin * SPLITS + other); }

  // By one warp.
  __device__ __forceinline__ void init(bool in_blocks) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      for (int i = 0; i < Room<ROWS>::STAGES; ++i) {
        barrier_init(full(i), in_blocks ? 1 : PRODUCERS);
        barrier_init(empty(i), WARPS * TWINS);
      }
      for (int i = 0; i < GROUPS; ++i) {
        barrier_init(received(i), 1);
        barrier_init(free(i), SPLITS * WARPS / GROUPS);
      }
      barriers_ready();
    }
    for (int row = lane; row < ROWS; row += 32)
      *reinterpret_cast<u64*>(__cvta_shared_to_generic(shared + BEST + row * 8)) = 0;
  }
};

// The stage of x that is next, and the parity of its barriers.
template <int STAGES>
struct Cursor {
  int stage = 0;
  u32 parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// Zeros when ``valid`` is false.
__device__ __forceinline__ void copy4_or_zero(u32 to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// ``bytes`` to the same place of every block of ``blocks``; counts on their barriers.
__device__ __forceinline__ void copy_bulk_to(u32 to, const void* from, int bytes, u32 barrier, u16 blocks) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "h"(blocks)
      : "memory");
}

// The warps that bring x. A tensor in blocks is copied as it lies; of one in rows, a lane copies a pair of k.
template <class F, int ROWS, int SPLITS, int TWINS>
__device__ __forceinline__ void produce(const Job& job, const Block<ROWS, SPLITS, TWINS>& block) {
  using R = Room<ROWS>;
  Cursor<R::STAGES> at;
  const int thread = threadIdx.x - 32 * WARPS, lane = thread % 32, warp = thread / 32,
            all = block.passes * block.count_k;
  if (job.x_stride < 0) {
    if (thread > 0) return;
    asm volatile("fence.proxy.async.global;" ::: "memory");  // copies see what the kernels before wrote
    const u8* x = reinterpret_cast<const u8*>(job.x) + static_cast<long long>(block.first_k) * R::STAGE;
    int b = 0;
#pragma unroll 1
    for (int i = 0; i < all; ++i) {
      barrier_wait(block.empty(at.stage), at.parity ^ 1);
      barrier_expect(block.full(at.stage), R::STAGE);
      const u8* from = x + b * R::STAGE;
      if constexpr (TWINS == 1) {
        copy_bulk(block.stage(at.stage), from, R::STAGE, block.full(at.stage));
      } else {
        const u32 half = block.twin * (R::STAGE / 2);
        copy_bulk_to(block.stage(at.stage) + half, from + half, R::STAGE / 2, block.full(at.stage),
                     (1 << SPLITS | 1) << block.split);
      }
      if (++b == block.count_k) b = 0;
      at.advance();
    }
    return;
  }
  constexpr int BEHIND = R::STAGES > 3 ? 3 : 1;  // stages whose copies may be under way
  const int pair = F::WINDOW == 64 ? lane % 8 : lane / 16 * 4 + lane % 4, t = F::WINDOW == 64 ? lane / 8 : lane / 4 % 4;
  Cursor<R::STAGES> there;
  auto arrive = [&] {
    publish();
    barrier_arrive(block.full(there.stage));
    there.advance();
  };
  int b = 0;
#pragma unroll 1
  for (int i = 0; i < all; ++i) {
    barrier_wait(block.empty(at.stage), at.parity ^ 1);
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
template <int ROWS, int SPLITS, int TWINS>
struct Warp {
  const Block<ROWS, SPLITS, TWINS>& block;
  int lane, warp, group;  // warp: of the group
  Cursor<Room<ROWS>::STAGES> at;
  u32 ring;  // this lane's bytes of the first piece
  int left;  // tiles of both stacks that the group has still to do

  __device__ __forceinline__ explicit Warp(const Block<ROWS, SPLITS, TWINS>& b, u32 ring_bytes) : block(b) {
    lane = threadIdx.x % 32;
    const int number = __shfl_sync(ALL, threadIdx.x / 32, 0);
    group = number / 4, warp = number % 4;
    ring = block.shared + Room<ROWS>::RINGS_AT + number * ring_bytes + lane * 16;
    left = block.all_of(group);
  }

  __device__ __forceinline__ void wait_x() const { barrier_wait(block.full(at.stage), at.parity); }

  // A stage of x that this warp has read may be filled again.
  __device__ __forceinline__ void release(u32 empty) const {
    __syncwarp();
    if constexpr (TWINS == 1) {
      if (lane == 0) barrier_arrive(empty);
    } else {
      if (lane < TWINS) barrier_arrive(empty, lane * SPLITS + block.split);
    }
  }

  // Tiles done so far.
  __device__ __forceinline__ int number() const { return late(block.all_of(group)) - left; }

  // A pass in which the group has no tile.
  __device__ __forceinline__ void skip() {
#pragma unroll 1
    for (int b = 0; b < block.count_k; ++b) {
      wait_x();
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

// ``tile``: 16 weight rows of unit ``unit``.
template <bool SIDE>
__device__ __forceinline__ Target target_of(const Job& job, int unit, int tile, int lane) {
  Target to;
  to.real = unit < job.units;
  const int u = to.real ? unit : 0, row = lane % 4 * 2;
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

// A warp's stream of weights and its sums, tiles of one stack. SIDE: of a BF16 stack, on x in the order of MAIN.
template <class F, int ROWS, int SPLITS, int TWINS, int DEPTH, bool SIDE, class MAIN = F>
struct Stream {
  using P = Piece<F>;
  using R = Room<ROWS>;
  static constexpr int PIECES = BLOCK_K / F::WINDOW, COLUMNS = ROWS / 8;
  static constexpr int PART = 4 * COLUMNS / SPLITS;  // warps' columns (16 x 8 sums) of a tile that a block finishes
  static constexpr int OWN = (PART + 3) / 4;         // of those, a warp's

  const Job& job;
  Warp<ROWS, SPLITS, TWINS>& warp;
  int pieces, lost;       // of a tile in the part of K; of those, past the last window
  const u8* at;           // where the next load comes from
  int at_left, at_total;  // pieces to load of that tile, and in all
  u32 place;              // in the ring, of the next piece
  float sum[ROWS / 2], total[R::KEPT ? 1 : ROWS / 2];

  // ``tile``: the group's first one; ``tiles``: how many.
  __device__ __forceinline__ Stream(const Job& j, Warp<ROWS, SPLITS, TWINS>& w, int tile, int tiles) : job(j), warp(w) {
    const int first = w.block.first_k * PIECES;
    pieces = w.block.count_k * PIECES, lost = PIECES > 1 ? max(first + pieces - job.windows, 0) : 0;
    const int unit = tile * TILE_UNITS + w.warp / 2, missing = unit + (tiles - 1) * GROUPS * TILE_UNITS >= job.units;
    at = job.weights + (static_cast<long long>(unit) * job.windows + first) * F::UNIT + w.lane * 16;
    at_left = pieces, at_total = pieces * (tiles - missing);
    place = w.ring;
    for (int i = 0; i < DEPTH; ++i) fill(w.ring + i * P::BYTES);
  }

  __device__ __forceinline__ void fill(u32 to) {
    if (at_total > 0 && (PIECES == 1 || at_left > lost)) P::fetch(to, at, warp.lane, warp.warp % 2);
    copy_commit();
    at += F::UNIT, --at_total;
    if (--at_left > 0) return;
    at += (static_cast<long long>(GROUPS * TILE_UNITS) * job.windows - pieces) * F::UNIT;
    at_left = pieces;
  }

  // Piece ``p`` of block ``b``; zeros past the last window.
  __device__ __forceinline__ typename F::Words next(int b, int p) {
    const u32 here = place;
    place = here == warp.ring + (DEPTH - 1) * P::BYTES ? warp.ring : here + P::BYTES;
    copy_wait<DEPTH - 1>();
    typename F::Words words = P::read(here, warp.lane, warp.warp % 2);
    if constexpr (PIECES > 1) {
      const u32 there = b * PIECES + p < pieces - lost ? ALL : 0;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        words.part[i] = {words.part[i].x & there, words.part[i].y & there, words.part[i].z & there,
                         words.part[i].w & there};
    }
    fill(here);
    return words;
  }

  // Half a block of k: its products run while the other half is decoded. Of a piece past the last one the operand is zero,
  // as its part of x is. ``words``: of the piece, which has one half or two.
  __device__ __forceinline__ void half_step(int h, const typename F::Words& words, u64 x, u32 (&a)[2][2][4]) {
    u32 pair[2][4];
    F::fragments(words, 0, PIECES == 1 ? h : 0, pair);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      a[h][i / 4][i % 4] = PIECES == 1 ? pair[i / 4][i % 4] : mul_bf16x2(pair[i / 4][i % 4], 0x3F803F80u);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 2; ++j) Wgmma<ROWS>::multiply(sum, a[h][j], x + 4 * h + 2 * j, 1);
    wgmma_commit();
    wgmma_wait<1>();
    keep(a[1 - h]);
  }

  __device__ __forceinline__ void step(u32 (&a)[2][2][4], int b, u32& before) {
    typename F::Words words = next(b, 0);
    warp.wait_x();
    const u64 x = operand(warp.block.stage(warp.at.stage));
    half_step(0, words, x, a);
    if (before != 0) warp.release(before);
    before = warp.block.empty(warp.at.stage);
    if (PIECES > 1) words = next(b, 1);
    half_step(1, words, x, a);
    warp.at.advance();
  }

  __device__ __forceinline__ float (&four(int n))[4] { return *reinterpret_cast<float (*)[4]>(&sum[4 * n]); }

  __device__ __forceinline__ void side_step(int b) {
    warp.wait_x();
    const int t = warp.lane % 4, row = warp.lane / 4;
#pragma unroll 1
    for (int p = 0; p < PIECES; ++p) {
      const typename F::Words words = next(b, p);
      u32 a[2][4];
      F::fragments(words, 0, 0, a);
      const int half = MAIN::WINDOW == 64 ? t % 2 : p, pair = MAIN::WINDOW == 64 ? p * 2 + t / 2 : t;
      const u32 from = warp.block.stage(warp.at.stage) + row * 128 + pair * 4;
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
    if constexpr (R::KEPT) {
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
        for (int i = 0; i < ROWS / 2; ++i) sum[i] = __fadd_rn(total[i], sum[i]);
#pragma unroll
      for (int i = 0; i < ROWS / 2; ++i) total[i] = sum[i];
    }
  }

  // One tile's products.
  __device__ __forceinline__ void multiply() {
    u32 a[2][2][4], before = 0;
    int b = 0;
#pragma unroll 1
    for (int slice = 0; slice < SLICES; ++slice) {
      const int stop = warp.block.count_k * (slice + 1) / SLICES;
#pragma unroll
      for (int i = 0; i < ROWS / 2; ++i) sum[i] = 0.0f;
      if constexpr (SIDE) {
#pragma unroll 1
        for (; b < stop; ++b) side_step(b);
      } else if (b < stop) {
#pragma unroll 1
        for (; b < stop; ++b) step(a, b, before);
        wgmma_wait<0>();
        keep(a[0]), keep(a[1]), keep(sum);
        warp.release(before);
        before = 0;
      }
      fold(slice);
    }
  }

  // ``n``: eight activation rows.
  template <bool RANKED>
  __device__ __forceinline__ void emit(const Target& to, int n, const Float4& s) const {
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
        if (to.residual != nullptr) z = sum_of(to.residual[offset], z);
        to.out[offset] = z;
      }
    }
  }

  __device__ __forceinline__ void emit_any(const Target& to, int n, const Float4& s) const {
    if (!SIDE && job.mode == GREEDY)
      emit<true>(to, n, s);
    else
      emit<false>(to, n, s);
  }

  // Lets every block of the cluster send sums to this group's part.
  __device__ __forceinline__ void let_send() const {
    __syncwarp();
    if (warp.lane < SPLITS) barrier_arrive(warp.block.free(warp.group), warp.block.twin * SPLITS + warp.lane);
  }

  // The tile's sums, in ``sum``: to the blocks that finish them, added there, stored.
  //
  // Sums go to a block's part only when its group let them: when it has read those of the tile before, or (KEPT) its own of
  // the slices, which lie in the same place. The last time nobody is told, so that a block may end.
  __device__ __forceinline__ void finish() {
    const int tile = warp.block.first + warp.group + warp.number() * GROUPS - (SIDE ? warp.block.tiles : 0);
    --warp.left;
    if constexpr (SPLITS == 1) {
      const Target to = target_of<SIDE>(job, tile * TILE_UNITS + warp.warp / 2, warp.warp % 2, warp.lane);
      pdl_wait();
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        Float4 s;
#pragma unroll
        for (int i = 0; i < 4; ++i) s.v[i] = four(n)[i];
        emit_any(to, n, s);
      }
    } else {
      const auto& block = warp.block;
      const int split = late(block.split);
      const int quarter = late(warp.warp);  // of the tile, 16 weight rows
      const u32 mine = late(block.sums(warp.group)), received = late(block.received(warp.group)),
                number = warp.number() - 1;
      if (warp.warp == 0 && warp.lane == 0) barrier_expect(received, R::SUMS);
      keep(sum);
      if constexpr (R::KEPT) let_send();
      if (R::KEPT || number > 0) barrier_wait(block.free(warp.group), (R::KEPT ? number : number - 1) & 1);
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const int column = n * 4 + quarter, other = column / PART;
        Float4 s;
#pragma unroll
        for (int i = 0; i < 4; ++i) s.v[i] = four(n)[i];
        send(block.of_split(mine + (split * PART + column % PART) * 512 + warp.lane * 16, other),
             block.of_split(received, other), s);
      }
      const int finished = (split * PART + quarter) % 4;  // the quarter of all columns that a warp finishes
      const Target to = target_of<SIDE>(job, tile * TILE_UNITS + finished / 2, finished % 2, warp.lane);
      pdl_wait();
      barrier_wait_cluster(received, number & 1);
#pragma unroll 1
      for (int i = 0; i < OWN; ++i) {
        const int c = quarter + 4 * i;
        if (PART < 4 && c >= PART) break;
        const u32 from = mine + c * 512 + warp.lane * 16;
        Float4 s = load_sums(from);
#pragma unroll
        for (int other = 1; other < SPLITS; ++other) add(s, load_sums(from + other * PART * 512));
        emit_any(to, (split * PART + c) / 4, s);
      }
      if constexpr (R::KEPT)
        named_barrier<128>(1 + warp.group);  // the next tile's slices go where these sums lay
      else if (warp.left > 0)
        let_send();
    }
  }

  // Until so many tiles are left.
  __device__ __forceinline__ void run(int left) {
#pragma unroll 1
    while (warp.left > left) {
      multiply();
      finish();
    }
  }
};

template <class F, int ROWS, int SPLITS, int TWINS, int DEPTH>
__device__ __forceinline__ void run_blocks(const Job& main, const Job& side) {
  extern __shared__ __align__(1024) u8 memory[];
  constexpr int RING = DEPTH * Piece<F>::BYTES, SIDE_DEPTH = RING / Piece<Bf16>::BYTES;
  static_assert(Room<ROWS>::RINGS_AT + WARPS * RING <= SHARED, "room of a block");
  const Block<ROWS, SPLITS, TWINS> block(main, side.units, shared_address(memory));
  if (threadIdx.x >= 32 * WARPS) {
    fewer_registers<32>();
    if (threadIdx.x < 32 * WARPS + 32) block.init(main.x_stride < 0);
    __syncthreads();
    if (SPLITS * TWINS > 1) cluster_arrive(), cluster_wait();
    pdl_trigger();
    pdl_wait();
    produce<F>(main, block);
  } else {
    more_registers<112>();
    Warp<ROWS, SPLITS, TWINS> warp(block, RING);
    {
      const int tiles = block.tiles_of(warp.group);
      Stream<F, ROWS, SPLITS, TWINS, DEPTH, false> stream(main, warp, block.first + warp.group, tiles);
      __syncthreads();
      if (SPLITS * TWINS > 1) cluster_arrive(), cluster_wait();
      pdl_trigger();
      stream.run(warp.left - tiles);
    }
    const Block<ROWS, SPLITS, TWINS> rest(main, side.units, late(block.shared));  // not kept in registers so far
    if (warp.left > 0) {
      const int tile = rest.first + warp.group + rest.tiles_of(warp.group) * GROUPS - rest.tiles;
      copy_wait<0>();
      Stream<Bf16, ROWS, SPLITS, TWINS, SIDE_DEPTH, true, F> stream(side, warp, tile, warp.left);
      stream.run(0);
    }
    if (rest.all_of(warp.group) < rest.passes) warp.skip();
    if (main.mode == GREEDY) {
      named_barrier<32 * WARPS>(1 + GROUPS);
      const u64* bests = reinterpret_cast<const u64*>(__cvta_shared_to_generic(block.shared + BEST));
      const int row = (warp.group * 4 + warp.warp) * 32 + warp.lane;
      if (row < ROWS) main.best[blockIdx.x * ROWS + row] = bests[row];
    }
  }
  if (TWINS > 1) {  // no block ends while its twin arrives at its barriers
    __syncwarp();
    cluster_sync();
  }
}

#define LINEAR(FORMAT, F, ROWS, SPLITS, TWINS, DEPTH)                                            \
  extern "C" __global__ void __cluster_dims__(SPLITS* TWINS, 1, 1) __launch_bounds__(THREADS, 1) \
      linear_wide_##FORMAT##_##ROWS##_##SPLITS##_##TWINS(const __grid_constant__ Job main,       \
                                                         const __grid_constant__ Job side) {     \
    run_blocks<F, ROWS, SPLITS, TWINS, DEPTH>(main, side);                                       \
  }
#define LINEAR_ROWS(FORMAT, F, ROWS, DEPTH) \
  LINEAR(FORMAT, F, ROWS, 1, 1, DEPTH)      \
  LINEAR(FORMAT, F, ROWS, 2, 1, DEPTH)      \
  LINEAR(FORMAT, F, ROWS, 4, 1, DEPTH)      \
  LINEAR(FORMAT, F, ROWS, 8, 1, DEPTH)      \
  LINEAR(FORMAT, F, ROWS, 1, 2, DEPTH)      \
  LINEAR(FORMAT, F, ROWS, 2, 2, DEPTH)      \
  LINEAR(FORMAT, F, ROWS, 4, 2, DEPTH)

LINEAR_ROWS(nvfp4, Nvfp4, 32, 10)
LINEAR_ROWS(nvfp4, Nvfp4, 64, 8)
LINEAR_ROWS(nvfp4, Nvfp4, 128, 4)
LINEAR_ROWS(fp8, Fp8, 32, 8)
LINEAR_ROWS(fp8, Fp8, 64, 6)
LINEAR_ROWS(fp8, Fp8, 128, 3)
LINEAR_ROWS(bf16, Bf16, 32, 8)
LINEAR_ROWS(bf16, Bf16, 64, 6)
LINEAR_ROWS(bf16, Bf16, 128, 3)
#endif
