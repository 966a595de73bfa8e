// The work list of a mixture of experts, made on the device: what experts.cu writes and experts_linear.cu works through.
//
// An *entry* is a member (an expert, or a slice of the shared expert behind all experts) and up to ``tile`` rows that chose
// it, in ascending order. Entries come by member, ascending. A row has a *slot* for each member that it chose, ascending.
//
//   list: [entries, 0, 0, 0] [entry 0] [entry 1] ...    words of 32 bits
//   entry: [member | rows << 16, 0, 0, 0] [row << 8 | slot: tile words, the first ``rows`` of them set]
#pragma once
#include "prelude.cuh"

static constexpr int LIST_HEAD = 4, ENTRY_HEAD = 4;

__device__ __forceinline__ int entry_at(int entry, int tile) { return LIST_HEAD + entry * (ENTRY_HEAD + tile); }
