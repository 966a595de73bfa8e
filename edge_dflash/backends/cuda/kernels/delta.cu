// The gated delta layer of one pass: prepare (convolution, norms, gates of pending and own rows), recurrence, gated norm.
//
// S [Hv, Dk, Dv] FP32 and history [K-1, C] BF16 (oldest first) hold the base. The tape holds the rows of the last
// verify: u [rows, C] BF16, g and beta [rows, Hv] FP32; its first `pending` rows are committed but not in S. A pass
// replays them, then runs its own rows with the same instructions, so replayed bits equal first-run bits. S is read
// once and written once: after the replay, or after the own rows when the pass commits (prefill). With no own rows
// the same kernels are a flush.
//
// Columns of S are independent. A warp owns 4 columns of one head; a lane has Dk / 32 elements of each in registers. Two
// paths give the same bits: three kernels with scratch between them (prefill, and every arch and shape), and one kernel
// whose clusters of two blocks are the heads (verify and flush of 128-wide heads: delta_cluster.cuh).
#include "blocks.cuh"
#include "cluster.cuh"

static constexpr int PREPARE_WARPS = 8, PREPARE_ROWS = 4;
static constexpr int COLUMNS = 16;  // of S a block of the recurrence, 4 a warp
static constexpr int THREADS = COLUMNS / 4 * 32;
static constexpr int STAGE = 16;  // rows in shared memory at a time, twice
static constexpr int TAPS = 4;    // longest convolution; shorter ones have leading zeros
static constexpr int PARTS = 8;   // partial sums of an output that the recurrence leaves

struct Scratch {     // FP32, row t of pending then own rows
  float *q, *k, *v;  // [T, Hk*Dk], [T, Hk*Dk], [T, Hv*Dv]
  float4* gate;      // [T, Hv]: decay exp(g), beta, g, unused
  float* o;          // [own rows, Hv*Dv]
};
__device__ __forceinline__ Scratch scratch_at(float* base, int most, int hk, int hv, int dk, int dv) {
  Scratch s;
  s.gate = (float4*)base;
  s.q = base + (u64)most * hv * 4;
  s.k = s.q + (u64)most * hk * dk;
  s.v = s.k + (u64)most * hk * dk;
  s.o = s.v + (u64)most * hv * dv;
  return s;
}

__device__ __forceinline__ int own_rows(const int* rows_there, int rows) {
  return rows_there ? min(*rows_there, rows) : rows;
}

// BF16 inputs of the convolution: row t < 0 is history, t < pending tape, then own.
struct Line {
  const u16 *history, *tape, *own;
  int pending, channels, own_stride, taps;
  __device__ __forceinline__ const u16* row(int t) const {
    if (t < 0) return history + (u64)(taps - 1 + t) * channels;
    return t < pending ? tape + (u64)t * channels : own + (u64)(t - pending) * own_stride;
  }
};

// ------------------------------------------------------------------------------------ arithmetic that both paths share

template <int E>
__device__ __forceinline__ void read_vector(float (&to)[E], const float* from) {
  if constexpr (E == 4) {
    const float4 x = *(const float4*)from;
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (E == 2) {
    const float2 x = *(const float2*)from;
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = *from;
  }
}

template <int E>
__device__ __forceinline__ void write_vector(float* to, const float (&x)[E]) {
  if constexpr (E == 4) {
    *(float4*)to = make_float4(x[0], x[1], x[2], x[3]);
  } else if constexpr (E == 2) {
    *(float2*)to = make_float2(x[0], x[1]);
  } else {
    *to = x[0];
  }
}

template <int E>
struct Raw {  // E channels of a row of BF16 inputs
  u16 x[E];
  __device__ __forceinline__ void load(const u16* p) {
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = __ldcg(p + e);
  }
  __device__ __forceinline__ float at(int e) const { return from_bf16(x[e]); }
};
template <>
struct Raw<2> {
  u32 x;
  __device__ __forceinline__ void load(const u16* p) { x = __ldcg((const u32*)p); }
  __device__ __forceinline__ void load_shared(const u16* p) { x = *(const u32*)p; }
  __device__ __forceinline__ float at(int e) const { return e ? bf16_high(x) : bf16_low(x); }
};
template <>
struct Raw<4> {
  uint2 x;
  __device__ __forceinline__ void load(const u16* p) { x = __ldcg((const uint2*)p); }
  __device__ __forceinline__ void load_shared(const u16* p) { x = *(const uint2*)p; }
  __device__ __forceinline__ float at(int e) const {
    const u32 pair = e < 2 ? x.x : x.y;
    return e % 2 ? bf16_high(pair) : bf16_low(pair);
  }
};

// Weights of E channels, [TAPS, stride] from the first of them.
template <int E>
struct Weights {
  float w[TAPS][E];
  __device__ __forceinline__ void load(const float* first, int stride) {
#pragma unroll
    for (int n = 0; n < TAPS; n++) read_vector(w[n], first + (u64)n * stride);
  }
};

// Convolution and SiLU of E channels; u: the rows t - 3 .. t, of which the last `taps` count.
template <int E>
__device__ __forceinline__ void convolve(float (&x)[E], const Raw<E>* u, const Weights<E>& weights, int taps) {
#pragma unroll
  for (int e = 0; e < E; e++) x[e] = 0.0f;
#pragma unroll
  for (int n = 0; n < TAPS; n++)
    if (n >= TAPS - taps)
#pragma unroll
      for (int e = 0; e < E; e++) x[e] = __fmaf_rn(u[n].at(e), weights.w[n][e], x[e]);
#pragma unroll
  for (int e = 0; e < E; e++) x[e] = silu(x[e]);
}

template <int E>
__device__ __forceinline__ void normalise(float (&x)[E], bool query) {
  // x / sqrt(sum(x^2) + 1e-6), a query also / sqrt(D); a warp has the D = 32 E elements
  float squares = 0.0f;
#pragma unroll
  for (int e = 0; e < E; e++) squares = __fmaf_rn(x[e], x[e], squares);
  float factor = reciprocal_root_fast(__fadd_rn(lane_sum<32>(squares), 1e-6f));
  if (query) factor = __fmul_rn(factor, reciprocal_root_fast(32 * E));
#pragma unroll
  for (int e = 0; e < E; e++) x[e] = __fmul_rn(x[e], factor);
}

__device__ __forceinline__ float log_decay(u16 a, float rate, float dt_bias) {  // rate: -exp(a_log)
  const float x = __fadd_rn(from_bf16(a), dt_bias);
  return __fmul_rn(rate, x > 20.0f ? x : log1pf(expf(x)));
}

// A lane's part of 4 columns of S [DK, dv], and what a token does to it. Elements lane * KE + e of the columns; slot c
// is column c ^ (lane / 8), so that the sums over lanes leave each column in a quarter of the lanes without a choice.
template <int DK>
struct Columns {
  static constexpr int KE = DK / 32;
  float s[KE][4];

  __device__ __forceinline__ void turn() {  // between memory order and slots; its own inverse
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < KE; e++)
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
        const bool swap = lane / 8 & bit;
#pragma unroll
        for (int c = 0; c < 4; c++)
          if (!(c & bit)) {
            const float x = s[e][c], y = s[e][c | bit];
            s[e][c] = swap ? y : x, s[e][c | bit] = swap ? x : y;
          }
      }
  }
  __device__ __forceinline__ void load(const float* first, int dv) {
#pragma unroll
    for (int e = 0; e < KE; e++) {
      const float4 x = __ldcg((const float4*)(first + (u64)(threadIdx.x % 32 * KE + e) * dv));
      s[e][0] = x.x, s[e][1] = x.y, s[e][2] = x.z, s[e][3] = x.w;
    }
  }
  __device__ __forceinline__ void store(float* first, int dv) const {
    Columns<DK> x = *this;
    x.turn();
#pragma unroll
    for (int e = 0; e < KE; e++)
      *(float4*)(first + (u64)(threadIdx.x % 32 * KE + e) * dv) =
          make_float4(x.s[e][0], x.s[e][1], x.s[e][2], x.s[e][3]);
  }
};

// A token in shared memory; W columns of values.
template <int DK, int W>
struct Row {
  float k[DK], q[DK], v[W], decay, beta, g, unused;
};

template <int DK, bool own>
struct Token {  // what a lane needs of it
  float k[DK / 32], q[DK / 32], v;
  float2 gate;
  template <int W>
  __device__ __forceinline__ void load(const Row<DK, W>& in) {
    const int lane = threadIdx.x % 32;
    read_vector(k, in.k + lane * (DK / 32));
    gate = *(const float2*)&in.decay;
    v = in.v[threadIdx.x / 32 * 4 + lane / 8];
    if (own) read_vector(q, in.q + lane * (DK / 32));
  }
};

// One token: S <- decay S + k d^T with d = beta (v - decay S^T k). Every sum over lanes goes through bits 4, 3, 2, 1, 0
// of the lane; after bits 4 and 3 a lane has column lane / 8. Own rows: returns one of the 8 parts of S^T q of it.
template <int DK, bool own>
__device__ __forceinline__ float step(Columns<DK>& columns, const Token<DK, own>& in) {
  constexpr int KE = DK / 32;
  auto& s = columns.s;
  auto join = [](float x, float other, int bit) { return __fadd_rn(x, __shfl_xor_sync(ALL, other, bit)); };
  auto dot = [&](const float (&x)[KE]) {
    float sum[4];
#pragma unroll
    for (int c = 0; c < 4; c++) sum[c] = __fmul_rn(x[0], s[0][c]);
#pragma unroll
    for (int e = 1; e < KE; e++)
#pragma unroll
      for (int c = 0; c < 4; c++) sum[c] = __fmaf_rn(x[e], s[e][c], sum[c]);
    return join(join(sum[0], sum[2], 16), join(sum[1], sum[3], 16), 8);
  };
  float sum = dot(in.k);
  sum = join(sum, sum, 4);
  sum = join(sum, sum, 2);
  sum = join(sum, sum, 1);
  const float decay = in.gate.x;
  float d[4];
  d[0] = __fmul_rn(__fsub_rn(in.v, __fmul_rn(decay, sum)), in.gate.y);
#pragma unroll
  for (int c = 1; c < 4; c++) d[c] = __shfl_xor_sync(ALL, d[0], c * 8);
#pragma unroll
  for (int e = 0; e < KE; e++)
#pragma unroll
    for (int c = 0; c < 4; c++) s[e][c] = __fmaf_rn(in.k[e], d[c], __fmul_rn(decay, s[e][c]));
  return own ? dot(in.q) : 0.0f;
}

// Parts of outputs in shared memory, without bank conflicts where a lane writes part lane % 8 of column lane / 8.
template <int W>
struct Parts {
  float x[PARTS][W + 4];
  __device__ __forceinline__ float2 sum(int column) const {  // of columns column, column + 1
    float2 p[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) p[i] = *(const float2*)&x[i][column];
#pragma unroll
    for (int width = 1; width < PARTS; width *= 2)
#pragma unroll
      for (int i = 0; i < PARTS; i += 2 * width)
        p[i].x = __fadd_rn(p[i].x, p[i + width].x), p[i].y = __fadd_rn(p[i].y, p[i + width].y);
    return p[0];
  }
};

// Tokens rows[0 .. count - 1]; the next token's operands are under way while one is computed.
template <int DK, bool own, int W>
__device__ __forceinline__ void steps(Columns<DK>& s, const Row<DK, W>* rows, int count, Parts<W>* parts) {
  if (count <= 0) return;
  float* o = &parts->x[threadIdx.x % 8][threadIdx.x / 32 * 4 + threadIdx.x % 32 / 8];
  Token<DK, own> token, next;
  token.load(*rows);
#pragma unroll 2
  for (int r = 0; r < count; r++) {
    if (r + 1 < count) rows++;
    next.load(*rows);
    const float part = step<DK, own>(s, token);
    if (own) *o = part, o += sizeof(Parts<W>) / 4;
    token = next;
  }
}

// Gated RMS norm, 2 columns a lane. Squares are summed over 64 columns by a warp, then over the head in order.
__device__ __forceinline__ float squares_of_64(const float2& x) {
  return lane_sum<32>(__fmaf_rn(x.y, x.y, __fmul_rn(x.x, x.x)));
}
__device__ __forceinline__ u32 gated_norm(const float2& o, float squares, int dv, float eps, const float2& weight,
                                          const float2& gate) {          // gate: silu(z)
  const float share = __uint_as_float((127u - (31 - __clz(dv))) << 23);  // 1 / dv, a power of two
  const float inverse = reciprocal_root_fast(__fmaf_rn(squares, share, eps));
  return pack_bf16(__fmul_rn(__fmul_rn(__fmul_rn(o.x, inverse), weight.x), gate.x),
                   __fmul_rn(__fmul_rn(__fmul_rn(o.y, inverse), weight.y), gate.y));
}
__device__ __forceinline__ u32 gated_norm(const float2& o, float squares, int dv, float eps, const float2& weight,
                                          u32 z) {
  return gated_norm(o, squares, dv, eps, weight, make_float2(silu(bf16_low(z)), silu(bf16_high(z))));
}

// ------------------------------------------------------------------------------------------------- path of three kernels

// Rows t .. stop - 1 (PREPARE_ROWS at most) of 32 E channels from `first`, a warp: convolved, and q and k normalised, to
// out [T, stride] from `column`.
template <int E>
__device__ __forceinline__ void prepare_head(const Line& line, const float* weight, int t, int stop, int first,
                                             float* out, int stride, int column, bool norm, bool query) {
  const int lane = threadIdx.x % 32, at = first + lane * E;
  Weights<E> weights;
  weights.load(weight + at, line.channels);
  Raw<E> u[TAPS - 1 + PREPARE_ROWS];
#pragma unroll
  for (int n = 0; n < TAPS - 1 + PREPARE_ROWS; n++)
    if (n >= TAPS - line.taps && t + n - (TAPS - 1) < stop) u[n].load(line.row(t + n - (TAPS - 1)) + at);
#pragma unroll
  for (int r = 0; r < PREPARE_ROWS; r++) {
    if (t + r >= stop) return;
    float x[E];
    convolve<E>(x, u + r, weights, line.taps);
    if (norm) normalise<E>(x, query);
    write_vector(out + (u64)(t + r) * stride + column + lane * E, x);
  }
}
__device__ __forceinline__ void prepare_head(int dim, const Line& line, const float* weight, int t, int stop, int first,
                                             float* out, int stride, int column, bool norm, bool query) {
  if (dim == 128) prepare_head<4>(line, weight, t, stop, first, out, stride, column, norm, query);
  if (dim == 64) prepare_head<2>(line, weight, t, stop, first, out, stride, column, norm, query);
  if (dim == 32) prepare_head<1>(line, weight, t, stop, first, out, stride, column, norm, query);
}

// One warp per PREPARE_ROWS rows (pending, then own; blockIdx.y) and head: Hk queries, Hk keys, Hv values.
extern "C" __global__ void __launch_bounds__(PREPARE_WARPS * 32)
    delta_prepare(const u16* qkv, const u16* a, const u16* b, int qkv_stride, int a_stride, int b_stride,
                  const float* conv, const float* a_log, const float* dt_bias, const u16* history, const u16* tape_u,
                  const float* tape_g, const float* tape_beta, float* scratch, const int* pending_there,
                  const int* rows_there, int rows, int most_rows, int hk, int hv, int dk, int dv, int taps) {
  pdl_wait();
  pdl_trigger();
  const int slot = blockIdx.x * PREPARE_WARPS + threadIdx.x / 32, first = blockIdx.y * PREPARE_ROWS;
  const int pending = *pending_there, own = own_rows(rows_there, rows), stop = min(first + PREPARE_ROWS, pending + own);
  if (slot >= 2 * hk + hv || first >= stop) return;
  const Scratch s = scratch_at(scratch, most_rows, hk, hv, dk, dv);
  const Line line{history, tape_u, qkv, pending, 2 * hk * dk + hv * dv, qkv_stride, taps};
  if (slot < 2 * hk) {
    const int head = slot % hk;
    prepare_head(dk, line, conv, first, stop, slot * dk, slot < hk ? s.q : s.k, hk * dk, head * dk, true, slot < hk);
    return;
  }
  const int head = slot - 2 * hk, t = first + threadIdx.x % 32;
  if (t < stop) {
    float g, beta;
    if (t < pending) {
      g = tape_g[(u64)t * hv + head], beta = tape_beta[(u64)t * hv + head];
    } else {
      const int r = t - pending;
      g = log_decay(a[(u64)r * a_stride + head], -expf(a_log[head]), dt_bias[head]);
      beta = sigmoid(from_bf16(b[(u64)r * b_stride + head]));
    }
    s.gate[(u64)t * hv + head] = make_float4(expf(g), beta, g, 0.0f);
  }
  prepare_head(dv, line, conv, first, stop, 2 * hk * dk + head * dv, s.v, hv * dv, head * dv, false, false);
}

template <int DK>
__device__ __forceinline__ void load_stage(Row<DK, COLUMNS>* to, const Scratch& s, int first, int count, int head,
                                           int key_head, int hk, int hv, int dv) {
  constexpr int PIECES = DK / 4;
  for (int i = threadIdx.x; i < count * PIECES; i += THREADS) {
    const int r = i / PIECES, c = i % PIECES * 4;
    const u64 at = ((u64)(first + r) * hk + key_head) * DK + c;
    copy16(&to[r].k[c], s.k + at);
    copy16(&to[r].q[c], s.q + at);
  }
  for (int i = threadIdx.x; i < count * COLUMNS / 4; i += THREADS) {
    const int r = i / (COLUMNS / 4), c = i % (COLUMNS / 4) * 4;
    copy16(&to[r].v[c], s.v + ((u64)(first + r) * hv + head) * dv + blockIdx.y * COLUMNS + c);
  }
  for (int r = threadIdx.x; r < count; r += THREADS) copy16(&to[r].decay, s.gate + (u64)(first + r) * hv + head);
  copy_commit();
}

// Base of the convolution and the tape after this pass, by the blocks of the last row of the grid. A thread owns
// whole channel pairs; prepare has read them.
__device__ __forceinline__ void write_tape(const Line& line, u16* history, u16* tape_u, float* tape_g, float* tape_beta,
                                           const Scratch& s, int own, int hv, bool commits) {
  const int threads = gridDim.x * THREADS, id = blockIdx.x * THREADS + threadIdx.x;
  const int base = line.pending + (commits ? own : 0);
  for (int c = id * 2; c < line.channels; c += threads * 2) {
    if (base > 0) {
      u32 last[TAPS - 1];
#pragma unroll
      for (int n = 0; n < TAPS - 1; n++)
        if (n < line.taps - 1) last[n] = *(const u32*)(line.row(base - (line.taps - 1) + n) + c);
#pragma unroll
      for (int n = 0; n < TAPS - 1; n++)
        if (n < line.taps - 1) *(u32*)(history + (u64)n * line.channels + c) = last[n];
    }
    if (commits) continue;
    for (int first = 0; first < own; first += STAGE) {
      u32 u[STAGE];  // all loads under way before the first store, which the compiler must assume to alias
#pragma unroll
      for (int r = 0; r < STAGE; r++)
        if (first + r < own) u[r] = *(const u32*)(line.own + (u64)(first + r) * line.own_stride + c);
#pragma unroll
      for (int r = 0; r < STAGE; r++)
        if (first + r < own) *(u32*)(tape_u + (u64)(first + r) * line.channels + c) = u[r];
    }
  }
  if (commits) return;
  for (int i = id; i < own * hv; i += threads) {
    const float4 gate = s.gate[(u64)(line.pending + i / hv) * hv + i % hv];
    tape_g[i] = gate.z, tape_beta[i] = gate.y;
  }
}

// Grid [Hv, Dv / COLUMNS + 1]: columns of a head, then the blocks that write the tape.
template <int DK>
__device__ void recurrence(float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch,
                           const u16* qkv, const int* pending_there, const int* rows_there, int rows, int most_rows,
                           int hk, int hv, int dv, int taps, int qkv_stride, int commits) {
  __shared__ __align__(16) Row<DK, COLUMNS> stages[2][STAGE];
  __shared__ __align__(16) Parts<COLUMNS> parts[STAGE];
  const int head = blockIdx.x, key_head = head / (hv / hk);
  const int column = blockIdx.y * COLUMNS + threadIdx.x / 32 * 4;  // first of the warp
  // S and the control words were written before the kernel that precedes this one (see prelude.cuh).
  const int pending = *pending_there, own = own_rows(rows_there, rows), total = pending + own;
  const Scratch there = scratch_at(scratch, most_rows, hk, hv, DK, dv);
  if (blockIdx.y == gridDim.y - 1) {
    pdl_wait();
    pdl_trigger();
    const Line line{history, tape_u, qkv, pending, 2 * hk * DK + hv * dv, qkv_stride, taps};
    write_tape(line, history, tape_u, tape_g, tape_beta, there, own, hv, commits);
    return;
  }
  float* place = state + (u64)head * DK * dv + column;
  Columns<DK> s;
  s.load(place, dv);
  s.turn();
  pdl_wait();
  pdl_trigger();
  if (total == 0) return;
  load_stage<DK>(stages[0], there, 0, min(STAGE, total), head, key_head, hk, hv, dv);
  for (int first = 0; first < total; first += STAGE) {
    const int next = first + STAGE;
    if (next < total) {
      load_stage<DK>(stages[next / STAGE % 2], there, next, min(STAGE, total - next), head, key_head, hk, hv, dv);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    const Row<DK, COLUMNS>* in = stages[first / STAGE % 2];
    const int stop = min(next, total), replayed = max(first, min(stop, pending));
    steps<DK, false>(s, in, replayed - first, parts);
    if (replayed == pending && first < pending && !commits) s.store(place, dv);
    steps<DK, true>(s, in + (replayed - first), stop - replayed, parts);
    __syncthreads();
    const int r = threadIdx.x / (COLUMNS / 2), c = threadIdx.x % (COLUMNS / 2) * 2;
    if (r < stop - replayed)
      *(float2*)(there.o + ((u64)(replayed - pending + r) * hv + head) * dv + blockIdx.y * COLUMNS + c) =
          parts[r].sum(c);
  }
  if (commits) s.store(place, dv);
}

#define RECURRENCE(DK)                                                                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                \
      delta_recurrence_k##DK(float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch, \
                             const u16* qkv, const int* pending_there, const int* rows_there, int rows, int most_rows, \
                             int hk, int hv, int dv, int taps, int qkv_stride, int commits) {                          \
    recurrence<DK>(state, history, tape_u, tape_g, tape_beta, scratch, qkv, pending_there, rows_there, rows,           \
                   most_rows, hk, hv, dv, taps, qkv_stride, commits);                                                  \
  }
RECURRENCE(32)
RECURRENCE(64)
RECURRENCE(128)

static_assert(THREADS / (COLUMNS / 2) == STAGE, "a thread finishes two outputs of a stage");

// One warp per own row (blockIdx.y) and head.
extern "C" __global__ void __launch_bounds__(PREPARE_WARPS * 32)
    delta_norm(float* scratch, const u16* z, const float* norm, u16* out, const int* rows_there, int rows,
               int most_rows, int hk, int hv, int dk, int dv, int z_stride, int out_stride, float eps) {
  const int head = blockIdx.x * PREPARE_WARPS + threadIdx.x / 32, r = blockIdx.y;
  pdl_wait();
  pdl_trigger();
  if (head >= hv || r >= own_rows(rows_there, rows)) return;
  const Scratch s = scratch_at(scratch, most_rows, hk, hv, dk, dv);
  float2 o[2], weight[2];
  u32 gate[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int column = i * 64 + threadIdx.x % 32 * 2;
    const bool there = column < dv;
    o[i] = there ? __ldcg((const float2*)(s.o + ((u64)r * hv + head) * dv + column)) : make_float2(0.0f, 0.0f);
    weight[i] = there ? *(const float2*)(norm + column) : o[i];
    gate[i] = there ? *(const u32*)(z + (u64)r * z_stride + head * dv + column) : 0u;
  }
  const float squares = __fadd_rn(squares_of_64(o[0]), squares_of_64(o[1]));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int column = i * 64 + threadIdx.x % 32 * 2;
    if (column < dv)
      *(u32*)(out + element_at(out_stride, r, head * dv + column)) =
          gated_norm(o[i], squares, dv, eps, weight[i], gate[i]);
  }
}

#include "delta_cluster.cuh"
