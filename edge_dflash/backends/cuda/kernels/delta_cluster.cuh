// Verify or flush of a gated delta layer in one launch: a cluster of two blocks is a head (SM90 and later). It uses the
// arithmetic of delta.cu, and its order of sums.
#pragma once

#if __CUDA_ARCH__ >= 900
namespace clustered {

static constexpr int D = 128;               // of keys and of values
static constexpr int WIDE = 64;             // columns of a block
static constexpr int CLUSTER = D / WIDE;    // blocks of a head
static constexpr int OWNED = 8;             // columns of a warp, 2 of a lane
static constexpr int BLOCK = 16;            // most rows of the tape, and of own rows
static constexpr int WARPS = WIDE / OWNED;  // that have columns; one more beside them
static constexpr int BEFORE = TAPS - 1;     // rows that a convolution looks back
static_assert(CLUSTER == 2 && BLOCK == 2 * WARPS, "a warp prepares two rows");

// Lane l has the elements 4 i .. 4 i + 3, i = l / 4, and those 32, 64 and 96 further on, of 2 columns: columns 2 (l % 4)
// and the next of its warp's. Neighbours read the same key: shared memory then serves half a warp at a time, not a quarter.
struct Vector {  // the lane's elements of a key or a query
  float x[4][4];
  __device__ __forceinline__ void load(const float* from) {  // from: the first of the lane's
#pragma unroll
    for (int m = 0; m < 4; m++) read_vector(x[m], from + m * 32);
  }
};

// Slot c is column c ^ (lane / 16), so that the sums over lanes leave each column in half of 8 lanes without a choice.
struct Columns {
  float s[4][4][2];  // element, slot

  // The slots' parts of S^T x: sums over bits 4 and 3 of the terms.
  __device__ __forceinline__ void dot(float (&sum)[2], const Vector& v) const {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float part[4];
#pragma unroll
      for (int m = 0; m < 4; m++) {
        part[m] = __fmul_rn(v.x[m][0], s[m][0][c]);
#pragma unroll
        for (int e = 1; e < 4; e++) part[m] = __fmaf_rn(v.x[m][e], s[m][e][c], part[m]);
      }
      sum[c] = __fadd_rn(__fadd_rn(part[0], part[2]), __fadd_rn(part[1], part[3]));
    }
  }
};
__device__ __forceinline__ float join(float x, float other, int bit) {
  return __fadd_rn(x, __shfl_xor_sync(ALL, other, bit));
}

// A token in shared memory.
struct Row {
  float k[D], v[WIDE], decay, beta, g, unused;
};
struct OwnRow : Row {
  float q[D];
};

// Eight partial sums of the outputs of a row, column c of part p at c ^ 8 (p % 4): no bank conflicts where a lane writes
// the part lane / 4 of a column.
struct Outputs {
  float x[PARTS][WIDE];
  static __device__ __forceinline__ int place(int part, int column) { return part * WIDE + (column ^ (part % 4 * 8)); }
  __device__ __forceinline__ float2 sum(int column) const {  // of columns column, column + 1
    float2 p[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) p[i] = *(const float2*)&x[0][place(i, column)];
    return sum_of_parts(p);
  }
};

// Tokens row[0 .. count - 1], with outputs for own rows. A row's output is computed beside the sums of the next row's key,
// which wait for each other. After the last row a key is read that no one needs.
template <class R>
__device__ __forceinline__ void steps(Columns& columns, const R* row, int count, Outputs* outputs) {
  constexpr bool own = sizeof(R) == sizeof(OwnRow);
  constexpr int ROW = sizeof(R) / 4, OUTPUTS = PARTS * WIDE;
  if (count <= 0) return;
  auto& s = columns.s;
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * OWNED + lane % 4 * 2, column = lane / 16;
  // Of this row and of the output before: addresses that grow are cheaper than those computed from r.
  const float *key = row->k + lane / 4 * 4, *gates = &row->decay, *values = row->v + first + column;
  float* to[2];
#pragma unroll
  for (int c = 0; c < 2; c++) to[c] = own ? outputs->x[0] + Outputs::place(lane / 4, first) + (column ^ c) : nullptr;
  Vector k, q;
  float sum[2], o[2];
  k.load(key);
  if constexpr (own) q = k;
  columns.dot(sum, k);
#pragma unroll 2
  for (int r = 0; r < count; r++) {
    const float2 gate = *(const float2*)gates;
    const float value = *values;
    float all = join(sum[0], sum[1], 16);
    all = join(all, all, 8);
    all = join(all, all, 4);
    if constexpr (own) {
      columns.dot(o, q);  // of the row before; the first is nobody's
      if (r > 0) {
#pragma unroll
        for (int c = 0; c < 2; c++) *to[c] = o[c], to[c] += OUTPUTS;
      }
      q.load(key + sizeof(Row) / 4);
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int c = 0; c < 2; c++) s[m][e][c] = __fmul_rn(gate.x, s[m][e][c]);
    const float d0 = __fmul_rn(__fsub_rn(value, __fmul_rn(gate.x, all)), gate.y);
    const float d[2] = {d0, __shfl_xor_sync(ALL, d0, 16)};
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int e = 0; e < 4; e++)
#pragma unroll
        for (int c = 0; c < 2; c++) s[m][e][c] = __fmaf_rn(k.x[m][e], d[c], s[m][e][c]);
    key += ROW, gates += ROW, values += ROW;
    k.load(key);
    columns.dot(sum, k);
  }
  if constexpr (own) {
    columns.dot(o, q);
#pragma unroll
    for (int c = 0; c < 2; c++) *to[c] = o[c];
  }
}

struct RawTape {  // BF16 inputs of a row of the tape
  u16 k[D], v[WIDE];
};
struct RawOwn {  // of an own row
  u16 q[D], k[D], v[WIDE];
};

struct Head {
  float tile[D * WIDE];  // the block's part of S, see Tile
  union {
    struct {  // until the own rows begin
      Row rows[BLOCK];
      RawTape raw[BEFORE + BLOCK];
      float conv[TAPS][2 * D + WIDE];  // weights of q, k, v
    } before;
    Outputs outputs[BLOCK];
  };
  OwnRow rows[BLOCK];
  RawOwn raw[BEFORE + BLOCK];  // the rows before the first own row, then own
  float squares[BLOCK];        // of the other block
  u64 squares_there;           // mbarrier
  int hint;
};
static_assert(sizeof(Head) == 98512, "delta.py has this number");

// The block's part of S [D, WIDE] in shared memory, so that device memory is read and written in whole lines. Groups of
// 4 columns are exchanged such that neither rows (device memory) nor the lanes of a warp (registers) share banks.
struct Tile {
  float* x;
  float* state;  // of the block
  static __device__ __forceinline__ int place(int k, int group) {
    const int four = k / 4 % 16, turned = (four & 8) | (four << 1 & 6) | (four >> 2 & 1);
    return k * WIDE + (group ^ turned) * 4;
  }
  // Of eight rows: they have one exchange.
  static __device__ __forceinline__ int row(int n) { return n / 4 * 64 + n % 4; }
  __device__ __forceinline__ void fetch() const {  // by the first WARPS warps
    const int k = threadIdx.x / 16 * 4, group = threadIdx.x % 16;
#pragma unroll
    for (int n = 0; n < 8; n++) copy16(x + place(k, group) + row(n) * WIDE, state + (k + row(n)) * D + group * 4);
  }
  __device__ __forceinline__ void flush() const {  // by one warp
    const int group = threadIdx.x % 16;
#pragma unroll 1
    for (int k = threadIdx.x % 32 / 16 * 4; k < 64; k += 8) {
      uint4 part[8];
#pragma unroll
      for (int n = 0; n < 8; n++) part[n] = *(const uint4*)(x + place(k, group) + row(n) * WIDE);
#pragma unroll
      for (int n = 0; n < 8; n++) __stcg((uint4*)(state + (k + row(n)) * D + group * 4), part[n]);
    }
  }
  __device__ __forceinline__ void flush_all() const {  // as fetch
    const int k = threadIdx.x / 16 * 4, group = threadIdx.x % 16;
#pragma unroll
    for (int n = 0; n < 8; n++)
      __stcg((uint4*)(state + (k + row(n)) * D + group * 4), *(const uint4*)(x + place(k, group) + row(n) * WIDE));
  }
  __device__ __forceinline__ float* at(int m, int e) const {  // 2 columns of an element of the lane
    const int k = m * 32 + threadIdx.x % 32 / 4 * 4, pair = threadIdx.x / 32 * 4 + threadIdx.x % 4;
    return x + place(k, pair / 2) + e * WIDE + pair % 2 * 2;
  }
  __device__ __forceinline__ void get(Columns& columns) const {
    const bool swap = threadIdx.x / 16 % 2;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float2 pair = *(const float2*)at(m, e);
        columns.s[m][e][0] = swap ? pair.y : pair.x, columns.s[m][e][1] = swap ? pair.x : pair.y;
      }
  }
  __device__ __forceinline__ void put(const Columns& columns) const {
    const bool swap = threadIdx.x / 16 % 2;
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float* s = columns.s[m][e];
        *(float2*)at(m, e) = make_float2(swap ? s[1] : s[0], swap ? s[0] : s[1]);
      }
  }
};

__device__ __forceinline__ u32 in_other(const void* shared) {  // the same place in the cluster's other block
  return address_in(shared_address(shared), cluster_rank() ^ 1);
}
// The cluster starts: a barrier of this block for `bytes` that the other sends. cluster_wait before the first send.
__device__ __forceinline__ void cluster_start(u64* barrier, int bytes) {
  if (threadIdx.x == 0) {
    barrier_init(shared_address(barrier), 1);
    barrier_expect(shared_address(barrier), bytes);
    barriers_ready();
  }
  __syncwarp();
  cluster_arrive();
}
__device__ __forceinline__ void send(const float* to, float x, const u64* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(in_other(to)),
               "r"(__float_as_uint(x)), "r"(in_other(barrier))
               : "memory");
}

struct Channels {  // the first of a block's q, k and v in a row of raw inputs
  int q, k, v;
  // A row, by a warp.
  __device__ __forceinline__ void fetch(RawTape* to, const u16* row) const {
    const int lane = threadIdx.x % 32;
    if (lane < (D + WIDE) / 8) copy16(to->k + lane * 8, row + (lane < D / 8 ? k : v - D) + lane * 8);
  }
  __device__ __forceinline__ void fetch(RawOwn* to, const u16* row) const {  // own rows are aligned to 8 bytes only
    const int i = threadIdx.x % 32 * 4;
    copy8(to->q + i, row + q + i);
    copy8(to->k + i, row + k + i);
    if (i < WIDE) copy8(to->v + i, row + v + i);
  }
  // q and k of a row, by a warp.
  __device__ __forceinline__ void write(u16* row, const RawOwn& from) const {
    const int lane = threadIdx.x % 32;
    *(uint4*)(row + (lane < D / 8 ? q : k - D) + lane * 8) = *(const uint4*)(from.q + lane * 8);
  }
};

// R consecutive rows of E channels a lane, convolved; raw: of the row BEFORE the first, `stride` apart.
template <int E, int R>
__device__ __forceinline__ void convolve_rows(float (&x)[R][E], const u16* raw, int stride, const float* weight) {
  Raw<E> u[BEFORE + R];
#pragma unroll
  for (int n = 0; n < BEFORE + R; n++) u[n].load_shared(raw + n * stride);
  Weights<E> weights;
  weights.load(weight, 2 * D + WIDE);
#pragma unroll
  for (int r = 0; r < R; r++) convolve<E>(x[r], u + r, weights, TAPS);
}

// As `normalise` does, N vectors side by side; the first `queries` are queries.
template <int N>
__device__ __forceinline__ void normalise_all(float (&x)[N][4], int queries) {
  float squares[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    squares[n] = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; e++) squares[n] = __fmaf_rn(x[n][e], x[n][e], squares[n]);
  }
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2)
#pragma unroll
    for (int n = 0; n < N; n++) squares[n] = join(squares[n], squares[n], bit);
#pragma unroll
  for (int n = 0; n < N; n++) {
    float factor = reciprocal_root_fast(__fadd_rn(squares[n], 1e-6f));
    if (n < queries) factor = __fmul_rn(factor, reciprocal_root_fast(D));
#pragma unroll
    for (int e = 0; e < 4; e++) x[n][e] = __fmul_rn(x[n][e], factor);
  }
}

// What a warp makes of the raw inputs of a row of the tape, and of two own rows.
__device__ __forceinline__ void prepare(const float (*conv)[2 * D + WIDE], Row* to, const RawTape* raw) {
  const int lane = threadIdx.x % 32;
  float k[1][4], v[1][2];
  convolve_rows(k, raw->k + lane * 4, sizeof(RawTape) / 2, conv[0] + D + lane * 4);
  convolve_rows(v, raw->v + lane * 2, sizeof(RawTape) / 2, conv[0] + 2 * D + lane * 2);
  write_vector(to->v + lane * 2, v[0]);
  normalise_all(k, 0);
  write_vector(to->k + lane * 4, k[0]);
}
__device__ __forceinline__ void prepare(const float (*conv)[2 * D + WIDE], OwnRow* to, const RawOwn* raw) {
  static constexpr int STRIDE = sizeof(RawOwn) / 2;
  const int lane = threadIdx.x % 32;
  float x[4][4], v[2][2];
  convolve_rows(*(float (*)[2][4])x, raw->q + lane * 4, STRIDE, conv[0] + lane * 4);
  convolve_rows(*(float (*)[2][4])(x + 2), raw->k + lane * 4, STRIDE, conv[0] + D + lane * 4);
  convolve_rows(v, raw->v + lane * 2, STRIDE, conv[0] + 2 * D + lane * 2);
  normalise_all(x, 2);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    write_vector(to[r].q + lane * 4, x[r]);
    write_vector(to[r].k + lane * 4, x[2 + r]);
    write_vector(to[r].v + lane * 2, v[r]);
  }
}

// Outputs of all rows, of the columns of WARPS warps: summed, normed with the squares of the other block, gated.
template <class H>
__device__ __forceinline__ void finish(H& h, const u16* z, const float* norm, u16* out, int first_row, int own,
                                       int head, int rank, int z_stride, int out_stride, float eps) {
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int column = head * D + rank * WIDE + lane * 2;
  const float2 weight = *(const float2*)(norm + rank * WIDE + lane * 2);
  u32 z_raw[2] = {0u, 0u};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (warp + i * WARPS < own)
      z_raw[i] = __ldcg((const u32*)(z + (u64)(first_row + warp + i * WARPS) * z_stride + column));
  named_barrier<WARPS * 32>(1);
  float2 o[2];
  float squares[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    o[i] = h.outputs[warp + i * WARPS].sum(lane * 2), squares[i] = __fmaf_rn(o[i].y, o[i].y, __fmul_rn(o[i].x, o[i].x));
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2)
#pragma unroll
    for (int i = 0; i < 2; i++) squares[i] = join(squares[i], squares[i], bit);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (lane == 0 && warp + i * WARPS < own) send(&h.squares[warp + i * WARPS], squares[i], &h.squares_there);
  float2 gate[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    gate[i] = make_float2(silu(bf16_low(z_raw[i])), silu(bf16_high(z_raw[i])));
    asm volatile("" : "+f"(gate[i].x), "+f"(gate[i].y));  // computed before the other block's sums are there
  }
  barrier_wait_cluster(shared_address(&h.squares_there), 0);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = warp + i * WARPS;
    if (r < own)
      *(u32*)(out + element_at(out_stride, first_row + r, column)) =
          gated_norm(o[i], __fadd_rn(squares[i], h.squares[r]), D, eps, weight, gate[i]);
  }
}

// Zeros for an idle slot.
__device__ __forceinline__ void leave_idle(u16* out, int first_row, int own, int column, int out_stride, int warps) {
  pdl_wait();
  pdl_trigger();
#pragma unroll 1
  for (int r = threadIdx.x / 32; r < own; r += warps) *(u32*)(out + element_at(out_stride, first_row + r, column)) = 0u;
}

// Grid [Hv, 2, slots]. A warp prepares rows, then has 8 columns; the last warp has the gates, and writes S and the tape
// beside the rows' recurrence. Each block prepares the whole of q and k; the two share their sums of squares.
//
// Before griddepcontrol.wait the kernel reads S, the history and the tape, prepares the pending rows and replays them.
// These were written by this layer's last pass, and a kernel that waits before it triggers lies between (prelude.cuh), so
// they are there. The number of pending rows may come from the kernel right before: it is a hint until the wait, and
// blocks may even read different hints; a wrong one costs time only.
//
// q and k of the tape and of the history belong to all blocks of a key head: the last of them to have read them writes
// them. No fence is needed: what a block has read has returned before the barrier that its arrival follows. arrived
// [slots, Hk] counts, and is zero again afterwards. v of a block's columns is its own. g and beta are the head's: its
// first block writes them after the other's message.
extern "C" __global__ void __cluster_dims__(1, CLUSTER, 1) __launch_bounds__((WARPS + 1) * 32, 2)
    delta_verify(const u16* qkv, const u16* z, const u16* a, const u16* b, int qkv_stride, int z_stride, int a_stride,
                 int b_stride, const float* conv, const float* a_log, const float* dt_bias, const float* norm,
                 float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, int* arrived, u16* out,
                 const int* control, int lanes, int own, int tape_rows, int hk, int hv, int out_stride, float eps) {
  extern __shared__ uint4 dynamic[];
  Head& h = *(Head*)dynamic;
  const int* words = words_of(control, blockIdx.z);
  const int seen = min(early_word(words + PENDING), BLOCK);  // a hint, and not the same one for all threads
  const int home = home_of(words, lanes), first_row = blockIdx.z * own;
  const int head = blockIdx.x, rank = blockIdx.y, key_head = head / (hv / hk);
  const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const bool helper = warp == WARPS;
  const int channels = 2 * hk * D + hv * D;
  if (home < 0) return leave_idle(out, first_row, own, head * D + rank * WIDE + lane * 2, out_stride, WARPS + 1);
  state += (u64)home * hv * D * D, history += (u64)home * BEFORE * channels;
  tape_u += (u64)home * tape_rows * channels;
  const int gates = home * tape_rows * hv + head;  // of the tape's first row
  const Channels at{key_head * D, (hk + key_head) * D, 2 * hk * D + head * D + rank * WIDE};
  const Line line{history, tape_u, qkv, BLOCK, channels, qkv_stride, TAPS};
  const Tile tile{h.tile, state + (u64)head * D * D + rank * WIDE};
  cluster_start(&h.squares_there, own * 4);

  auto fetch_tape = [&](int t) { at.fetch(&h.before.raw[BEFORE + t], line.row(t)); };
  float tape_gate[2] = {0.0f, 0.0f};    // a row of the tape a lane of the last warp: g, beta
  auto fetch_rest = [&](int pending) {  // what depends on the number of pending rows
    if (helper) {
      const int i = gates + lane * hv;
      if (lane < pending) tape_gate[0] = __ldcg(tape_g + i), tape_gate[1] = __ldcg(tape_beta + i);
      return;
    }
    if (warp < BEFORE) at.fetch(&h.raw[warp], line.row(pending - BEFORE + warp));
#pragma unroll 1
    for (int t = WARPS + warp; t < pending; t += WARPS) fetch_tape(t);
  };
  auto prepare_pending = [&](int pending) {
    if (helper) {
      if (lane < pending) *(float2*)&h.before.rows[lane].decay = make_float2(expf(tape_gate[0]), tape_gate[1]);
      return;
    }
#pragma unroll 1
    for (int t = warp; t < pending; t += WARPS) prepare(h.before.conv, &h.before.rows[t], &h.before.raw[t]);
  };
  Columns s;
  auto replay_pending = [&](int pending) {
    if (helper) return;
    tile.get(s);
    steps(s, h.before.rows, pending, h.outputs);
    if (pending > 0) tile.put(s);
  };

  // Weights, and the rows of the tape that are mostly pending, first.
  if (!helper) {
    const int n = threadIdx.x / 64, c = threadIdx.x % 64 * 4;
    copy16(&h.before.conv[n][c], conv + n * channels + (c < D ? at.q : at.k - D) + c);
  }
  if (warp >= WARPS - 1) {
    const int n = threadIdx.x / 16 % 4, c = threadIdx.x % 16 * 4;
    copy16(&h.before.conv[n][2 * D + c], conv + n * channels + at.v + c);
  }
  if (warp < BEFORE) fetch_tape(warp - BEFORE);
  if (!helper && warp < tape_rows) fetch_tape(warp);
  copy_commit();
  if (!helper) tile.fetch();
  copy_commit();
  fetch_rest(seen);
  copy_commit();
  if (threadIdx.x == 0) h.hint = seen;
  float rate = 0.0f, bias = 0.0f;
  if (helper) rate = a_log[head], bias = dt_bias[head];
  if (seen > WARPS)
    copy_wait<0>();
  else
    copy_wait<2>();
  __syncthreads();  // weights and the tape are there
  const int hint = h.hint;
  prepare_pending(hint);
  copy_wait<0>();
  __syncthreads();  // S and the pending rows are there
  replay_pending(hint);
  pdl_wait();
  pdl_trigger();

  const int pending = min(__ldcg(words + PENDING), BLOCK);
  u16 a_raw = 0, b_raw = 0;
  if (helper && lane < own)
    a_raw = a[(u64)(first_row + lane) * a_stride + head], b_raw = b[(u64)(first_row + lane) * b_stride + head];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = warp + i * WARPS;
    if (helper || r >= own) continue;
    at.fetch(&h.raw[BEFORE + r], qkv + (u64)(first_row + r) * qkv_stride);
  }
  copy_commit();
  copy_wait<0>();
  if (__syncthreads_or(seen != pending)) {  // a wrong hint: again
    fetch_rest(pending);
    if (!helper) tile.fetch();
    if (!helper && warp < tape_rows) fetch_tape(warp);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    prepare_pending(pending);
    __syncthreads();
    replay_pending(pending);
  }
  if (helper) {
    const float g = log_decay(a_raw, -expf(rate), bias);
    if (lane < own) *(float4*)&h.rows[lane].decay = make_float4(expf(g), sigmoid(from_bf16(b_raw)), g, 0.0f);
  } else if (2 * warp < own) {
    prepare(h.before.conv, &h.rows[2 * warp], &h.raw[2 * warp]);
  }
  __syncthreads();  // all rows and the new S are there; this block has read the tape and the history

  cluster_wait();
  if (helper) {
    int arrivals = 0;
    if (lane == 0) arrivals = atomicAdd(arrived + blockIdx.z * hk + key_head, 1);
    if (pending > 0) tile.flush();
#pragma unroll 4
    for (int r = lane / 8; r < own; r += 4)
      *(uint4*)(tape_u + (u64)r * channels + at.v + lane % 8 * 8) = *(const uint4*)(h.raw[BEFORE + r].v + lane % 8 * 8);
    if (pending > 0 && lane / 8 < BEFORE)
      *(uint4*)(history + (u64)(lane / 8) * channels + at.v + lane % 8 * 8) =
          *(const uint4*)(h.raw[lane / 8].v + lane % 8 * 8);
    if (__shfl_sync(ALL, arrivals, 0) == CLUSTER * (hv / hk) - 1) {
#pragma unroll 4
      for (int r = 0; r < own; r++) at.write(tape_u + (u64)r * channels, h.raw[BEFORE + r]);
      if (pending > 0)
        for (int n = 0; n < BEFORE; n++) at.write(history + (u64)n * channels, h.raw[n]);
      if (lane == 0) arrived[blockIdx.z * hk + key_head] = 0;
    }
    if (own > 0) barrier_wait_cluster(shared_address(&h.squares_there), 0);
    if (rank == 0 && lane < own) {
      tape_g[gates + lane * hv] = h.rows[lane].g;
      tape_beta[gates + lane * hv] = h.rows[lane].beta;
    }
    return;
  }
  steps(s, h.rows, own, h.outputs);
  if (own > 0) finish(h, z, norm, out, first_row, own, head, rank, z_stride, out_stride, eps);
}

}  // namespace clustered
#endif
