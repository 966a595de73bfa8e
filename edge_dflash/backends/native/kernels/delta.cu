// The gated delta layer of one pass: prepare (convolution, norms, gates of pending and own rows), recurrence, gated norm.
//
// S [Hv, Dk, Dv] FP32 and history [K-1, C] BF16 (oldest first) hold the base. The tape holds the rows of the last
// verify: u [rows, C] BF16, g and beta [rows, Hv] FP32; its first `pending` rows are committed but not in S. A pass
// replays them, then runs its own rows with the same instructions, so replayed bits equal first-run bits. S is read
// once and written once: after the replay, or after the own rows when the pass commits (prefill). With no own rows
// the same kernels are a flush.
//
// Columns of S are independent. A warp owns 4 columns of one head, a block 16; a lane has Dk / 32 elements of each of
// the 4 columns in registers. Two paths give the same bits: three kernels with scratch between them (prefill, and every
// arch and shape), and one kernel whose clusters of 8 blocks are the heads (verify and flush of 128-wide heads).
#include "state.cuh"

static constexpr int PREPARE_WARPS = 8;
static constexpr int COLUMNS = 16;  // of S a block, 4 a warp
static constexpr int THREADS = COLUMNS / 4 * 32;
static constexpr int STAGE = 16;  // rows in shared memory at a time, twice
#ifndef EARLY
#define EARLY 1
#endif
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
struct Raw {  // E channels of a row of BF16 inputs
    u16 x[E];
    __device__ __forceinline__ void load(const u16* p) {
#pragma unroll
        for (int e = 0; e < E; e++) x[e] = __ldcg(p + e);
    }
    __device__ __forceinline__ float at(int e) const { return bf16_float(x[e]); }
};
template <>
struct Raw<4> {
    uint2 x;
    __device__ __forceinline__ void load(const u16* p) { x = __ldcg((const uint2*)p); }
    __device__ __forceinline__ float at(int e) const {
        const u32 pair = e < 2 ? x.x : x.y;
        return e % 2 ? bf16_high(pair) : bf16_low(pair);
    }
};

// Convolution and SiLU of E channels; weights [TAPS, stride] from the first of them.
template <int E>
__device__ __forceinline__ void convolve(float (&x)[E], const Raw<E> (&u)[TAPS], const float* weight, int stride,
                                         int taps) {
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = 0.0f;
#pragma unroll
    for (int n = 0; n < TAPS; n++) {
        if (n < TAPS - taps) continue;
        float w[E];
        read_vector(w, weight + (u64)n * stride);
#pragma unroll
        for (int e = 0; e < E; e++) x[e] = __fadd_rn(x[e], __fmul_rn(u[n].at(e), w[e]));
    }
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = silu(x[e]);
}

template <int E>
__device__ __forceinline__ void normalise(float (&x)[E], float scale) {  // x * scale / sqrt(sum(x^2) + 1e-6)
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < E; e++) squares = __fmaf_rn(x[e], x[e], squares);
    const float factor = __fdiv_rn(scale, __fsqrt_rn(__fadd_rn(lane_sum<32>(squares), 1e-6f)));
#pragma unroll
    for (int e = 0; e < E; e++) x[e] = __fmul_rn(x[e], factor);
}

// A warp has a row of one key head, E channels a lane: q and k normalised, q scaled by 1 / sqrt(D). Returns q . k.
template <int E>
__device__ __forceinline__ float normalise_pair(float (&q)[E], float (&k)[E]) {
    normalise<E>(q, __fdiv_rn(1.0f, __fsqrt_rn((float)(32 * E))));
    normalise<E>(k, 1.0f);
    float dot = 0.0f;
#pragma unroll
    for (int e = 0; e < E; e++) dot = __fmaf_rn(q[e], k[e], dot);
    return lane_sum<32>(dot);
}

__device__ __forceinline__ float log_decay(u16 a, float a_log, float dt_bias) {
    const float x = __fadd_rn(bf16_float(a), dt_bias);
    return __fmul_rn(-expf(a_log), x > 20.0f ? x : log1pf(expf(x)));
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

// Rows of tokens in shared memory: k, q [rows, DK], v [rows, COLUMNS], gate [rows] (decay, beta), qk [rows].
template <int DK>
struct Rows {
    const float *k, *q, *v;
    const float2* gate;
    const float* qk;
};

template <int DK, bool own>
struct Token {
    float k[DK / 32], q[DK / 32], v, qk;
    float2 gate;
    __device__ __forceinline__ void load(const Rows<DK>& in, int r) {
        const int lane = threadIdx.x % 32;
        read_vector(k, in.k + r * DK + lane * (DK / 32));
        gate = in.gate[r];
        v = in.v[r * COLUMNS + threadIdx.x / 32 * 4 + lane / 8];
        if (own) read_vector(q, in.q + r * DK + lane * (DK / 32)), qk = in.qk[r];
    }
};

// One token: S <- decay S + k d^T with d = beta (v - decay S^T k); o = decay S^T q + (q . k) d, which is S_new^T q.
// Lanes differ in bits 4, 3: the column that they end with; bit 2: sums of k or of q; bits 1, 0: copies. Every sum
// over lanes goes through bits 4, 3, 2, 1, 0, with own rows and without. Lanes with bit 2 return o of their column.
template <int DK, bool own>
__device__ __forceinline__ float step(Columns<DK>& columns, const Token<DK, own>& in) {
    constexpr int KE = DK / 32;
    auto& s = columns.s;
    const int lane = threadIdx.x % 32;
    float a[4], b[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        a[c] = __fmul_rn(in.k[0], s[0][c]);
        if (own) b[c] = __fmul_rn(in.q[0], s[0][c]);
    }
#pragma unroll
    for (int e = 1; e < KE; e++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            a[c] = __fmaf_rn(in.k[e], s[e][c], a[c]);
            if (own) b[c] = __fmaf_rn(in.q[e], s[e][c], b[c]);
        }
    auto join = [](float x, float other, int bit) { return __fadd_rn(x, __shfl_xor_sync(ALL, other, bit)); };
    a[0] = join(a[0], a[2], 16), a[1] = join(a[1], a[3], 16);
    if (own) b[0] = join(b[0], b[2], 16), b[1] = join(b[1], b[3], 16);
    float sum = join(a[0], a[1], 8);
    if (own) {
        const float other = join(b[0], b[1], 8);
        const bool of_q = lane & 4;
        sum = join(of_q ? other : sum, of_q ? sum : other, 4);
    } else {
        sum = join(sum, sum, 4);
    }
    sum = join(sum, sum, 2);
    sum = join(sum, sum, 1);
    const float decay = in.gate.x, kept = __fmul_rn(decay, sum), mine = __fmul_rn(__fsub_rn(in.v, kept), in.gate.y);
    float d[4];
    if (own) {
#pragma unroll
        for (int c = 0; c < 4; c++) d[c] = __shfl_sync(ALL, mine, (lane & 27) ^ (c * 8));
    } else {
        d[0] = mine;
#pragma unroll
        for (int c = 1; c < 4; c++) d[c] = __shfl_xor_sync(ALL, mine, c * 8);
    }
#pragma unroll
    for (int e = 0; e < KE; e++)
#pragma unroll
        for (int c = 0; c < 4; c++) s[e][c] = __fmaf_rn(in.k[e], d[c], __fmul_rn(decay, s[e][c]));
    return own ? __fmaf_rn(in.qk, d[0], kept) : 0.0f;
}

// Tokens first .. stop - 1; the next token's operands are under way while one is computed. write(r, o) has column
// lane / 8 of the warp and is called by one lane of each column.
template <int DK, bool own, class Write>
__device__ __forceinline__ void steps(Columns<DK>& s, const Rows<DK>& in, int first, int stop, Write write) {
    if (first >= stop) return;
    Token<DK, own> token, next;
    token.load(in, first);
#pragma unroll 2
    for (int r = first; r < stop; r++) {
        next.load(in, min(r + 1, stop - 1));
        const float o = step<DK, own>(s, token);
        if (own && threadIdx.x % 8 == 4) write(r, o);
        token = next;
    }
}

// Gated RMS norm, 4 columns a lane. The sum of squares of 16 columns (4 lanes), then those of the head in order.
__device__ __forceinline__ float squares_of_16(const float4& x) {
    float sum = __fmul_rn(x.x, x.x);
    sum = __fmaf_rn(x.y, x.y, sum), sum = __fmaf_rn(x.z, x.z, sum), sum = __fmaf_rn(x.w, x.w, sum);
    return lane_sum<4>(sum);
}
__device__ __forceinline__ uint2 gated_norm(const float4& o, float squares, int dv, float eps, const float4& weight,
                                            const uint2& z) {
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, (float)dv), eps)));
    const float o4[4] = {o.x, o.y, o.z, o.w}, w4[4] = {weight.x, weight.y, weight.z, weight.w};
    const float z4[4] = {bf16_low(z.x), bf16_high(z.x), bf16_low(z.y), bf16_high(z.y)};
    float y[4];
#pragma unroll
    for (int e = 0; e < 4; e++) y[e] = __fmul_rn(__fmul_rn(__fmul_rn(o4[e], inverse), w4[e]), silu(z4[e]));
    return make_uint2(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]));
}

// ------------------------------------------------------------------------------------------------- path of three kernels

// Channels first + lane * E .. of row t.
template <int E>
__device__ __forceinline__ void convolve_row(float (&x)[E], const Line& line, const float* weight, int t, int first) {
    Raw<E> u[TAPS];
    const int at = first + threadIdx.x % 32 * E;
#pragma unroll
    for (int n = 0; n < TAPS; n++)
        if (n >= TAPS - line.taps) u[n].load(line.row(t + n - (TAPS - 1)) + at);
    convolve<E>(x, u, weight + at, line.channels, line.taps);
}

template <int E>
__device__ void prepare_key_head(const Scratch& s, const Line& line, const float* weight, int t, int head, int hk) {
    constexpr int D = 32 * E;
    float q[E], k[E];
    convolve_row<E>(q, line, weight, t, head * D);
    convolve_row<E>(k, line, weight, t, (hk + head) * D);
    const float dot = normalise_pair<E>(q, k);
    const u64 at = ((u64)t * hk + head) * D + threadIdx.x % 32 * E;
#pragma unroll
    for (int e = 0; e < E; e++) s.q[at + e] = q[e], s.k[at + e] = k[e];
    if (threadIdx.x % 32 == 0) s.qk[(u64)t * hk + head] = dot;
}

template <int E>
__device__ void prepare_value_head(const Scratch& s, const Line& line, const float* weight, int t, int head, int hv,
                                   int first) {
    float v[E];
    convolve_row<E>(v, line, weight, t, first + head * 32 * E);
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
        g = log_decay(a[(u64)r * a_stride + head], a_log[head], dt_bias[head]);
        beta = sigmoid(bf16_float(b[(u64)r * b_stride + head]));
    }
    s.gate[(u64)t * hv + head] = make_float4(expf(g), beta, g, 0.0f);
}

template <int DK>
struct Stage {
    float k[STAGE][DK], q[STAGE][DK], v[STAGE][COLUMNS];
    float2 gate[STAGE];
    float qk[STAGE];
    __device__ __forceinline__ Rows<DK> rows() const { return {k[0], q[0], v[0], gate, qk}; }
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
        copy8(&to.gate[r], s.gate + (u64)(first + r) * hv + head);
        copy4(&to.qk[r], s.qk + (u64)(first + r) * hk + key_head);
    }
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
    __shared__ __align__(16) Stage<DK> stages[2];
    const int head = blockIdx.x, key_head = head / (hv / hk), lane = threadIdx.x % 32;
    const int column = blockIdx.y * COLUMNS + threadIdx.x / 32 * 4;  // first of the warp
    // S and the control words were written before the kernel that precedes this one (see state.cuh).
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
    float* o = there.o + (u64)head * dv + column + lane / 8;
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
        const Rows<DK> in = stages[first / STAGE % 2].rows();
        const int stop = min(next, total), replayed = max(first, min(stop, pending));
        steps<DK, false>(s, in, 0, replayed - first, [](int, float) {});
        if (replayed == pending && first < pending && !commits) s.store(place, dv);
        steps<DK, true>(s, in, replayed - first, stop - first,
                        [&](int r, float x) { o[(u64)(first + r - pending) * hv * dv] = x; });
        __syncthreads();
    }
    if (commits) s.store(place, dv);
}

#define RECURRENCE(DK)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) delta_recurrence_k##DK(                                      \
        float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, float* scratch, const u16* qkv,      \
        const int* pending_there, const int* rows_there, int rows, int most_rows, int hk, int hv, int dv, int taps,    \
        int qkv_stride, int commits) {                                                                                 \
        recurrence<DK>(state, history, tape_u, tape_g, tape_beta, scratch, qkv, pending_there, rows_there, rows,       \
                       most_rows, hk, hv, dv, taps, qkv_stride, commits);                                              \
    }
RECURRENCE(32)
RECURRENCE(64)
RECURRENCE(128)

// One warp per own row (blockIdx.y) and head.
extern "C" __global__ void __launch_bounds__(PREPARE_WARPS * 32)
    delta_norm(float* scratch, const u16* z, const float* norm, u16* out, const int* rows_there, int rows,
               int most_rows, int hk, int hv, int dk, int dv, int z_stride, int out_stride, float eps) {
    const int head = blockIdx.x * PREPARE_WARPS + threadIdx.x / 32, r = blockIdx.y, column = threadIdx.x % 32 * 4;
    pdl_wait();
    pdl_trigger();
    if (head >= hv || r >= own_rows(rows_there, rows)) return;
    const Scratch s = scratch_at(scratch, most_rows, hk, hv, dk, dv);
    const bool there = column < dv;
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f), weight = o;
    uint2 gate = make_uint2(0u, 0u);
    if (there) {
        o = __ldcg((const float4*)(s.o + ((u64)r * hv + head) * dv + column));
        weight = *(const float4*)(norm + column);
        gate = *(const uint2*)(z + (u64)r * z_stride + head * dv + column);
    }
    const float part = squares_of_16(o);
    float squares = 0.0f;
    for (int i = 0; i < dv / 16; i++) squares = __fadd_rn(squares, __shfl_sync(ALL, part, i * 4));
    if (there)
        *(uint2*)(out + (u64)r * out_stride + head * dv + column) = gated_norm(o, squares, dv, eps, weight, gate);
}

// ---------------------------------------------------------------------------------------------------- path of clusters
#if __CUDA_ARCH__ >= 900

static constexpr int D = 128;       // of keys and of values
static constexpr int CLUSTER = D / COLUMNS;  // blocks of a head
static constexpr int BLOCK = 16;    // most rows of the tape, and of own rows
static_assert(BLOCK == 2 * CLUSTER && THREADS == 128, "a block prepares two rows of q and k, by a warp each");

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ u32 in_block(const void* shared, int rank) {  // the same place in another block's memory
    u32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(shared)), "r"(rank));
    return address;
}
__device__ __forceinline__ void send(u32 address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void send(u32 address, const float (&x)[4]) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

struct Head {  // rows 0 .. 15 of the tape, then own rows
    float k[2 * BLOCK][D], q[BLOCK][D], v[2 * BLOCK][COLUMNS];
    float2 gate[2 * BLOCK];
    float qk[BLOCK], squares[CLUSTER][BLOCK];
    float o[BLOCK][COLUMNS];
    float conv[TAPS][2 * D], conv_v[TAPS][COLUMNS];  // weights: q, k; v
    uint2 kept[2][2][32];         // raw q, k of the two own rows
    uint2 base[TAPS - 1][2][32];  // of the rows before the first own row
    int hints[CLUSTER], is_last;
    __device__ __forceinline__ Rows<D> tape() const { return {k[0], nullptr, v[0], gate, nullptr}; }
    __device__ __forceinline__ Rows<D> own() const { return {k[BLOCK], q[0], v[BLOCK], gate + BLOCK, qk}; }
};

// What a thread of warps 0, 1 (a row of q and k) or 2, 3 (4 columns of a row of v) reads of a row: the taps.
struct Inputs {
    Raw<4> q[TAPS], k[TAPS];  // warps 2, 3: q is v
    __device__ __forceinline__ void load(const Line& line, int t, int at, int at_k, bool both) {
#pragma unroll
        for (int n = 0; n < TAPS; n++) {
            const u16* row = line.row(t + n - (TAPS - 1));
            q[n].load(row + at);
            if (both) k[n].load(row + at_k);
        }
    }
};

// Row `row` of the head's shared memory, to every block of the cluster; `own` rows have q and q . k.
template <bool own>
__device__ __forceinline__ void send_row(Head& h, const Inputs& in, int row) {
    const int lane = threadIdx.x % 32;
    float q[4], k[4];
    convolve<4>(q, in.q, &h.conv[0][lane * 4], 2 * D, TAPS);
    convolve<4>(k, in.k, &h.conv[0][D + lane * 4], 2 * D, TAPS);
    const float dot = normalise_pair<4>(q, k);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) {
        send(in_block(&h.k[row][lane * 4], rank), k);
        if (own) send(in_block(&h.q[row - BLOCK][lane * 4], rank), q);
    }
    if (own && lane < CLUSTER) send(in_block(&h.qk[row - BLOCK], lane), dot);
}
__device__ __forceinline__ void put_values(Head& h, const Inputs& in, int row, int column) {
    float v[4];
    convolve<4>(v, in.q, &h.conv_v[0][column], COLUMNS, TAPS);
    *(float4*)&h.v[row][column] = make_float4(v[0], v[1], v[2], v[3]);
}

// Verify (rows own rows) or flush (0) of a layer in one launch; grid [Hv, 8], a cluster is a head. Blocks share the
// convolution of q and k (two rows each) and the sums of squares through each other's shared memory.
//
// Before griddepcontrol.wait the kernel reads S, the history and the tape, prepares the pending rows and replays them.
// These were written by this layer's last pass, and a kernel that waits before it triggers lies between (state.cuh), so
// they are there. The number of pending rows may come from the kernel right before: it is a hint until the wait, and
// blocks may even read different hints; a wrong one costs time only.
//
// q and k of the tape and of the history belong to the heads of a key head together: whichever of their clusters is the
// last to have read them writes them. arrived [Hk, 8] counts, and is zero again afterwards.
extern "C" __global__ void __cluster_dims__(1, CLUSTER, 1) __launch_bounds__(THREADS)
    delta_verify(const u16* qkv, const u16* z, const u16* a, const u16* b, int qkv_stride, int z_stride, int a_stride,
                 int b_stride, const float* conv, const float* a_log, const float* dt_bias, const float* norm,
                 float* state, u16* history, u16* tape_u, float* tape_g, float* tape_beta, int* arrived, u16* out,
                 const int* pending_there, int own, int hk, int hv, int out_stride, float eps) {
    __shared__ __align__(16) Head h;
    const int head = blockIdx.x, rank = blockIdx.y, key_head = head / (hv / hk);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool keys = warp < 2;                                       // prepares q and k, else v
    const int row = keys ? rank * 2 + warp : threadIdx.x / 4 % 16;    // of the tape, and own row
    const int column = keys ? lane * 4 : threadIdx.x % 4 * 4;         // of the head, or of the block
    const int channels = 2 * hk * D + hv * D, value = 2 * hk * D + head * D + rank * COLUMNS;
    const int at = keys ? key_head * D + column : value + column, at_k = (hk + key_head) * D + column;
    cluster_arrive();
    for (int i = threadIdx.x; i < TAPS * 2 * D / 4; i += THREADS) {
        const int n = i / (2 * D / 4), c = i % (2 * D / 4) * 4;
        copy16(&h.conv[n][c], conv + (u64)n * channels + (c / D * hk + key_head) * D + c % D);
    }
    if (threadIdx.x < TAPS * COLUMNS / 4) {
        const int n = threadIdx.x / 4, c = threadIdx.x % 4 * 4;
        copy16(&h.conv_v[n][c], conv + (u64)n * channels + value + c);
    }
    copy_commit();
    const int hint = min(__ldcg(pending_there), BLOCK);
    float* place = state + (u64)head * D * D + rank * COLUMNS + warp * 4;
    Columns<D> s;
    s.load(place, D);
    Line line{history, tape_u, qkv, hint, channels, qkv_stride, TAPS};
    Inputs in;
    const bool gates = warp == 2 && lane < 16, pending_gates = warp == 3 && lane < 16;
    float rate = 0.0f, bias = 0.0f;
    if (gates) rate = a_log[head], bias = dt_bias[head];
    const float4 weight = *(const float4*)(norm + rank * COLUMNS + threadIdx.x % 4 * 4);
    auto pending_gate = [&] {
        const u64 i = (u64)lane * hv + head;
        h.gate[lane] = make_float2(expf(__ldcg(tape_g + i)), __ldcg(tape_beta + i));
    };
    if (row < hint) in.load(line, row, at, at_k, keys);
    if (row < TAPS - 1) {  // for the first own rows
#pragma unroll
        for (int n = 0; n < TAPS - 1; n++)
            if (hint + row + n - (TAPS - 1) < hint) {
                prefetch(line.row(hint + row + n - (TAPS - 1)) + at);
                if (keys) prefetch(line.row(hint + row + n - (TAPS - 1)) + at_k);
            }
    }
    copy_wait<0>();
    __syncthreads();
    cluster_wait();  // the others' shared memory is there
    if (row < hint) {
        if (keys) send_row<false>(h, in, row);
        else put_values(h, in, row, column);
    }
    if (pending_gates && lane < hint) pending_gate();
    s.turn();
#if EARLY
    if (threadIdx.x < CLUSTER)
        asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(in_block(&h.hints[rank], threadIdx.x)), "r"(hint)
                     : "memory");
    cluster_arrive();
    cluster_wait();
    int done = h.hints[0];
#pragma unroll
    for (int i = 1; i < CLUSTER; i++) done = min(done, h.hints[i]);
    steps<D, false>(s, h.tape(), 0, done, [](int, float) {});
#else
    int done = 0;
#endif
    pdl_wait();
    pdl_trigger();

    const int pending = min(__ldcg(pending_there), BLOCK);
    u16 a_raw = 0, b_raw = 0;
    uint2 z_raw = make_uint2(0u, 0u);
    if (gates && lane < own) a_raw = a[(u64)lane * a_stride + head], b_raw = b[(u64)lane * b_stride + head];
    if (!keys && row < own) z_raw = *(const uint2*)(z + (u64)row * z_stride + head * D + rank * COLUMNS + column);
    auto load_own = [&] {  // the rows before the first own row also for a flush: they become the history
        if (row < own) in.load(line, line.pending + row, at, at_k, keys);
        else if (row == 0)
#pragma unroll
            for (int n = 0; n < TAPS - 1; n++) {
                const u16* from = line.row(line.pending + n - (TAPS - 1));
                in.q[n].load(from + at);
                if (keys) in.k[n].load(from + at_k);
            }
    };
    load_own();
    if (pending != hint) {
        line.pending = pending;
        if (hint <= row && row < pending) {
            in.load(line, row, at, at_k, keys);
            if (keys) send_row<false>(h, in, row);
            else put_values(h, in, row, column);
        }
        if (pending_gates && hint <= lane && lane < pending) pending_gate();
        load_own();
    }
    float g = 0.0f, beta = 0.0f;
    if (row < own) {
        if (keys) {
            send_row<true>(h, in, BLOCK + row);
            h.kept[warp][0][lane] = in.q[TAPS - 1].x, h.kept[warp][1][lane] = in.k[TAPS - 1].x;
        } else {
            put_values(h, in, BLOCK + row, column);
        }
    }
    if (keys && row == 0)
#pragma unroll
        for (int n = 0; n < TAPS - 1; n++) h.base[n][0][lane] = in.q[n].x, h.base[n][1][lane] = in.k[n].x;
    if (gates && lane < own) {
        g = log_decay(a_raw, rate, bias), beta = sigmoid(bf16_float(b_raw));
        h.gate[BLOCK + lane] = make_float2(expf(g), beta);
    }
    cluster_arrive();
    cluster_wait();  // all rows are there, and the head's tape and history have been read

    int arrivals = 0;
    if (threadIdx.x == THREADS - 1) {
        __threadfence();
        arrivals = atomicAdd(arrived + key_head * CLUSTER + rank, 1);
    }
    if (!keys) {
        if (row < own) *(uint2*)(tape_u + (u64)row * channels + at) = in.q[TAPS - 1].x;
        if (row == 0 && pending > 0)
#pragma unroll
            for (int n = 0; n < TAPS - 1; n++) *(uint2*)(history + (u64)n * channels + at) = in.q[n].x;
    }
    if (rank == 0 && gates && lane < own) {
        tape_g[(u64)lane * hv + head] = g;
        tape_beta[(u64)lane * hv + head] = beta;
    }
    if (done > pending) {  // replayed by a wrong hint
        s.load(place, D);
        s.turn();
        done = 0;
    }
    steps<D, false>(s, h.tape(), done, pending, [](int, float) {});
    if (pending > 0) s.store(place, D);
    steps<D, true>(s, h.own(), 0, own, [&](int r, float x) { h.o[r][warp * 4 + lane / 8] = x; });

    if (threadIdx.x == THREADS - 1) h.is_last = arrivals == hv / hk - 1;
    __syncthreads();
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (!keys) {
        if (row < own) o = *(const float4*)&h.o[row][column];
        const float part = squares_of_16(o);
#pragma unroll
        for (int i = 0; i < 2; i++) send(in_block(&h.squares[rank][row], lane % 4 * 2 + i), part);
    }
    cluster_arrive();
    if (keys && h.is_last) {
        __threadfence();
        if (row < own) {
            *(uint2*)(tape_u + (u64)row * channels + at) = h.kept[warp][0][lane];
            *(uint2*)(tape_u + (u64)row * channels + at_k) = h.kept[warp][1][lane];
        }
        if (row == 0 && pending > 0)
#pragma unroll
            for (int n = 0; n < TAPS - 1; n++) {
                *(uint2*)(history + (u64)n * channels + at) = h.base[n][0][lane];
                *(uint2*)(history + (u64)n * channels + at_k) = h.base[n][1][lane];
            }
        if (threadIdx.x == 0) arrived[key_head * CLUSTER + rank] = 0;
    }
    cluster_wait();
    if (keys || row >= own) return;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < CLUSTER; i++) squares = __fadd_rn(squares, h.squares[i][row]);
    *(uint2*)(out + (u64)row * out_stride + head * D + rank * COLUMNS + column) =
        gated_norm(o, squares, D, eps, weight, z_raw);
}
#endif
