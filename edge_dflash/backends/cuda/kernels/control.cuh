// Words of the control block of a slot in device memory (int32), mirrored by memory.Control.
#pragma once

enum Control { LENGTH = 0, PENDING = 1, ROWS = 2, ANCHOR = 3, LANE = 4 };
static constexpr int CONTROL_WORDS = 8;  // from a slot's block to the next one's
static constexpr int MOST_SLOTS = 8;

// Rows of a cycle's verify that count, of each slot, as the host says and as the drafter's confidence cuts them.
enum Counted { ROWS_ASKED = 0, THRESHOLD = 1, ROWS_SURE = 2 };  // THRESHOLD: float
static constexpr int COUNTED_WORDS = 3;
