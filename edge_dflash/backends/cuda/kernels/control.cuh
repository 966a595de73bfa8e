// Words of the control block in device memory (int32), mirrored by memory.Control.
#pragma once

enum Control { LENGTH = 0, PENDING = 1, ROWS = 2, ANCHOR = 3, DRAFTS = 4, THRESHOLD = 5, PROPOSED = 6 };
