// The frame of a cycle: the ids of a pass, greedy acceptance and commit on the device, and columns that are moved or
// gated outside a linear. One clock (ns) is read at each part's beginning, so that a cycle knows its own times.
#include "control.cuh"
#include "prelude.cuh"

static constexpr int THREADS = 256;

__device__ __forceinline__ u64 now() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// ids = [anchor, mask...] when drafts is null, else [anchor, drafts...]. One warp.
extern "C" __global__ void cycle_ids(const int* control, const int* drafts, int* ids, int rows, int mask, u64* clock) {
  pdl_wait();
  pdl_trigger();
  for (int i = threadIdx.x; i < rows; i += 32) ids[i] = i == 0 ? control[ANCHOR] : drafts ? drafts[i - 1] : mask;
  if (threadIdx.x == 0 && clock) *clock = now();
}

// Acceptance and commit of a block of ``rows`` <= 32, of which the first *valid count, if it is given. n is the longest
// prefix with drafts[i] == choices[i], or pattern[cycle % patterns] when there is one (benchmarks), but at most all
// drafts. Commits n + 1 rows: LENGTH and PENDING move, choices[n] becomes ANCHOR. clock: of propose, of verify, cycles so
// far. result, in the host's memory: n, drafts that counted, two unused, the choices, and then the clocks of propose, verify and accept.
extern "C" __global__ void cycle_accept(const int* drafts, const int* choices, int rows, int* control, int* result,
                                        u64* clock, const int* pattern, int patterns, const int* valid) {
  pdl_wait();
  pdl_trigger();
  const int lane = threadIdx.x, last = (valid ? *valid : rows) - 1;
  const bool differs = lane >= last || drafts[lane] != choices[lane];
  const u64 cycle = clock[2];
  const int accepted = patterns ? min(pattern[cycle % patterns], last) : __ffs(__ballot_sync(ALL, differs)) - 1;
  if (lane < rows) result[4 + lane] = choices[lane];
  if (lane) return;
  control[LENGTH] += accepted + 1, control[PENDING] = accepted + 1, control[ANCHOR] = choices[accepted];
  result[0] = accepted, result[1] = last, clock[2] = cycle + 1;
  u64* times = (u64*)(result + 4 + 32);
  times[0] = clock[0], times[1] = clock[1], times[2] = now();
}

// State of the sequence as the host has it.
extern "C" __global__ void cycle_set(int* control, int length, int pending, int rows, int anchor) {
  pdl_wait();
  pdl_trigger();
  if (threadIdx.x) return;
  control[LENGTH] = length, control[PENDING] = pending, control[ROWS] = rows, control[ANCHOR] = anchor;
}

// BF16 columns that are moved; strides in elements.
static constexpr int PARTS = 8;
struct Parts {
  const u16* x[PARTS];
  u16* out[PARTS];
  int columns[PARTS], x_stride[PARTS], out_stride[PARTS];
};

// Row blockIdx.x of part blockIdx.y by pieces of 16 bytes where its rows lie so, else of 2 values.
template <class Piece>
__device__ __forceinline__ void copy_row(const Parts& parts, int part) {
  constexpr int VALUES = sizeof(Piece) / 2, AHEAD = 4;
  const Piece* from = (const Piece*)(parts.x[part] + (u64)blockIdx.x * parts.x_stride[part]);
  Piece* to = (Piece*)(parts.out[part] + (u64)blockIdx.x * parts.out_stride[part]);
  const int count = parts.columns[part] / VALUES;
  for (int i = threadIdx.x; i < count; i += AHEAD * THREADS) {
    Piece piece[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      if (i + k * THREADS < count) piece[k] = from[i + k * THREADS];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k)
      if (i + k * THREADS < count) to[i + k * THREADS] = piece[k];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_columns(const __grid_constant__ Parts parts) {
  const int part = blockIdx.y;
  const bool wide = ((u64)parts.x[part] | (u64)parts.out[part]) % 16 == 0 &&
                    (parts.columns[part] | parts.x_stride[part] | parts.out_stride[part]) % 8 == 0;
  pdl_wait();
  pdl_trigger();
  if (wide)
    copy_row<uint4>(parts, part);
  else
    copy_row<u32>(parts, part);
}

// out [rows, columns] = bf16(silu(gate) * up).
extern "C" __global__ void __launch_bounds__(THREADS)
    gate_columns(const u16* gate, const u16* up, u16* out, int columns, int gate_stride, int up_stride,
                 int out_stride) {
  pdl_wait();
  pdl_trigger();
  const u64 row = blockIdx.x;
  for (int i = threadIdx.x; i < columns; i += THREADS)
    out[row * out_stride + i] =
        to_bf16(__fmul_rn(silu(from_bf16(gate[row * gate_stride + i])), from_bf16(up[row * up_stride + i])));
}

// out [rows, columns] = bf16(a + b).
extern "C" __global__ void __launch_bounds__(THREADS)
    add_columns(const u16* a, const u16* b, u16* out, int columns, int a_stride, int b_stride, int out_stride) {
  pdl_wait();
  pdl_trigger();
  const u64 row = blockIdx.x;
  for (int i = threadIdx.x; i < columns; i += THREADS)
    out[row * out_stride + i] = to_bf16(__fadd_rn(from_bf16(a[row * a_stride + i]), from_bf16(b[row * b_stride + i])));
}

// The clock into one place: what lies between two of them is one step's time. One thread.
extern "C" __global__ void stamp(u64* place) {
  pdl_wait();
  *place = now();
  pdl_trigger();
}
