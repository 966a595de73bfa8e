// Weight formats in their streaming layout, and how a lane turns its bytes into tensor-core fragments.
//
// A matrix [N, K] is cut into *units* of 32 rows and *windows* of WINDOW consecutive k; unit u, window v is one
// contiguous piece of UNIT bytes at (u * windows + v) * UNIT. Within it everything is in lane order (lane = 4 g + t), so
// that a lane loads 16-byte vectors, needs no other lane's data, and K is permuted to suit: within a window, lane t owns
// WINDOW / 4 consecutive k, and tensor-core step j multiplies its k 4j .. 4j+3 (pairs 2j and 2j+1), in the weights and
// in the activations alike.
//
//   NVFP4, WINDOW 64: lane t owns one block of 16 k of each row.            1152 bytes
//     [tile 0: 32 lanes x {row g: 2 words, row g+8: 2 words}] [tile 1: same] [32 lanes x 4 scale bytes]
//     scale bytes of a lane: tile 0 row g, tile 0 row g+8, tile 1 row g, tile 1 row g+8
//   FP8, WINDOW 64: [tile 0 row g: 32 lanes x 16 codes] [tile 0 row g+8] [tile 1 row g] [tile 1 row g+8]     2048 bytes
//   BF16, WINDOW 32: the same four parts, 32 lanes x 8 values                                                2048 bytes
//
// An NVFP4 word is for masks and shifts, or, where an instruction converts two codes (SM100 and later), holds a pair a byte.
//
// ``fetch`` and ``read`` take addresses that include 16 * lane. A tile is 16 rows of the unit. The Python side is
// weights/layout.py, for the bits of a word too.
#pragma once
#include "e2m1.cuh"

// The four BF16 pairs of a word of eight E2M1 codes, each times 2^-126. A pair's sign and magnitude bits land at 15 and
// 8..6 of each half: E2M1's subnormal 0.5 becomes BF16's, so no case is special. Some bits of a word serve two pairs, so that
// four masks, one rotation and three shifts to the left suffice; the latter compile to products, for another pipe.
__device__ __forceinline__ void e2m1_pairs(u32 w, u32 (&pair)[4]) {
  const u32 rotated = __funnelshift_r(w, w, 6);
  pair[0] = (w ^ w << 2) & 0x81C081C0u;
  pair[1] = (w << 6) & 0x81C081C0u;
  pair[2] = (w ^ rotated << 2) & 0x81C081C0u;
  pair[3] = rotated & 0x81C081C0u;
}

// Scale bytes 2m and 2m + 1 (5 exponent bits, 3 mantissa bits) as a BF16 pair: block scales times 2^107, of rows g and
// g + 8 of tile ``m``. e2m1 * 2^-126 times one is exact in BF16: 6 significant bits, the product times 2^-19.
__device__ __forceinline__ u32 block_scales(u32 bytes, int m) {
  return __byte_perm(bytes, 0, m ? 0x4342u : 0x4140u) * 16u + 0x70007000u;
}

// ``pair`` times the low or the high one of ``scales``: a multiplication selects halves by itself, where PTX takes them so.
#if __CUDA_ARCH__ >= 900
#define MULTIPLY "mul.rn.bf16x2 %0, %1, twice;"
#else
#define MULTIPLY "fma.rn.bf16x2 %0, %1, twice, %3;"  // as mul_bf16x2
#endif
#define TIMES(NAME, HALF)                                                                                      \
  __device__ __forceinline__ u32 NAME(u32 pair, u32 scales) {                                                  \
    u32 d;                                                                                                     \
    asm("{\n.reg .b16 low, high;\n.reg .b32 twice;\nmov.b32 {low, high}, %2;\nmov.b32 twice, {" HALF ", " HALF \
        "};\n" MULTIPLY "\n}"                                                                                  \
        : "=r"(d)                                                                                              \
        : "r"(pair), "r"(scales), "r"(0x80008000u));                                                           \
    return d;                                                                                                  \
  }
TIMES(times_low, "low")
TIMES(times_high, "high")
#undef TIMES
#undef MULTIPLY

// The two BF16 pairs of a word of four E4M3 codes; ``pair`` 0 from bytes 1 and 3, pair 1 from bytes 0 and 2.
__device__ __forceinline__ void e4m3_pairs(u32 w, u32& pair0, u32& pair1) {
  const u32 shift_exponent = 0x7B807B80u;  // 2^120: the field bias of E4M3 is 7, that of BF16 127
  pair0 = mul_bf16x2((w & 0x80008000u) | ((w >> 4) & 0x07F007F0u), shift_exponent);
  pair1 = mul_bf16x2(((w << 8) & 0x80008000u) | ((w << 4) & 0x07F007F0u), shift_exponent);
}

struct Nvfp4 {
  static constexpr int WINDOW = 64, UNIT = 1152, STEPS = 4;
  static constexpr bool EAGER = true;  // the words of two units fit in registers beside their sums

  struct Words {
    uint4 tile[2];
    u32 scales;
  };

  static __device__ __forceinline__ void fetch(u32 to, const u8* from, int lane) {
    copy16(to, from);
    copy16(to + 512, from + 512);
    copy4(to + 1024 - lane * 12, from + 1024 - lane * 12);
  }

  static __device__ __forceinline__ Words read(u32 at, int lane) {
    return {{load_shared16(at), load_shared16(at + 512)}, load_shared4(at + 1024 - lane * 12)};
  }

  // Tile ``m`` alone, to the place of tile 0; and its words as those of tile 0.
  static __device__ __forceinline__ void fetch_tile(u32 to, const u8* from, int lane, int m) {
    copy16(to, from + m * 512);
    copy4(to + 1024 - lane * 12, from + 1024 - lane * 12);
  }

  static __device__ __forceinline__ Words read_tile(u32 at, int lane, int m) {
    return {{load_shared16(at), {}}, load_shared4(at + 1024 - lane * 12) >> (16 * m)};
  }

  // Tile ``m`` of a whole piece, its words as those of tile 0.
  static __device__ __forceinline__ Words read_half(u32 at, int lane, int m) {
    return {{load_shared16(at + m * 512), {}}, load_shared4(at + 1024 - lane * 12) >> (16 * m)};
  }

  // Fragments of tile ``m`` for steps 2h and 2h+1 of the window.
  static __device__ __forceinline__ void fragments(const Words& w, int m, int h, u32 (&a)[2][4]) {
    const u32 words[2][2] = {{w.tile[m].x, w.tile[m].y}, {w.tile[m].z, w.tile[m].w}};
    u32 low[4], high[4];
#if __CUDA_ARCH__ >= 1000
    const u32 scales = scale_pair(w.scales, m);
    byte_pairs(words[0][h], low), byte_pairs(words[1][h], high);
#else
    const u32 scales = block_scales(w.scales, m);
    e2m1_pairs(words[0][h], low), e2m1_pairs(words[1][h], high);
#endif
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i / 2][i % 2 * 2] = times_low(low[i], scales);
      a[i / 2][i % 2 * 2 + 1] = times_high(high[i], scales);
    }
  }
};

// FP8 and BF16 share the place of their vectors: four parts of 512 bytes.
struct FourParts {
  static constexpr int UNIT = 2048;

  struct Words {
    uint4 part[4];  // tile 0 row g, tile 0 row g+8, tile 1 row g, tile 1 row g+8
  };

  static __device__ __forceinline__ void fetch(u32 to, const u8* from, int) {
#pragma unroll
    for (int i = 0; i < 4; ++i) copy16(to + i * 512, from + i * 512);
  }

  static __device__ __forceinline__ Words read(u32 at, int) {
    Words w;
#pragma unroll
    for (int i = 0; i < 4; ++i) w.part[i] = load_shared16(at + i * 512);
    return w;
  }

  static __device__ __forceinline__ void fetch_tile(u32 to, const u8* from, int, int m) {
    copy16(to, from + m * 1024);
    copy16(to + 512, from + m * 1024 + 512);
  }

  static __device__ __forceinline__ Words read_tile(u32 at, int, int) {
    return {{load_shared16(at), load_shared16(at + 512), {}, {}}};
  }

  static __device__ __forceinline__ Words read_half(u32 at, int lane, int m) {
    return read_tile(at + m * 1024, lane, m);
  }
};

struct Fp8 : FourParts {
  static constexpr int WINDOW = 64, STEPS = 4;
  static constexpr bool EAGER = false;

  static __device__ __forceinline__ void fragments(const Words& w, int m, int h, u32 (&a)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = w.part[2 * m + half];
      e4m3_pairs(h ? v.z : v.x, a[0][half], a[0][2 + half]);
      e4m3_pairs(h ? v.w : v.y, a[1][half], a[1][2 + half]);
    }
  }
};

struct Bf16 : FourParts {
  static constexpr int WINDOW = 32, STEPS = 2;
  static constexpr bool EAGER = true;

  static __device__ __forceinline__ void fragments(const Words& w, int m, int, u32 (&a)[2][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 v = w.part[2 * m + half];
      a[0][half] = v.x, a[0][2 + half] = v.y;
      a[1][half] = v.z, a[1][2 + half] = v.w;
    }
  }
};
