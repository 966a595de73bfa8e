// The gated delta layer of one pass: prepare (convolution, norms, gates of pending and own rows), then recurrence.
//
// S [Hv, Dk, Dv] FP32 and history [K-1, C] BF16 (oldest first) hold the base. The tape holds the rows of the last
// verify: u [rows, C] BF16, g and beta [rows, Hv] FP32; its first `pending` rows are committed but not in S. A pass
// replays them, then runs its own rows with the same instructions, so replayed bits equal first-run bits. S is read
// once and written once: after the replay, or after the own rows when the pass commits (prefill). With no own rows
// the same two kernels are a flush.
//
// Columns of S are independent. A block owns 16 columns of one head; 8 lanes share a pair of columns, each with an
// eighth of its elements in registers. The blocks of one more row of the grid write the tape beside them.
#include "state.cuh"

static constexpr int PREPARE_WARPS = 8;
static constexpr int LANES = 8;          // that share a pair of columns of S
static constexpr int WARP_COLUMNS = 64 / LANES;
static constexpr int COLUMNS = 16;       // of S a block
static constexpr int THREADS = COLUMNS / WARP_COLUMNS * 32;
static constexpr int STAGE = 16;  // rows in shared memory at a time, twice
static constexpr int TAPS = 4;    // longest convolution; shorter ones have leading zeros

struct Scratch {  // FP32, row t of pending then own rows
    float *q, *k, *v, *qk;  // [T, Hk*Dk], [T, Hk*Dk], [T, Hv*Dv], [T, Hk]: q . k
    float4* gate;           // [T, Hv]: decay exp(g), beta, g, unused
    float* o;               // [own rows, Hv*Dv]
    float* z;               // [own rows, Hv*Dv]: silu(z)
};
__device__ __forceinline__ Scratch scratch_at(float* base, int most, int hk, int hv, int dk, int dv) {
    Scratch s;
    s.gate = (float4*)base;
    s.q = base + (u64)most * hv * 4;
    s.k = s.q + (u64)most * hk * dk;
    s.v = s.k + (u64)most * hk * dk;
    s.o = s.v + (u64)most * hv * dv;
    s.z = s.o + (u64)most * hv * dv;
    s.qk = s.z + (u64)most * hv * dv;
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

// Convolution and SiLU of channels first + lane * E .. of row t.
template <int E>
__device__ __forceinline__ void convolve(float (&x)[E], const Line& line, const float* weight, int t, int first) {
    const int lane = threadIdx.x % 32, at = first + lane * E;
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = 0.0f;
#pragma unroll
    for (int n = 0; n < TAPS; n++) {
        if (n < TAPS - line.taps) continue;
        const u16* u = line.row(t + n - (TAPS - 1)) + at;
        const float* w = weight + (u64)n * line.channels + at;
#pragma unroll
        for (int e = 0; e < E; e++) x[e] = __fadd_rn(x[e], __fmul_rn(bf16_float(u[e]), w[e]));
    }
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = silu(x[e]);
}
template <>
__device__ __forceinline__ void convolve<4>(float (&x)[4], const Line& line, const float* weight, int t, int first) {
    const int lane = threadIdx.x % 32, at = first + lane * 4;
    x[0] = x[1] = x[2] = x[3] = 0.0f;
#pragma unroll
    for (int n = 0; n < TAPS; n++) {
        if (n < TAPS - line.taps) continue;
        const uint2 u = *(const uint2*)(line.row(t + n - (TAPS - 1)) + at);
        const float4 w = __ldg((const float4*)(weight + (u64)n * line.channels + at));
        x[0] = __fadd_rn(x[0], __fmul_rn(bf16_low(u.x), w.x)), x[1] = __fadd_rn(x[1], __fmul_rn(bf16_high(u.x), w.y));
        x[2] = __fadd_rn(x[2], __fmul_rn(bf16_low(u.y), w.z)), x[3] = __fadd_rn(x[3], __fmul_rn(bf16_high(u.y), w.w));
    }
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = silu(x[e]);
}

template <int E>
__device__ __forceinline__ float normalise(float (&x)[E]) {  // x / sqrt(sum(x^2) + 1e-6)
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < E; e++) squares = __fmaf_rn(x[e], x[e], squares);
    const float length = __fsqrt_rn(__fadd_rn(lane_sum<32>(squares), 1e-6f));
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = __fdiv_rn(x[e], length);
    return length;
}

template <int E>
__device__ void prepare_key_head(const Scratch& s, const Line& line, const float* weight, int t, int head, int hk) {
    constexpr int D = 32 * E;
    float q[E], k[E], dot = 0.0f;
    convolve<E>(q, line, weight, t, head * D);
    convolve<E>(k, line, weight, t, (hk + head) * D);
    normalise<E>(q);
    normalise<E>(k);
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn((float)D));
    const u64 at = ((u64)t * hk + head) * D + threadIdx.x % 32 * E;
#pragma unroll
    for (int e = 0; e < E; e++) {
        q[e] = __fmul_rn(q[e], scale);
        dot = __fmaf_rn(q[e], k[e], dot);
        s.q[at + e] = q[e], s.k[at + e] = k[e];
    }
    dot = lane_sum<32>(dot);
    if (threadIdx.x % 32 == 0) s.qk[(u64)t * hk + head] = dot;
}

template <int E>
__device__ void prepare_value_head(const Scratch& s, const Line& line, const float* weight, int t, int head, int hv,
                                   int first, const u16* z, int z_stride) {
    float v[E];
    convolve<E>(v, line, weight, t, first + head * 32 * E);
    const u64 column = (u64)head * 32 * E + threadIdx.x % 32 * E, row = (u64)hv * 32 * E;
#pragma unroll
    for (int e = 0; e < E; e++) s.v[t * row + column + e] = v[e];
    if (t < line.pending) return;
    const u64 r = t - line.pending;
#pragma unroll
    for (int e = 0; e < E; e++) s.z[r * row + column + e] = silu(bf16_float(z[r * z_stride + column + e]));
}

// One warp per row (pending, then own; blockIdx.y) and head (Hk query-key pairs, then Hv values).
extern "C" __global__ void __launch_bounds__(PREPARE_WARPS * 32)
    delta_prepare(const u16* qkv, const u16* z, const u16* a, const u16* b, int qkv_stride, int z_stride, int a_stride,
                  int b_stride, const float* conv, const float* a_log, const float* dt_bias, const u16* history, const u16* tape_u,
                  const float* tape_g, const float* tape_beta, float* scratch, const int* pending_there,
                  const int* rows_there, int rows, int most_rows, int hk, int hv, int dk, int dv, int taps) {
    pdl_wait();
    pdl_trigger();
    const int slot = blockIdx.x * PREPARE_WARPS + threadIdx.x / 32, t = blockIdx.y, lane = threadIdx.x % 32;
    const int pending = *pending_there, own = own_rows(rows_there, rows);
    if (slot >= hk + hv || t >= pending + own) return;
    const Scratch s = scratch_at(scratch, most_rows, hk, hv, dk, dv);
    const Line line{history, tape_u, qkv, pending, 2 * hk * dk + hv * dv, qkv_stride, taps};
    if (slot < hk) {
        if (dk == 128) prepare_key_head<4>(s, line, conv, t, slot, hk);
        if (dk == 64) prepare_key_head<2>(s, line, conv, t, slot, hk);
        if (dk == 32) prepare_key_head<1>(s, line, conv, t, slot, hk);
        return;
    }
    const int head = slot - hk, first = 2 * hk * dk;
    if (dv == 128) prepare_value_head<4>(s, line, conv, t, head, hv, first, z, z_stride);
    if (dv == 64) prepare_value_head<2>(s, line, conv, t, head, hv, first, z, z_stride);
    if (dv == 32) prepare_value_head<1>(s, line, conv, t, head, hv, first, z, z_stride);
    if (lane) return;
    float g, beta;
    if (t < pending) {
        g = tape_g[(u64)t * hv + head], beta = tape_beta[(u64)t * hv + head];
    } else {
        const int r = t - pending;
        const float x = __fadd_rn(bf16_float(a[(u64)r * a_stride + head]), dt_bias[head]);
        g = __fmul_rn(-expf(a_log[head]), x > 20.0f ? x : log1pf(expf(x)));
        beta = sigmoid(bf16_float(b[(u64)r * b_stride + head]));
    }
    s.gate[(u64)t * hv + head] = make_float4(expf(g), beta, g, 0.0f);
}

// ------------------------------------------------------------------------------------------------------- recurrence

template <int DK>
struct Stage {
    float k[STAGE][DK], q[STAGE][DK], v[STAGE][COLUMNS];
    float4 gate[STAGE];
    float qk[STAGE];
};

template <int DK>
__device__ __forceinline__ void load_stage(Stage<DK>& to, const Scratch& s, int first, int count, int head, int key_head,
                                           int hk, int hv, int dv) {
    constexpr int PIECES = DK / 4;
    for (int i = threadIdx.x; i < count * PIECES; i += THREADS) {
        const int r = i / PIECES, c = i % PIECES * 4;
        const u64 at = ((u64)(first + r) * hk + key_head) * DK + c;
        copy16(&to.k[r][c], s.k + at);
        copy16(&to.q[r][c], s.q + at);
    }
    for (int i = threadIdx.x; i < count * COLUMNS / 4; i += THREADS) {
        const int r = i / (COLUMNS / 4), c = i % (COLUMNS / 4) * 4;
        copy16(&to.v[r][c], s.v + ((u64)(first + r) * hv + head) * dv + blockIdx.y * COLUMNS + c);
    }
    for (int r = threadIdx.x; r < count; r += THREADS) {
        copy16(&to.gate[r], s.gate + (u64)(first + r) * hv + head);
        copy4(&to.qk[r], s.qk + (u64)(first + r) * hk + key_head);
    }
    copy_commit();
}

// What one token brings to a lane: its elements of k and q, and the scalars of the head.
template <int DK, bool own>
struct Token {
    float4 k[DK / 4 / LANES], q[DK / 4 / LANES], gate;
    float2 v;
    float qk;
    __device__ __forceinline__ void load(const Stage<DK>& in, int r) {
        const int lane = threadIdx.x % 32, part = lane % LANES;
#pragma unroll
        for (int c = 0; c < DK / 4 / LANES; c++) {
            k[c] = *(const float4*)&in.k[r][(c * LANES + part) * 4];
            if (own) q[c] = *(const float4*)&in.q[r][(c * LANES + part) * 4];
        }
        gate = in.gate[r];
        v = *(const float2*)&in.v[r][threadIdx.x / 32 * WARP_COLUMNS + lane / LANES * 2];
        if (own) qk = in.qk[r];
    }
};

// One token: S <- decay S + k d^T with d = beta (v - decay S^T k); o = decay S^T q + (q . k) d, which is S_new^T q.
template <int DK, bool own>
__device__ __forceinline__ float2 step(float (&s)[DK / LANES][2], const Token<DK, own>& in) {
    float ks[2][2] = {}, qs[2][2] = {};  // sums over even and odd groups of four
#pragma unroll
    for (int c = 0; c < DK / 4 / LANES; c++) {
        const float k[4] = {in.k[c].x, in.k[c].y, in.k[c].z, in.k[c].w};
        const float q[4] = {in.q[c].x, in.q[c].y, in.q[c].z, in.q[c].w};
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                ks[c % 2][j] = __fmaf_rn(k[e], s[c * 4 + e][j], ks[c % 2][j]);
                if (own) qs[c % 2][j] = __fmaf_rn(q[e], s[c * 4 + e][j], qs[c % 2][j]);
            }
    }
    const float decay = in.gate.x, v[2] = {in.v.x, in.v.y};
    float d[2], o[2] = {0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const float sum = lane_sum<LANES>(__fadd_rn(ks[0][j], ks[1][j]));
        d[j] = __fmul_rn(__fsub_rn(v[j], __fmul_rn(decay, sum)), in.gate.y);
        if (own) o[j] = __fmaf_rn(in.qk, d[j], __fmul_rn(decay, lane_sum<LANES>(__fadd_rn(qs[0][j], qs[1][j]))));
    }
#pragma unroll
    for (int c = 0; c < DK / 4 / LANES; c++) {
        const float k[4] = {in.k[c].x, in.k[c].y, in.k[c].z, in.k[c].w};
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                s[c * 4 + e][j] = __fmaf_rn(k[e], d[j], __fmul_rn(decay, s[c * 4 + e][j]));
    }
    return make_float2(o[0], o[1]);
}

// Tokens first .. stop - 1 of a stage; the next token's loads are under way while one is computed.
template <int DK, bool own, class Write>
__device__ __forceinline__ void steps(float (&s)[DK / LANES][2], const Stage<DK>& in, int first, int stop, Write write) {
    if (first >= stop) return;
    Token<DK, own> token, next;
    token.load(in, first);
#pragma unroll 2
    for (int r = first; r < stop; r++) {
        next.load(in, min(r + 1, stop - 1));
        const float2 o = step<DK, own>(s, token);
        if (own) write(r, o);
        token = next;
    }
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

// Gated RMS norm of one head's outputs: bf16(o / rms(o) * w * silu(z)). A warp has ROWS rows at a time, their loads
// under way together.
__device__ __forceinline__ void write_output(const float* o, const float* z, const float* norm, u16* out, int rows,
                                             int head, int hv, int dv, int out_stride, float eps) {
    constexpr int ROWS = 4;
    const int lane = threadIdx.x % 32, count = dv / 32;
    for (int first = threadIdx.x / 32 * ROWS; first < rows; first += THREADS / 32 * ROWS) {
        float x[ROWS][4], gate[ROWS][4], weight[4];
#pragma unroll
        for (int i = 0; i < 4; i++) weight[i] = i < count ? norm[i * 32 + lane] : 0.0f;
#pragma unroll
        for (int n = 0; n < ROWS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const bool there = i < count && first + n < rows;
                const u64 r = first + n, j = head * dv + i * 32 + lane;
                x[n][i] = there ? __ldcg(o + r * hv * dv + j) : 0.0f;
                gate[n][i] = there ? __ldcg(z + r * hv * dv + j) : 0.0f;
            }
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < 4; i++) squares = __fmaf_rn(x[n][i], x[n][i], squares);
            const float mean = __fdiv_rn(lane_sum<32>(squares), (float)dv);
            const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int j = i * 32 + lane;
                if (i < count && first + n < rows)
                    out[(u64)(first + n) * out_stride + head * dv + j] = to_bf16(__fmul_rn(
                        __fmul_rn(__fmul_rn(x[n][i], inverse), weight[i]), gate[n][i]));
            }
        }
    }
}

template <int DK>
__device__ void recurrence(float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch,
                           int* arrived, const u16* qkv, const float* norm, u16* out,
                           const int* pending_there, const int* rows_there, int rows, int most_rows, int hk, int hv,
                           int dv, int taps, int qkv_stride, int out_stride, float eps, int commits) {
    __shared__ __align__(16) Stage<DK> stages[2];
    __shared__ int is_last;
    const int head = blockIdx.x, key_head = head / (hv / hk), lane = threadIdx.x % 32, part = lane % LANES;
    const int column = blockIdx.y * COLUMNS + threadIdx.x / 32 * WARP_COLUMNS + lane / LANES * 2;
    // S and the control words were written long before the kernel that precedes this one.
    const int pending = *pending_there, own = own_rows(rows_there, rows), total = pending + own;
    const Scratch there = scratch_at(scratch, most_rows, hk, hv, DK, dv);
    if (blockIdx.y == gridDim.y - 1) {
        pdl_wait();
        pdl_trigger();
        const Line line{history, tape_u, qkv, pending, 2 * hk * DK + hv * dv, qkv_stride, taps};
        write_tape(line, history, tape_u, tape_g, tape_beta, there, own, hv, commits);
        return;
    }
    float2* place = (float2*)(state + ((u64)head * DK) * dv + column);
    float s[DK / LANES][2];
    auto element = [&](int i) { return place + (u64)((i / 4 * LANES + part) * 4 + i % 4) * dv / 2; };
#pragma unroll
    for (int i = 0; i < DK / LANES; i++) {
        const float2 x = __ldcg(element(i));
        s[i][0] = x.x, s[i][1] = x.y;
    }
    pdl_wait();
    pdl_trigger();
    if (total == 0) return;
    auto write_state = [&] {
#pragma unroll
        for (int i = 0; i < DK / LANES; i++) *element(i) = make_float2(s[i][0], s[i][1]);
    };
    float* o = there.o + (u64)head * dv + column;
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
        const Stage<DK>& in = stages[first / STAGE % 2];
        const int stop = min(next, total), replayed = max(first, min(stop, pending));
        steps<DK, false>(s, in, 0, replayed - first, [](int, float2) {});
        if (replayed == pending && first < pending && !commits) write_state();
        steps<DK, true>(s, in, replayed - first, stop - first, [&](int r, float2 x) {
            if (part == 0) *(float2*)(o + (u64)(first + r - pending) * hv * dv) = x;
        });
        __syncthreads();
    }
    if (commits) write_state();
    if (own == 0) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {  // the last block of the head norms its outputs
        is_last = atomicAdd(arrived + head, 1) == gridDim.y - 2;
        if (is_last) arrived[head] = 0;
        __threadfence();
    }
    __syncthreads();
    if (is_last) write_output(there.o, there.z, norm, out, own, head, hv, dv, out_stride, eps);
}

#define RECURRENCE(DK)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) delta_recurrence_k##DK(                                      \
        float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch, int* arrived,        \
        const u16* qkv, const float* norm, u16* out, const int* pending_there, const int* rows_there, int rows,        \
        int most_rows, int hk, int hv, int dv, int taps, int qkv_stride, int out_stride, float eps, int commits) {     \
        recurrence<DK>(state, history, tape_u, tape_g, tape_beta, scratch, arrived, qkv, norm, out, pending_there,     \
                       rows_there, rows, most_rows, hk, hv, dv, taps, qkv_stride, out_stride, eps, commits);           \
    }
RECURRENCE(32)
RECURRENCE(64)
RECURRENCE(128)
