// Attention over E4M3 keys with Hopper's warpgroup products (sm90a), transposed: keys, and dims of the values, are the
// 64 rows of a product and come from registers, where their codes become F16 once; queries [columns, D] and probabilities
// [columns, keys] are its columns, in shared memory. Keys and values come there by bulk copies, as stored. A block has 32,
// 64 or 96 query rows of one KV head as its columns; the number changes no bits.
//
// A split is 128 w keys; w grows with what the row itself sees (width_of), so that there are about ``most`` splits at
// most, whatever the length. The rows of a tile have one width, or two where a boundary of widths lies between them: then
// the splits of both are worked on, each with its own rows. A row's split has its result in the same steps whichever rows
// are beside it, so rows stay independent of each other, as in attend.cu; so do prefill and verify agree.
//
// Two warpgroups have 64 keys of a chunk of 128 each, then half the dims each. Eight keys are one copy, and lie close; a
// gap follows, so that the first keys of all eights lie in different banks. Hence the order of keys in products: row or
// column 8 r + j of a warpgroup's 64 is key 8 j + r of them.
#pragma once
#include "attend_rules.cuh"
#include "wgmma.cuh"

namespace wide {

static constexpr int KEYS = 128;  // of a chunk
static constexpr int THREADS = 256;
static constexpr float NONE = -1e30f;     // the base of a row that has seen nothing: any score lies far above it
static constexpr u32 MOST = 0x5c005c00u;  // two probabilities of 2^8 in F16: one above them moves the row's base

// Place of a pair of dims in a row of prepared queries. A thread holds 16 consecutive codes of each 64 of a key, four for
// each of four steps: two for columns 2 t, 2 t + 1 of a step, two for columns 2 t + 8, 2 t + 9.
__device__ __forceinline__ int query_place(int pair) {
  return (pair & ~31) | (pair >> 1 & 3) << 3 | (pair & 1) << 2 | (pair >> 3 & 3);
}

// Prepared queries lie as the products read them: D / 64 parts of N rows of 128 bytes, 16-byte piece c of row m at
// c ^ (m % 8). Word of a pair of row m:
__device__ __forceinline__ int query_word(int pair, int m, int columns) {
  const int place = query_place(pair);
  return place / 32 * columns * 32 + m * 32 + ((place / 4 ^ m) & 7) * 4 + place % 4;
}

__device__ __forceinline__ int width_of(int p, int window, int most) {
  return KEYS * ((window ? min(p, window) : p) / (KEYS * most) + 1);
}

// Splits that the rows at positions pa .. pb, all of one width, see: keys [begin, stop) in ``count`` splits.
struct Span {
  int pa, pb, width, begin, stop, first, count;
  View low, high;
};
__device__ __forceinline__ Span span_of(int pa, int pb, int width, int keys, int window, int flags) {
  Span s;
  s.pa = pa, s.pb = pb, s.width = width;
  s.low = view(pa, keys, window, flags), s.high = view(pb, keys, window, flags);
  s.begin = s.low.first / KEYS * KEYS, s.stop = s.high.stop;
  s.first = s.begin / width;
  s.count = s.stop > s.begin && pb >= pa ? (s.stop - 1) / width + 1 - s.first : 0;
  return s;
}
// Last position of the first of the (at most two) widths among positions p0 .. last.
__device__ __forceinline__ int last_of_width(int p0, int last, int window, int most) {
  const int width = width_of(p0, window, most);
  return width_of(last, window, most) == width ? last : width * most - 1;
}

// What a block works on.
struct Task {
  int start, rows, keys, p0;  // stored before; of the pass; stored with them; position of the tile's first row
  int last, between;          // position of the tile's last row; the last of the first width
  int slots;                  // splits of the first width
  int index;                  // of the split: 0 .. slots - 1, then those of the second width
  Span span;
  __device__ __forceinline__ bool two() const { return between < last; }
  __device__ __forceinline__ bool second() const { return index >= slots; }
  __device__ __forceinline__ int start_of(int i) const {  // of a split of this width: its first key
    return (span.first + i - (second() ? slots : 0)) * span.width;
  }
};
// Splits of the first width for the tile whose first row is ``first_row`` of the pass.
__device__ __forceinline__ Task task_of(int start, int rows, int first_row, int tile_log2, int capacity, int window,
                                        int flags, int most) {
  Task t;
  t.start = start, t.rows = rows, t.p0 = start + first_row, t.keys = min(start + rows, capacity);
  t.last = t.p0 + min(1 << tile_log2, rows - first_row) - 1;
  t.between = last_of_width(t.p0, t.last, window, most);
  t.span = span_of(t.p0, t.between, width_of(t.p0, window, most), t.keys, window, flags);
  t.slots = t.span.count, t.index = 0;
  return t;
}
__device__ __forceinline__ void second_width(Task& t, int window, int flags, int most) {
  t.span = span_of(t.between + 1, t.last, width_of(t.last, window, most), t.keys, window, flags);
}
// Blocks that share the columns of one block, 32 each, where few splits in all slots (of a launch: gridDim.z) leave
// multiprocessors idle: their time is that of one chunk.
__device__ __forceinline__ int parts_of(const Task& t, int slots, int columns, int most) {
  return !t.two() && t.slots * (columns / 32) * slots <= most ? columns / 32 : 1;
}

}  // namespace wide

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace wide {

__device__ __forceinline__ u32 larger_f16(u32 a, u32 b) {
  u32 r;
  asm("max.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Whether a half of x is above the same half of y. NaN is not.
__device__ __forceinline__ bool above_f16(u32 x, u32 y) {
  u32 r;
  asm("set.gt.u32.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r != 0;
}
__device__ __forceinline__ int again(int x) {  // computed anew where it is used: registers are dearer
  asm volatile("" : "+r"(x));
  return x;
}

template <int D, int N>  // head dim, columns
struct Geometry {
  static constexpr int TILES = D / 128, COLS = N / 8, SUMS = COLS / 4, BLOCKS = D / 64;
  static constexpr int q_bytes = N * D * 2, p_bytes = N * KEYS * 2;
  static constexpr int k_eight = 8 * D + 64, v_eight = 8 * D + 16;  // keys are read 64 bytes a key, values 16
  static constexpr int k_bytes = 16 * k_eight, v_bytes = 16 * v_eight;
  static constexpr int k_at = q_bytes + 2 * p_bytes, v_at = k_at + k_bytes, rest_at = v_at + 2 * v_bytes;
};

// In shared memory behind the tiles.
template <int N>
struct Rest {
  float base[N], keep[N], take[N];  // base: in units of scores
  float sums[2][N];                 // of probabilities, over half the keys of every chunk
  float m[N], l[N];                 // of the splits so far
  float top[8][N];
  u64 queries_there[4], keys_there[2], values_there[2];  // parts of 64 dims; of a warpgroup; tiles
  Task task;
};

// A thread's part of the work on the tiles.
template <int D, int N>
struct Block {
  using G = Geometry<D, N>;
  u32 q, p, k, v;  // shared memory
  Rest<N>* rest;
  const u8 *k_codes, *v_codes;  // of the KV head
  int keys;                     // stored ones
  float scale;
  int warp, quarter, half, g, t;  // warp of the block; of the warpgroup; warpgroup; lane / 4, lane % 4

  // Sixteen keys of the warpgroup's by each warp; behind the last is what was there before: such scores are masked.
  __device__ __forceinline__ void copy_keys(int key) const {
    if (threadIdx.x % 32) return;
    key += warp * 16;
    const int bytes = max(0, min(16, keys - key)) * D;
    const u32 there = shared_address(&rest->keys_there[half]), to = k + warp * 2 * G::k_eight;
    const u8* from = k_codes + (u64)key * D;
    barrier_expect(there, bytes);
    if (bytes > 0) copy_bulk(to, from, min(bytes, 8 * D), there);
    if (bytes > 8 * D) copy_bulk(to + G::k_eight, from + 8 * D, bytes - 8 * D, there);
  }

  // Sixteen values by each warp; zeros behind the last.
  __device__ __forceinline__ void copy_values(int key, int stage) const {
    key += warp * 16;
    const int bytes = max(0, min(16, keys - key)) * D, lane = threadIdx.x % 32;
    const u32 there = shared_address(&rest->values_there[stage]), to = v + stage * G::v_bytes + warp * 2 * G::v_eight;
    if (bytes < 16 * D)
      for (int at = bytes + lane * 16; at < 16 * D; at += 512)
        asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(to + at + at / (8 * D) * 16), "r"(0) : "memory");
    if (lane) return;
    const u8* from = v_codes + (u64)key * D;
    barrier_expect(there, bytes);
    if (bytes > 0) copy_bulk(to, from, min(bytes, 8 * D), there);
    if (bytes > 8 * D) copy_bulk(to + G::v_eight, from + 8 * D, bytes - 8 * D, there);
  }

  // s[64 keys of the warpgroup x N] = keys times queries, less the base of the row. The keys from ``next`` on are then
  // under way.
  __device__ __forceinline__ void scores(float (&s)[N / 2], bool first, int parity, int next) const {
    u32 a[2][4][4];
    const u8* tile = (const u8*)rest - (G::rest_at - G::k_at) + (half * 8 + g) * G::k_eight + quarter * 2 * D + t * 16;
    uint4 raw[G::BLOCKS][2];
    const u64 b = k_major(q);
    barrier_wait(shared_address(&rest->keys_there[half]), parity);
#pragma unroll
    for (int i = 0; i < G::BLOCKS; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) raw[i][h] = *(const uint4*)(tile + h * D + i * 64);
#pragma unroll
    for (int j = 0; j < G::COLS; j++) {
      const float2 base = first ? make_float2(0.0f, 0.0f) : *(const float2*)(rest->base + j * 8 + t * 2);
      s[j * 4] = s[j * 4 + 2] = base.x == NONE ? 0.0f : -base.x;
      s[j * 4 + 1] = s[j * 4 + 3] = base.y == NONE ? 0.0f : -base.y;
    }
#pragma unroll
    for (int i = 0; i < G::BLOCKS; i++) {
      const u32 low[4] = {raw[i][0].x, raw[i][0].y, raw[i][0].z, raw[i][0].w};
      const u32 high[4] = {raw[i][1].x, raw[i][1].y, raw[i][1].z, raw[i][1].w};
      u32(&now)[4][4] = a[i % 2];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        now[k][0] = e4m3_pair(low[k]), now[k][1] = e4m3_pair(high[k]);
        now[k][2] = e4m3_pair(low[k] >> 16), now[k][3] = e4m3_pair(high[k] >> 16);
      }
      barrier_wait(shared_address(&rest->queries_there[i]), 0);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; k++) Wgmma<N, true>::multiply(s, now[k], b + i * (N * 128 / 16) + k * 2, 1);
      wgmma_commit();
      if (i > 0 && i + 1 < G::BLOCKS) wgmma_wait<1>(), keep(a[(i + 1) % 2]);
    }
    if (next >= 0) {
      named_barrier<128>(1 + half);  // the warpgroup has its keys in registers
      copy_keys(next);
    }
    wgmma_wait<0>();
    keep(a[0]), keep(a[1]), keep(s);
  }

  // Scores of keys that a row does not see, and of rows of the other width, become -inf.
  __device__ __forceinline__ void mask(float (&s)[N / 2], int key, int tile_rows, int window, int flags) const {
    const int p0 = rest->task.p0, pa = rest->task.span.pa, pb = rest->task.span.pb;
    const int mine = key + half * 64 + g * 8 + quarter * 2;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int position = again(p0 + ((j * 8 + t * 2 + e) & (tile_rows - 1)));
        View seen = view(position, keys, window, flags);
        if (position < pa || position > pb) seen.stop = 0;
        const bool low = mine < seen.first || mine >= seen.stop;
        const bool high = mine + 1 < seen.first || mine + 1 >= seen.stop;
#pragma unroll
        for (int c = j; c < G::COLS; c += 4) {
          if (low) s[c * 4 + e] = NEG_INF;
          if (high) s[c * 4 + 2 + e] = NEG_INF;
        }
      }
  }

  // Probabilities [N, 128 keys] to shared memory; whether one of this thread's is too large for its row's base.
  __device__ __forceinline__ bool probabilities(const float (&s)[N / 2], int parity) const {
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8;
    const u32 to =
        p + parity * G::p_bytes + half * (N * 128) + row * 128 + ((quarter * 2 + lane / 8 % 2) ^ lane % 8) * 16;
    u32 most = 0;
#pragma unroll
    for (int j = 0; j < G::COLS; j += 2) {
      u32 pairs[4];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float* x = s + (j + c) * 4;
#pragma unroll
        for (int e = 0; e < 2; e++)
          pairs[c * 2 + e] = pack_f16(exp2_fast(__fmul_rn(x[e * 2], scale)), exp2_fast(__fmul_rn(x[e * 2 + 1], scale)));
        most = larger_f16(most, larger_f16(pairs[c * 2], pairs[c * 2 + 1]));
      }
      store_transposed(to + j * 1024, pairs);
    }
    publish();
    return above_f16(most, MOST);
  }

  // Each lane keeps the larger ones of half of the 2 n values, lower or upper by a bit of its number; returns where
  // these began. (No generic lambda: NVRTC 13.0 takes it for a host function.)
  template <int n>
  static __device__ __forceinline__ int halve(float (&x)[2 * G::COLS], int bit) {
    const bool upper = threadIdx.x % 32 & bit;
#pragma unroll
    for (int i = 0; i < n; i++) {
      const float send = upper ? x[i] : x[i + n], mine = upper ? x[i + n] : x[i];
      x[i] = fmaxf(mine, __shfl_xor_sync(ALL, send, bit));
    }
    return upper ? n : 0;
  }

  // The largest score of every column over the keys of this warp, to shared memory.
  __device__ __forceinline__ void tops(const float (&s)[N / 2]) const {
    float x[2 * G::COLS];
#pragma unroll
    for (int j = 0; j < G::COLS; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) x[j * 2 + e] = fmaxf(s[j * 4 + e], s[j * 4 + 2 + e]);
    int first = halve<G::COLS>(x, 16);
    first += halve<G::COLS / 2>(x, 8);
    first += halve<G::COLS / 4>(x, 4);
#pragma unroll
    for (int i = 0; i < G::COLS / 4; i++) {
      const int at = first + i;
      rest->top[warp][at / 2 * 8 + t * 2 + at % 2] = x[i];
    }
  }

  // Bases follow the largest scores where these are too far above them, or the first that a row sees; s, o and l with
  // the bases.
  __device__ __forceinline__ void move(float (&s)[N / 2], float (&o)[G::TILES][N / 2], float (&l)[G::SUMS][4],
                                       bool first) const {
    tops(s);
    __syncthreads();
    const int m = threadIdx.x;
    if (m < N) {
      float top = rest->top[0][m];
#pragma unroll
      for (int w = 1; w < 8; w++) top = fmaxf(top, rest->top[w][m]);
      const float base = first ? NONE : rest->base[m];
      const bool moves =
          base == NONE ? top > NEG_INF : above_f16(pack_f16(exp2_fast(__fmul_rn(top, scale)), 0.0f), MOST);
      rest->take[m] = moves ? top : 0.0f;
      rest->keep[m] = !moves ? 1.0f : base == NONE ? 0.0f : exp2_fast(__fmul_rn(-top, scale));
      rest->base[m] = !moves ? base : base == NONE ? top : __fadd_rn(base, top);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < G::COLS; j++) {
      const float2 less = *(const float2*)(rest->take + j * 8 + t * 2);
#pragma unroll
      for (int e = 0; e < 4; e++) s[j * 4 + e] = __fsub_rn(s[j * 4 + e], e % 2 ? less.y : less.x);
    }
    if (first) return;
#pragma unroll
    for (int j = 0; j < G::COLS; j++) {
      const float2 keep = *(const float2*)(rest->keep + j * 8 + t * 2);
#pragma unroll
      for (int i = 0; i < G::TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[i][j * 4 + e] = __fmul_rn(o[i][j * 4 + e], e % 2 ? keep.y : keep.x);
    }
#pragma unroll
    for (int i = 0; i < G::SUMS; i++) {
      const float2 keep = *(const float2*)(rest->keep + (quarter * G::SUMS + i) * 8 + t * 2);
      l[i][0] = __fmul_rn(l[i][0], keep.x), l[i][1] = __fmul_rn(l[i][1], keep.y);
    }
  }

  // o[half the dims x N] += values times probabilities.
  __device__ __forceinline__ void values(float (&o)[G::TILES][N / 2], int parity, int phase) const {
    const int lane = threadIdx.x % 32;
    barrier_wait(shared_address(&rest->values_there[parity]), phase);
    const u32 from = v + parity * G::v_bytes + lane % 8 * G::v_eight + lane / 8 * D + half * (D / 2) + quarter * 16;
    const u64 b = k_major(p + parity * G::p_bytes);
    u32 a[2][2 * G::TILES][4];
#pragma unroll
    for (int k = 0; k < 4; k++) {  // 32 keys
      u32(&now)[2 * G::TILES][4] = a[k % 2];
#pragma unroll
      for (int i = 0; i < G::TILES; i++) {
        u32 raw[4];  // two keys of two dims a word: keys 0-7, 8-15 of two steps
        load_matrices_transposed(raw, from + k / 2 * 8 * G::v_eight + k % 2 * 4 * D + i * 64);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const u32 low = __byte_perm(raw[e * 2], 0, 0x3120), high = __byte_perm(raw[e * 2 + 1], 0, 0x3120);
          u32(&to)[4] = now[e * G::TILES + i];
          to[0] = e4m3_pair(low), to[1] = e4m3_pair(low >> 16);
          to[2] = e4m3_pair(high), to[3] = e4m3_pair(high >> 16);
        }
      }
      wgmma_fence();
#pragma unroll
      for (int e = 0; e < 2; e++)
#pragma unroll
        for (int i = 0; i < G::TILES; i++)
          Wgmma<N, true>::multiply(o[i], now[e * G::TILES + i], b + k / 2 * (N * 128 / 16) + (k % 2 * 2 + e) * 2, 1);
      wgmma_commit();
      if (k > 0 && k < 3) wgmma_wait<1>(), keep(a[(k + 1) % 2]);
    }
    wgmma_wait<0>();
    keep(a[0]), keep(a[1]);
#pragma unroll
    for (int i = 0; i < G::TILES; i++) keep(o[i]);
  }

  // l += sums of this warp's share of the probabilities.
  __device__ __forceinline__ void sum(float (&l)[G::SUMS][4], int parity) const {
    const int lane = threadIdx.x % 32;
    const u32 mine = p + parity * G::p_bytes;
    const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
    for (int i = 0; i < G::SUMS; i++)
#pragma unroll
      for (int k = 0; k < 2; k++) {
        u32 raw[4];
        load_matrices(raw, mine + half * (N * 128) + ((quarter * G::SUMS + i) * 8 + lane % 8) * 128 +
                               ((k * 4 + lane / 8) ^ lane % 8) * 16);
        mma<true>(l[i], ones, raw[0], raw[1]);
        mma<true>(l[i], ones, raw[2], raw[3]);
      }
  }

  // o to rows of D floats, of which there are ``rows``.
  __device__ __forceinline__ void store(const float (&o)[G::TILES][N / 2], float* to, int rows) const {
    to += t * 2 * D + half * (D / 2) + quarter * 16 + g * 2;
#pragma unroll
    for (int j = 0; j < G::COLS; j++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (j * 8 + t * 2 + e < rows)
#pragma unroll
          for (int i = 0; i < G::TILES; i++)
            *(float2*)(to + (j * 8 + e) * D + i * 64) = make_float2(o[i][j * 4 + e], o[i][j * 4 + 2 + e]);
  }
};

struct Place {
  int column, dim, r, head;
  bool there;
};

// Results of the rows of a span, from sums [N, D] and rest.l.
template <int D, int N>
__device__ __forceinline__ void write_rows(const float* sums, const Rest<N>& rest, u16* out, const u16* gate,
                                           int block_row, int first_row, int first_head, int M, int tile_log2,
                                           int flags, int gate_stride, int out_stride, float v_scale) {
  constexpr int TOGETHER = 8;
  const Task& task = rest.task;
  const int rows = task.rows, first = task.span.pa - task.start, last = task.span.pb - task.start;
#pragma unroll 1
  for (int i = threadIdx.x; i < N * D / 2; i += THREADS * TOGETHER) {
    float2 x[TOGETHER];
    u32 open[TOGETHER];
    auto place = [&](int c) {
      const int at = i + c * THREADS, column = at / (D / 2), row_m = block_row + column;
      const int r = first_row + (row_m & ((1 << tile_log2) - 1));
      return Place{column, at % (D / 2) * 2, r, first_head + (row_m >> tile_log2),
                   row_m < M && r < rows && r >= first && r <= last};
    };
#pragma unroll
    for (int c = 0; c < TOGETHER; c++) {  // all under way together
      const Place to = place(c);
      x[c] = *(const float2*)(sums + (i + c * THREADS) * 2);
      open[c] = 0;
      if ((flags & GATED) && to.there)
        open[c] = *(const u32*)(gate + (u64)to.r * gate_stride + to.head * 2 * D + D + to.dim);
    }
#pragma unroll
    for (int c = 0; c < TOGETHER; c++) {
      const Place to = place(c);
      if (to.there)
        *(u32*)(out + (u64)to.r * out_stride + to.head * D + to.dim) =
            result(x[c].x, x[c].y, rest.l[to.column], v_scale, flags & GATED, open[c]);
    }
  }
}

enum Walk { ONE, SEVERAL, ALL };  // splits of one width that a block works on

// The block's columns are N of ``columns``, part ``part``.
template <int D, int N, Walk walk>
__device__ void attend(Task now, int home, int columns, int part, const u16* q, const u8* k_memory, const u8* v_memory,
                       float* partial, float* partial_ml, u16* out, const u16* gate, int tile_log2, int group,
                       int kv_heads, int row_blocks, int capacity, int window, int flags, int most, int gate_stride,
                       int out_stride, float score_scale, float v_scale) {
  using G = Geometry<D, N>;
  constexpr bool sequential = walk == ALL;
  extern __shared__ __align__(1024) u8 tiles[];
  Block<D, N> b;
  b.q = shared_address(tiles), b.p = b.q + G::q_bytes, b.k = b.q + G::k_at, b.v = b.q + G::v_at,
  b.rest = (Rest<N>*)(tiles + G::rest_at);
  const int lane = threadIdx.x % 32;
  b.warp = threadIdx.x / 32, b.quarter = b.warp % 4, b.half = b.warp / 4, b.g = lane / 4, b.t = lane % 4;
  b.scale = score_scale;
  auto kv_head = [&] { return again(blockIdx.x) / row_blocks; };
  auto first_row = [&] { return sequential ? again(blockIdx.z) << tile_log2 : 0; };
  if (home < 0 || first_row() >= now.rows || (!sequential && now.second() && !now.two())) {
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) pdl_wait();  // a kernel with no row at all also ends in turn
    return;
  }
  if (!sequential && now.second()) {
    second_width(now, window, flags, most);
    if (now.index >= now.slots + now.span.count) return;
  }
  b.keys = now.keys;
  const u64 offset = (u64)(home * kv_heads + kv_head()) * capacity * D;
  b.k_codes = k_memory + offset, b.v_codes = v_memory + offset;

  int key, end, stop, clear_first, clear_stop;  // a chunk within [clear_first, clear_stop) is seen by all rows
  auto begin = [&](const Task& t) {
    key = t.span.begin, stop = t.span.stop, end = key - key % t.span.width;
    if (!sequential) {
      end = t.start_of(t.index);
      key = max(key, end), stop = min(stop, end + t.span.width);
    }
    clear_first = t.two() ? FAR : t.span.high.first, clear_stop = t.span.low.stop;
  };
  begin(now);
  if (threadIdx.x == 0) {
    b.rest->task = now;
    for (int i = 0; i < 4; i++) barrier_init(shared_address(&b.rest->queries_there[i]), 1);
    for (int i = 0; i < 2; i++) {
      barrier_init(shared_address(&b.rest->keys_there[i]), 4);
      barrier_init(shared_address(&b.rest->values_there[i]), 8);
    }
    barriers_ready();
  }
  if (sequential && threadIdx.x < N) b.rest->m[threadIdx.x] = NEG_INF, b.rest->l[threadIdx.x] = 0.0f;
  __syncthreads();
  int count = 0;          // of chunks: every second one has the other tile of values and of probabilities
  auto following = [&] {  // first key of the block's next split of this width, below 0: none
    if (walk != SEVERAL) return -1;
    const Task& task = b.rest->task;
    const int start = task.start_of(task.index + (int)gridDim.z);
    return start < task.span.stop ? start : -1;
  };
  const bool early = key + KEYS <= now.start;  // stored by an earlier pass
  if (early) b.copy_keys(key), b.copy_values(key, 0);
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x == 0) {
    const u64 block = ((u64)(sequential ? blockIdx.z : blockIdx.y) * gridDim.x + blockIdx.x) * columns * D;
    for (int i = 0; i < D / 64; i++) {
      const u32 there = shared_address(&b.rest->queries_there[i]);
      barrier_expect(there, N * 128);
      copy_bulk(b.q + i * (N * 128), q + block + (i * columns + part * N) * 64, N * 128, there);
    }
  }
  if (!early) b.copy_keys(key), b.copy_values(key, 0);
  for (;;) {  // the splits of one width: all in turn, or one
    bool first_split = true;
    while (key < stop) {
      if (sequential) end += b.rest->task.span.width;
      float o[G::TILES][N / 2], l[G::SUMS][4];
#pragma unroll
      for (int i = 0; i < G::TILES; i++)
#pragma unroll
        for (int e = 0; e < N / 2; e++) o[i][e] = 0.0f;
#pragma unroll
      for (int i = 0; i < G::SUMS; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) l[i][e] = 0.0f;
      if (walk == SEVERAL)  // addresses are computed anew in every split: registers are dearer
        asm volatile(""
                     : "+r"(b.q), "+r"(b.p), "+r"(b.k), "+r"(b.v), "+r"(b.warp), "+r"(b.quarter), "+r"(b.half),
                       "+r"(b.g), "+r"(b.t));
      bool first = true, more = true;
      for (; first || (more && (!sequential || key < end)); key += KEYS) {
        float s[N / 2];
        const int parity = count & 1;
        int next = key + KEYS;
        more = next < stop;
        if (!more) next = following();
        b.scores(s, first, parity, next);
        if (key < clear_first || key + KEYS > clear_stop) b.mask(s, key, 1 << tile_log2, window, flags);
        if (!first) b.sum(l, parity ^ 1);         // of the chunk before: nothing else multiplies now
        bool over = first || key <= clear_first;  // some row may see its first key
        if (!over) over = b.probabilities(s, parity);
        if (__syncthreads_or(over)) {  // else: probabilities are there, those and values before are done with
          b.move(s, o, l, first);
          b.probabilities(s, parity);
          __syncthreads();
        }
        if (next >= 0) b.copy_values(next, parity ^ 1);
        b.values(o, parity, count >> 1 & 1);
        count++, first = false;
      }
      b.sum(l, count & 1 ^ 1);
      if (lane < 4)
#pragma unroll
        for (int i = 0; i < G::SUMS; i++)
          *(float2*)(b.rest->sums[b.half] + (b.quarter * G::SUMS + i) * 8 + lane * 2) = make_float2(l[i][0], l[i][1]);
      __syncthreads();
      const int m = threadIdx.x, M = group << tile_log2;
      const float sum = m < N ? __fadd_rn(b.rest->sums[0][m], b.rest->sums[1][m]) : 0.0f;
      const float base = m < N && b.rest->base[m] != NONE ? __fmul_rn(b.rest->base[m], score_scale) : NONE;
      if constexpr (!sequential) {
        const int split = b.rest->task.index * gridDim.y + again(blockIdx.y);
        const u64 at = ((u64)split * gridDim.x + again(blockIdx.x)) * columns + part * N;
        if (m < N) ((float2*)partial_ml)[at + m] = make_float2(base, sum);
        float4* to = (float4*)(partial + at * D) + threadIdx.x;
#pragma unroll
        for (int i = 0; i < G::TILES; i++)
#pragma unroll
          for (int j = 0; j < G::COLS; j++)
            to[(i * G::COLS + j) * THREADS] =
                make_float4(o[i][j * 4], o[i][j * 4 + 1], o[i][j * 4 + 2], o[i][j * 4 + 3]);
        const int start = following();
        if (start < 0) break;
        key = start, stop = min(b.rest->task.span.stop, start + b.rest->task.span.width);
        __syncthreads();
        if (threadIdx.x == 0) b.rest->task.index += gridDim.z;
        __syncthreads();
        continue;
      }
      if (m < N) {
        const Fold f = fold(b.rest->m[m], b.rest->l[m], base, sum);
        b.rest->m[m] = f.m, b.rest->l[m] = f.l, b.rest->keep[m] = f.keep, b.rest->take[m] = f.take;
      }
      __syncthreads();
      float* sums = partial + ((u64)again(blockIdx.z) * gridDim.x + blockIdx.x) * (N * D);
#pragma unroll
      for (int i = 0; i < G::TILES; i++)
#pragma unroll
        for (int j = 0; j < G::COLS; j++) {
          float4* kept = (float4*)sums + (i * G::COLS + j) * THREADS + threadIdx.x;
          const float4 y = first_split ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *kept;
          const float2 keep = *(const float2*)(b.rest->keep + j * 8 + b.t * 2);
          const float2 take = *(const float2*)(b.rest->take + j * 8 + b.t * 2);
          const Fold left = {0.0f, 0.0f, keep.x, take.x}, right = {0.0f, 0.0f, keep.y, take.y};
          float* x = o[i] + j * 4;
          x[0] = fold_value(y.x, x[0], left), x[1] = fold_value(y.y, x[1], right);
          x[2] = fold_value(y.z, x[2], left), x[3] = fold_value(y.w, x[3], right);
          if (more) *kept = make_float4(x[0], x[1], x[2], x[3]);
        }
      first_split = false;
      if (more) continue;
      __syncthreads();
      b.store(o, sums, N);
      __syncthreads();
      write_rows<D, N>(sums, *b.rest, out, gate, blockIdx.x % row_blocks * N, first_row(), kv_head() * group, M,
                       tile_log2, flags, gate_stride, out_stride, v_scale);
    }
    // The next split, of the other width: nothing is loaded ahead for it.
    __syncthreads();
    Task next = b.rest->task;
    if (sequential && next.second()) break;
    const bool was_second = next.second();
    next.index = sequential ? next.slots : next.index + gridDim.z;
    if (next.second() && !next.two()) break;
    if (next.second() && !was_second) second_width(next, window, flags, most);
    if (next.second() && !sequential && next.index >= next.slots + next.span.count) break;
    __syncthreads();
    if (threadIdx.x == 0) b.rest->task = next;
    begin(next);
    if (sequential && threadIdx.x < N) b.rest->m[threadIdx.x] = NEG_INF, b.rest->l[threadIdx.x] = 0.0f;
    b.copy_keys(key), b.copy_values(key, count & 1);
    __syncthreads();
  }
}

}  // namespace wide

// attend_wide_slots is for several slots: not every split has a block of its own.
#define WIDE(D, N)                                    \
  WIDE_KERNEL(attend_wide_splits, D, N, wide::ONE)    \
  WIDE_KERNEL(attend_wide_slots, D, N, wide::SEVERAL) \
  WIDE_KERNEL(attend_wide_prefill, D, N, wide::ALL)
#define WIDE_KERNEL(NAME, D, N, WALK)                                                                                 \
  extern "C" __global__ void __launch_bounds__(wide::THREADS, 1)                                                      \
      NAME##_d##D##_n##N(const u16* q, const u8* k_memory, const u8* v_memory, float* partial, float* partial_ml,     \
                         u16* out, const u16* gate, const int* control, const int* rows_there, int rows,              \
                         int tile_log2, int group, int kv_heads, int row_blocks, int capacity, int window, int flags, \
                         int most, int gate_stride, int out_stride, float score_scale, float v_scale) {               \
    const int* words = words_of(control, WALK == wide::ALL ? 0 : blockIdx.y);                                         \
    const int first_row = WALK == wide::ALL ? blockIdx.z << tile_log2 : 0, home = home_of(words);                     \
    wide::Task task = wide::task_of(early_word(words + LENGTH), valid_rows(rows_there, rows), first_row, tile_log2,   \
                                    capacity, window, flags, most);                                                   \
    const int parts = WALK == wide::ALL ? 1 : wide::parts_of(task, gridDim.y, N, most);                               \
    task.index = WALK == wide::ALL ? 0 : blockIdx.z / parts;                                                          \
    if (N > 32 && parts > 1)                                                                                          \
      wide::attend<D, 32, WALK>(task, home, N, blockIdx.z % parts, q, k_memory, v_memory, partial, partial_ml, out,   \
                                gate, tile_log2, group, kv_heads, row_blocks, capacity, window, flags, most,          \
                                gate_stride, out_stride, score_scale, v_scale);                                       \
    else                                                                                                              \
      wide::attend<D, N, WALK>(task, home, N, 0, q, k_memory, v_memory, partial, partial_ml, out, gate, tile_log2,    \
                               group, kv_heads, row_blocks, capacity, window, flags, most, gate_stride, out_stride,   \
                               score_scale, v_scale);                                                                 \
  }
WIDE(128, 32)
WIDE(128, 64)
WIDE(128, 96)
WIDE(256, 32)
WIDE(256, 64)
WIDE(256, 96)
#undef WIDE
#undef WIDE_KERNEL

namespace wide {

// Folds the splits of every row in order. A thread has what one thread of a splits block had of one column pair: two
// dims of two rows. blockIdx.z: the slot.
template <int BATCH>  // splits that are loaded together
__device__ __forceinline__ void combine(const float* partial, const float* partial_ml, u16* out, const u16* gate,
                                        const int* control, int rows, int tile_log2, int group, int columns,
                                        int row_blocks, int dim, int capacity, int window, int flags, int most,
                                        int gate_stride, int out_stride, float v_scale) {
  const int* words = words_of(control, blockIdx.z);
  const int start = early_word(words + LENGTH), home = home_of(words);
  Task task = task_of(start, rows, 0, tile_log2, capacity, window, flags, most);
  const int parts = parts_of(task, gridDim.z, columns, most), stacks = columns / 8 / parts;  // column eights of a block
  if (task.two()) second_width(task, window, flags, most);
  const int stops = task.slots + (task.two() ? task.span.count : 0);
  const int block = blockIdx.y, cell = blockIdx.x, lane = threadIdx.x % 32;
  const int part = cell / (dim / 128 * stacks), tile = cell / stacks % (dim / 128);
  const int column = (part * stacks + cell % stacks) * 8 + lane % 4 * 2, row_m = block % row_blocks * columns + column;
  const int at_dim = tile * 64 + threadIdx.x / 128 * (dim / 2) + threadIdx.x / 32 % 4 * 16 + lane / 4 * 2;
  const int row = row_m & ((1 << tile_log2) - 1), tensor_row = blockIdx.z * rows + row,
            head = block / row_blocks * group + (row_m >> tile_log2);
  u32 open[2] = {0u, 0u};
  const bool there = row_m < group << tile_log2;
  // Gates were written before the two kernels that precede this one.
#pragma unroll
  for (int e = 0; e < 2; e++)
    if ((flags & GATED) && there && row + e < rows)
      open[e] = __ldcg((const u32*)(gate + (u64)(tensor_row + e) * gate_stride + head * 2 * dim + dim + at_dim));
  pdl_wait();
  pdl_trigger();
  if (!there) return;
  u16* to = out + (u64)tensor_row * out_stride + head * dim + at_dim;
  if (home < 0) {
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (row + e < rows) *(u32*)(to + e * out_stride) = 0u;
    return;
  }
  float m[2] = {NEG_INF, NEG_INF}, l[2] = {0.0f, 0.0f}, x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int split = 0; split < stops; split += BATCH) {
    float4 ml[BATCH], y[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {  // all under way together; what is not there changes nothing
      const u64 place = ((u64)((split + i) * gridDim.z + blockIdx.z) * gridDim.y + block) * columns;
      ml[i] = make_float4(NEG_INF, 0.0f, NEG_INF, 0.0f), y[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (split + i >= stops) continue;
      asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(y[i].x), "=f"(y[i].y), "=f"(y[i].z), "=f"(y[i].w)
                   : "l"((const float4*)(partial + place * dim) + cell * THREADS + threadIdx.x)
                   : "memory");
      asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(ml[i].x), "=f"(ml[i].y), "=f"(ml[i].z), "=f"(ml[i].w)
                   : "l"(partial_ml + (place + column) * 2)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const Fold left = fold(m[0], l[0], ml[i].x, ml[i].y), right = fold(m[1], l[1], ml[i].z, ml[i].w);
      m[0] = left.m, l[0] = left.l, m[1] = right.m, l[1] = right.l;
      x[0] = fold_value(x[0], y[i].x, left), x[1] = fold_value(x[1], y[i].y, right);
      x[2] = fold_value(x[2], y[i].z, left), x[3] = fold_value(x[3], y[i].w, right);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++)
    if (row + e < rows) *(u32*)(to + e * out_stride) = result(x[e], x[2 + e], l[e], v_scale, flags & GATED, open[e]);
}

}  // namespace wide

#define WIDE_COMBINE(NAME, BATCH, ...)                                                                              \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__)                                                         \
      NAME(const float* partial, const float* partial_ml, u16* out, const u16* gate, const int* control, int rows,  \
           int tile_log2, int group, int columns, int row_blocks, int dim, int capacity, int window, int flags,     \
           int most, int gate_stride, int out_stride, float v_scale) {                                              \
    wide::combine<BATCH>(partial, partial_ml, out, gate, control, rows, tile_log2, group, columns, row_blocks, dim, \
                         capacity, window, flags, most, gate_stride, out_stride, v_scale);                          \
  }
WIDE_COMBINE(attend_wide_combine, 16, wide::THREADS)
WIDE_COMBINE(attend_wide_combine_slots, 6, wide::THREADS, 3)  // more blocks than multiprocessors
#undef WIDE_COMBINE
#endif
