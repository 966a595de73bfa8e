// Attention of the rows of one pass over a KV memory: prepare (norm, RoPE, append), attend (splits), combine.
//
// KV memory of a layer: K and V, each [lanes, Hkv, capacity, D], E4M3 codes or BF16. A pass is a prefill of one slot, or a
// block of rows in each of several (control.cuh); row r of a slot's `rows` is at position length + r. Rows go in tiles of
// T = 16 or 32, a slot's block is one; for one tile and KV head, the query rows are m = g * T + r for query head
// kv_head * group + g, M = group * T in all. Prepared queries: [tiles, Hkv, M, D], F16 over E4M3 keys (exact products,
// 11-bit queries and probabilities) with pairs of dims in the order of pair_place, BF16 over BF16 keys.
//
// The context is cut at fixed absolute positions into splits (first_key), a split into chunks of 64 keys. Within a
// split the softmax is online over its chunks; splits are folded in order. A chunk or split that a row does not see
// changes none of its bits, so a row's result depends on its own query and the keys it sees alone. Prefill walks the
// splits in one block per tile and KV head and folds with the same arithmetic, so it gives the bits of verify.
//
// Hopper has other kernels for FP8 and 128 or 256 dims (attend_hopper.cuh), after the same prepare.
#include "attend_hopper.cuh"

static constexpr int THREADS = 256;   // of prepare and combine
static constexpr int WARPS = 4;       // of attend: along keys (QK) or head dims (PV); all have the block's query rows
static constexpr int CHUNK = 64;      // keys
static constexpr float SLACK = 8.0f;  // probabilities stay below 2^8, well inside F16
static constexpr int BATCH = 12;      // splits that a combine thread loads together

// Splits of 64 keys below 512, 128 below 2048, 256 below 4096, 512 below 8192, then 1024: short where few are live,
// so that a short context fills the device; long where many are, so that partial results stay small beside the keys.
__device__ __forceinline__ int first_key(int split) {
  if (split < 8) return split * 64;
  if (split < 20) return 512 + (split - 8) * 128;
  if (split < 28) return 2048 + (split - 20) * 256;
  if (split < 36) return 4096 + (split - 28) * 512;
  return 8192 + (split - 36) * 1024;
}
__device__ __forceinline__ int split_of(int key) {
  if (key < 512) return key / 64;
  if (key < 2048) return 8 + (key - 512) / 128;
  if (key < 4096) return 20 + (key - 2048) / 256;
  if (key < 8192) return 28 + (key - 4096) / 512;
  return 36 + (key - 8192) / 1024;
}

// Place of a pair of dims among the 8 pairs of a tensor-core step: the thread that holds pairs l and l + 4 of a step
// gets pairs 2 l and 2 l + 1, which are four codes of one word of keys.
__device__ __forceinline__ int pair_place(int pair) { return (pair & ~7) | (pair & 1) * 4 | (pair >> 1 & 3); }

// ---------------------------------------------------------------------------------------------------------- prepare

// One warp per row and head. blockIdx.y is the slot's row; heads: Hq queries, then Hkv keys, then Hkv values. turn_rows:
// of a lane's own table of cosines and sines, row i of which is token i's; 0: all lanes have one.
template <bool fp8>
__device__ void prepare(int slot, const u16* q, const u16* k, const u16* v, int q_stride, int k_stride, int v_stride,
                        const float* q_norm, const float* k_norm, const float* cosine, const float* sine, u16* q_out,
                        void* k_memory, void* v_memory, const int* control, const int* rows_there, int rows, int heads,
                        int kv_heads, int dim, int half, int capacity, int tile_log2, int q_step, int columns,
                        float eps, float k_scale, float v_scale, int turn_rows) {
  __shared__ float line[THREADS / 32][256];
  // A pass with queries began with a kernel that waited before it let others start, after the length was written: what
  // depends on no more than the length is loaded before the wait.
  const bool early = heads > 0;
  if (!early) pdl_wait(), pdl_trigger();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = blockIdx.x * (THREADS / 32) + warp, row = blockIdx.y, tensor_row = slot * rows + row;
  const int* words = words_of(control, slot);
  const int home = home_of(words);
  const bool there = each < heads + 2 * kv_heads && row < valid_rows(rows_there, rows) && home >= 0;
  const int kind = each < heads ? 0 : each < heads + kv_heads ? 1 : 2;
  const int head = each - (kind == 0 ? 0 : kind == 1 ? heads : heads + kv_heads);
  const u16* source = kind == 0   ? q + (u64)tensor_row * q_stride + head * q_step
                      : kind == 1 ? k + (u64)tensor_row * k_stride + head * dim
                                  : v + (u64)tensor_row * v_stride + head * dim;
  const int position = early_word(words + LENGTH) + row, pairs = dim / 64;
  Lane x, c, s, w;
  if (there && kind < 2)
    load_turn(c, s, cosine, sine, home * turn_rows + position, half, lane);  // under way beside the row
  if (there && kind < 2) load_weight(w, kind == 0 ? q_norm : k_norm, pairs, lane);
  if (early) pdl_wait(), pdl_trigger();
  if (!there) return;
  load_row(x, source, pairs, lane);
  if (kind < 2) {
    norm(x, w, inverse_of(sum_of_squares(x), pairs, eps), line[warp], pairs, lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < pairs && i * 64 < 2 * half) turn(x, i, c, s, line[warp], half, lane);
  }
  if (kind == 0) {
    const int group = heads / kv_heads, tile = (row >> tile_log2) + slot;  // one of them is 0
    const int m = ((head % group) << tile_log2) + (row & ((1 << tile_log2) - 1));
    const int M = group << tile_log2;
    const u64 part = (u64)tile * kv_heads + head / group;
    // Hopper: blocks of ``columns``.
    u32* out =
        (u32*)(q_out + (columns ? (part * ((M + columns - 1) / columns) + m / columns) * columns : part * M + m) * dim);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int pair = i * 32 + lane;
      if (i < pairs && fp8)
        out[columns ? wide::query_word(pair, m % columns, columns) : pair_place(pair)] = query_pair(x.x[i]);
      if (i < pairs && !fp8) out[pair] = pack_bf16(x.x[i][0], x.x[i][1]);
    }
  } else if (position < capacity) {
    const float scale = kind == 1 ? k_scale : v_scale, inverse = __fdiv_rn(1.0f, scale);
    const u64 at = ((u64)(home * kv_heads + head) * capacity + position) * dim / 2 + lane;
    void* memory = kind == 1 ? k_memory : v_memory;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i < pairs && fp8) ((u16*)memory)[at + i * 32] = code_pair(x.x[i], scale, inverse);
      if (i < pairs && !fp8) ((u32*)memory)[at + i * 32] = pack_bf16(x.x[i][0], x.x[i][1]);
    }
  }
}

// blockIdx.z: the slot.
#define PREPARE(NAME, FP8)                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                                        \
      const u16* q, const u16* k, const u16* v, int q_stride, int k_stride, int v_stride, const float* q_norm,       \
      const float* k_norm, const float* cosine, const float* sine, u16* q_out, void* k_memory, void* v_memory,       \
      const int* control, const int* rows_there, int rows, int heads, int kv_heads, int dim, int half, int capacity, \
      int tile_log2, int q_step, int columns, float eps, float k_scale, float v_scale, int turn_rows) {              \
    prepare<FP8>(blockIdx.z, q, k, v, q_stride, k_stride, v_stride, q_norm, k_norm, cosine, sine, q_out, k_memory,   \
                 v_memory, control, rows_there, rows, heads, kv_heads, dim, half, capacity, tile_log2, q_step,       \
                 columns, eps, k_scale, v_scale, turn_rows);                                                         \
  }
PREPARE(attend_prepare_fp8, true)
PREPARE(attend_prepare_bf16, false)

// Keys and values of a layer that are stored without queries.
struct Appended {
  const u16 *k, *v;
  const float *k_norm, *cosine, *sine;
  void *k_memory, *v_memory;
  float k_scale, v_scale;
  int k_stride, v_stride;
};
struct AppendedLayers {
  Appended layer[8];
};

// blockIdx.z: the layer, below `count`, and 8 times the slot.
#define APPEND(NAME, FP8)                                                                                            \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
      NAME(const __grid_constant__ AppendedLayers layers, int count, const int* control, const int* rows_there,      \
           int rows, int kv_heads, int dim, int half, int capacity, float eps) {                                     \
    if (blockIdx.z % 8 >= count) return;                                                                             \
    const Appended& l = layers.layer[blockIdx.z % 8];                                                                \
    prepare<FP8>(blockIdx.z / 8, nullptr, l.k, l.v, 0, l.k_stride, l.v_stride, nullptr, l.k_norm, l.cosine, l.sine,  \
                 nullptr, l.k_memory, l.v_memory, control, rows_there, rows, 0, kv_heads, dim, half, capacity, 0, 0, \
                 0, eps, l.k_scale, l.v_scale, 0);                                                                   \
  }
APPEND(attend_append_fp8, true)
APPEND(attend_append_bf16, false)

// ----------------------------------------------------------------------------------------------------------- attend

template <int D, int MT, bool fp8>  // head dim; a block has 16 * MT query rows
struct Geometry {
  static constexpr int rows = 16 * MT, threads = 32 * WARPS;
  static constexpr int stride = D * 2 + 16;                 // bytes of a query row in shared memory
  static constexpr int kv_stride = D * (fp8 ? 1 : 2) + 16;  // of a key or value row
  static constexpr int p_stride = CHUNK * 2 + 16;           // of a row of probabilities
  static constexpr int q_bytes = rows * stride, kv_bytes = CHUNK * kv_stride, p_bytes = rows * p_stride;
  static constexpr int NT = D / 32;  // 8-column tiles of the output a warp
  // Dims of tile c of a warp that a lane holds: first, and the distance of its two.
  static __device__ __forceinline__ int dim(int c, int e) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * (D / 4);
    return fp8 ? first + c / 2 * 16 + lane % 4 * 4 + e * 2 + c % 2 : first + c * 8 + lane % 4 * 2 + e;
  }
};

// Rows first .. first + 63 of one KV head to shared memory, under way; rows from `stop` on are zeros.
template <int D, int MT, bool fp8>
__device__ __forceinline__ void copy_chunk(u8* shared, const u8* head, int first, int stop) {
  using G = Geometry<D, MT, fp8>;
  constexpr int PIECES = D * (fp8 ? 1 : 2) / 16;  // of a row
#pragma unroll
  for (int i = 0; i < CHUNK * PIECES / G::threads; i++) {
    const int piece = i * G::threads + threadIdx.x, r = piece / PIECES;
    copy16_or_zero(shared + r * G::kv_stride + piece % PIECES * 16, head + ((u64)first * PIECES + piece) * 16,
                   first + r < stop);
  }
}

struct Task {
  int kv_head, block_row, M, tile_mask, tile_log2, p0, keys, window, flags;
  const u8 *k, *v;  // of the KV head
};

// Scores of a chunk [rows, 16 keys a warp]: q in shared memory times the key tile.
template <int D, int MT, bool fp8>
__device__ __forceinline__ void multiply_keys(float (&s)[MT][2][4], u32 q, u32 tile, int warp, int lane) {
  using G = Geometry<D, MT, fp8>;
  const u32 a_at = q + lane % 16 * G::stride + lane / 16 * 16;
  // FP8: matrices of keys 0-7 and 8-15 by 16 codes, for two steps. BF16: keys by two halves of a step.
  const u32 b_at = tile + (fp8 ? (warp * 16 + lane % 16) * G::kv_stride + lane / 16 * 16
                               : (warp * 16 + lane / 16 * 8 + lane % 8) * G::kv_stride + lane / 8 % 2 * 16);
  constexpr int PER = fp8 ? 2 : 1;  // steps of one load of keys
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[i][n][e] = 0.0f;
  u32 a[2][MT][4], b[2][4];  // fragments of this step and the next
  auto load = [&](int k) {
    if (k % PER == 0) load_matrices(b[k / PER % 2], b_at + k / PER * 32);
#pragma unroll
    for (int i = 0; i < MT; i++) load_matrices(a[k % 2][i], a_at + i * 16 * G::stride + k * 32);
  };
  load(0);
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    if (k + 1 < D / 16) load(k + 1);
    const u32(&raw)[4] = b[k / PER % 2];
    u32 keys[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        keys[n][half] = fp8 ? e4m3_pair(raw[k % PER * 2 + n] >> half * 16) : raw[n * 2 + half];
#pragma unroll
    for (int i = 0; i < MT; i++) {
      mma<fp8>(s[i][0], a[k % 2][i], keys[0][0], keys[0][1]);
      mma<fp8>(s[i][1], a[k % 2][i], keys[1][0], keys[1][1]);
    }
  }
}

// o [rows, D / 4 dims a warp] += p times the value tile. FP8: a transposed matrix of byte pairs has two codes of two
// keys in a word; its even dims make one tile, its odd dims the next.
template <int D, int MT, bool fp8>
__device__ __forceinline__ void multiply_values(float (&o)[MT][D / 32][4], u32 p, u32 tile, int warp, int lane) {
  using G = Geometry<D, MT, fp8>;
  constexpr int BYTES = fp8 ? 1 : 2, WIDE = D / 4 * BYTES / 16;  // 16-byte columns a warp
  constexpr int LOADS = (WIDE + 1) / 2;                          // of two columns a step of 16 keys
  const u32 a_at = p + lane % 16 * G::p_stride + lane / 16 * 16;
  const u32 b_at = tile + lane % 16 * G::kv_stride + warp * (D / 4) * BYTES + lane / 16 * (WIDE > 1 ? 16 : 0);
  u32 a[MT][4], b[2][4];
  auto load = [&](int t) { load_matrices_transposed(b[t % 2], b_at + t / LOADS * 16 * G::kv_stride + t % LOADS * 32); };
  load(0);
#pragma unroll
  for (int t = 0; t < CHUNK / 16 * LOADS; t++) {
    const int k = t / LOADS, n = t % LOADS;
    if (n == 0)
#pragma unroll
      for (int i = 0; i < MT; i++) load_matrices(a[i], a_at + i * 16 * G::p_stride + k * 32);
    if (t + 1 < CHUNK / 16 * LOADS) load(t + 1);
    const u32(&raw)[4] = b[t % 2];
#pragma unroll
    for (int wide = 0; wide < (WIDE > 1 ? 2 : 1); wide++) {
      if constexpr (fp8) {
        const u32 low = __byte_perm(raw[wide * 2], 0, 0x3120), high = __byte_perm(raw[wide * 2 + 1], 0, 0x3120);
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
          const u32 b0 = e4m3_pair(low >> odd * 16), b1 = e4m3_pair(high >> odd * 16);
#pragma unroll
          for (int i = 0; i < MT; i++) mma<true>(o[i][(n * 2 + wide) * 2 + odd], a[i], b0, b1);
        }
      } else {
#pragma unroll
        for (int i = 0; i < MT; i++) mma<false>(o[i][n * 2 + wide], a[i], raw[wide * 2], raw[wide * 2 + 1]);
      }
    }
  }
}

template <int D, int MT, bool fp8>
__device__ void attend(const u16* q, const u8* k_memory, const u8* v_memory, float* partial, float* partial_ml,
                       u16* out, const u16* gate, const int* control, const int* rows_there, int rows, int tile_log2,
                       int group, int kv_heads, int row_blocks, int capacity, int window, int flags, int gate_stride,
                       int out_stride, float score_scale, float v_scale) {
  using G = Geometry<D, MT, fp8>;
  constexpr int BYTES = fp8 ? 1 : 2;
  extern __shared__ uint4 dynamic[];
  u8* q_tile = (u8*)dynamic;
  u8* k_tile = q_tile + G::q_bytes;
  u8* v_tile = k_tile + G::kv_bytes;
  u8* p_tile = v_tile + G::kv_bytes;
  float (*largest)[G::rows] = (float (*)[G::rows])(p_tile + G::p_bytes);  // [4][rows]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int tile = blockIdx.z, first_row = flags & SEQUENTIAL ? tile << tile_log2 : 0;
  const int* words = words_of(control, flags & SEQUENTIAL ? 0 : tile);  // written long before: no wait is needed
  const int start = early_word(words + LENGTH), home = home_of(words), n = valid_rows(rows_there, rows);
  Task t;
  t.kv_head = blockIdx.x / row_blocks, t.block_row = blockIdx.x % row_blocks * G::rows;
  t.M = group << tile_log2, t.p0 = start + first_row, t.keys = min(start + n, capacity);
  const int tile_rows = 1 << tile_log2;
  // All rows of the tile together see keys [begin, end); every row sees [inner, inner_end) of them.
  const View low = view(t.p0, t.keys, window, flags), high = view(t.p0 + tile_rows - 1, t.keys, window, flags);
  const int last = split_of(max(high.stop - 1, 0));
  int split = last - (int)blockIdx.y;  // the long splits start first
  if (flags & SEQUENTIAL) split = split_of(low.first);
  if (first_row >= n || home < 0 || split < 0 || first_key(split + 1) <= low.first) {
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) pdl_wait();  // a kernel with no row at all also ends in turn
    return;
  }
  const u64 stored = (u64)(home * kv_heads + t.kv_head) * capacity * D * BYTES;
  t.k = k_memory + stored, t.v = v_memory + stored;

  int key = max(first_key(split), low.first) / CHUNK * CHUNK;
  int stop = min(first_key(split + 1), high.stop);
  auto copy_first = [&] {
    copy_chunk<D, MT, fp8>(k_tile, t.k, key, t.keys);
    copy_chunk<D, MT, fp8>(v_tile, t.v, key, t.keys);
  };
  const bool early = key + CHUNK <= start;  // stored by an earlier pass
  if (early) copy_first();
  pdl_wait();
  pdl_trigger();
  if (!early) copy_first();
  {
    const u16* source = q + (((u64)tile * kv_heads + t.kv_head) * t.M + t.block_row) * D;
    for (int piece = threadIdx.x; piece < G::rows * D / 8; piece += G::threads) {
      u8* to = q_tile + piece / (D / 8) * G::stride + piece % (D / 8) * 16;
      if (t.block_row + piece / (D / 8) < t.M)
        copy16(to, source + piece * 8);
      else
        *(uint4*)to = make_uint4(0u, 0u, 0u, 0u);
    }
    copy_commit();
  }
  const u32 q_at = shared_address(q_tile), k_at = shared_address(k_tile), v_at = shared_address(v_tile);
  const u32 p_at = shared_address(p_tile);
  float* carried = partial + ((u64)(tile * gridDim.x + blockIdx.x) * (MT * G::NT * 4)) * G::threads + threadIdx.x * 4;
  float run_m[MT][2], run_l[MT][2];  // sequential: folded over the splits so far
#pragma unroll
  for (int i = 0; i < MT; i++) run_m[i][0] = run_m[i][1] = NEG_INF, run_l[i][0] = run_l[i][1] = 0.0f;
  bool first_split = true, first_chunk = true;

  for (;; split++) {  // one split, or in turn all that are live
    float o[MT][G::NT][4], m[MT][2], l[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) {
      m[i][0] = m[i][1] = NEG_INF, l[i][0] = l[i][1] = 0.0f;
#pragma unroll
      for (int c = 0; c < G::NT; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[i][c][e] = 0.0f;
    }
    stop = min(first_key(split + 1), high.stop);
    for (; key < stop; key += CHUNK) {
      // The next chunk of a later split follows this one without a gap: live splits are consecutive.
      const int next = key + CHUNK;
      const bool more = next < stop || ((flags & SEQUENTIAL) && split < last);
      copy_wait<0>();
      __syncthreads();  // keys are there; values of the chunk before are done with
      if (!first_chunk) copy_chunk<D, MT, fp8>(v_tile, t.v, key, t.keys);
      first_chunk = false;
      copy_commit();
      float s[MT][2][4];
      multiply_keys<D, MT, fp8>(s, q_at, k_at, warp, lane);
      if (key < high.first || key + CHUNK > low.stop)  // some row does not see some key
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int row = i * 16 + h * 8 + lane / 4;
            asm volatile("" : "+r"(row));  // computed anew: registers are dearer
            const View seen = view(t.p0 + ((t.block_row + row) & (tile_rows - 1)), t.keys, window, flags);
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
              for (int e = 0; e < 2; e++) {
                const int at = key + warp * 16 + c * 8 + lane % 4 * 2 + e;
                if (at < seen.first || at >= seen.stop) s[i][c][h * 2 + e] = NEG_INF;
              }
          }
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float top = fmaxf(fmaxf(s[i][0][h * 2], s[i][0][h * 2 + 1]), fmaxf(s[i][1][h * 2], s[i][1][h * 2 + 1]));
          top = fmaxf(top, __shfl_xor_sync(ALL, top, 1));
          top = fmaxf(top, __shfl_xor_sync(ALL, top, 2));
          if (lane % 4 == 0) largest[warp][i * 16 + h * 8 + lane / 4] = top;
        }
      __syncthreads();  // maxima are there; keys are done with
      if (more) copy_chunk<D, MT, fp8>(k_tile, t.k, next, t.keys);
      copy_commit();
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int row = i * 16 + h * 8 + lane / 4;
          float top = fmaxf(fmaxf(largest[0][row], largest[1][row]), fmaxf(largest[2][row], largest[3][row]));
          // The base follows the largest score only when that is SLACK above it: o is seldom scaled.
          top = __fmul_rn(top, score_scale);
          const bool moves = top > __fadd_rn(m[i][h], SLACK);
          const float now = moves ? top : m[i][h], base = now == NEG_INF ? 0.0f : now;
          if (__any_sync(ALL, moves)) {
            const float keep = exp2_fast(m[i][h] - base);
            l[i][h] = __fmul_rn(l[i][h], keep);
#pragma unroll
            for (int c = 0; c < G::NT; c++)
              o[i][c][h * 2] = __fmul_rn(o[i][c][h * 2], keep),
                          o[i][c][h * 2 + 1] = __fmul_rn(o[i][c][h * 2 + 1], keep);
          }
          m[i][h] = now;
          float sum = 0.0f;
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const float p0 = exp2_fast(__fmaf_rn(s[i][c][h * 2], score_scale, -base));
            const float p1 = exp2_fast(__fmaf_rn(s[i][c][h * 2 + 1], score_scale, -base));
            sum = __fadd_rn(sum, __fadd_rn(p0, p1));
            *(u32*)(p_tile + row * G::p_stride + (warp * 16 + c * 8 + lane % 4 * 2) * 2) =
                fp8 ? pack_f16(p0, p1) : pack_bf16(p0, p1);
          }
          l[i][h] = __fadd_rn(l[i][h], sum);
        }
      copy_wait<1>();
      __syncthreads();  // values and probabilities are there
      multiply_values<D, MT, fp8>(o, p_at, v_at, warp, lane);
    }
    // Sum of a row: its four lanes, then the four warps along the keys.
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        l[i][h] = lane_sum<4>(l[i][h]);
        if (lane % 4 == 0) largest[warp][i * 16 + h * 8 + lane / 4] = l[i][h];
      }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = i * 16 + h * 8 + lane / 4, row_m = t.block_row + row;
        l[i][h] = __fadd_rn(__fadd_rn(largest[0][row], largest[1][row]), __fadd_rn(largest[2][row], largest[3][row]));
        const int r = first_row + (row_m & (tile_rows - 1));
        if (!(flags & SEQUENTIAL)) {
          if (row_m >= t.M) continue;
          u64 at = (((u64)split * gridDim.z + tile) * kv_heads + t.kv_head) * t.M + row_m;
          if (warp == 0 && lane % 4 == 0) ((float2*)partial_ml)[at] = make_float2(m[i][h], l[i][h]);
#pragma unroll
          for (int c = 0; c < G::NT; c += fp8 ? 2 : 1) {
            float* to = partial + at * D + G::dim(c, 0);
            if (fp8)
              *(float4*)to =
                  make_float4(o[i][c][h * 2], o[i][c + 1][h * 2], o[i][c][h * 2 + 1], o[i][c + 1][h * 2 + 1]);
            else
              *(float2*)to = make_float2(o[i][c][h * 2], o[i][c][h * 2 + 1]);
          }
          continue;
        }
        Fold f = fold(run_m[i][h], run_l[i][h], m[i][h], l[i][h]);
        run_m[i][h] = f.m, run_l[i][h] = f.l;
        float4* kept = (float4*)carried + (i * 2 + h) * (G::NT / 2) * G::threads;
        float4 y[G::NT / 2];  // all under way before the first store
#pragma unroll
        for (int c = 0; c < G::NT / 2; c++)
          y[c] = first_split ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : kept[c * G::threads];
#pragma unroll
        for (int c = 0; c < G::NT / 2; c++) {
          const float (&left)[4] = o[i][2 * c], (&right)[4] = o[i][2 * c + 1];
          y[c].x = fold_value(y[c].x, left[h * 2], f);
          y[c].y = fold_value(y[c].y, fp8 ? right[h * 2] : left[h * 2 + 1], f);
          y[c].z = fold_value(y[c].z, fp8 ? left[h * 2 + 1] : right[h * 2], f);
          y[c].w = fold_value(y[c].w, right[h * 2 + 1], f);
        }
        if (split < last) {
#pragma unroll
          for (int c = 0; c < G::NT / 2; c++) kept[c * G::threads] = y[c];
        } else if (row_m < t.M && r < n) {
          const int head = t.kv_head * group + (row_m >> tile_log2);
          const u16* gates = gate + (u64)r * gate_stride + head * 2 * D + D;
          u16* to = out + (u64)r * out_stride + head * D;
#pragma unroll
          for (int c = 0; c < G::NT / 2; c++) {
            const int left = G::dim(2 * c, 0), right = fp8 ? left + 2 : G::dim(2 * c + 1, 0);
            *(u32*)(to + left) =
                result(y[c].x, y[c].y, f.l, v_scale, flags & GATED, flags & GATED ? *(const u32*)(gates + left) : 0u);
            *(u32*)(to + right) =
                result(y[c].z, y[c].w, f.l, v_scale, flags & GATED, flags & GATED ? *(const u32*)(gates + right) : 0u);
          }
        }
      }
    first_split = false;
    if (!(flags & SEQUENTIAL) || split >= last) break;
    __syncthreads();
  }
}

#define ATTEND(D, MT, FP8, NAME)                                                                                       \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)                                                          \
      NAME##_d##D##_m##MT(const u16* q, const u8* k_memory, const u8* v_memory, float* partial, float* partial_ml,     \
                          u16* out, const u16* gate, const int* control, const int* rows_there, int rows,              \
                          int tile_log2, int group, int kv_heads, int row_blocks, int capacity, int window, int flags, \
                          int gate_stride, int out_stride, float score_scale, float v_scale) {                         \
    constexpr float unit = FP8 ? E4M3_PAIR_SCALE : 1.0f;                                                               \
    attend<D, MT, FP8>(q, k_memory, v_memory, partial, partial_ml, out, gate, control, rows_there, rows, tile_log2,    \
                       group, kv_heads, row_blocks, capacity, window, flags, gate_stride, out_stride,                  \
                       score_scale * unit, v_scale * unit);                                                            \
  }
#define BOTH(D, MT)               \
  ATTEND(D, MT, true, attend_fp8) \
  ATTEND(D, MT, false, attend_bf16)
BOTH(64, 2)
BOTH(64, 4)
BOTH(128, 2)
BOTH(128, 4)
BOTH(256, 2)
ATTEND(256, 3, true, attend_fp8)

// ---------------------------------------------------------------------------------------------------------- combine

// Folds the live splits of every row in order. A thread has 4 dims of one row and head; blockIdx.z: the slot.
template <bool fp8>
__device__ void combine(const float* partial, const float* partial_ml, u16* out, const u16* gate, const int* control,
                        int rows, int tile_log2, int group, int kv_heads, int dim, int capacity, int window, int flags,
                        int gate_stride, int out_stride, float v_scale) {
  constexpr float unit = fp8 ? E4M3_PAIR_SCALE : 1.0f;
  v_scale *= unit;
  const int quarter = dim / 4, at = blockIdx.x * THREADS + threadIdx.x, column = at % quarter * 4;
  const int heads = group * kv_heads, head = at / quarter % heads, row = at / quarter / heads;
  const int* words = words_of(control, blockIdx.z);
  const int start = early_word(words + LENGTH), home = home_of(words), tensor_row = blockIdx.z * rows + row;
  const int keys = min(start + rows, capacity), M = group << tile_log2;
  const View low = view(start, keys, window, flags), high = view(start + (1 << tile_log2) - 1, keys, window, flags);
  const int kv_head = head / group, slot_head = blockIdx.z * kv_heads + kv_head, all_heads = gridDim.z * kv_heads;
  const int m_row = ((head % group) << tile_log2) + row;
  const int first = split_of(low.first), stop = split_of(max(high.stop - 1, 0)) + 1;
  // Gates were written before the two kernels that precede this one.
  const u16* gates = gate + (u64)tensor_row * gate_stride + head * 2 * dim + dim + column;
  const uint2 open = (flags & GATED) && row < rows ? __ldcg((const uint2*)gates) : make_uint2(0u, 0u);
  pdl_wait();
  pdl_trigger();
  if (row >= rows) return;
  uint2* to = (uint2*)(out + (u64)tensor_row * out_stride + head * dim + column);
  if (home < 0) {
    *to = make_uint2(0u, 0u);
    return;
  }
  float m = NEG_INF, l = 0.0f, x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int split = first; split < stop; split += BATCH) {
    float2 ml[BATCH];
    float4 y[BATCH];
    int now = split;
    asm volatile("" : "+r"(now));  // addresses are computed here: kept from batch to batch, they keep loads apart
#pragma unroll
    for (int i = 0; i < BATCH; i++) {  // all under way together; what is not there changes nothing
      const u64 place = ((u64)(now + i) * all_heads + slot_head) * M + m_row;
      ml[i] = make_float2(NEG_INF, 0.0f), y[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (split + i >= stop) continue;
      asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];"
                   : "=f"(y[i].x), "=f"(y[i].y), "=f"(y[i].z), "=f"(y[i].w)
                   : "l"(partial + place * dim + column)
                   : "memory");
      asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];"
                   : "=f"(ml[i].x), "=f"(ml[i].y)
                   : "l"((const float2*)partial_ml + place)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const Fold f = fold(m, l, ml[i].x, ml[i].y);
      m = f.m, l = f.l;
      x[0] = fold_value(x[0], y[i].x, f), x[1] = fold_value(x[1], y[i].y, f);
      x[2] = fold_value(x[2], y[i].z, f), x[3] = fold_value(x[3], y[i].w, f);
    }
  }
  *to = make_uint2(result(x[0], x[1], l, v_scale, flags & GATED, open.x),
                   result(x[2], x[3], l, v_scale, flags & GATED, open.y));
}

#define COMBINE(NAME, FP8)                                                                                         \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                            \
      NAME(const float* partial, const float* partial_ml, u16* out, const u16* gate, const int* control, int rows, \
           int tile_log2, int group, int kv_heads, int dim, int capacity, int window, int flags, int gate_stride,  \
           int out_stride, float v_scale) {                                                                        \
    combine<FP8>(partial, partial_ml, out, gate, control, rows, tile_log2, group, kv_heads, dim, capacity, window, \
                 flags, gate_stride, out_stride, v_scale);                                                         \
  }
COMBINE(attend_combine_fp8, true)
COMBINE(attend_combine_bf16, false)
