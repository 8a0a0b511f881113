"""Write `megatron_fsdp_0_16.zip`: a checkpoint of one model by Megatron Core, and by Megatron-FSDP.

    python tests/data/make_megatron_fsdp.py tests/data/megatron_fsdp_0_16.zip

Both were trained for the same three steps on two ranks, with megatron-core 0.16.1 on gloo, and hold
the same numbers: in `torch_dist`, layers in stacks, 16-bit weights, 32-bit ones in the optimizer;
in `fsdp_dtensor`, parameters one by one, as uneven DTensors.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import zipfile

import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12}


def write(rank, port, folder):
    from tests.support import megatron_fsdp as fsdp

    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=2)
    fsdp.on_cpu()
    model, optimizer = fsdp.wrapped_by_ddp(fsdp.make_gpt(**SIZES))
    fsdp.train(model, optimizer, 3)
    fsdp.save_torch_dist(f"{folder}/torch_dist", model, optimizer)
    model, optimizer = fsdp.wrapped_by_fsdp(fsdp.make_gpt(**SIZES))
    fsdp.train(model, optimizer, 3)
    fsdp.save_fsdp(f"{folder}/fsdp_dtensor", model, optimizer)


def main(path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(write, (port, folder), 2)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
            for place, _, names in sorted(os.walk(folder)):
                for name in sorted(names):
                    file = os.path.join(place, name)
                    archive.write(file, os.path.relpath(file, folder))


if __name__ == "__main__":
    main(sys.argv[1])
