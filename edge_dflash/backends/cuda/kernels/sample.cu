// Choice of a token for each row of BF16 logits, with the results of decode/sampling.py.
//
// A row has at most 65,536 distinct logits. Where top_k or top_p filter, a histogram over them (`bin` 0 is the largest
// value) gives the exact cut without a sort: bins before `cut.bin` are kept, and of that bin the first `cut.ties` ids.
// All sums are of integers, so no order of arrival matters, and a row's token depends on its logits, its mask and the
// settings alone. A launch has a block of rows for each slot, and each slot has settings and masks of its own. The score of a token is logit / T + Gumbel noise in FP64; an estimate in FP32 with a bound on its
// error tells which few tokens of a slice may be the best, and only those are scored.
#include "choice.cuh"
#include "control.cuh"

static constexpr u32 BINS = 65536, CHUNK = 128, CHUNKS = BINS / CHUNK;
static constexpr int SLICE = 8192;  // logits of a block; of a thread of the choice, GROUPS times 8 in a row
static constexpr int COUNT_THREADS = 512, CUT_THREADS = CHUNKS, THREADS = 256, GROUPS = SLICE / (8 * THREADS);
static constexpr u32 NEAR_LOW = 117 << 7, NEAR = 20 << 7;  // |x| in [2^-10, 2^10): bins counted in shared memory first

struct Job {
  const u16* logits;
  const Settings* settings;  // of each slot
  const int* length;  // CONTROL_WORDS from a slot's to the next one's; null: rows and position as in the settings
  const u32* masks;   // [slots, apart, words], bit i of a word is the token 32 * word + i; null: none
  int stride, columns, words;
  int offset, first, stop;  // with a length: a slot's row r, first <= r < stop, chooses for length + offset + r
  int block, apart;         // rows of a slot, and masks
};

// A row of a launch.
struct Row {
  const Job& job;
  const int all, slot, r;  // of all rows; its slot; of the slot's rows
  const Settings& s;

  __device__ __forceinline__ Row(const Job& job, int row)
      : job(job), all(row), slot(row / job.block), r(row - slot * job.block), s(job.settings[slot]) {}
  __device__ __forceinline__ bool wanted() const {
    return job.length ? r >= job.first && r < job.stop : r >= s.first && r < s.stop;
  }
  __device__ __forceinline__ const u8* mask() const {  // null: every token may come
    return job.masks && (s.masked >> r & 1) ? (const u8*)(job.masks + (u64)(slot * job.apart + r) * job.words)
                                            : nullptr;
  }
  __device__ __forceinline__ u32 position() const {
    return job.length ? job.length[slot * CONTROL_WORDS] + job.offset + r : s.position + r - s.first;
  }
};

struct Cut {
  u32 bin, ties;
};

struct alignas(16) Best {
  u64 score;
  u32 id;
};
static constexpr u32 NONE = ~0u;  // an id

// Logits first .. first + 7 of a row.
__device__ __forceinline__ uint4 load8(const Job& job, int row, int first) {
  return first < job.columns ? *(const uint4*)(job.logits + (u64)row * job.stride + first) : make_uint4(0, 0, 0, 0);
}
// Which of them there are and may come, one bit each.
__device__ __forceinline__ u32 alive8(const Job& job, const u8* mask, int first) {
  if (first >= job.columns) return 0;
  u32 alive = first + 8 <= job.columns ? 0xffu : (1u << (job.columns - first)) - 1;
  if (mask) alive &= mask[first / 8];
  return alive;
}
__device__ __forceinline__ u32 bin8(const uint4& words, int i) {
  const u32 pair = i / 2 == 0 ? words.x : i / 2 == 1 ? words.y : i / 2 == 2 ? words.z : words.w;
  return bin_of(i % 2 ? pair >> 16 : pair & 0xffffu);
}

// Gumbel noise -ln(-ln((bits + 0.5) / 2^32)), to 2e-5.
__device__ __forceinline__ float noise_estimate(u32 bits) {
  const float low = fmaf((float)bits, 0x1p-32f, 0x1p-33f);          // u
  const float high = fmaf((float)~bits, 0x1p-32f, 0x1p-33f);        // 1 - u, exact to FP32's last bit where u is near 1
  const float z = high * reciprocal_fast(2.0f - high), zz = z * z;  // -ln(1 - v) = 2 artanh(v / (2 - v))
  const float series = 2.0f * z * fmaf(zz, fmaf(zz, fmaf(zz, 1.0f / 7, 1.0f / 5), 1.0f / 3), 1.0f);
  const float e = bits >= 0xC0000000u ? series : -0.693147181f * log2_fast(low);
  return -0.693147181f * log2_fast(e);
}

__device__ __forceinline__ u64 score(u32 bin, u32 bits, double temperature) {
  const double x = value_of(bin);
  return temperature == 0.0 ? ordered(x) : noisy_score(x, minus_noise(bits), temperature);
}
__device__ __forceinline__ bool better(u64 score, u32 id, const Best& than) {
  return score > than.score || (score == than.score && id < than.id);
}

// Histogram of each row's bins and of chunks of them, and its smallest bin (the top value). Only where a filter is.
extern "C" __global__ void __launch_bounds__(COUNT_THREADS) sample_count(Job job, u32* bins, u32* chunks, u32* tops) {
  __shared__ u32 counts[2 * NEAR + 1];
  __shared__ u32 lowest[COUNT_THREADS / 32];
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.y, t = threadIdx.x;
  const Row at(job, row);
  if (!filters(at.s) || !at.wanted()) return;
  const u8* mask = at.mask();
  for (int i = t; i < 2 * NEAR + 1; i += COUNT_THREADS) counts[i] = 0;
  __syncthreads();
  u32* far = bins + (u64)row * BINS;
  chunks += row * CHUNKS;
  u32 top = BINS;
#pragma unroll
  for (int part = 0; part < SLICE / (8 * COUNT_THREADS); part++) {
    const int first = blockIdx.x * SLICE + (part * COUNT_THREADS + t) * 8;
    const uint4 words = load8(job, row, first);
    const u32 alive = alive8(job, mask, first);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      if (!(alive >> i & 1)) continue;
      const u32 bin = bin8(words, i);
      top = min(top, bin);
      const bool negative = bin & 0x8000u;
      const u32 size = negative ? bin & 0x7fffu : 0x7fffu - bin;
      if (size - NEAR_LOW < NEAR)
        atomicAdd(counts + (negative ? NEAR : 0) + size - NEAR_LOW, 1);
      else if (size == 0)
        atomicAdd(counts + 2 * NEAR, 1);
      else
        atomicAdd(far + bin, 1), atomicAdd(chunks + bin / CHUNK, 1);
    }
  }
  top = __reduce_min_sync(ALL, top);
  if (t % 32 == 0) lowest[t / 32] = top;
  __syncthreads();
  for (int i = t; i < 2 * NEAR; i += COUNT_THREADS) {  // a warp is in one chunk
    const u32 count = counts[i], size = NEAR_LOW + i % NEAR;
    const u32 bin = i >= NEAR ? size | 0x8000u : 0x7fffu - size, sum = __reduce_add_sync(ALL, count);
    if (count) atomicAdd(far + bin, count);
    if (sum && t % 32 == 0) atomicAdd(chunks + bin / CHUNK, sum);
  }
  if (t) return;
  if (counts[2 * NEAR]) atomicAdd(far + 0x7fff, counts[2 * NEAR]), atomicAdd(chunks + 0x7fff / CHUNK, counts[2 * NEAR]);
  for (int i = 0; i < COUNT_THREADS / 32; i++) top = min(top, lowest[i]);
  atomicMin(tops + row, top);
}

// The cut of each row, one block a row: first by top_k, then by top_p among what that keeps: a token is kept while the
// mass before it is below top_p times the whole. Leaves the histogram empty for the next launch.
extern "C" __global__ void __launch_bounds__(CUT_THREADS)
    sample_cut(Job job, u32* bins, u32* sums, u32* tops, Cut* cuts) {
  __shared__ u32 counts[CHUNKS];
  __shared__ u64 masses[CHUNKS];
  __shared__ u32 chunk_k, before_k, bin_k, ties_k, chunk_p;
  __shared__ u64 mass_k, whole;
  pdl_wait();
  pdl_trigger();
  const Row at(job, blockIdx.x);
  const Settings s = at.s;
  const int row = blockIdx.x, t = threadIdx.x, lane = t % 32, warp = t / 32;
  constexpr int WARPS = CUT_THREADS / 32;
  if (!filters(s) || !at.wanted()) return;
  uint4* chunks = (uint4*)(bins + (u64)row * BINS);  // 32 of 4 bins a chunk
  sums += row * CHUNKS;
  counts[t] = sums[t], masses[t] = 0;
  const double top = value_of(tops[row]);
  const bool by_mass = s.top_p < 1.0;
  // A lane's part of a chunk: its bins' counts and masses.
  auto mass_of = [&](u32 chunk, const u32(&count)[4], u64(&mass)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      mass[i] = count[i] && by_mass ? weight(value_of(chunk * CHUNK + lane * 4 + i), top, s.temperature) : 0;
  };
  __syncthreads();
  for (u32 chunk = warp; chunk < CHUNKS && by_mass; chunk += WARPS) {
    if (!counts[chunk]) continue;
    const uint4 found = chunks[chunk * 32 + lane];
    const u32 here[4] = {found.x, found.y, found.z, found.w};
    u64 each[4];
    mass_of(chunk, here, each);
    u64 mass = here[0] * each[0] + here[1] * each[1] + here[2] * each[2] + here[3] * each[3];
#pragma unroll
    for (int bit = 16; bit > 0; bit /= 2) mass += __shfl_xor_sync(ALL, mass, bit);
    if (lane == 0) masses[chunk] = mass;
  }
  __syncthreads();
  u32 all;
  u64 all_mass;
  const u32 count = counts[t], until = block_scan<CUT_THREADS>(count, all);
  const u64 mass_until = block_scan<CUT_THREADS>(masses[t], all_mass), mass_before = mass_until - masses[t];
  const u32 kept = s.top_k > 0 ? min((u32)s.top_k, all) : all;
  if (t == 0) chunk_p = 0, chunk_k = 0, before_k = 0, mass_k = 0;
  __syncthreads();
  if (until - count < kept && kept <= until) chunk_k = t, before_k = until - count, mass_k = mass_before;
  __syncthreads();
  if (warp == 0) {  // the bin that holds the last token of top_k
    const uint4 found = chunks[chunk_k * 32 + lane];
    const u32 here[4] = {found.x, found.y, found.z, found.w};
    u64 each[4];
    mass_of(chunk_k, here, each);
    const u32 sum = here[0] + here[1] + here[2] + here[3];
    const u64 mass = here[0] * each[0] + here[1] * each[1] + here[2] * each[2] + here[3] * each[3];
    u32 before = before_k + warp_scan(sum) - sum;
    u64 so_far = mass_k + warp_scan(mass) - mass;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (before < kept && kept <= before + here[i]) {
        bin_k = chunk_k * CHUNK + lane * 4 + i, ties_k = kept - before;
        whole = so_far + (kept - before) * each[i];
        if (!by_mass) cuts[row] = kept == before + here[i] ? Cut{bin_k + 1, 0} : Cut{bin_k, ties_k};
      }
      before += here[i], so_far += here[i] * each[i];
    }
  }
  __syncthreads();
  if (by_mass) {
    const double limit = __dmul_rn(__ull2double_rn(whole), s.top_p);
    if (count && __ull2double_rn(mass_before) < limit && t <= (int)chunk_k) atomicMax(&chunk_p, (u32)t);
    __syncthreads();
    if (t == (int)chunk_p) mass_k = mass_before;
    __syncthreads();
    if (warp == 0) {  // the bin that holds the last token of top_p
      const uint4 found = chunks[chunk_p * 32 + lane];
      const u32 here[4] = {found.x, found.y, found.z, found.w};
      u64 each[4];
      mass_of(chunk_p, here, each);
      const u64 mass = here[0] * each[0] + here[1] * each[1] + here[2] * each[2] + here[3] * each[3];
      u64 so_far = mass_k + warp_scan(mass) - mass;
      u64 from = 0, unit = 0;
      u32 bin = 0, ties = 0, there = 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32 b = chunk_p * CHUNK + lane * 4 + i;
        if (here[i] && b <= bin_k && __ull2double_rn(so_far) < limit)
          bin = b, there = here[i], ties = b == bin_k ? ties_k : here[i], from = so_far, unit = each[i];
        so_far += here[i] * each[i];
      }
      if (bin == __reduce_max_sync(ALL, there ? bin : 0) && there) {
        u32 low = 1, high = ties;  // how many tokens have less than the limit before them
        while (low < high) {
          const u32 middle = (low + high + 1) / 2;
          if (__ull2double_rn(from + (middle - 1) * unit) < limit)
            low = middle;
          else
            high = middle - 1;
        }
        cuts[row] = low == there ? Cut{bin + 1, 0} : Cut{bin, low};
      }
    }
  }
  __syncthreads();
  for (u32 chunk = warp; chunk < CHUNKS; chunk += WARPS)
    if (counts[chunk]) chunks[chunk * 32 + lane] = make_uint4(0, 0, 0, 0);
  sums[t] = 0;
  if (t == 0) tops[row] = ~0u;
}

// How many of a slice's tokens are tied on the cut, where it goes through tied tokens.
extern "C" __global__ void __launch_bounds__(THREADS) sample_ties(Job job, const Cut* cuts, u32* ties) {
  __shared__ u32 sums[THREADS / 32];
  pdl_wait();
  pdl_trigger();
  const int row = blockIdx.y, t = threadIdx.x;
  const Row at(job, row);
  if (!filters(at.s) || !at.wanted() || !cuts[row].ties) return;
  const u8* mask = at.mask();
  const u32 bin = cuts[row].bin;
  u32 count = 0;
#pragma unroll
  for (int g = 0; g < GROUPS; g++) {
    const int first = blockIdx.x * SLICE + (g * THREADS + t) * 8;
    const uint4 words = load8(job, row, first);
    const u32 alive = alive8(job, mask, first);
#pragma unroll
    for (int i = 0; i < 8; i++) count += (alive >> i & 1) && bin8(words, i) == bin;
  }
  count = __reduce_add_sync(ALL, count);
  if (t % 32 == 0) sums[t / 32] = count;
  __syncthreads();
  if (t) return;
  for (int i = 1; i < THREADS / 32; i++) count += sums[i];
  ties[row * gridDim.x + blockIdx.x] = count;
}

struct Scores {
  u32 position, k0, k1;
  double temperature;
  float inverse;  // 1 / T

  template <int n>
  __device__ __forceinline__ void noise(u32 (&bits)[n], u32 first) const {
    if (temperature > 0.0) philox(bits, first, position, k0, k1);
  }
  // Near the score, but for the margin.
  __device__ __forceinline__ float estimate(u32 bin, u32 bits) const {
    const float x = value_of(bin);
    return temperature > 0.0 ? fmaf(x, inverse, noise_estimate(bits)) : x;
  }
  __device__ __forceinline__ float margin(u32 bin) const {
    return temperature > 0.0 ? fmaf(fabsf(value_of(bin) * inverse), 0x1p-20f, 2e-5f) : 0.0f;
  }
};

__device__ __forceinline__ void warp_best(Best& best) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) {
    const u64 other = __shfl_xor_sync(ALL, best.score, bit);
    const u32 id = __shfl_xor_sync(ALL, best.id, bit);
    if (better(other, id, best)) best = {other, id};
  }
}

// ids[row] = the choice. One block a slice finds that slice's best; the row's last block finds the best of all.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    sample_choose(Job job, const Cut* cuts, const u32* ties, Best* bests, u32* arrived, int* ids) {
  __shared__ float floors[THREADS / 32];
  __shared__ Best tops[THREADS / 32];
  __shared__ bool last;
  pdl_wait();
  pdl_trigger();
  const Row at(job, blockIdx.y);
  const Settings& s = at.s;
  const int row = blockIdx.y, t = threadIdx.x, lane = t % 32, warp = t / 32, slice = blockIdx.x, slices = gridDim.x;
  const u32 start = slice * SLICE + t * 8;  // id of this thread's first token; a group is THREADS * 8 further
  uint4 words[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; g++) words[g] = load8(job, row, start + g * THREADS * 8);
  if (!at.wanted()) return;
  const Scores scores{at.position(), (u32)s.seed, (u32)(s.seed >> 32), s.temperature,
                      s.temperature > 0.0 ? __frcp_rn((float)s.temperature) : 1.0f};
  const u8* mask = at.mask();
  u32 alive = 0;  // bit 8 g + i
#pragma unroll
  for (int g = 0; g < GROUPS; g++) alive |= alive8(job, mask, start + g * THREADS * 8) << 8 * g;
  if (filters(s)) {
    const Cut cut = cuts[row];
    u32 above = 0, on = 0;
#pragma unroll
    for (int i = 0; i < 8 * GROUPS; i++) {
      const u32 bin = bin8(words[i / 8], i % 8);
      above |= bin < cut.bin ? 1u << i : 0, on |= bin == cut.bin ? 1u << i : 0;
    }
    on &= alive, alive &= above;
    if (cut.ties) {  // the first of them by id
      u32 before = 0;
      for (int i = lane; i < slice; i += 32) before += ties[row * slices + i];
      before = __reduce_add_sync(ALL, before);
      if (before + ties[row * slices + slice] <= cut.ties) {
        alive |= on;
      } else if (before < cut.ties) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
          u32 all, rest = on >> 8 * g & 0xffu;
          u32 rank = before + block_scan<THREADS>((u32)__popc(rest), all) - __popc(rest);
          for (; rest && rank < cut.ties; rest &= rest - 1, rank++) alive |= (rest & (0 - rest)) << 8 * g;
          before += all;
        }
      }
    }
  }
  // This thread's largest bound and where it is, the largest bound of its others, and a floor under the best score.
  float most = NEG_INF, second = NEG_INF, floor = NEG_INF;
  int where = -1;
#pragma unroll
  for (int first = 0; first < 8 * GROUPS; first += 4) {
    if (!(alive >> first & 0xfu)) continue;
    u32 noise[4];
    scores.noise(noise, start + first / 8 * (THREADS * 8) + first % 8);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 bin = bin8(words[first / 8], first % 8 + i);
      const float estimate = scores.estimate(bin, noise[i]), margin = scores.margin(bin);
      const bool there = alive >> (first + i) & 1;
      const float bound = there ? estimate + margin : NEG_INF;
      floor = fmaxf(floor, there ? estimate - margin : NEG_INF);
      second = fmaxf(second, fminf(most, bound));
      if (bound > most) most = bound, where = first + i;
    }
  }
  if (s.temperature == 0.0) second = NEG_INF;  // the bound is the score, and its first place the lowest id
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) floor = fmaxf(floor, __shfl_xor_sync(ALL, floor, bit));
  if (lane == 0) floors[warp] = floor;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < THREADS / 32; i++) floor = fmaxf(floor, floors[i]);
  u32 near = 0;
  if (alive && second >= floor)  // also where nothing is known: all bounds are infinite
    near = alive;
  else if (where >= 0 && most >= floor)
    near = 1u << where;
  Best best = {0, NONE};
#pragma unroll 1
  for (; near; near &= near - 1) {
    const int i = __ffs(near) - 1;
    const u32 id = start + i / 8 * (THREADS * 8) + i % 8, bin = bin_of(job.logits[(u64)row * job.stride + id]);
    u32 noise[1];
    scores.noise(noise, id);
    if (scores.estimate(bin, noise[0]) + scores.margin(bin) < floor) continue;
    const u64 exact = score(bin, noise[0], s.temperature);
    if (better(exact, id, best)) best = {exact, id};
  }
  __syncwarp();
  warp_best(best);
  if (lane == 0) tops[warp] = best;
  __syncthreads();
  bests += row * slices;
  if (t == 0) {
#pragma unroll
    for (int i = 1; i < THREADS / 32; i++)
      if (better(tops[i].score, tops[i].id, best)) best = tops[i];
    bests[slice] = best;
    __threadfence();
    last = atomicAdd(arrived + row, 1) == (u32)slices - 1;
    if (last) arrived[row] = 0;
  }
  __syncthreads();
  if (!last || warp) return;
  __threadfence();
  best = {0, NONE};
  for (int i = lane; i < slices; i += 32) {
    const uint4 found = __ldcg((const uint4*)(bests + i));
    const u64 other = (u64)found.y << 32 | found.x;
    if (better(other, found.z, best)) best = {other, found.z};
  }
  warp_best(best);
  if (lane == 0) ids[row] = best.id == NONE ? 0 : (int)best.id;
}

static constexpr int LOGPROB_THREADS = 1024, LOGPROB_WARPS = LOGPROB_THREADS / 32, AHEAD = 4;

// What `join` makes of all threads' values, in one order.
template <class Join>
__device__ __forceinline__ float over_block(float value, float* parts, const Join& join) {
#pragma unroll
  for (int bit = 16; bit > 0; bit /= 2) value = join(value, __shfl_xor_sync(ALL, value, bit));
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int i = 1; i < LOGPROB_WARPS; ++i) value = join(value, parts[i]);
  return value;
}

__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000u); }  // -inf

// Tells `add` a row's logits, of which a thread has eight in a row; behind the last column they are -inf.
template <class Add>
__device__ __forceinline__ void each_logit(const u16* row, int columns, const Add& add) {
  for (int first = threadIdx.x * 8; first < columns; first += AHEAD * LOGPROB_THREADS * 8) {
    uint4 words[AHEAD];
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const int at = first + k * LOGPROB_THREADS * 8;
      words[k] = at < columns ? *(const uint4*)(row + at) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {
      const u32 pairs[4] = {words[k].x, words[k].y, words[k].z, words[k].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float x = __uint_as_float(i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16);
        add(first + k * LOGPROB_THREADS * 8 + i < columns ? x : nothing());
      }
    }
  }
}

// found[row] = ln of the probability of ids[row] by the row's logits: x - max - ln(sum of exp(x' - max)). A block a row, so
// that the order of the sum depends on the columns alone.
extern "C" __global__ void __launch_bounds__(LOGPROB_THREADS)
    row_logprobs(const u16* logits, const int* ids, float* found, int stride, int columns) {
  __shared__ float parts[LOGPROB_WARPS];
  pdl_wait();
  pdl_trigger();
  const u16* row = logits + (u64)blockIdx.x * stride;
  float best = nothing(), sum = 0.0f;
  each_logit(row, columns, [&](float x) { best = fmaxf(best, x); });
  best = over_block(best, parts, [](float a, float b) { return fmaxf(a, b); });
  each_logit(row, columns, [&](float x) { sum += expf(x - best); });
  sum = over_block(sum, parts, [](float a, float b) { return a + b; });
  if (threadIdx.x) return;
  const float x = __uint_as_float((u32)row[ids[blockIdx.x]] << 16);
  found[blockIdx.x] = (float)((double)x - best - log((double)sum));
}
