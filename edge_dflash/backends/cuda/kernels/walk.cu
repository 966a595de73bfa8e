// The walk behind the head of a drafter whose drafts depend on each other (DFlash2's selector, DSpark's Markov heads):
// a row's largest logits are its candidates, and each row's token is chosen with the one before it in mind.
//
// What does not depend on the path is done for all rows at once: candidates (walk_top) and products of the hidden rows
// (walk_project). Then one block goes from row to row (walk_rows): a step reads one row of `before` and each candidate's
// row of `after`, which is there by then. Heads whose vector takes a matrix have it from walk_mix, a launch a step.
// All sums have a fixed order that depends on rank and columns alone. A launch has the same rows of each slot, `apart` rows
// of hidden columns, logits and tokens from the next slot's; what only the walk reads and writes lies close.
#include "choice.cuh"
#include "control.cuh"

static constexpr int TOP_THREADS = 256, TOP_WARPS = TOP_THREADS / 32, SLICE = 8192,
                     PER = SLICE / TOP_THREADS;                   // logits of a block; of a thread
static constexpr int SPLITS = 8, PROJECT_WARPS = 4, WINDOW = 32;  // of the columns of a hidden row
static constexpr int MIX_WARPS = 8, WALK_THREADS = 512, WALK_WARPS = WALK_THREADS / 32, MOST_RANK = 1024;

struct TopMemory {
  u32 maxima[TOP_THREADS], list[SLICE], bounds[TOP_WARPS], count;
};

// A key that at least `top` keys reach, or 1; `most` is the largest of this thread. All threads get the same.
__device__ __forceinline__ u32 bound(TopMemory& m, u32 most, int top) {
  const int t = threadIdx.x, lane = t % 32, wanted = (top + TOP_WARPS - 1) / TOP_WARPS;  // of a warp
  int above = 0;
#pragma unroll
  for (int i = 1; i < 32; i++) above += __shfl_xor_sync(ALL, most, i) > most;
  __syncthreads();  // an earlier call has read what is shared
  m.maxima[t] = most;
  if (t == 0) m.count = 0;
  const u32 reached = __reduce_max_sync(ALL, above == wanted - 1 ? most : 0);  // 0: the warp has too few
  if (lane == 0) m.bounds[t / 32] = reached;
  __syncthreads();
  u32 floor = m.bounds[0];
#pragma unroll
  for (int i = 1; i < TOP_WARPS; i++) floor = min(floor, m.bounds[i]);
  if (floor && wanted <= 2) return floor;  // of more, too many keys reach it
  __syncthreads();
  if (t == 0) m.bounds[0] = 1;
  __syncthreads();
  above = 0;
  for (int i = 0; i < TOP_THREADS / 4; i++) {
    const uint4 other = ((const uint4*)m.maxima)[i];
    above += (other.x > most) + (other.y > most) + (other.z > most) + (other.w > most);
  }
  if (above == top - 1 && most) m.bounds[0] = most;
  __syncthreads();
  return m.bounds[0];
}

// The `top` largest of all threads' keys, which are unique but for 0: none. `give` is told rank and key of each.
template <class Give>
__device__ __forceinline__ void largest(TopMemory& m, const u32 (&keys)[PER], int top, const Give& give) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < PER; i++) most = max(most, keys[i]);
  const u32 floor = bound(m, most, top);
#pragma unroll
  for (int i = 0; i < PER; i++)
    if (keys[i] >= floor) m.list[atomicAdd(&m.count, 1)] = keys[i];
  __syncthreads();
  const u32 count = m.count;
  for (u32 i = threadIdx.x; i < count; i += TOP_THREADS) {
    const u32 key = m.list[i];
    int rank = 0;
#pragma unroll 8
    for (u32 k = 0; k < count; k++) rank += m.list[k] > key;
    if (rank < top) give(rank, key);
  }
}

// The `top` largest of each row's logits, the lower id first on a tie: ids and values [slots, rows, top]. Block (slice, row)
// finds those of its slice, the row's last block those of all. found: [slots, rows, slices, top]; arrived: [slots, rows], 0
// between launches.
extern "C" __global__ void __launch_bounds__(TOP_THREADS)
    walk_top(const u16* logits, int stride, int columns, int top, u32* found, u32* arrived, int* ids, float* values,
             int rows, int apart) {
  __shared__ alignas(16) TopMemory memory;
  __shared__ bool last;
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.y, t = threadIdx.x, slice = blockIdx.x, slices = gridDim.x, start = slice * SLICE;
  const u16* from = logits + (u64)(row / rows * apart + row % rows) * stride + start;
  u32 keys[PER];  // place of the value, then of the id: both descend
#pragma unroll
  for (int g = 0; g < PER / 8; g++) {
    const int first = (g * TOP_THREADS + t) * 8;
    const bool there = start + first < columns;
    const uint4 words = there ? *(const uint4*)(from + first) : make_uint4(0, 0, 0, 0);
    const u32 pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const u32 place = 0xffffu - bin_of(i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffffu);
      keys[8 * g + i] = start + first + i < columns ? place << 16 | (0xffffu - first - i) : 0;
    }
  }
  found += (u64)row * slices * top;
  for (int i = t; i < top; i += TOP_THREADS) found[slice * top + i] = 0;
  largest(memory, keys, top, [&](int rank, u32 key) { found[slice * top + rank] = key; });
  __threadfence();
  __syncthreads();
  if (t == 0) {
    last = atomicAdd(arrived + row, 1) == (u32)slices - 1;
    if (last) arrived[row] = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  const int all = slices * top;
#pragma unroll
  for (int i = 0; i < PER; i++) {
    const int e = i * TOP_THREADS + t;
    const u32 key = e < all ? __ldcg(found + e) : 0;
    keys[i] = key ? (key & 0xffff0000u) | (0xffffu - e) : 0;  // slices, and ids in them, ascend
  }
  ids += row * top, values += row * top;
  largest(memory, keys, top, [&](int rank, u32 key) {
    const int e = 0xffff - (key & 0xffffu);
    ids[rank] = e / top * SLICE + 0xffff - (__ldcg(found + e) & 0xffffu);
    values[rank] = value_of(0xffffu - (key >> 16));
  });
}

// sums[split][row][n] += x[row] . matrix[n] over the split's windows of columns: BF16, 16 rows and 8 outputs a block. Blocks
// (outputs / 8, splits, slots * rows / 16); a row of `matrix` begins on 16 bytes, columns is a multiple of 8.
extern "C" __global__ void __launch_bounds__(32 * PROJECT_WARPS)
    walk_project(const u16* x, int x_stride, int rows, int columns, const u16* matrix, int matrix_stride, int outputs,
                 float* sums, int apart) {
  __shared__ float parts[PROJECT_WARPS][16][8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int tiles = (rows + 15) / 16, slot = blockIdx.z / tiles, row = (blockIdx.z - slot * tiles) * 16;
  const int n = blockIdx.x * 8, split = blockIdx.y, windows = (columns + WINDOW - 1) / WINDOW;
  const int each = (windows + SPLITS * PROJECT_WARPS - 1) / (SPLITS * PROJECT_WARPS);
  const int first = (split * PROJECT_WARPS + warp) * each, stop = min(first + each, windows);
  const uint4 none = make_uint4(0, 0, 0, 0);
  float c[4] = {};
  x += (u64)slot * apart * x_stride, sums += (u64)slot * SPLITS * rows * outputs;
  pdl_wait();
  pdl_trigger();
#pragma unroll 2
  for (int window = first; window < stop; window++) {
    const int k = window * WINDOW + 8 * t;  // a lane's eight: the order of K is the same on both sides
    const u16* at = x + (u64)(row + g) * x_stride + k;
    const bool inside = k < columns;
    const uint4 a = inside && row + g < rows ? *(const uint4*)at : none;
    const uint4 b = inside && row + g + 8 < rows ? *(const uint4*)(at + (u64)8 * x_stride) : none;
    const uint4 w = inside && n + g < outputs ? *(const uint4*)(matrix + (u64)(n + g) * matrix_stride + k) : none;
    const u32 low[4] = {a.x, b.x, a.y, b.y}, high[4] = {a.z, b.z, a.w, b.w};
    mma<false>(c, low, w.x, w.y);
    mma<false>(c, high, w.z, w.w);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) parts[warp][g + i / 2 * 8][2 * t + i % 2] = c[i];
  __syncthreads();
  const int r = threadIdx.x / 8, o = threadIdx.x % 8;  // 16 x 8 threads
  float sum = parts[0][r][o];
#pragma unroll
  for (int i = 1; i < PROJECT_WARPS; i++) sum = __fadd_rn(sum, parts[i][r][o]);
  if (row + r < rows && n + o < outputs) sums[((u64)split * rows + row + r) * outputs + n + o] = sum;
}

// The sum over walk_project's splits, in order.
__device__ __forceinline__ float projected(const float* sums, int rows, int outputs, int row, int n) {
  const float* at = sums + (u64)row * outputs + n;
  float sum = at[0];
#pragma unroll
  for (int s = 1; s < SPLITS; s++) sum = __fadd_rn(sum, at[(u64)s * rows * outputs]);
  return sum;
}

__device__ __forceinline__ float exact_sigmoid(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

// x . y over `rank` columns (a multiple of 8) by a warp, x in shared memory on 16 bytes; every lane gets the sum.
__device__ __forceinline__ float dot(const u16* y, const float* x, int rank) {
  float sum = 0.0f;
  for (int k = threadIdx.x % 32 * 8; k < rank; k += 256) {
    const uint4 words = *(const uint4*)(y + k);
    const float4 low = *(const float4*)(x + k), high = *(const float4*)(x + k + 4);
    sum = __fmaf_rn(bf16_low(words.x), low.x, sum), sum = __fmaf_rn(bf16_high(words.x), low.y, sum);
    sum = __fmaf_rn(bf16_low(words.y), low.z, sum), sum = __fmaf_rn(bf16_high(words.y), low.w, sum);
    sum = __fmaf_rn(bf16_low(words.z), high.x, sum), sum = __fmaf_rn(bf16_high(words.z), high.y, sum);
    sum = __fmaf_rn(bf16_low(words.w), high.z, sum), sum = __fmaf_rn(bf16_high(words.w), high.w, sum);
  }
  return lane_sum<32>(sum);
}

struct Mix {
  const u16* before;     // [V, rank]
  const u16* matrix;     // columns of the predecessor: of [rank, stride], or of [3 rank, stride] where there is a state
  const u16* recurrent;  // columns of the state in the same rows; null: gated
  const float* sums;     // of the hidden rows, by walk_project
  const float* bias;     // [rank] or [3 rank]
  const int* control;
  const int* tokens;  // of the rows so far
  float* state;       // [slots, 2, rank]: before even rows, before odd ones
  float* mixed;       // [slots, rank], out
  int rank, rows, stride, vocabulary;
  int apart;
};

__device__ __forceinline__ int predecessor(const int* control, const int* tokens, int row, int vocabulary) {
  const int token = row ? tokens[row - 1] : control[ANCHOR];
  return token >= 0 && token < vocabulary ? token : 0;
}

// The vector of row `row` of each slot from `slot` on (blockIdx.y), of rank values: one warp each. Dynamic shared memory: 8 * rank bytes.
extern "C" __global__ void __launch_bounds__(32 * MIX_WARPS)
    walk_mix(const __grid_constant__ Mix m, int row, int slot) {
  extern __shared__ uint4 memory[];
  float* const vectors = (float*)memory;  // the predecessor's row, then the state
  pdl_wait();
  pdl_trigger();
  const int t = threadIdx.x, lane = t % 32, j = blockIdx.x * MIX_WARPS + t / 32, rank = m.rank;
  slot += blockIdx.y;
  const int gates = m.recurrent ? 3 : 1;
  const int* const control = m.control + slot * CONTROL_WORDS;
  const float* const sums = m.sums + (u64)slot * SPLITS * m.rows * gates * rank;
  float* const state = m.state + slot * 2 * rank;
  const u16* from = m.before + (u64)predecessor(control, m.tokens + slot * m.apart, row, m.vocabulary) * rank;
  for (int i = t; i < rank; i += 32 * MIX_WARPS) {
    vectors[i] = from_bf16(from[i]);
    vectors[rank + i] = m.recurrent && row ? state[row % 2 * rank + i] : 0.0f;
  }
  __syncthreads();
  if (j >= rank) return;
  float gate[3];
#pragma unroll
  for (int i = 0; i < 3; i++) {
    if (i >= gates) break;
    const int n = i * rank + j;
    float sum =
        __fadd_rn(projected(sums, m.rows, gates * rank, row, n), dot(m.matrix + (u64)n * m.stride, vectors, rank));
    if (m.recurrent) sum = __fadd_rn(sum, dot(m.recurrent + (u64)n * m.stride, vectors + rank, rank));
    gate[i] = __fadd_rn(sum, m.bias[n]);
  }
  if (lane) return;
  const float open = exact_sigmoid(gate[0]);
  if (!m.recurrent) {
    m.mixed[slot * rank + j] = __fmul_rn(open, vectors[j]);
  } else {
    const float kept = __fmul_rn(open, vectors[rank + j]), fresh = __fmul_rn(__fsub_rn(1.0f, open), tanhf(gate[1]));
    state[(row + 1) % 2 * rank + j] = __fadd_rn(kept, fresh);
    m.mixed[slot * rank + j] = tanhf(gate[2]);
  }
}

struct Walk {                // of slot 0
  const u16* before;         // [V, rank]: rows of predecessors
  const u16* after;          // [V, rank]: rows of candidates
  const float* sums;         // selector: each row's factors, by walk_project; null: none
  const float* mixed;        // the step's vector, by walk_mix; null: the predecessor's row
  const int* ids;            // candidates [rows, top]; null: all tokens
  const float* values;       // their logits
  const u16* logits;         // [rows, stride], of all tokens where ids is null
  const int* control;        // LENGTH and ANCHOR
  const Settings* settings;  // null: greedy
  const u32* masks;   // [rows, words]; not null: rows, position and masks as in the settings, greedy behind them; one
                      // slot
  const int* others;  // [rows]: choices where a mask leaves no candidate
  int* tokens;        // [rows], out
  float* scores;      // [rows, top], out
  const float* sure;  // confidence: the hidden rows' part, by walk_project; null: none
  const u16* sure_before;  // weights of the predecessor's row [rank]; null: none
  const float* sure_bias;
  float* confidence;  // [rows], out
  int* counted;       // out, where there is confidence: ROWS_SURE, 1 + drafts before the first unsure one
  int rank, top, rows, stride, vocabulary, words;
  int by_id;  // the lowest id wins a tie, as it does when a choice is sampled; 0: the first candidate
  int apart;
};

// The same of slot `slot`.
__device__ __forceinline__ Walk of_slot(Walk w, int slot) {
  const int rows = slot * w.rows, found = rows * w.top;
  if (w.sums) w.sums += (u64)SPLITS * rows * w.rank;
  if (w.mixed) w.mixed += slot * w.rank;
  if (w.ids) w.ids += found;
  w.values += found, w.scores += found, w.logits += (u64)slot * w.apart * w.stride, w.tokens += slot * w.apart;
  w.control += slot * CONTROL_WORDS, w.counted += slot * COUNTED_WORDS;
  if (w.settings) w.settings += slot;
  if (w.sure) w.sure += SPLITS * rows;
  w.confidence += rows;
  return w;
}

// A step's candidates in shared memory.
struct Candidates {
  u64* keys;        // [top]: of the choice; 0: it may not be chosen
  u64* masses;      // [top]: minus the noise, then masses by rank
  float* scores;    // [top]
  u16* ranks;       // [top]: by score, the lower id first, among those with a key
  const int* list;  // [top]: ids; null: the places are

  __device__ __forceinline__ int id(int c) const { return list ? list[c] : c; }
};

// Leaves out, by key 0, what top_k and top_p do not keep; a candidate is a warp's.
__device__ __forceinline__ void filter(const Settings& s, const Candidates& at, int top) {
  __shared__ float best;
  __shared__ int there;
  const int t = threadIdx.x, lane = t % 32;
  for (int c = t / 32; c < top; c += WALK_WARPS) {
    if (!at.keys[c]) continue;
    const float x = at.scores[c];
    const int id = at.id(c);
    int rank = 0, all = 0;
    for (int first = 0; first < top; first += 32) {
      const int i = first + lane;
      const bool other = i < top && at.keys[i];
      const bool before = other && (at.scores[i] > x || (at.scores[i] == x && at.id(i) < id));
      rank += __popc(__ballot_sync(ALL, before)), all += __popc(__ballot_sync(ALL, other));
    }
    if (lane == 0) {
      at.ranks[c] = rank, there = all;
      if (rank == 0) best = x;
    }
  }
  __syncthreads();
  const int kept = s.top_k > 0 ? min(s.top_k, there) : there;
  const bool by_mass = s.top_p < 1.0;
  if (by_mass) {
    for (int c = t; c < top; c += WALK_THREADS)
      if (at.keys[c]) at.masses[at.ranks[c]] = weight(at.scores[c], best, s.temperature);
    __syncthreads();
  }
  for (int c = t / 32; c < top; c += WALK_WARPS) {
    if (!at.keys[c]) continue;
    const int rank = at.ranks[c];
    bool stays = rank < kept;
    if (stays && by_mass) {
      u64 before = 0, whole = 0;
      for (int i = lane; i < kept; i += 32) whole += at.masses[i], before += i < rank ? at.masses[i] : 0;
#pragma unroll
      for (int bit = 16; bit > 0; bit /= 2) {
        whole += __shfl_xor_sync(ALL, whole, bit);
        before += __shfl_xor_sync(ALL, before, bit);
      }
      stays = __ull2double_rn(before) < __dmul_rn(__ull2double_rn(whole), s.top_p);
    }
    __syncwarp();
    if (lane == 0 && !stays) at.keys[c] = 0;
  }
  __syncthreads();
}

// The place of the largest key; every warp finds the same. -1: all are 0.
__device__ __forceinline__ int first_of(const Candidates& at, int top, bool by_id) {
  u64 best = 0;
  int place = -1, order = 0;  // `order` decides a tie
  for (int c = threadIdx.x % 32; c < top; c += 32) {
    const int mine = by_id ? at.id(c) : c;
    const u64 key = at.keys[c];
    if (key > best || (key == best && best && mine < order)) best = key, place = c, order = mine;
  }
  const u32 high = __reduce_max_sync(ALL, (u32)(best >> 32)), low = (u32)best;
  const bool tied = place >= 0 && (u32)(best >> 32) == high;
  const u32 lowest = __reduce_max_sync(ALL, tied ? low : 0);
  const u32 first = __reduce_min_sync(ALL, tied && low == lowest ? (u32)order : ~0u);
  const u32 found = __ballot_sync(ALL, tied && low == lowest && (u32)order == first);
  return found ? __shfl_sync(ALL, place, __ffs(found) - 1) : -1;
}

// How sure the drafter is of a row, by one warp; ``from``: the predecessor's row.
__device__ __forceinline__ float sureness(const Walk& w, const u16* from, int row) {
  float sum = 0.0f;
  for (int k = threadIdx.x % 32; k < w.rank && w.sure_before; k += 32)
    sum = __fmaf_rn(from_bf16(w.sure_before[k]), from_bf16(from[k]), sum);
  sum = __fadd_rn(projected(w.sure, w.rows, 1, row, 0), lane_sum<32>(sum));
  return exact_sigmoid(__fadd_rn(sum, *w.sure_bias));
}

// Rows first .. stop - 1, one after the other, of each slot from `slot` on, a block each. Factors, candidates and their
// logits are in shared memory from the start, and where `staged` the candidates' rows a step ahead: a step waits for the
// predecessor's row alone. Dynamic shared memory: 22 * top bytes, 4 * rank, 4 * rows * rank for a selector, 8 * rows * top
// where there are ids, staged 4 * top * rank.
extern "C" __global__ void __launch_bounds__(WALK_THREADS, 1)
    walk_rows(const __grid_constant__ Walk all, int first, int stop, int staged, int slot) {
  extern __shared__ uint4 memory[];
  const Walk w = of_slot(all, slot + blockIdx.x);
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, top = w.top, rank = w.rank;
  u16* const stage = (u16*)memory;  // [2, top, rank]
  float* const vector = (float*)(stage + (staged ? 2 * top * rank : 0));
  float* const factors = vector + rank;  // [rows, rank]
  u64* const keys = (u64*)(factors + (w.sums ? w.rows * rank : 0));
  float* const scores = (float*)(keys + 2 * top);
  float* const values = scores + top;
  int* const ids = (int*)(values + (w.ids ? w.rows * top : 0));  // [rows, top], like values
  Candidates at = {keys, keys + top, scores, (u16*)(ids + (w.ids ? w.rows * top : 0)), nullptr};
  pdl_wait();
  pdl_trigger();
  Settings s = {};
  if (w.settings) s = *w.settings;
  const bool steered = w.masks;
  const int from_row = steered ? s.first : 0, to_row = steered ? s.stop : w.rows;
  const int position = steered ? s.position - s.first : w.control[LENGTH] + 1;
  if (!w.mixed) first = max(first, from_row);  // rows before keep their tokens
  int token = predecessor(w.control, w.tokens, first, w.vocabulary);
  int sure = first ? w.counted[ROWS_SURE] : w.counted[ROWS_ASKED];
  for (int i = first * top + t; w.ids && i < stop * top; i += WALK_THREADS) ids[i] = w.ids[i], values[i] = w.values[i];
  __syncthreads();
  auto fetch = [&](int row) {
    for (int c = warp; staged && row < stop && c < top; c += WALK_WARPS) {
      const u16* after = w.after + (u64)(w.ids ? ids[row * top + c] : c) * rank;
      u16* const to = stage + (row % 2 * top + c) * rank;
      for (int k = 8 * lane; k < rank; k += 256) copy16(to + k, after + k);
    }
    copy_commit();
  };
  fetch(first);
  for (int i = first * rank + t; w.sums && i < stop * rank; i += WALK_THREADS)
    factors[i] = projected(w.sums, w.rows, rank, i / rank, i % rank);
  for (int row = first; row < stop; row++) {
    const u16* from = w.before + (u64)(token >= 0 && token < w.vocabulary ? token : 0) * rank;
    const bool asked = row < to_row, masked = steered && asked && (s.masked >> row & 1);
    const bool sampled = asked && s.temperature > 0.0;
    float x[MOST_RANK / WALK_THREADS];
#pragma unroll
    for (int k = 0; k < MOST_RANK / WALK_THREADS; k++) {
      const int i = k * WALK_THREADS + t;
      x[k] = i >= rank ? 0.0f : w.mixed ? w.mixed[i] : from_bf16(from[i]);
    }
    fetch(row + 1);
    at.list = w.ids ? ids + row * top : nullptr;
    for (int c = t; c < top; c += WALK_THREADS) {
      const int id = at.id(c);
      scores[c] = w.ids ? values[row * top + c] : from_bf16(w.logits[(u64)row * w.stride + c]);
      keys[c] = !masked || (w.masks[(u64)row * w.words + id / 32] >> id % 32 & 1);
      if (!sampled) continue;
      u32 noise[1];
      philox(noise, (u32)id, (u32)(position + row), (u32)s.seed, (u32)(s.seed >> 32));
      at.masses[c] = (u64)__double_as_longlong(minus_noise(noise[0]));
    }
#pragma unroll
    for (int k = 0; k < MOST_RANK / WALK_THREADS; k++) {
      const int i = k * WALK_THREADS + t;
      if (i < rank) vector[i] = w.sums ? __fmul_rn(x[k], factors[row * rank + i]) : x[k];
    }
    copy_wait<1>();
    __syncthreads();
    for (int c = warp; c < top; c += WALK_WARPS) {
      const u16* after = staged ? stage + (row % 2 * top + c) * rank : w.after + (u64)at.id(c) * rank;
      const float score = __fadd_rn(scores[c], dot(after, vector, rank));
      __syncwarp();
      if (lane) continue;
      scores[c] = score, w.scores[row * top + c] = score;
      if (!keys[c]) continue;
      const double minus = sampled ? __longlong_as_double((long long)at.masses[c]) : 0.0;
      keys[c] = max(sampled ? noisy_score(score, minus, s.temperature) : ordered(score), 1ull);
    }
    if (w.sure) {
      const float value = sureness(w, from, row);
      if (value < __int_as_float(w.counted[THRESHOLD])) sure = min(sure, row + 1);
      if (t == 0) w.confidence[row] = value;
    }
    __syncthreads();
    if (sampled && filters(s)) filter(s, at, top);
    const int place = first_of(at, top, sampled || w.by_id);
    const int found = place >= 0 ? at.id(place) : w.others ? w.others[row] : at.id(0);  // none: logits are no numbers
    token = row < from_row ? w.tokens[row] : found;
    if (t == 0) w.tokens[row] = token;
    __syncthreads();  // scores, keys and the vector are read
  }
  if (t == 0) w.counted[ROWS_SURE] = sure;
}
