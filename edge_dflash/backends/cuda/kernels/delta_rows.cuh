// The gated delta layer as three kernels with scratch between them: prepare, recurrence, gated norm. Prefill on every
// device, and verify and flush where no clusters are. Bits are those of delta_verify.
//
// Scratch of a slot, FP32; row t of pending then own rows, `most` rows a head:
//   gate [Hv, most]          decay exp(g), beta, g, unused
//   kq   [Hk, most, 2, Dk]   key, query
//   v    [Hv, Dv / 16, most, 16]
//   o    [own rows, Hv * Dv]
// so that what a block of the recurrence reads lies in three streams. Element e of term l of a
// key or query (delta.cu) is at e * 32 + l % 8 * 4 + l / 8: see Slice.
#pragma once

static constexpr int PREPARE_WARPS = 8, PREPARE_ROWS = 4;
static constexpr int COLUMNS = 16;  // of S a block of the recurrence, 4 a warp, one a lane
static constexpr int THREADS = COLUMNS / 4 * 32;
static constexpr int STAGE = 16;      // rows in shared memory at a time, twice
static constexpr int TAPE_ROWS = 16;  // loaded together
static constexpr int NORM_ROWS = 4;

struct Scratch {
  float4* gate;
  float *kq, *v, *o;
  int most;
};
__device__ __forceinline__ Scratch scratch_at(float* base, int most, int hk, int hv, int dk, int dv) {
  base += (u64)blockIdx.z * most * (hv * 4 + hk * dk * 2 + hv * dv * 2);
  Scratch s;
  s.most = most;
  s.gate = (float4*)base;
  s.kq = base + (u64)most * hv * 4;
  s.v = s.kq + (u64)most * hk * dk * 2;
  s.o = s.v + (u64)most * hv * dv;
  return s;
}

__device__ __forceinline__ int own_rows(const int* rows_there, int rows) {
  return rows_there ? min(early_word(rows_there), rows) : rows;
}

// ------------------------------------------------------------------------------------------------------------- prepare

// Rows t .. stop - 1 (PREPARE_ROWS at most) of 32 E channels from `first`, a warp: convolved to out + t * stride, the
// elements of a lane together; or normalised too, as keys and queries lie.
template <int E>
__device__ __forceinline__ void prepare_head(const Line& line, const float* weight, int t, int stop, int first,
                                             float* out, int stride, bool norm, bool query) {
  const int at = first + threadIdx.x % 32 * E;
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
    float* row = out + (u64)(t + r) * stride;
    if (norm) {
#pragma unroll
      for (int e = 0; e < E; e++) row[e * 32] = x[e];
    } else {
      write_vector(row, x);
    }
  }
}
__device__ __forceinline__ void prepare_head(int dim, const Line& line, const float* weight, int t, int stop, int first,
                                             float* out, int stride, bool norm, bool query) {
  if (dim == 128) prepare_head<4>(line, weight, t, stop, first, out, stride, norm, query);
  if (dim == 64) prepare_head<2>(line, weight, t, stop, first, out, stride, norm, query);
  if (dim == 32) prepare_head<1>(line, weight, t, stop, first, out, stride, norm, query);
}

// One warp per PREPARE_ROWS rows (pending, then own; blockIdx.y) and head: Hk queries, Hk keys, Hv values.
extern "C" __global__ void __launch_bounds__(PREPARE_WARPS * 32, 4)
    delta_prepare(const u16* qkv, const u16* a, const u16* b, int qkv_stride, int a_stride, int b_stride,
                  const float* conv, const float* a_log, const float* dt_bias, const u16* history, const u16* tape_u,
                  const float* tape_g, const float* tape_beta, float* scratch, const int* control,
                  const int* rows_there, int rows, int lanes, int tape_rows, int most_rows, int hk, int hv, int dk,
                  int dv, int taps) {
  pdl_wait();
  pdl_trigger();
  const int* words = words_of(control, blockIdx.z);
  const int home = home_of(words, lanes), first_row = blockIdx.z * rows, channels = 2 * hk * dk + hv * dv;
  if (home < 0) return;
  history += (u64)home * (taps - 1) * channels, tape_u += (u64)home * tape_rows * channels;
  tape_g += home * tape_rows * hv, tape_beta += home * tape_rows * hv;
  qkv += (u64)first_row * qkv_stride, a += (u64)first_row * a_stride, b += (u64)first_row * b_stride;
  const int slot = blockIdx.x * PREPARE_WARPS + threadIdx.x / 32, first = blockIdx.y * PREPARE_ROWS;
  const int lane = threadIdx.x % 32;
  const int pending = words[PENDING], own = own_rows(rows_there, rows), stop = min(first + PREPARE_ROWS, pending + own);
  if (slot >= 2 * hk + hv || first >= stop) return;
  const Scratch s = scratch_at(scratch, most_rows, hk, hv, dk, dv);
  const Line line{history, tape_u, qkv, pending, channels, qkv_stride, taps};
  if (slot < 2 * hk) {
    const bool query = slot < hk;
    const u64 head = (u64)(slot % hk) * s.most * 2 + query;
    prepare_head(dk, line, conv, first, stop, slot * dk, s.kq + head * dk + lane % 8 * 4 + lane / 8, 2 * dk, true,
                 query);
    return;
  }
  const int head = slot - 2 * hk, t = first + lane;
  if (t < stop) {
    float g, beta;
    if (t < pending) {
      g = tape_g[(u64)t * hv + head], beta = tape_beta[(u64)t * hv + head];
    } else {
      const int r = t - pending;
      g = log_decay(a[(u64)r * a_stride + head], -expf(a_log[head]), dt_bias[head]);
      beta = sigmoid(from_bf16(b[(u64)r * b_stride + head]));
    }
    s.gate[(u64)head * s.most + t] = make_float4(expf(g), beta, g, 0.0f);
  }
  const int column = lane * (dv / 32);
  float* v = s.v + ((u64)head * (dv / COLUMNS) + column / COLUMNS) * s.most * COLUMNS + column % COLUMNS;
  prepare_head(dv, line, conv, first, stop, 2 * hk * dk + head * dv, v, COLUMNS, false, false);
}

// ---------------------------------------------------------------------------------------------------------- recurrence

// Pairs of numbers.
__device__ __forceinline__ float2 mul2(const float2& x, const float2& y) {
  return make_float2(__fmul_rn(x.x, y.x), __fmul_rn(x.y, y.y));
}
__device__ __forceinline__ float2 add2(const float2& x, const float2& y) {
  return make_float2(__fadd_rn(x.x, y.x), __fadd_rn(x.y, y.y));
}
__device__ __forceinline__ float2 fma2(const float2& x, const float2& y, const float2& add) {
  return make_float2(__fmaf_rn(x.x, y.x, add.x), __fmaf_rn(x.y, y.y, add.y));
}

// What a lane has of one column of S: the elements of the terms l = j, j + 8, j + 16, j + 24, j = lane / 4, so that the
// sums over bits 4 and 3 of l are sums of registers. Eight lanes have a column; four columns lie side by side,
// so that neighbours read the same key.
template <int DK>
struct Slice {
  static constexpr int KE = DK / 32;
  float2 s[KE][2];  // l = j, j + 8; j + 16, j + 24

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int column() { return threadIdx.x / 32 * 4 + threadIdx.x % 4; }  // of the block's
  static __device__ __forceinline__ int row(int e, int i) { return (lane() + 8 * i) * KE + e; }
  __device__ __forceinline__ void load(const float* first, int dv) {
#pragma unroll
    for (int e = 0; e < KE; e++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        s[e][i] = make_float2(__ldcg(first + row(e, 2 * i) * dv), __ldcg(first + row(e, 2 * i + 1) * dv));
  }
  __device__ __forceinline__ void store(float* first, int dv) const {
#pragma unroll
    for (int e = 0; e < KE; e++)
#pragma unroll
      for (int i = 0; i < 2; i++) first[row(e, 2 * i) * dv] = s[e][i].x, first[row(e, 2 * i + 1) * dv] = s[e][i].y;
  }
};

template <int DK>
struct Vector {  // a lane's elements of a key or query
  static constexpr int KE = DK / 32;
  float2 x[KE][2];
  __device__ __forceinline__ void load(const float* row) {
#pragma unroll
    for (int e = 0; e < KE; e++) {
      const float4 y = *(const float4*)(row + e * 32 + Slice<DK>::lane() * 4);
      x[e][0] = make_float2(y.x, y.y), x[e][1] = make_float2(y.z, y.w);
    }
  }
  // The lane's part of x^T s, a sum over bits 4 and 3 of the terms.
  __device__ __forceinline__ float dot(const float2 (&s)[KE][2]) const {
    float2 a = mul2(x[0][0], s[0][0]), b = mul2(x[0][1], s[0][1]);
#pragma unroll
    for (int e = 1; e < KE; e++) a = fma2(x[e][0], s[e][0], a), b = fma2(x[e][1], s[e][1], b);
    a = add2(a, b);
    return __fadd_rn(a.x, a.y);
  }
};

template <int DK>
struct Stage {
  float kq[STAGE][2 * DK];
  float v[STAGE + 1][COLUMNS];  // the last is never used, nor is that of gate
  float4 gate[STAGE + 1];
};
template <int DK>
struct Shared {
  Stage<DK> stages[2];
  Parts<COLUMNS> parts[1 + STAGE];  // of row r at r + 1
};

template <int DK>
struct KeyAndValue {  // what a lane needs of a row, but its query
  Vector<DK> k;
  float v;
  float2 gate;
  __device__ __forceinline__ void load(const Stage<DK>& stage, int r) {
    k.load(stage.kq[0] + r * 2 * DK);
    v = stage.v[r][Slice<DK>::column()];
    gate = *(const float2*)&stage.gate[r];
  }
};

// Rows first .. stop - 1 of a stage: S <- decay S + k d^T with d = beta (v - decay S^T k), and the eight parts of S^T q.
// The output of a row is computed beside the next row's sums, which wait for each other.
template <int DK>
__device__ __forceinline__ void steps(Slice<DK>& slice, Shared<DK>& shared, const Stage<DK>& stage, int first,
                                      int stop) {
  if (first >= stop) return;
  float* o = &shared.parts[first].x[slice.lane()][slice.column()];
  KeyAndValue<DK> in;
  in.load(stage, first);
  Vector<DK> q = in.k;
  auto& s = slice.s;
#pragma unroll 2
  for (int r = first; r < stop; r++) {
    float sum = in.k.dot(s);
    *o = q.dot(s);  // of the row before; the first is nobody's
    o += sizeof(Parts<COLUMNS>) / 4;
    q.load(stage.kq[r] + DK);
    KeyAndValue<DK> next;
    next.load(stage, r + 1);  // behind the last row: unused
#pragma unroll
    for (int bit = 16; bit > 2; bit /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(ALL, sum, bit));
    const float2 decay = make_float2(in.gate.x, in.gate.x);
    const float d = __fmul_rn(__fsub_rn(in.v, __fmul_rn(decay.x, sum)), in.gate.y);
#pragma unroll
    for (int e = 0; e < DK / 32; e++)
#pragma unroll
      for (int i = 0; i < 2; i++) s[e][i] = fma2(in.k.x[e][i], make_float2(d, d), mul2(decay, s[e][i]));
    in = next;
  }
  *o = q.dot(s);
}

// Rows first .. first + STAGE - 1 of the scratch; those behind the last are garbage.
template <int DK>
__device__ __forceinline__ void load_stage(Stage<DK>& to, const float* kq, const float* v, const float4* gate,
                                           int first) {
  const int i = threadIdx.x;
#pragma unroll
  for (int n = 0; n < STAGE * 2 * DK / 4 / THREADS; n++)
    copy16(&to.kq[0][0] + (n * THREADS + i) * 4, kq + (u64)first * 2 * DK + (n * THREADS + i) * 4);
  if (i < STAGE * COLUMNS / 4) copy16(&to.v[0][0] + i * 4, v + (u64)first * COLUMNS + i * 4);
  if (THREADS - STAGE <= i) copy16(&to.gate[i + STAGE - THREADS], gate + first + i + STAGE - THREADS);
  copy_commit();
}
static_assert(STAGE * COLUMNS / 4 <= THREADS, "a thread copies one piece of the values");

// Base of the convolution and the tape after this pass, by all blocks of a slot. A thread owns whole channel pairs;
// prepare has read them.
__device__ __forceinline__ void write_tape(const Line& line, u16* history, u16* tape_u, float* tape_g, float* tape_beta,
                                           const Scratch& s, int own, int hv, bool commits) {
  const int threads = gridDim.x * gridDim.y * THREADS;
  const int id = (blockIdx.y * gridDim.x + blockIdx.x) * THREADS + threadIdx.x;
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
    for (int first = 0; first < own; first += TAPE_ROWS) {
      int stride = line.own_stride, channels = line.channels;
      asm volatile("" : "+r"(stride), "+r"(channels));  // addresses are computed here: registers are dearer
      u32 u[TAPE_ROWS];  // all loads under way before the first store, which the compiler must assume to alias
#pragma unroll
      for (int r = 0; r < TAPE_ROWS; r++)
        if (first + r < own) u[r] = *(const u32*)(line.own + (u64)(first + r) * stride + c);
#pragma unroll
      for (int r = 0; r < TAPE_ROWS; r++)
        if (first + r < own) *(u32*)(tape_u + (u64)(first + r) * channels + c) = u[r];
    }
  }
  if (commits) return;
  for (int i = id; i < own * hv; i += threads) {
    const float4 gate = s.gate[(u64)(i % hv) * s.most + line.pending + i / hv];
    tape_g[i] = gate.z, tape_beta[i] = gate.y;
  }
}

static_assert(sizeof(Shared<128>) == 46368, "as delta.py");

// Grid [Hv, Dv / COLUMNS, slots].
template <int DK>
__device__ void recurrence(float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch,
                           const u16* qkv, const int* control, const int* rows_there, int rows, int lanes,
                           int tape_rows, int most_rows, int hk, int hv, int dv, int taps, int qkv_stride,
                           int commits) {
  extern __shared__ uint4 stages_and_parts[];
  Shared<DK>& shared = *(Shared<DK>*)stages_and_parts;
  const int head = blockIdx.x, column = blockIdx.y * COLUMNS, channels = 2 * hk * DK + hv * dv;
  // S and the control words were written before the kernel that precedes this one (see prelude.cuh).
  const int* words = words_of(control, blockIdx.z);
  const int pending = early_word(words + PENDING), own = own_rows(rows_there, rows), total = pending + own;
  const int home = home_of(words, lanes);
  if (home < 0) {
    pdl_wait();
    return;
  }
  state += (u64)home * hv * DK * dv;
  const Scratch there = scratch_at(scratch, most_rows, hk, hv, DK, dv);
  const float* kq = there.kq + (u64)(head / (hv / hk)) * there.most * 2 * DK;
  const float* v = there.v + ((u64)head * (dv / COLUMNS) + blockIdx.y) * there.most * COLUMNS;
  const float4* gate = there.gate + (u64)head * there.most;
  float* place = state + (u64)head * DK * dv + column + Slice<DK>::column();
  Slice<DK> slice;
  slice.load(place, dv);
  pdl_wait();
  pdl_trigger();
  if (total == 0) return;
  load_stage<DK>(shared.stages[0], kq, v, gate, 0);
  history += (u64)home * (taps - 1) * channels, tape_u += (u64)home * tape_rows * channels;
  tape_g += home * tape_rows * hv, tape_beta += home * tape_rows * hv, qkv += (u64)blockIdx.z * rows * qkv_stride;
  const Line line{history, tape_u, qkv, pending, channels, qkv_stride, taps};
  write_tape(line, history, tape_u, tape_g, tape_beta, there, own, hv, commits);
  for (int first = 0; first < total; first += STAGE) {
    const int next = first + STAGE;
    if (next < total) {
      load_stage<DK>(shared.stages[next / STAGE % 2], kq, v, gate, next);
      copy_wait<1>();
    } else {
      copy_wait<0>();
    }
    __syncthreads();
    const Stage<DK>& in = shared.stages[first / STAGE % 2];
    const int stop = min(STAGE, total - first), replayed = max(0, min(stop, pending - first));
    steps<DK>(slice, shared, in, 0, replayed);
    if (first < pending && pending <= next && !commits) slice.store(place, dv);
    steps<DK>(slice, shared, in, replayed, stop);
    __syncthreads();
    for (int i = threadIdx.x; i < STAGE * COLUMNS / 2; i += THREADS) {
      const int r = i / (COLUMNS / 2), c = i % (COLUMNS / 2) * 2;
      if (replayed <= r && r < stop)
        *(float2*)(there.o + ((u64)(first + r - pending) * hv + head) * dv + column + c) = shared.parts[r + 1].sum(c);
    }
  }
  if (commits) slice.store(place, dv);
}

// Threads; and blocks of a multiprocessor, where registers would be the limit.
#define RECURRENCE(DK, ...)                                                                                         \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__) delta_recurrence_k##DK(                                 \
      float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch, const u16* qkv,     \
      const int* control, const int* rows_there, int rows, int lanes, int tape_rows, int most_rows, int hk, int hv, \
      int dv, int taps, int qkv_stride, int commits) {                                                              \
    recurrence<DK>(state, history, tape_u, tape_g, tape_beta, scratch, qkv, control, rows_there, rows, lanes,       \
                   tape_rows, most_rows, hk, hv, dv, taps, qkv_stride, commits);                                    \
  }
RECURRENCE(32, THREADS, 5)
RECURRENCE(64, THREADS)
RECURRENCE(128, THREADS, 4)

// ---------------------------------------------------------------------------------------------------------------- norm

// One warp per NORM_ROWS own rows (blockIdx.y) and head.
extern "C" __global__ void __launch_bounds__(PREPARE_WARPS * 32, 5)
    delta_norm(float* scratch, const u16* z, const float* norm, u16* out, const int* control, const int* rows_there,
               int rows, int lanes, int most_rows, int hk, int hv, int dk, int dv, int z_stride, int out_stride,
               float eps) {
  const int head = blockIdx.x * PREPARE_WARPS + threadIdx.x / 32, first = blockIdx.y * NORM_ROWS;
  float2 weight[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int column = i * 64 + threadIdx.x % 32 * 2;
    weight[i] = column < dv ? *(const float2*)(norm + column) : make_float2(0.0f, 0.0f);
  }
  pdl_wait();
  pdl_trigger();
  const int own = own_rows(rows_there, rows), first_row = blockIdx.z * rows;
  const bool idle = home_of(words_of(control, blockIdx.z), lanes) < 0;
  if (head >= hv || first >= own) return;
  const Scratch s = scratch_at(scratch, most_rows, hk, hv, dk, dv);
  float2 o[NORM_ROWS][2];
  u32 gate[NORM_ROWS][2];
#pragma unroll
  for (int n = 0; n < NORM_ROWS; n++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = i * 64 + threadIdx.x % 32 * 2, r = first + n;
      const bool there = column < dv && r < own && !idle;
      o[n][i] = there ? __ldcg((const float2*)(s.o + ((u64)r * hv + head) * dv + column)) : make_float2(0.0f, 0.0f);
      gate[n][i] = there ? *(const u32*)(z + (u64)(first_row + r) * z_stride + head * dv + column) : 0u;
    }
#pragma unroll
  for (int n = 0; n < NORM_ROWS; n++) {
    const float squares = __fadd_rn(squares_of_64(o[n][0]), squares_of_64(o[n][1]));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = i * 64 + threadIdx.x % 32 * 2, r = first + n;
      if (column < dv && r < own)
        *(u32*)(out + element_at(out_stride, first_row + r, head * dv + column)) =
            idle ? 0u : gated_norm(o[n][i], squares, dv, eps, weight[i], gate[n][i]);
    }
  }
}
