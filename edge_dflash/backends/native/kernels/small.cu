// Small kernels of a pass and of the cycle: gather, norm, add, row selection, argmax, block assembly, accept, commit.
#include "state.cuh"

static constexpr int THREADS = 256;
static constexpr int SLICE = 8192;  // logits of one argmax block

// Row ids[blockIdx.x] of table [V, H] BF16; pieces of 8 values. Ids outside the table give row 0 (never in a valid row).
extern "C" __global__ void __launch_bounds__(THREADS)
    gather_rows(const int* ids, const u16* table, u16* out, int columns, int vocabulary, int out_stride) {
    pdl_wait();
    pdl_trigger();
    const int row = blockIdx.x, asked = ids[row], id = asked >= 0 && asked < vocabulary ? asked : 0;
    const uint4* from = (const uint4*)(table + (u64)id * columns);
    uint4* to = (uint4*)(out + (u64)row * out_stride);
    for (int i = threadIdx.x; i < columns / 8; i += THREADS) to[i] = from[i];
}

// bf16(x / sqrt(mean(x^2) + eps) * w), one block a row; the order of the sum depends on the columns alone.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const u16* x, const float* weight, u16* out, int columns, int x_stride, int out_stride, float eps) {
    __shared__ float sums[THREADS / 32];
    pdl_wait();
    pdl_trigger();
    const u32* from = (const u32*)(x + (u64)blockIdx.x * x_stride);
    u32* to = (u32*)(out + (u64)blockIdx.x * out_stride);
    float squares = 0.0f;
    for (int i = threadIdx.x; i < columns / 2; i += THREADS) {
        const float a = bf16_low(from[i]), b = bf16_high(from[i]);
        squares = __fmaf_rn(a, a, squares);
        squares = __fmaf_rn(b, b, squares);
    }
    squares = lane_sum<32>(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    __syncthreads();
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) total = __fadd_rn(total, sums[i]);
    const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(total, (float)columns), eps)));
    for (int i = threadIdx.x; i < columns / 2; i += THREADS) {
        const float2 w = *(const float2*)(weight + 2 * i);
        to[i] = pack_bf16(__fmul_rn(__fmul_rn(bf16_low(from[i]), inverse), w.x),
                          __fmul_rn(__fmul_rn(bf16_high(from[i]), inverse), w.y));
    }
}

// bf16(a + b) over `pairs` pairs of BF16.
extern "C" __global__ void __launch_bounds__(THREADS) add_rows(const u32* a, const u32* b, u32* out, int pairs) {
    pdl_wait();
    pdl_trigger();
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < pairs) out[i] = pack_bf16(bf16_low(a[i]) + bf16_low(b[i]), bf16_high(a[i]) + bf16_high(b[i]));
}

// Last valid row (control word ROWS, or `rows`) of x [rows, columns] BF16.
extern "C" __global__ void __launch_bounds__(THREADS)
    last_row(const u16* x, u16* out, const int* rows_there, int rows, int columns, int x_stride) {
    pdl_wait();
    pdl_trigger();
    const int row = max((rows_there ? min(*rows_there, rows) : rows) - 1, 0), i = blockIdx.x * THREADS + threadIdx.x;
    if (i < columns / 8) ((uint4*)out)[i] = ((const uint4*)(x + (u64)row * x_stride))[i];
}

// Order of floats as unsigned integers; with the complement of the id, a maximum that prefers the lowest id.
__device__ __forceinline__ u64 rank(float x, int id) {
    u32 bits = __float_as_uint(x == 0.0f ? 0.0f : x);  // -0 equals 0
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (u64)bits << 32 | (u32)~id;
}
__device__ __forceinline__ u64 warp_max(u64 x) {
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) {
        const u64 other = __shfl_xor_sync(ALL, x, bit);
        x = other > x ? other : x;
    }
    return x;
}

// Largest rank of a slice (blockIdx.x) of a row (blockIdx.y) of BF16 logits [rows, columns].
extern "C" __global__ void __launch_bounds__(THREADS)
    argmax_slices(const u16* logits, u64* partial, int columns, int stride) {
    __shared__ u64 tops[THREADS / 32];
    pdl_wait();
    pdl_trigger();
    const u16* row = logits + (u64)blockIdx.y * stride;
    const int first = blockIdx.x * SLICE, stop = min(first + SLICE, columns);
    u64 top = 0;
    for (int i = first + threadIdx.x * 2; i < stop; i += THREADS * 2) {
        const u64 a = rank(bf16_float(row[i]), i);
        top = a > top ? a : top;
        if (i + 1 < stop) {
            const u64 b = rank(bf16_float(row[i + 1]), i + 1);
            top = b > top ? b : top;
        }
    }
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    top = warp_max(threadIdx.x < THREADS / 32 ? tops[threadIdx.x] : 0);
    if (threadIdx.x == 0) partial[blockIdx.y * gridDim.x + blockIdx.x] = top;
}

// ids[row] = id of the largest rank among the slices of a row; one warp a row.
extern "C" __global__ void argmax_rows(const u64* partial, int* ids, int slices) {
    pdl_wait();
    pdl_trigger();
    u64 top = 0;
    for (int i = threadIdx.x; i < slices; i += 32) {
        const u64 x = partial[blockIdx.x * slices + i];
        top = x > top ? x : top;
    }
    top = warp_max(top);
    if (threadIdx.x == 0) ids[blockIdx.x] = (int)~(u32)top;
}

// ids = [anchor, drafts...], or [anchor, mask...] when drafts is null. One warp.
extern "C" __global__ void assemble_block(const int* control, const int* drafts, int* ids, int rows, int mask) {
    pdl_wait();
    pdl_trigger();
    for (int i = threadIdx.x; i < rows; i += 32) ids[i] = i == 0 ? control[ANCHOR] : drafts ? drafts[i - 1] : mask;
}

// Greedy acceptance and commit. n is the longest prefix with drafts[i] == choices[i]; tokens are those n drafts and
// choices[n] (which are choices[0..n]), cut after the first stop token and at BUDGET. Commits as many rows: LENGTH and
// PENDING move, the last token becomes ANCHOR; after a stop token BUDGET is 0, so that later cycles commit nothing.
// result: tokens committed, n, new length, remaining budget, then the tokens. One warp.
extern "C" __global__ void accept_greedy(const int* drafts, const int* choices, const int* stops, int stop_count,
                                         int rows, int* control, int* result) {
    pdl_wait();
    pdl_trigger();
    const int lane = threadIdx.x, budget = max(control[BUDGET], 0);
    const bool differs = lane < rows - 1 ? drafts[lane] != choices[lane] : true;
    const int accepted = __ffs(__ballot_sync(ALL, differs || lane >= rows - 1)) - 1;
    bool stops_here = false;
    if (lane <= accepted)
        for (int i = 0; i < stop_count; i++) stops_here |= choices[lane] == stops[i];
    const u32 stopping = __ballot_sync(ALL, stops_here);
    int count = min(accepted + 1, budget);
    const bool stopped = stopping && __ffs(stopping) <= count;
    if (stopped) count = __ffs(stopping);
    if (lane < rows) result[4 + lane] = lane < count ? choices[lane] : -1;
    __syncwarp();
    if (lane) return;
    const int length = control[LENGTH] + count, left = stopped ? 0 : budget - count;
    control[LENGTH] = length, control[PENDING] = count, control[BUDGET] = left;
    if (count > 0) control[ANCHOR] = choices[count - 1];
    result[0] = count, result[1] = accepted, result[2] = length, result[3] = left;
}

// rows < 0: a pass or flush has replayed the pending rows. rows >= 0: commit so many rows of the last verify.
extern "C" __global__ void commit_rows(int* control, int rows) {
    pdl_wait();
    pdl_trigger();
    if (threadIdx.x) return;
    if (rows < 0) {
        control[PENDING] = 0;
    } else {
        control[LENGTH] += rows, control[PENDING] = rows;
    }
}

// End of a prefill pass: its ROWS rows are committed and in the recurrent state.
extern "C" __global__ void commit_prefill(int* control) {
    pdl_wait();
    pdl_trigger();
    if (threadIdx.x) return;
    control[LENGTH] += control[ROWS], control[PENDING] = 0;
}
