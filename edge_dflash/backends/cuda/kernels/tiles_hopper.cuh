// The tiles of linear_tiles.cu for Hopper: y[rows, N] = x[rows, K] W[N, K]^T with warpgroup products.
//
// A block multiplies 128 weight rows (4 units) by n activation rows, K in order, 64 a stage. Warps 8..11 copy: x by
// tensor copies, half of it each for both blocks of a cluster (they share the rows of x, not the weights), packed weights
// as they are. Warpgroups 0 and 1 each own 2 units: a lane decodes from shared memory what the product expects of it
// (k 2t 2t+1 and 2t+8 2t+9 of each 16 k, in the true order of K), as its left operand in registers; x is the right one,
// read from shared memory. So a weight is decoded once for n rows.
//
//   shared memory: stages of [n rows x 128 bytes of x][4 units of weights]; 2 x [128 rows x 128 bytes] of output
//   n is 32 .. 256, by the rows that are there; the sums of a row are the same with every n
#pragma once
#include "job.cuh"
#include "wgmma.cuh"

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

namespace hopper {

static constexpr int THREADS = 384, CLUSTER = 2, WARPS = 8, UNITS = 4, BOX = 32, MOST = 256, MOST_STAGES = 16;
static constexpr int DECODE = 250;   // time of a tile besides its products, as if it had so many rows more
static constexpr int CONTENDED = 8;  // the same, of a tile where all clusters read the same weights at the same time
static constexpr int ROW_GROUP = 4;  // tiles of rows that go through all weights together, so that x stays in L2
static constexpr u32 SHARED = 232448, OUTPUT = MOST / 2 * 128, RING = SHARED - 1024 - 2 * OUTPUT - 16 * MOST_STAGES;

// Where a lane finds its operands in the units of a warpgroup. ``warp``: 0..3 of it.
struct Nvfp4Operands {
  static constexpr u32 BYTES = Nvfp4::UNIT;  // of a unit in a stage
  static constexpr int WINDOWS = 1;          // of the format in a stage
  static constexpr bool BULK = true;         // copied as it is
  u32 codes, scales, rotate, times, low, high;

  __device__ __forceinline__ Nvfp4Operands(int warp, int lane) {
    const int g = lane / 4, t = lane % 4, tile = warp % 2;
    codes = warp / 2 * BYTES + tile * 512 + g * 64;
    scales = warp / 2 * BYTES + 1024 + g * 16;
    rotate = t == 0 ? 0 : t == 1 ? 26 : t == 2 ? 4 : 6;  // as e2m1_pairs: this lane's pair of every word is pair t
    times = t == 0 ? 4 : t == 2 ? 1 : 0;
    low = 0x4040u + 0x0101u * (2 * tile), high = low + 0x0101u;
  }

  __device__ __forceinline__ u32 pair(u32 word) const {
    return (__funnelshift_r(word, word, rotate) ^ word * times) & 0x81C081C0u;
  }

  struct Words {
    uint4 block[4], scales;  // block of 16 k: row g, row g + 8
  };

  __device__ __forceinline__ void read(u32 at, Words& w) const {
    w.scales = load_shared16(at + scales);
#pragma unroll
    for (int i = 0; i < 4; ++i) w.block[i] = load_shared16(at + codes + i * 16);
  }

  __device__ __forceinline__ void decode(const Words& w, int i, u32 (&a)[4]) const {
    const uint4 v = w.block[i];
    const u32 bytes = i == 0 ? w.scales.x : i == 1 ? w.scales.y : i == 2 ? w.scales.z : w.scales.w;
    const u32 scale0 = __byte_perm(bytes, 0, low) * 16u + 0x70007000u;
    const u32 scale1 = __byte_perm(bytes, 0, high) * 16u + 0x70007000u;
    a[0] = mul_bf16x2(pair(v.x), scale0);
    a[1] = mul_bf16x2(pair(v.z), scale1);
    a[2] = mul_bf16x2(pair(v.y), scale0);
    a[3] = mul_bf16x2(pair(v.w), scale1);
  }
};

struct Fp8Operands {
  static constexpr u32 BYTES = Fp8::UNIT;
  static constexpr int WINDOWS = 1;
  static constexpr bool BULK = true;
  u32 codes, shift;
  bool second;  // this lane's pairs lie in the second word of each eight codes

  __device__ __forceinline__ Fp8Operands(int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    codes = warp / 2 * BYTES + warp % 2 * 1024 + g * 64;
    shift = t % 2 * 8, second = t >= 2;
  }

  struct Words {
    uint4 block[4][2];  // block of 16 k, row g or g + 8
  };

  __device__ __forceinline__ void read(u32 at, Words& w) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) w.block[i][half] = load_shared16(at + codes + half * 512 + i * 16);
  }

  __device__ __forceinline__ u32 pair(u32 word) const {
    word <<= shift;
    return mul_bf16x2((word & 0x80008000u) | ((word >> 4) & 0x07F007F0u), 0x7B807B80u);  // as e4m3_pairs
  }

  __device__ __forceinline__ void decode(const Words& w, int i, u32 (&a)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = w.block[i][half];
      a[half] = pair(second ? v.y : v.x);
      a[2 + half] = pair(second ? v.w : v.z);
    }
  }
};

// The vector of lane (g, t) of a part goes to 8 t + g, so that lanes that read a word of the same t in different g meet
// no bank twice.
struct Bf16Operands {
  static constexpr u32 BYTES = 2 * Bf16::UNIT;
  static constexpr int WINDOWS = 2;
  static constexpr bool BULK = false;
  u32 values;

  __device__ __forceinline__ Bf16Operands(int warp, int lane) {
    values = warp / 2 * BYTES + warp % 2 * 1024 + lane / 4 * 16 + lane % 4 * 4;
  }

  // A window past the last one is the last one again: x is zero there.
  static __device__ __forceinline__ void fetch(u32 to, const u8* from, int lane, int window, int windows) {
    const u32 place = (lane % 4 * 8 + lane / 4) * 16;
#pragma unroll
    for (int w = 0; w < 2; ++w)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        copy16(to + w * 2048 + i * 512 + place, from + (window + w < windows ? w : 0) * 2048 + i * 512 + lane * 16);
  }

  struct Words {
    u32 word[4][4];
  };

  __device__ __forceinline__ void read(u32 at, Words& w) const {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 from = at + values + i / 2 * 2048 + half * 512 + i % 2 * 256;
        w.word[i][half] = load_shared4(from);
        w.word[i][2 + half] = load_shared4(from + 128);
      }
  }

  // Times one: the operands must have separate registers, because the next words are read while these are in use by
  // products in flight, which the compiler does not see.
  __device__ __forceinline__ void decode(const Words& w, int i, u32 (&a)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) a[j] = mul_bf16x2(w.word[i][j], 0x3F803F80u);
  }
};

// Which tiles there are: the same in every thread of the launch.
struct Schedule {
  int rows, n, groups;                // groups: warpgroups of a block that multiply, 1 where tiles are few
  int row_tiles, tiles, first, step;  // of clusters: see place
  u32 stage_bytes;
  int stages, windows;  // windows of 64 k

  template <class Operands>
  __device__ __forceinline__ void make(const Job& job, int count) {
    const int clusters = gridDim.x / CLUSTER, stacks = (job.units + CLUSTER * UNITS - 1) / (CLUSTER * UNITS);
    const int sizes[] = {256, 192, 128, 64, 32};
    rows = count, n = MOST;
    int best = 1 << 30;
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      const int tiles_there = stacks * ((count + sizes[i] - 1) / sizes[i]);
      int cost = (tiles_there + clusters - 1) / clusters * (sizes[i] + DECODE);
      if (!Operands::BULK && stacks == 1) cost += tiles_there * CONTENDED;  // the gates of a gated delta layer
      if (cost < best) best = cost, n = sizes[i];
    }
    row_tiles = (count + n - 1) / n;
    groups = 2 * stacks * row_tiles <= clusters ? 1 : 2;
    tiles = row_tiles * ((job.units + CLUSTER * 2 * groups - 1) / (CLUSTER * 2 * groups));
    first = blockIdx.x / CLUSTER, step = clusters;
    stage_bytes = (n * 128 + UNITS * Operands::BYTES + 1023) / 1024 * 1024;
    stages = RING / stage_bytes < MOST_STAGES ? RING / stage_bytes : MOST_STAGES;
    windows = (job.k + 63) / 64;
  }

  // First unit of this block and first row of a tile.
  __device__ __forceinline__ void place(int tile, int& unit, int& row) const {
    const int whole = tiles / row_tiles * ROW_GROUP, group = tile / whole,
              there = min(ROW_GROUP, row_tiles - group * ROW_GROUP);
    unit = (tile % whole / there * CLUSTER + cluster_rank()) * 2 * groups;
    row = (group * ROW_GROUP + tile % whole % there) * n;
  }
};

// The stage that is next, and the parity of its barriers.
struct Cursor {
  u32 ring, full, empty;  // shared memory: stages, MOST_STAGES barriers each
  int stage;
  u32 parity;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// Bulk copies count the bytes of a stage on its barrier: one thread's arrival opens it. Copies of 16 bytes need the
// arrival of every thread that makes them, 128 one after the other.
template <class Operands>
__device__ __forceinline__ void produce(const Job& job, const TensorMap& x, const Schedule& plan, Cursor at) {
  constexpr bool BULK = Operands::BULK;
  constexpr int PIECE = Operands::BYTES, STEP = Operands::WINDOWS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - WARPS, units = 2 * plan.groups;
  const int rank = cluster_rank(), boxes = (plan.n / BOX - rank + CLUSTER - 1) / CLUSTER;
  const u32 bytes = plan.n * 128 + (BULK ? units * PIECE : 0);
  if (BULK && warp > 0) return;
  for (int tile = plan.first; tile < plan.tiles; tile += plan.step) {
    int unit, row;
    plan.place(tile, unit, row);
    unit += BULK ? lane % UNITS : warp;
    row += (rank + lane * CLUSTER) * BOX;
    const u8* weights =
        job.weights + (unit < job.units ? unit : 0) * static_cast<long long>(job.windows) * (PIECE / STEP);
    for (int w = 0; w < plan.windows; ++w, weights += PIECE) {
      const u32 stage = at.ring + at.stage * plan.stage_bytes, full = at.full + at.stage * 8;
      barrier_wait(at.empty + at.stage * 8, at.parity ^ 1);
      if (warp == 0) {
        if (lane == 0) barrier_expect(full, bytes);
        __syncwarp();
        if (lane < boxes)
          copy_box(stage + (rank + lane * CLUSTER) * BOX * 128, x, w * 64, row, full, (1 << CLUSTER) - 1);
      }
      __syncwarp();
      if constexpr (BULK) {
        if (lane < units) copy_bulk(stage + plan.n * 128 + lane * PIECE, weights, PIECE, full);
      } else {
        if (warp < units && unit < job.units)
          Operands::fetch(stage + plan.n * 128 + warp * PIECE, weights, lane, w * STEP, job.windows);
        barrier_arrive_after_copies(full);
      }
      at.advance(plan.stages);
    }
  }
}

__device__ __forceinline__ void release(u32 barrier) {
  if (threadIdx.x % 32 < CLUSTER) barrier_arrive(barrier, threadIdx.x % 32);
}

// 16 bytes of an output row: 8 columns from a tile's sums, which lie in ``from``.
struct Piece {
  u16* out;
  const u16* residual;
  int stride, columns;  // columns: 0..8 that exist
  bool wide;

  __device__ __forceinline__ Piece(const Job& job, int unit, int chunk) {
    if (job.mode == SWIGLU) {
      const int column = unit * 16 + chunk * 8;
      out = job.out[0] + column, stride = job.out_stride[0], columns = job.columns[0] - column, residual = nullptr;
    } else {
      unit += chunk / 4;
      const Place at = place_of(job, unit, unit * UNIT_ROWS + chunk % 4 * 8, 0);
      out = at.out + at.offset, residual = job.mode == RESIDUAL ? job.residual + at.offset : nullptr;
      stride = static_cast<int>(place_of(job, unit, unit * UNIT_ROWS, 1).offset -
                                place_of(job, unit, unit * UNIT_ROWS, 0).offset);
      columns = 0;
      for (int i = 0; i < 8; ++i) columns += place_of(job, unit, unit * UNIT_ROWS + chunk % 4 * 8 + i, 0).inside;
    }
    if (unit >= job.units || columns < 0) columns = 0;
    wide =
        columns >= 8 && stride % 8 == 0 && ((reinterpret_cast<u64>(out) | reinterpret_cast<u64>(residual)) & 15) == 0;
  }

  static __device__ __forceinline__ u32 add(u32 y, u32 r) {
    return sum_of(r & 0xFFFF, y & 0xFFFF) | static_cast<u32>(sum_of(r >> 16, y >> 16)) << 16;
  }

  __device__ __forceinline__ void store(u32 from, long long row) const {
    const long long offset = row * stride;
    uint4 y = load_shared16(from);
    if (wide) {
      if (residual != nullptr) {
        const uint4 r = *reinterpret_cast<const uint4*>(residual + offset);
        y = {add(y.x, r.x), add(y.y, r.y), add(y.z, r.z), add(y.w, r.w)};
      }
      *reinterpret_cast<uint4*>(out + offset) = y;
      return;
    }
    const u32 words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= columns) continue;
      const u16 v = words[i / 2] >> (16 * (i % 2));
      out[offset + i] = residual != nullptr ? sum_of(residual[offset + i], v) : v;
    }
  }
};

__device__ __forceinline__ u32 pack(float low, float high) {
  return to_bf16(low) | static_cast<u32>(to_bf16(high)) << 16;
}

// Sums of a warpgroup's 64 weight rows to shared memory as [n rows][128 bytes], then in whole rows to their outputs.
template <int N>
__device__ __forceinline__ void finish(const Job& job, const float* d, int unit, long long row, int rows, u32 to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, thread = threadIdx.x % 128;
  const int padded = unit * UNIT_ROWS + warp * TILE + lane / 4;
  const bool there = unit + warp / 2 < job.units, gated_pair = job.mode == SWIGLU;
  const float low = there ? __ldg(job.scale + padded) : 0.0f, high = there ? __ldg(job.scale + padded + 8) : 0.0f;
  const int r = lane % 8, i = lane / 8;
  if (gated_pair) {
#pragma unroll
    for (int j = 0; j < N / 8; j += 4) {
      u32 y[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float* c = d + 4 * (j + q);
        u16 v[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) v[e] = gated(from_bf16(to_bf16(c[e] * low)), from_bf16(to_bf16(c[2 + e] * high)));
        y[q] = v[0] | static_cast<u32>(v[1]) << 16;
      }
      store_transposed(to + (8 * (j + i) + r) * 128 + (warp ^ r) * 16, y);
    }
  } else {
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
      const float* c = d + 4 * j;
      const u32 y[4] = {pack(c[0] * low, c[1] * low), pack(c[2] * high, c[3] * high), pack(c[4] * low, c[5] * low),
                        pack(c[6] * high, c[7] * high)};
      store_transposed(to + (8 * (j + i / 2) + r) * 128 + ((2 * warp + i % 2) ^ r) * 16, y);
    }
  }
  named_barrier<128>(1 + threadIdx.x / 128);
  const int chunks = gated_pair ? 4 : 8, chunk = thread % chunks, step = 128 / chunks;
  const Piece piece(job, unit, chunk);
  if (piece.columns > 0)
#pragma unroll 4
    for (int k = thread / chunks; k < rows; k += step) piece.store(to + k * 128 + (chunk ^ k % 8) * 16, row + k);
  named_barrier<128>(1 + threadIdx.x / 128);
}

template <class Operands, int N>
__device__ __forceinline__ void consume(const Job& job, const Schedule& plan, Cursor at, u32 output) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
  const Operands operands(warp % 4, lane);
  for (int tile = plan.first; tile < plan.tiles; tile += plan.step) {
    if (group >= plan.groups) {
      for (int w = 0; w < plan.windows; ++w) {
        barrier_wait(at.full + at.stage * 8, at.parity);
        release(at.empty + at.stage * 8);
        at.advance(plan.stages);
      }
      continue;
    }
    float d[N / 2];
    u32 even[4][4], odd[4][4], before = 0;
    typename Operands::Words words;
    auto read = [&] {
      barrier_wait(at.full + at.stage * 8, at.parity);
      operands.read(at.ring + at.stage * plan.stage_bytes + N * 128 + group * 2 * Operands::BYTES, words);
    };
    // Decodes a window, enqueues its products and reads the next one's words, while the products of the one before run.
    auto window = [&](u32(&a)[4][4], u32(&in_flight)[4][4], bool first, bool last) {
      const u64 x = k_major(at.ring + at.stage * plan.stage_bytes);
      const u32 empty = at.empty + at.stage * 8;
      at.advance(plan.stages);
#pragma unroll
      for (int i = 0; i < 4; ++i) operands.decode(words, i, a[i]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) Wgmma<N>::multiply(d, a[i], x + 2 * i, i > 0 || !first);
      wgmma_commit();
      if (!last) read();
      wgmma_wait<1>();
      if (!first) {
        keep(in_flight);
        release(before);
      }
      before = empty;
    };
    read();
    for (int w = 0;;) {
      window(even, odd, w == 0, w + 1 == plan.windows);
      if (++w == plan.windows) break;
      window(odd, even, false, w + 1 == plan.windows);
      if (++w == plan.windows) break;
    }
    wgmma_wait<0>();
    keep(even);
    keep(odd);
    keep(d);
    release(before);
    int unit, row;
    plan.place(tile, unit, row);
    constexpr int PART = N > 128 ? N / 2 : N;
#pragma unroll
    for (int i = 0; i < N; i += PART)
      finish<PART>(job, d + i / 2, unit + 2 * group, row + i, min(plan.rows - row - i, PART), output + group * OUTPUT);
  }
}

// ``x``: map of job.x, boxes of 64 columns x 32 rows, zeros outside. ``valid``: device count of rows, or null.
template <class Operands>
__device__ __forceinline__ void run(const Job& job, const TensorMap& x, int rows, const int* valid) {
  extern __shared__ u8 memory[];
  const u32 shared = (shared_address(memory) + 1023) & ~1023u, output = shared + RING / 1024 * 1024;
  const u32 full = output + 2 * OUTPUT, empty = full + 8 * MOST_STAGES;
  if (threadIdx.x == 0)
    for (int i = 0; i < MOST_STAGES; ++i) {
      barrier_init(full + 8 * i, Operands::BULK ? 1 : 128 + 1);
      barrier_init(empty + 8 * i, WARPS * CLUSTER);
    }
  cluster_sync();
  pdl_trigger();
  pdl_wait();
  Schedule plan;
  plan.make<Operands>(job, valid == nullptr || *valid > rows ? rows : *valid);
  const Cursor start{shared, full, empty, 0, 0};
  if (threadIdx.x >= 256) {
    fewer_registers<40>();
    produce<Operands>(job, x, plan, start);
  } else {
    more_registers<232>();
    if (plan.n == 256)
      consume<Operands, 256>(job, plan, start, output);
    else if (plan.n == 192)
      consume<Operands, 192>(job, plan, start, output);
    else if (plan.n == 128)
      consume<Operands, 128>(job, plan, start, output);
    else if (plan.n == 64)
      consume<Operands, 64>(job, plan, start, output);
    else
      consume<Operands, 32>(job, plan, start, output);
  }
  cluster_sync();  // no block ends while another arrives at its barriers
}

}  // namespace hopper

#define HOPPER_TILES_KERNEL(NAME, OPERANDS)                                                                    \
  extern "C" __global__ void __cluster_dims__(hopper::CLUSTER, 1, 1) __launch_bounds__(hopper::THREADS, 1)     \
      NAME(const __grid_constant__ Job job, const __grid_constant__ TensorMap x, int rows, const int* valid) { \
    hopper::run<hopper::OPERANDS>(job, x, rows, valid);                                                        \
  }

HOPPER_TILES_KERNEL(hopper_tiles_nvfp4, Nvfp4Operands)
HOPPER_TILES_KERNEL(hopper_tiles_fp8, Fp8Operands)
HOPPER_TILES_KERNEL(hopper_tiles_bf16, Bf16Operands)

#endif
