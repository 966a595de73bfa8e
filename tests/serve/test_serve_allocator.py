import subprocess
import sys

HELD = """
import threading
from edge_dflash.serve.server import LARGE, return_large_blocks

def memory():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))

return_large_blocks()
before, blocks = memory(), []
for _ in range(2):  # the first ones to be freed would raise the bound
    for _ in range(8):
        thread = threading.Thread(target=lambda: blocks.append(bytearray(LARGE + 1)))
        thread.start()
        thread.join()
    keep = bytearray(1000)  # above them on the heap
    blocks.clear()
print(memory() - before)
"""


def test_large_blocks_go_back_to_the_system():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 << 20
