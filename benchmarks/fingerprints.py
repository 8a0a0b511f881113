"""Compare the speed of fingerprints with reading memory and xxh3, in one thread, by CPU time.

python benchmarks/fingerprints.py [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import xxhash
from tables import markdown_table

from distckpt._format.fingerprint import region_number

SHAPES = {
    "BF16 matrix": ((1024, 8192), torch.bfloat16),
    "F32 matrix": ((1024, 4096), torch.float32),
    "F8 matrix": ((2048, 8192), torch.float8_e4m3fn),
    "BF16 vector": ((8 << 20,), torch.bfloat16),
    "BF16 rows of 64": ((128 << 10, 64), torch.bfloat16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (shape, dtype) in SHAPES.items():
        values = torch.randn(shape).to(dtype)
        ways = ways_over(values)
        seconds = [[timed(way) for way in ways] for _ in range(arguments.rounds)]
        medians = map(statistics.median, zip(*seconds, strict=True))
        speeds = [values.nbytes / each / 1e9 for each in medians]
        ratios = [f"{speeds[0] / other:.2f}" for other in speeds[1:]]
        rows.append([name, *(f"{speed:.1f}" for speed in speeds), *ratios])
    titles = ["", "fingerprint GB/s", "xxh3 GB/s", "sum GB/s", "of xxh3", "of the sum"]
    print(markdown_table(titles, rows))


def ways_over(values: torch.Tensor) -> list[Callable[[], object]]:
    """Return calls that go over all bytes of a tensor."""
    plain = values.view(torch.uint8)
    content, words = plain.numpy(), plain.view(-1).view(torch.int64)
    origin = (0,) * values.ndim
    return [
        lambda: region_number(values, origin),
        lambda: xxhash.xxh3_64_intdigest(content),
        words.sum,
    ]


def timed(function: Callable[[], object]) -> float:
    started = time.process_time()
    function()
    return time.process_time() - started


if __name__ == "__main__":
    main()
