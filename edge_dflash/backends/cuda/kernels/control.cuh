// Words of the control block in device memory (int32), mirrored by memory.Control.
#pragma once

enum Control { LENGTH = 0, PENDING = 1, ROWS = 2, ANCHOR = 3 };

// Rows of a cycle's verify that count, as the host says and as the drafter's confidence cuts them.
enum Counted { ROWS_ASKED = 0, THRESHOLD = 1, ROWS_SURE = 2 };  // THRESHOLD: float
