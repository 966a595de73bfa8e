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

// ids [slots, rows] = [anchor, mask...] when drafts is null, else [anchor, drafts...]. A slot's drafts are `apart` words
// from the next one's. Each block is a slot, one warp.
extern "C" __global__ void cycle_ids(const int* control, const int* drafts, int* ids, int rows, int mask, u64* clock,
                                     int apart) {
  const int slot = blockIdx.x;
  control += slot * CONTROL_WORDS, ids += slot * rows;
  if (drafts) drafts += slot * apart;
  pdl_wait();
  pdl_trigger();
  for (int i = threadIdx.x; i < rows; i += 32) ids[i] = i == 0 ? control[ANCHOR] : drafts ? drafts[i - 1] : mask;
  if (threadIdx.x == 0 && slot == 0 && clock) *clock = now();
}

// Acceptance and commit of a block of ``rows`` <= 32 in each slot, of which the first *valid count, if it is given. n is
// the longest prefix with drafts[i] == choices[i], or pattern[cycle % patterns] when there is one (benchmarks), but at
// most all drafts. Commits n + 1 rows: LENGTH and PENDING move, choices[n] becomes ANCHOR. Nothing in an idle slot.
// clock: of propose, of verify, and with a pattern the cycles of each lane so far. result [slots], in the host's memory: n,
// drafts that counted, two unused, the choices, and then the clocks of propose, verify and accept. Each block is a slot.
static constexpr int RESULT_WORDS = 4 + 32 + 6;
extern "C" __global__ void cycle_accept(const int* drafts, const int* choices, int rows, int* control, int* result,
                                        u64* clock, const int* pattern, int patterns, const int* valid, int apart,
                                        int valid_apart) {
  const int t = threadIdx.x, slot = blockIdx.x;
  control += slot * CONTROL_WORDS, drafts += slot * apart, choices += slot * rows, result += slot * RESULT_WORDS;
  pdl_wait();
  pdl_trigger();
  const int lane = control[LANE], length = control[LENGTH];
  const int last = (valid ? valid[slot * valid_apart] : rows) - 1;
  const bool differs = t >= last || drafts[t] != choices[t];
  int accepted = __ffs(__ballot_sync(ALL, differs)) - 1;
  if (lane < 0) return;
  if (t < rows) result[4 + t] = choices[t];
  if (t) return;
  if (patterns) accepted = min(pattern[clock[2 + lane]++ % patterns], last);
  control[LENGTH] = length + accepted + 1, control[PENDING] = accepted + 1, control[ANCHOR] = choices[accepted];
  result[0] = accepted, result[1] = last;
  u64* times = (u64*)(result + 4 + 32);
  times[0] = clock[0], times[1] = clock[1], times[2] = now();
}

// What slots work on, as the host has it: the blocks of those whose bit is set. A thread a word.
struct Blocks {
  int words[MOST_SLOTS * CONTROL_WORDS];
};
extern "C" __global__ void cycle_set(int* control, const __grid_constant__ Blocks blocks, u32 slots) {
  pdl_wait();
  pdl_trigger();
  if (slots >> threadIdx.x / CONTROL_WORDS & 1) control[threadIdx.x] = blocks.words[threadIdx.x];
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
