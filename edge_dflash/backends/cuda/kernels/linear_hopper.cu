// y[rows, N] = x[rows, K] W[N, K]^T for 1..16 rows on Hopper: as linear_cluster.cu, with warpgroup products (wgmma), whose
// right operand, the activations, stays in shared memory, and with separate warps for the ends of sums.
//
// Work is *quads* of 4 units, 128 weight rows (decode.cuh). K is split over the SPLITS blocks of a cluster and there over
// the block's 4 slices, a warpgroup each: warp w of a slice streams unit w of the block's quad, decodes it in registers as
// left operand, and every product of the warpgroup multiplies 4 x 16 weight rows by all activation rows. Every lane copies
// its own bytes of weights into its own places of a ring of DEPTH pieces, ahead of use and across the borders of quads, so
// that the stream needs no synchronisation. At the end of a quad a slice leaves its sums in shared memory and goes on; four
// more warps, the finishers, add four slices' sums, in order, send them to the block that finishes them, add there the
// SPLITS sums in the order of the blocks, and store. Decoding is what takes time: the warps that multiply do little else.
//
// The order of a sum depends on K and SPLITS: never on the activation rows, the quad's place or the number of blocks.
//
// ``side`` is a second, BF16 stack on the same x: its units go to the last clusters.
#include "blocks.cuh"
#include "job.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "wgmma.cuh"

static constexpr int ROWS = 16, SLICES = 4, QUAD = 4, WARPS = SLICES * QUAD, FINISHERS = 128;
static constexpr int THREADS = 32 * WARPS + FINISHERS;
static constexpr int X_GROUPS = 3;                // of a slice's blocks of x, each awaited as a whole
static constexpr int SLOTS = 2;                   // quads whose sums may be under way between blocks
static constexpr int SUMS = 2048;                 // bytes of a warp's sums of a unit
static constexpr int VECTORS = QUAD * SUMS / 16;  // of four sums, of a quad
static constexpr u32 RECEIVED = 0, FREE = 16, FULL = 24, READY = 32, BEST = 128, EXCHANGE = 1024;  // in shared memory
static constexpr u32 SLOT_BASE = EXCHANGE + WARPS * SUMS;
// Lanes of a warp that arrive at FULL and FREE: one would do, after __syncwarp, but racecheck follows all lanes only.
static constexpr int ARRIVING = 32;

// The group of a slice's block of x, and the first block of a group: one, three, the others.
__device__ __forceinline__ int group_of(int b) { return (b > 0) + (b > 3); }
__device__ __forceinline__ int group_at(int group) { return group == 0 ? 0 : 3 * group - 2; }

// Which units of a stack are a cluster's: those from ``first`` to ``stop``, quads and perhaps half of one at the end. A half
// has two units: warps 0 and 1 of a slice have the tiles of the first one, 2 and 3 those of the second.
struct Share {
  int first, stop, halves;

  // ``sides``: units of a side stack, one for each of the last clusters, which then have a quad less.
  __device__ __forceinline__ Share(const Job& job, int sides, int cluster, int clusters) {
    const int all = (job.units + 1) / 2;
    if (sides > clusters || all < 2 * clusters) sides = 0;
    const int base = (all + 2 * sides) / clusters, rest = (all + 2 * sides) % clusters, before = clusters - sides;
    halves = base + (cluster < rest) - (cluster < before ? 0 : 2);
    first = 2 * (cluster * base + min(cluster, rest) - 2 * max(cluster - before, 0));
    stop = min(first + 2 * halves, job.units);
  }

  // One unit as half of a quad.
  __device__ __forceinline__ explicit Share(int unit) : first(unit), stop(unit + 1), halves(1) {}
};

// Where this block is, and its part of K.
template <int SPLITS>
struct Block {
  static constexpr u32 X_BASE = SLOT_BASE + (SPLITS > 1 ? SLOTS * QUAD * SUMS : 0);

  u32 shared;
  int clusters, cluster, rank;   // rank: of the block in its cluster
  int blocks, first_k, count_k;  // blocks of BLOCK_K: of K, the block's part of them

  __device__ __forceinline__ Block(const Job& job, u32 start) : shared(start) {
    clusters = gridDim.x / SPLITS, cluster = blockIdx.x / SPLITS, rank = blockIdx.x % SPLITS;
    blocks = (job.k + BLOCK_K - 1) / BLOCK_K;
    first_k = rank * blocks / SPLITS, count_k = (rank + 1) * blocks / SPLITS - first_k;
  }

  __device__ __forceinline__ u32 ready(int slice) const { return shared + READY + slice * (X_GROUPS * 8); }
  __device__ __forceinline__ u32 ring() const { return shared + X_BASE + (blocks + SPLITS - 1) / SPLITS * X_BYTES; }

  // By one warp. The arrival at the cluster hands over barriers only: it is relaxed.
  __device__ __forceinline__ void init_barriers() const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      for (int i = 0; i < SLOTS; ++i) barrier_init(shared + RECEIVED + i * 8, 1);
      barrier_init(shared + FREE, FINISHERS / 32 * ARRIVING);
      barrier_init(shared + FULL, WARPS * ARRIVING);
      for (int i = 0; i < SLICES * X_GROUPS; ++i) barrier_init(shared + READY + i * 8, 32);
      barriers_ready();
    }
    if (lane < ROWS) *reinterpret_cast<u64*>(__cvta_shared_to_generic(shared + BEST + lane * 8)) = 0;
  }
};

// The slice's blocks of BLOCK_K in a block's part of K.
struct Slice {
  int begin, stop;

  template <class B>
  __device__ __forceinline__ Slice(const B& block, int slice) {
    begin = block.count_k * slice / SLICES, stop = block.count_k * (slice + 1) / SLICES;
  }
};

// Two chunks of x in shared memory as right operand, 16 k of 16 rows (k_major of wgmma.cuh): the low word for address ``at``,
// to which bytes / 16 are added for another; the high word is a constant.
__device__ __forceinline__ u32 operand_at(u32 at) { return (at & 0x3FFFF) >> 4 | 1u << 16; }
__device__ __forceinline__ u64 operand(u32 low) { return static_cast<u64>(64 | 1u << 30) << 32 | low; }

// A warp that multiplies: who it is, and what outlives a stack.
template <int SPLITS, int RING_BYTES>
struct Warp {
  u32 shared;
  int lane, warp, slice;  // warp: of the slice
  u32 span;               // the slice's blocks of BLOCK_K: first, and the one after the last in the high half
  u32 x, ready, ring;     // the slice's first block of x, its groups' barriers; this lane's bytes of the first piece
  bool fresh = true;      // x has not been awaited
  u32 handed = 0;         // quads handed over so far

  __device__ __forceinline__ Warp(const Block<SPLITS>& block) : shared(block.shared) {
    lane = threadIdx.x % 32;
    const int number = __shfl_sync(ALL, threadIdx.x / 32, 0);
    slice = number / QUAD, warp = number % QUAD;
    const Slice mine(block, slice);
    span = block.first_k + mine.begin | (block.first_k + mine.stop) << 16;
    x = shared + Block<SPLITS>::X_BASE + mine.begin * X_BYTES, ready = block.ready(slice);
    ring = block.ring() + number * RING_BYTES + lane * 16;
  }

  __device__ __forceinline__ int begin_k() const { return packed() & 0xFFFF; }
  __device__ __forceinline__ int stop_k() const { return packed() >> 16; }

  // The compiler would keep both in registers of their own, from one stack to the next.
  __device__ __forceinline__ u32 packed() const {
    u32 both = span;
    asm volatile("" : "+r"(both));
    return both;
  }

  // Until the slice's block ``b`` of x is there.
  __device__ __forceinline__ void wait_x(int b) const { barrier_wait(ready + group_of(b) * 8, 0); }
};

// A warp's stream of weights and its sums. SIDE: of a unit of a BF16 stack, half of a quad, on x in the order of MAIN.
template <class F, class W, int DEPTH, int PIECE, bool SIDE, class MAIN = F>
struct Stream {
  static constexpr int PIECES = BLOCK_K / F::WINDOW;
  static constexpr bool OWN = F::WINDOW == 64;  // decoded fragments have separate registers: see tiles_hopper.cuh
  static constexpr int AHEAD = SIDE ? DEPTH : 2;

  const Job& job;
  W& warp;
  int pieces, half;       // of a unit in this slice; of the half at the end, of which both warps of a unit load all
  const u8* at;           // where the next load comes from
  int at_left, at_total;  // pieces to load of that unit, and in all
  u32 x_at, stage;        // operand of the next piece's first step of x; where in the ring the next piece lies
  float sum[2][ROWS / 2];

  // Nothing is loaded of units that are not there.
  __device__ __forceinline__ Stream(const Job& j, W& w, const Share& share) : job(j), warp(w) {
    const int quads = share.halves / 2, odd = share.halves % 2;
    const int begin = w.begin_k() * PIECES, rest = share.first + quads * QUAD + w.warp / 2;
    const int unit = quads > 0 ? share.first + w.warp : rest;
    pieces = max(min(w.stop_k() * PIECES, job.windows) - begin, 0);
    half = odd && rest < share.stop ? pieces : 0;
    at = job.weights + (static_cast<long long>(unit) * job.windows + begin) * F::UNIT + w.lane * 16;
    const int missing = !odd && share.stop - share.first <= (quads - 1) * QUAD + w.warp;
    at_left = pieces, at_total = pieces * (quads - missing) + half;
    stage = w.ring;
    fill_ring(0, AHEAD);
  }

  // Places ``from`` .. ``to`` - 1. Before x is asked for only AHEAD are: it would wait behind all of them.
  __device__ __forceinline__ void fill_ring(int from, int to) {
#pragma unroll
    for (int i = from; i < to; ++i) fill(warp.ring + i * PIECE);
  }

  // The next piece into a place of the ring.
  __device__ __forceinline__ void fill(u32 to) {
    load(to, at_total > 0);
    loaded(1);
  }

  // ``there``: whether a piece is left. ``loaded`` is owed.
  __device__ __forceinline__ void load(u32 to, bool there) {
    if (there) {
      if (SIDE)
        F::fetch_tile(to, at, warp.lane, warp.warp % 2);
      else
        F::fetch(to, at, warp.lane);
    }
    copy_commit();
    at += F::UNIT;
  }

  // Counts pieces, all of one unit, and goes on to the next unit behind its last one.
  __device__ __forceinline__ void loaded(int count) {
    at_total -= count, at_left -= count;
    if (at_left > 0) return;
    const int units = at_total == half ? QUAD - warp.warp + warp.warp / 2 : QUAD;  // to the warp's next one
    at += (units * job.windows - pieces) * F::UNIT;
    at_left = pieces;
  }

  __device__ __forceinline__ u32 next_place() {
    const u32 here = stage;
    stage = here == warp.ring + (DEPTH - 1) * PIECE ? warp.ring : here + PIECE;
    copy_wait<DEPTH - 1>();
    return here;
  }

  // A block of x has PIECES pieces side by side.
  __device__ __forceinline__ void next_x() {
    constexpr int BLOCK = X_BYTES / 16, ACROSS = BLOCK_K * 2 / 16 / PIECES;
    x_at += PIECES == 1 ? BLOCK : x_at & ACROSS ? BLOCK - ACROSS : ACROSS;
  }

  // A piece times its block of x; products of one tile run while the other is decoded.
  __device__ __forceinline__ void step(u32 (&a)[2][F::STEPS][4], bool more) {
    const u32 here = next_place();
    const typename F::Words w = F::read(here, warp.lane);
    load(here, more);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int h = 0; h < F::STEPS / 2; ++h) {
        u32 pair[2][4];
        F::fragments(w, m, h, pair);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          a[m][2 * h + i / 4][i % 4] = OWN ? pair[i / 4][i % 4] : mul_bf16x2(pair[i / 4][i % 4], 0x3F803F80u);
      }
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < F::STEPS; ++j) Wgmma<ROWS>::multiply(sum[m], a[m][j], operand(x_at + j * 2), 1);
      wgmma_commit();
      wgmma_wait<1>();
      keep(a[1 - m]);
    }
    next_x();
  }

  // Of a half of a quad: the warp's tile alone; its products run while the next piece is decoded.
  __device__ __forceinline__ void half_step(u32 (&a)[F::STEPS][4], u32 (&other)[F::STEPS][4]) {
    const u32 here = next_place();
    const typename F::Words w = F::read_half(here, warp.lane, warp.warp % 2);
    fill(here);
#pragma unroll
    for (int h = 0; h < F::STEPS / 2; ++h) {
      u32 pair[2][4];
      F::fragments(w, 0, h, pair);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        a[2 * h + i / 4][i % 4] = OWN ? pair[i / 4][i % 4] : mul_bf16x2(pair[i / 4][i % 4], 0x3F803F80u);
    }
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < F::STEPS; ++j) Wgmma<ROWS>::multiply(sum[0], a[j], operand(x_at + j * 2), 1);
    wgmma_commit();
    wgmma_wait<1>();
    keep(other);
    next_x();
  }

  __device__ __forceinline__ void side_step(int piece) {
    const u32 here = next_place();
    const Bf16::Words w = Bf16::read_tile(here, warp.lane, 0);
    fill(here);
    u32 a[2][4];
    Bf16::fragments(w, 0, 0, a);
    const int t = warp.lane % 4;
    const int half = MAIN::WINDOW == 64 ? t % 2 : piece % 2, pair = MAIN::WINDOW == 64 ? piece % 2 * 2 + t / 2 : t;
    const int row = warp.lane / 4;
    const u32 from = warp.x + piece / 2 * X_BYTES + row * 128 + pair * 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int n = 0; n < 2; ++n)
        mma<false>(four(0, n), a[j], load_shared4(from + n * 1024 + ((half * 4 + 2 * j) ^ row) * 16),
                   load_shared4(from + n * 1024 + ((half * 4 + 2 * j + 1) ^ row) * 16));
  }

  __device__ __forceinline__ float (&four(int m, int n))[4] { return *reinterpret_cast<float (*)[4]>(&sum[m][4 * n]); }

  // Sums of a unit, weight tile m, column tile n (8 rows), lane l: four of them in vector m * 64 + n * 32 + l.
  template <bool HALF>
  __device__ __forceinline__ void hand_over() {
    if (warp.handed > 0) barrier_wait(warp.shared + FREE, (warp.handed - 1) & 1);
    ++warp.handed;
    const int first = HALF ? warp.warp : 2 * warp.warp;  // tile of the quad
    const u32 to = warp.shared + EXCHANGE + warp.slice * (QUAD * SUMS) + first * (SUMS / 2) + warp.lane * 16;
#pragma unroll
    for (int m = 0; m < (HALF ? 1 : 2); ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) store_sums(to + m * 1024 + n * 512, four(m, n));
    __syncwarp();
    if (warp.lane < ARRIVING) barrier_arrive(warp.shared + FULL);
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) (&sum[0][0])[i] = 0.0f;
    x_at = operand_at(warp.x);
  }

  // Steps from ``piece`` on with nothing else to do: x is there for them, and what they load is of one unit, or nothing.
  __device__ __forceinline__ int together(int piece) const {
    int count = min(pieces - piece, at_left);
    if (at_total > 0) count = min(count, at_total);
    const int b = piece / PIECES;
    if (warp.fresh && b < group_at(X_GROUPS - 1)) count = min(count, group_at(group_of(b) + 1) * PIECES - piece);
    return count;
  }

  // Before piece ``piece`` is multiplied.
  __device__ __forceinline__ void await_x(int piece) {
    if (warp.fresh) warp.wait_x(piece / PIECES);
  }

  __device__ __forceinline__ void run(int halves) {
    u32 a[2][F::STEPS][4];
#pragma unroll 1
    for (; halves > 1; halves -= 2) {
      start();
      int due = 0, since = 0;  // pieces: when something else than a step is due, and when it was
      bool more = false;
#pragma unroll 1
      for (int piece = 0; piece < pieces; ++piece) {
        if (piece == due) {
          loaded(piece - since);
          since = piece, more = at_total > 0;
          await_x(piece);
          due += together(piece);
        }
        step(a, more);
      }
      loaded(pieces - since);
      wgmma_wait<0>();
      keep(a[0]), keep(a[1]), keep(sum[0]), keep(sum[1]);
      warp.fresh = false;
      hand_over<false>();
    }
    if (halves == 0) return;
    start();
    u32 b[2][F::STEPS][4];
#pragma unroll 1
    for (int piece = 0; piece < pieces; piece += 2) {
      await_x(piece);
      half_step(b[0], b[1]);
      if (piece + 1 == pieces) break;
      await_x(piece + 1);
      half_step(b[1], b[0]);
    }
    wgmma_wait<0>();
    keep(b[0]), keep(b[1]), keep(sum[0]);
    warp.fresh = false;
    hand_over<true>();
  }

  // SIDE: the unit.
  __device__ __forceinline__ void run_side() {
    start();
#pragma unroll 1
    for (int piece = 0; piece < half; ++piece) {
      await_x(piece);
      side_step(piece);
    }
    hand_over<true>();
  }
};

// The slices' parts of x, each by one of the warps that finish, in the order in which they are used. A tensor in blocks is
// copied. Of one in rows, a lane reads 8 k of every fourth row of a block, so that a warp reads whole lines, and stores them in
// pairs of k.
template <class F, int SPLITS>
__device__ __forceinline__ void stage_x(const Job& job, const Block<SPLITS>& block) {
  const int lane = threadIdx.x % 32, slice = __shfl_sync(ALL, threadIdx.x / 32, 0) - WARPS;
  const Slice mine(block, slice);
  const int count = mine.stop - mine.begin, first = block.first_k + mine.begin;
  const u32 x = block.shared + Block<SPLITS>::X_BASE + mine.begin * X_BYTES, ready = block.ready(slice);
  if (job.x_stride < 0) {
    asm volatile("fence.proxy.async.global;" ::: "memory");  // copies see what the kernels before wrote
    const u8* from = reinterpret_cast<const u8*>(job.x) + first * X_BYTES;
#pragma unroll
    for (int i = 0; i < X_GROUPS; ++i) {
      const int at = group_at(i), bytes = (min(i + 1 < X_GROUPS ? group_at(i + 1) : count, count) - at) * X_BYTES;
      if (lane == 0 && bytes > 0) {
        barrier_expect(ready + i * 8, bytes);
        copy_bulk(x + at * X_BYTES, from + at * X_BYTES, bytes, ready + i * 8);
      } else {
        barrier_arrive(ready + i * 8);
      }
    }
    return;
  }
  constexpr int BATCH = 2;
  const int chunk = lane % 8, t = F::WINDOW == 64 ? chunk / 2 : chunk % 4,
            half = F::WINDOW == 64 ? chunk % 2 : chunk / 4;
  const u16* from = job.x + static_cast<long long>(lane / 8) * job.x_stride + first * BLOCK_K + chunk * 8;
  const int left = job.k - first * BLOCK_K - chunk * 8;
  const u32 to = x + lane / 8 * 128 + t * 4;
#pragma unroll 1
  for (int b0 = 0; b0 < count; b0 += BATCH) {
    uint4 v[BATCH][4];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int b = b0 + i;
        const u16* here = from + r * 4ll * job.x_stride + b * BLOCK_K;
        v[i][r] = b < count && b * BLOCK_K < left ? __ldcg(reinterpret_cast<const uint4*>(here)) : uint4{0, 0, 0, 0};
      }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int b = b0 + i;
      if (b >= count) break;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const u32 at = to + b * X_BYTES + r * 512, words[4] = {v[i][r].x, v[i][r].y, v[i][r].z, v[i][r].w};
#pragma unroll
        for (int p = 0; p < 4; ++p)
          store_shared4(at + (half * 4 + p ^ lane / 8 + r % 2 * 4) * 16, __uint_as_float(words[p]));
      }
      publish();
      if (b + 1 == count || group_of(b + 1) > group_of(b)) barrier_arrive(ready + group_of(b) * 8);
    }
  }
}

// The warps that finish: thread i has vectors i, i + 128, ... of the block's part of a quad's sums; v counts those of the
// whole quad. All of a thread's vectors have the same two activation rows.
template <int SPLITS>
struct Finisher {
  static constexpr int PART = VECTORS / SPLITS;  // that a block finishes
  static constexpr int BATCH = PART >= 4 * FINISHERS ? 4
                               : PART > FINISHERS    ? PART / FINISHERS
                                                     : 1;  // under way together

  const Block<SPLITS>& block;
  int thread, lane;
  u32 handed = 0;        // quads taken over so far
  u64 best[2] = {0, 0};  // GREEDY: of two rows, order of the largest logit, then the complement of its id

  __device__ __forceinline__ Finisher(const Block<SPLITS>& b) : block(b) {
    thread = threadIdx.x - 32 * WARPS, lane = thread % 32;
  }

  static __device__ __forceinline__ int tile_of(int v) { return v / 64 % 2; }

  // Where the sums of a vector go, two weight rows (8 apart) of two activation rows each, and what they need besides, loaded
  // long before they are there.
  struct Target {
    bool real;  // whether there are such rows
    int unit, column;
    float scale[2];
    u16* out;             // of the first
    const u16* residual;  // not used: without it the compiler makes other code than the one that was measured
    int stride, columns;  // columns from the first one on that exist
    u32 before[2];        // the residual, pairs of activation rows
  };

  template <bool SIDE>
  __device__ __forceinline__ Target target(const Job& job, int v, int first, int stop) const {
    Target to;
    to.unit = first + v / 128;
    to.real = to.unit < stop;
    if (!to.real) return to;
    const int padded = to.unit * UNIT_ROWS + tile_of(v) * TILE + v % 32 / 4;
    to.scale[0] = __ldg(job.scale + padded), to.scale[1] = __ldg(job.scale + padded + 8);
    const bool gated_pair = !SIDE && job.mode == SWIGLU;
    Place at = gated_pair ? Place{} : place_of(job, to.unit, padded, row_of(v));
    if (gated_pair) {
      at.column = to.unit * TILE + tile_of(v) * 8 + v % 32 / 4, at.out = job.out[0], at.stride = job.out_stride[0];
      const u64 next = element_at(at.stride, row_of(v) + 1, at.column);
      at.offset = element_at(at.stride, row_of(v), at.column), at.stride = static_cast<int>(next - at.offset);
    }
    to.column = padded, to.stride = at.stride, to.columns = at.columns - at.column;
    if (gated_pair) to.columns = job.columns[0] - at.column;
    to.out = at.out == nullptr ? nullptr : at.out + at.offset;
    if (SIDE || job.mode != RESIDUAL) return to;
    const u16* from = job.residual + at.offset;
#pragma unroll
    for (int w = 0; w < 2; ++w)
      if (8 * w < to.columns) to.before[w] = from[8 * w] | from[8 * w + to.stride] << 16;
    return to;
  }

  template <bool SIDE>
  __device__ __forceinline__ void emit(const Job& job, const Float4& s, int v, const Target& to) {
    if (!to.real) return;
    u16 y[2][2];  // [weight row][activation row]
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i / 2][i % 2] = to_bf16(s.v[i] * to.scale[i / 2]);
    if (!SIDE && job.mode == SWIGLU) {
      if (to.columns <= 0) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) to.out[i * to.stride] = gated(from_bf16(y[0][i]), from_bf16(y[1][i]));
      return;
    }
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      if (8 * w >= to.columns) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u16 z = y[w][i];
        if (!SIDE && job.mode == RESIDUAL) z = sum_of(to.before[w] >> 16 * i, z);
        if (!SIDE && job.mode == GREEDY) {
          const u64 found = rank_of(order_of(z), to.column + 8 * w);
          best[i] = found > best[i] ? found : best[i];
          if (to.out == nullptr) continue;
        }
        to.out[8 * w + i * to.stride] = z;
      }
    }
  }

  __device__ __forceinline__ u32 slot(u32 number) const {
    return block.shared + SLOT_BASE + number % SLOTS * (QUAD * SUMS);
  }
  __device__ __forceinline__ u32 received(u32 number) const { return block.shared + RECEIVED + number % SLOTS * 8; }

  // Vector v of the slices' sums, added in order.
  __device__ __forceinline__ Float4 slices(int v) const {
    const u32 from = block.shared + EXCHANGE + v * 16;
    Float4 total = load_sums(from);
#pragma unroll
    for (int s = 1; s < SLICES; ++s) add(total, load_sums(from + s * (QUAD * SUMS)));
    return total;
  }

  // Sends the slices' sums to the blocks that finish them.
  //
  // A slot is free when it is sent to: a thread sends quad n + 2 after it has waited for all of quad n + 1, those that finish
  // nothing included; the block it sends to sent its part of that after it had read slot n. Where only half of the threads
  // read slots (8 splits), the other half sends to other blocks than these do: there all of them meet after the reads.
  // So no phase of RECEIVED gets bytes of the next one, and two slots suffice. Bytes may come before this block expects
  // them: the phase ends with both.
  __device__ __forceinline__ void send_sums(u32 number) const {
    if (thread == 0) barrier_expect(received(number), QUAD * SUMS);
#pragma unroll
    for (int i = 0; i < VECTORS / FINISHERS; ++i) {
      const int v = thread + i * FINISHERS;
      send(address_in(slot(number) + (block.rank * PART + v % PART) * 16, v / PART),
           address_in(received(number), v / PART), slices(v));
    }
  }

  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (lane < ARRIVING) barrier_arrive(block.shared + FREE);
  }

  // The quad from unit ``first`` on, as far as ``stop``.
  template <bool SIDE>
  __device__ __forceinline__ void finish(const Job& job, int first, int stop) {
    const u32 number = handed++;
    Target to[BATCH];
#pragma unroll 1
    for (int v0 = thread; v0 < PART || v0 == thread; v0 += BATCH * FINISHERS) {
      const bool mine = v0 < PART;
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (mine) to[i] = target<SIDE>(job, block.rank * PART + v0 + i * FINISHERS, first, stop);
      if (v0 == thread) {
        barrier_wait(block.shared + FULL, number & 1);
        if constexpr (SPLITS > 1) {
          send_sums(number);
          release();
          barrier_wait_cluster(received(number), number / SLOTS & 1);
        }
      }
#pragma unroll
      for (int i = 0; i < BATCH; ++i) {
        if (!mine) continue;
        const int v = v0 + i * FINISHERS;
        Float4 total;
        if constexpr (SPLITS == 1) {
          total = slices(v);
        } else {
          total = load_sums(slot(number) + v * 16);
#pragma unroll
          for (int s = 1; s < SPLITS; ++s) add(total, load_sums(slot(number) + (s * PART + v) * 16));
        }
        emit<SIDE>(job, total, block.rank * PART + v, to[i]);
      }
    }
    if constexpr (SPLITS == 1) release();
    if constexpr (PART < FINISHERS) named_barrier<FINISHERS>(1 + SLICES);  // see send_sums
  }

  // The block's best logits of every row, by way of BEST.
  __device__ __forceinline__ void rank_logits(const Job& job) const {
    u64* bests = reinterpret_cast<u64*>(__cvta_shared_to_generic(block.shared + BEST));
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (best[i] > 0) atomicMax(bests + row_of(thread) + i, best[i]);
    named_barrier<FINISHERS>(1 + SLICES);
    if (thread < ROWS) job.best[blockIdx.x * ROWS + thread] = bests[thread];
  }
};

template <class F, int SPLITS, int DEPTH>
__device__ __forceinline__ void run_blocks(const Job& main, const Job& side) {
  extern __shared__ __align__(1024) u8 memory[];
  const Block<SPLITS> block(main, shared_address(memory));
  const Share share(main, side.units, block.cluster, block.clusters);
  const int side_units = side.units, last = block.clusters - 1 - block.cluster;
  if (threadIdx.x >= 32 * WARPS) {
    if (threadIdx.x < 32 * WARPS + 32) block.init_barriers();
    __syncthreads();
    if (SPLITS > 1) cluster_arrive();
    pdl_trigger();
    pdl_wait();
    stage_x<F>(main, block);
    if (SPLITS > 1) cluster_wait();
    Finisher<SPLITS> finisher(block);
#pragma unroll 1
    for (int unit = share.first; unit < share.stop; unit += QUAD)
      finisher.template finish<false>(main, unit, share.stop);
#pragma unroll 1
    for (int unit = last; unit < side_units; unit += block.clusters)
      finisher.template finish<true>(side, unit, unit + 1);
    if (main.mode == GREEDY) finisher.rank_logits(main);
    return;  // every byte sent to this block has come: it may end, others need not
  }
  using W = Warp<SPLITS, DEPTH * F::UNIT>;
  W warp(block);
  Stream<F, W, DEPTH, F::UNIT, false> stream(main, warp, share);
  __syncthreads();
  if (SPLITS > 1) cluster_arrive();
  pdl_trigger();
  if (SPLITS > 1) cluster_wait();
  if (warp.begin_k() < warp.stop_k()) warp.wait_x(0);
  stream.fill_ring(stream.AHEAD, DEPTH);
  stream.run(share.halves);
#pragma unroll 1
  for (int unit = last; unit < side_units; unit += block.clusters) {
    constexpr int TILE_BYTES = Bf16::UNIT / 2, PLACES = DEPTH * F::UNIT / TILE_BYTES;
    Stream<Bf16, W, PLACES, TILE_BYTES, true, F> more(side, warp, Share(unit));
    more.run_side();
  }
}

#define LINEAR(FORMAT, F, SPLITS, DEPTH)                                                                      \
  extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(THREADS, 1)                     \
      linear_hopper_##FORMAT##_##SPLITS(const __grid_constant__ Job main, const __grid_constant__ Job side) { \
    run_blocks<F, SPLITS, DEPTH>(main, side);                                                                 \
  }
#define LINEAR_FORMAT(FORMAT, F, DEPTH) \
  LINEAR(FORMAT, F, 1, DEPTH)           \
  LINEAR(FORMAT, F, 2, DEPTH)           \
  LINEAR(FORMAT, F, 4, DEPTH)           \
  LINEAR(FORMAT, F, 8, DEPTH)

LINEAR_FORMAT(nvfp4, Nvfp4, 5)
LINEAR_FORMAT(fp8, Fp8, 3)
LINEAR_FORMAT(bf16, Bf16, 3)
#endif
