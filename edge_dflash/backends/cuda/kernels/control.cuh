// Words of the control block of a slot in device memory (int32); memory.Control has their names.
#pragma once
#include "prelude.cuh"

enum Control { LENGTH = 0, PENDING = 1, ROWS = 2, ANCHOR = 3, LANE = 4 };
static constexpr int CONTROL_WORDS = 8;  // from a slot's block to the next one's
static constexpr int MOST_SLOTS = 8;

// The control block of a slot, and whose memory its kernels use: LANE, stored before the kernel that precedes the reader.
// Below 0: nobody's, the slot is idle. Where `lanes` is 1 it is that one, and nothing waits for the word.
__device__ __forceinline__ const int* words_of(const int* control, int slot) { return control + slot * CONTROL_WORDS; }
__device__ __forceinline__ int home_of(const int* words) { return early_word(words + LANE); }
__device__ __forceinline__ int home_of(const int* words, int lanes) { return lanes > 1 ? home_of(words) : 0; }

// Rows of a cycle's verify that count, of each slot, as the host says and as the drafter's confidence cuts them.
enum Counted { ROWS_ASKED = 0, THRESHOLD = 1, ROWS_SURE = 2 };  // THRESHOLD: float
static constexpr int COUNTED_WORDS = 3;
