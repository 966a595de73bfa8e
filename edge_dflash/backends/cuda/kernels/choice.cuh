// What every choice of a token is made of, with the results of decode/sampling.py: settings, the order of BF16 logits, mass,
// noise, score, and sums over the threads of a block.
#pragma once
#include "prelude.cuh"

struct Settings {  // of a request, then of one launch
  double temperature, top_p;
  u64 seed;
  int top_k;
  int position;     // of row `first`
  int first, stop;  // rows
  u32 masked;       // bit r: row r has a mask
  u32 unused;
};

__device__ __forceinline__ bool filters(const Settings& s) {
  return s.temperature > 0.0 && (s.top_k > 0 || s.top_p < 1.0);
}

// Place of a BF16 value in descending order; -0 is 0.
__device__ __forceinline__ u32 bin_of(u32 bits) {
  return bits & 0x7fffu ? (bits & 0x8000u ? bits : 0x7fffu - bits) : 0x7fffu;
}
__device__ __forceinline__ float value_of(u32 bin) {
  return __uint_as_float((bin & 0x8000u ? bin : 0x7fffu - bin) << 16);
}

// Mass of a token in units of 2^-40 of the top's: round(2^40 exp((x - top) / T)), bit for bit as in decode/sampling.py.
__device__ u64 weight(double x, double top, double temperature) {
  const double y = __ddiv_rn(__dsub_rn(x, top), temperature);
  if (!(y >= -29.0)) return 0;  // below half a unit
  const double n = rint(__dmul_rn(y, 1.4426950408889634));
  const double r =
      __dsub_rn(__dsub_rn(y, __dmul_rn(n, 6.93147180369123816490e-01)), __dmul_rn(n, 1.90821492927058770002e-10));
  double p = 1.0 / 6227020800.0, factorial = 6227020800.0;
#pragma unroll
  for (int k = 12; k >= 0; k--) {
    factorial /= k + 1;
    p = __dadd_rn(__dmul_rn(p, r), 1.0 / factorial);
  }
  return __double2ull_rn(__dmul_rn(p, __hiloint2double((1023 + 40 + (int)n) << 20, 0)));
}

__device__ __forceinline__ u32 multiply(u32 a, u32 b, u32& high) {
  u32 low;
  asm("{\n.reg .b64 product;\nmul.wide.u32 product, %2, %3;\nmov.b64 {%0, %1}, product;\n}"
      : "=r"(low), "=r"(high)
      : "r"(a), "r"(b));
  return low;
}
// First words of Philox4x32-10 of the counters (first + i, position, 0, 0); several at once hide each other's latency.
template <int n>
__device__ __forceinline__ void philox(u32 (&bits)[n], u32 first, u32 position, u32 k0, u32 k1) {
  u32 c1[n], c2[n], c3[n];
#pragma unroll
  for (int i = 0; i < n; i++) bits[i] = first + i, c1[i] = position, c2[i] = 0, c3[i] = 0;
#pragma unroll
  for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
#pragma unroll
    for (int i = 0; i < n; i++) {
      u32 high0, high1;
      const u32 low0 = multiply(bits[i], 0xD2511F53u, high0), low1 = multiply(c2[i], 0xCD9E8D57u, high1);
      bits[i] = high1 ^ c1[i] ^ k0, c1[i] = low1, c2[i] = high0 ^ c3[i] ^ k1, c3[i] = low0;
    }
  }
}

// An order of doubles as unsigned integers; 0 is below all.
__device__ __forceinline__ u64 ordered(double x) {
  const u64 bits = (u64)__double_as_longlong(__dadd_rn(x, 0.0));  // -0 becomes 0
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}
// Minus the Gumbel noise of 32 random bits, and the score of a token: a pure function of its logit, noise and temperature.
__device__ __forceinline__ double minus_noise(u32 bits) {
  return log(-log(__dmul_rn(__dadd_rn((double)bits, 0.5), 0x1p-32)));
}
__device__ __forceinline__ u64 noisy_score(double x, double minus, double temperature) {
  return ordered(__dsub_rn(__ddiv_rn(x, temperature), minus));
}

template <typename T>
__device__ __forceinline__ T warp_scan(T x) {  // inclusive
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T other = __shfl_up_sync(ALL, x, step);
    x += lane >= step ? other : 0;
  }
  return x;
}
// Inclusive sum over the threads of a block; `total` is that of all.
template <int threads, typename T>
__device__ T block_scan(T x, T& total) {
  __shared__ T sums[threads / 32];
  const T inclusive = warp_scan(x);
  __syncthreads();
  if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int i = 0; i < threads / 32; i++) {
    if (i == (int)threadIdx.x / 32) before = total;
    total += sums[i];
  }
  return before + inclusive;
}
