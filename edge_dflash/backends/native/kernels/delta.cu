// The gated delta layer of one pass: prepare (convolution, norms, gates of pending and own rows), then recurrence.
//
// S [Hv, Dk, Dv] FP32 and history [K-1, C] BF16 (oldest first) hold the base. The tape holds the rows of the last
// verify: u [rows, C] BF16, g and beta [rows, Hv] FP32; its first `pending` rows are committed but not in S. A pass
// replays them, then runs its own rows with the same instructions, so replayed bits equal first-run bits. S is read
// once and written once: after the replay, or after the own rows when the pass commits (prefill). With no own rows
// the same two kernels are a flush.
//
// Columns of S are independent. A warp owns 8 columns of one head; 8 lanes share a pair of columns, each with Dk / 8
// of its elements in registers.
#include "state.cuh"

static constexpr int PREPARE_WARPS = 8;
static constexpr int COLUMNS = 32;  // of S a block
static constexpr int THREADS = 128;
static constexpr int STAGE = 16;  // rows in shared memory at a time, twice
static constexpr int TAPS = 4;    // longest convolution; shorter ones have leading zeros

struct Scratch {  // FP32, row t of pending then own rows
    float *q, *k, *v, *qk;  // [T, Hk*Dk], [T, Hk*Dk], [T, Hv*Dv], [T, Hk]: q . k
    float4* gate;           // [T, Hv]: decay exp(g), beta, g, unused
    float* o;               // [own rows, Hv*Dv]
};
__device__ __forceinline__ Scratch scratch_at(float* base, int most, int hk, int hv, int dk, int dv) {
    Scratch s;
    s.gate = (float4*)base;
    s.q = base + (u64)most * hv * 4;
    s.k = s.q + (u64)most * hk * dk;
    s.v = s.k + (u64)most * hk * dk;
    s.o = s.v + (u64)most * hv * dv;
    s.qk = s.o + (u64)most * hv * dv;
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
                                   int first) {
    float v[E];
    convolve<E>(v, line, weight, t, first + head * 32 * E);
    const u64 at = ((u64)t * hv + head) * 32 * E + threadIdx.x % 32 * E;
#pragma unroll
    for (int e = 0; e < E; e++) s.v[at + e] = v[e];
}

// One warp per row (pending, then own; blockIdx.y) and head (Hk query-key pairs, then Hv values).
extern "C" __global__ void __launch_bounds__(PREPARE_WARPS * 32)
    delta_prepare(const u16* qkv, const u16* a, const u16* b, int qkv_stride, int a_stride, int b_stride,
                  const float* conv, const float* a_log, const float* dt_bias, const u16* history, const u16* tape_u,
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
    if (dv == 128) prepare_value_head<4>(s, line, conv, t, head, hv, first);
    if (dv == 64) prepare_value_head<2>(s, line, conv, t, head, hv, first);
    if (dv == 32) prepare_value_head<1>(s, line, conv, t, head, hv, first);
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

// One token: S <- decay S + k d^T with d = beta (v - decay S^T k); o = decay S^T q + (q . k) d, which is S_new^T q.
template <int DK, bool own>
__device__ __forceinline__ float2 step(float (&s)[DK / 8][2], const Stage<DK>& in, int r) {
    const int lane = threadIdx.x % 32, part = lane % 8, column = threadIdx.x / 32 * 8 + lane / 8 * 2;
    float4 k[DK / 32], q[DK / 32];
    float ks[2] = {0.0f, 0.0f}, qs[2] = {0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < DK / 32; c++) {
        k[c] = *(const float4*)&in.k[r][(c * 8 + part) * 4];
        if (own) q[c] = *(const float4*)&in.q[r][(c * 8 + part) * 4];
    }
#pragma unroll
    for (int c = 0; c < DK / 32; c++) {
        const float kc[4] = {k[c].x, k[c].y, k[c].z, k[c].w}, qc[4] = {q[c].x, q[c].y, q[c].z, q[c].w};
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                ks[j] = __fmaf_rn(kc[e], s[c * 4 + e][j], ks[j]);
                if (own) qs[j] = __fmaf_rn(qc[e], s[c * 4 + e][j], qs[j]);
            }
    }
    const float4 gate = in.gate[r];
    const float decay = gate.x, v[2] = {in.v[r][column], in.v[r][column + 1]};
    float d[2], o[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        d[j] = __fmul_rn(__fsub_rn(v[j], __fmul_rn(decay, lane_sum<8>(ks[j]))), gate.y);
        if (own) o[j] = __fmaf_rn(in.qk[r], d[j], __fmul_rn(decay, lane_sum<8>(qs[j])));
    }
#pragma unroll
    for (int c = 0; c < DK / 32; c++) {
        const float kc[4] = {k[c].x, k[c].y, k[c].z, k[c].w};
#pragma unroll
        for (int e = 0; e < 4; e++)
#pragma unroll
            for (int j = 0; j < 2; j++)
                s[c * 4 + e][j] = __fmaf_rn(kc[e], d[j], __fmul_rn(decay, s[c * 4 + e][j]));
    }
    return own ? make_float2(o[0], o[1]) : make_float2(0.0f, 0.0f);
}

// Base of the convolution and the tape after this pass. A thread owns whole channel pairs; prepare has read them.
__device__ __forceinline__ void write_tape(const Line& line, u16* history, u16* tape_u, float* tape_g, float* tape_beta,
                                           const Scratch& s, int own, int hv, bool commits) {
    const int blocks = gridDim.x * gridDim.y, threads = blocks * THREADS;
    const int warp = threadIdx.x / 32 * blocks + blockIdx.y * gridDim.x + blockIdx.x;  // spread over the blocks
    const int id = warp * 32 + threadIdx.x % 32;
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
        if (!commits)
#pragma unroll 8
            for (int r = 0; r < own; r++)
                *(u32*)(tape_u + (u64)r * line.channels + c) = *(const u32*)(line.own + (u64)r * line.own_stride + c);
    }
    if (commits) return;
    for (int i = id; i < own * hv; i += threads) {
        const float4 gate = s.gate[(u64)(line.pending + i / hv) * hv + i % hv];
        tape_g[i] = gate.z, tape_beta[i] = gate.y;
    }
}

// Gated RMS norm of one head's outputs: bf16(o / rms(o) * w * silu(z)). A warp per row.
__device__ __forceinline__ void write_output(const float* o, const u16* z, const float* norm, u16* out, int rows,
                                             int head, int hv, int dv, int z_stride, int out_stride, float eps) {
    const int lane = threadIdx.x % 32, count = dv / 32;
    for (int r = threadIdx.x / 32; r < rows; r += THREADS / 32) {
        float x[4], squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = i < count ? __ldcg(o + ((u64)r * hv + head) * dv + i * 32 + lane) : 0.0f;
            squares = __fmaf_rn(x[i], x[i], squares);
        }
        const float mean = __fdiv_rn(lane_sum<32>(squares), (float)dv);
        const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, eps)));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i >= count) continue;
            const int j = i * 32 + lane;
            const float gate = silu(bf16_float(z[(u64)r * z_stride + head * dv + j]));
            out[(u64)r * out_stride + head * dv + j] =
                to_bf16(__fmul_rn(__fmul_rn(__fmul_rn(x[i], inverse), norm[j]), gate));
        }
    }
}

template <int DK>
__device__ void recurrence(float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch,
                           int* arrived, const u16* qkv, const u16* z, const float* norm, u16* out,
                           const int* pending_there, const int* rows_there, int rows, int most_rows, int hk, int hv,
                           int dv, int taps, int qkv_stride, int z_stride, int out_stride, float eps, int commits) {
    __shared__ __align__(16) Stage<DK> stages[2];
    __shared__ int is_last;
    const int head = blockIdx.x, key_head = head / (hv / hk), lane = threadIdx.x % 32, part = lane % 8;
    const int column = blockIdx.y * COLUMNS + threadIdx.x / 32 * 8 + lane / 8 * 2;
    float2* place = (float2*)(state + ((u64)head * DK) * dv + column);
    float s[DK / 8][2];
#pragma unroll
    for (int i = 0; i < DK / 8; i++) {  // S was written long before the kernel that precedes this one
        const float2 x = __ldcg(place + (u64)((i / 4 * 8 + part) * 4 + i % 4) * dv / 2);
        s[i][0] = x.x, s[i][1] = x.y;
    }
    pdl_wait();
    pdl_trigger();
    const int pending = *pending_there, own = own_rows(rows_there, rows), total = pending + own;
    if (total == 0) return;
    const Scratch there = scratch_at(scratch, most_rows, hk, hv, DK, dv);
    const Line line{history, tape_u, qkv, pending, 2 * hk * DK + hv * dv, qkv_stride, taps};
    auto write_state = [&] {
#pragma unroll
        for (int i = 0; i < DK / 8; i++)
            place[(u64)((i / 4 * 8 + part) * 4 + i % 4) * dv / 2] = make_float2(s[i][0], s[i][1]);
    };
    load_stage<DK>(stages[0], there, 0, min(STAGE, total), head, key_head, hk, hv, dv);
    write_tape(line, history, tape_u, tape_g, tape_beta, there, own, hv, commits);
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
        const int stop = min(next, total);
        int t = first;
        for (; t < min(stop, pending); t++) step<DK, false>(s, in, t - first);
        if (t == pending && pending > 0 && first < pending && !commits) write_state();
        for (; t < stop; t++) {
            const float2 o = step<DK, true>(s, in, t - first);
            if (part == 0) *(float2*)(there.o + ((u64)(t - pending) * hv + head) * dv + column) = o;
        }
        __syncthreads();
    }
    if (commits) write_state();
    if (own == 0) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {  // the last block of the head norms its outputs
        is_last = atomicAdd(arrived + head, 1) == gridDim.y - 1;
        if (is_last) arrived[head] = 0;
        __threadfence();
    }
    __syncthreads();
    if (is_last) write_output(there.o, z, norm, out, own, head, hv, dv, z_stride, out_stride, eps);
}

#define RECURRENCE(DK)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) delta_recurrence_k##DK(                                      \
        float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch, int* arrived,        \
        const u16* qkv, const u16* z, const float* norm, u16* out, const int* pending_there, const int* rows_there,    \
        int rows, int most_rows, int hk, int hv, int dv, int taps, int qkv_stride, int z_stride, int out_stride,       \
        float eps, int commits) {                                                                                      \
        recurrence<DK>(state, history, tape_u, tape_g, tape_beta, scratch, arrived, qkv, z, norm, out, pending_there,  \
                       rows_there, rows, most_rows, hk, hv, dv, taps, qkv_stride, z_stride, out_stride, eps, commits); \
    }
RECURRENCE(32)
RECURRENCE(64)
RECURRENCE(128)
