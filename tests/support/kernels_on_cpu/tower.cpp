// Launches of kernels/tower.cu on a CPU, with the arguments of its host side.
#include "tower.cu"

extern "C" {
void patches(const u8* levels, u16* out, int rows, int channels, int area, int times, int stride, Channels by) {
  cpu::launch({rows, 1, 1}, THREADS, [=] { tower_patches(levels, out, channels, area, times, stride, by); });
}
void positions(u16* x, const u16* table, const int* corners, const float* shares, int rows, int columns, int stride) {
  cpu::launch({rows, 1, 1}, THREADS, [=] { tower_positions(x, table, corners, shares, columns, stride); });
}
void norm(const u16* x, const float* weight, const float* bias, u16* out, int rows, int columns, int x_stride,
          int out_stride, float eps) {
  cpu::launch({rows, 1, 1}, THREADS, [=] { tower_norm(x, weight, bias, out, columns, x_stride, out_stride, eps); });
}
void finish(const u16* x, const float* bias, const u16* residual, u16* out, int rows, int columns, int stride,
            int activation) {
  cpu::launch({rows, 1, 1}, THREADS, [=] { tower_finish(x, bias, residual, out, columns, stride, activation); });
}
void turn(u16* qkv, const float* cosine, const float* sine, int rows, int heads, int dim, int stride) {
  cpu::launch({rows, 1, 1}, THREADS, [=] { tower_turn(qkv, cosine, sine, heads, dim, stride); });
}
void attend(const u16* qkv, u16* out, int rows, int heads, int dim, int stride, int out_stride, float scale) {
  const Dim blocks = {(rows + QUERIES - 1) / QUERIES, heads, 1};
  auto run = [=](auto kernel) {
    cpu::launch(blocks, 32 * WARPS, [=] { kernel(qkv, out, rows, heads, dim, stride, out_stride, scale); });
  };
  switch ((dim + 15) / 16) {
    case 1: return run(tower_attend_1);
    case 2: return run(tower_attend_2);
    case 3: return run(tower_attend_3);
    case 4: return run(tower_attend_4);
    case 5: return run(tower_attend_5);
    case 6: return run(tower_attend_6);
    case 7: return run(tower_attend_7);
    case 8: return run(tower_attend_8);
  }
}
}
