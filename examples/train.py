"""A small Llama learns to write Python, from the standard library's sources: torchrun --nproc-per-node 4 examples/train.py [steps]"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from planner import auto_parallelize
from runtime import parallelize

text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, 128, 128)
dataset = [{"input_ids": window, "labels": window} for window in windows]
sizes = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=128, **sizes))

dist.init_process_group()
rank, steps = dist.get_rank(), int(sys.argv[1]) if len(sys.argv) > 1 else 100
plans = [auto_parallelize(model, gpus=dist.get_world_size()) if rank == 0 else None]
dist.broadcast_object_list(plans)  # one rank plans, all run the same plan
parallel = parallelize(model, plans[0], batch="local")
loader = parallel.dataloader(dataset, batch_size=plans[0].input_shapes()["input_ids"][0])
optimizer = torch.optim.AdamW(parallel.parameters(), lr=2e-3)
if rank == 0:
    print(f"{plans[0]}\n{len(text)} bytes of Python, {loader.batch_size} x 128 bytes a step, {steps} steps", flush=True)
for step, batch in zip(range(1, steps + 1), loader):
    loss = parallel.step(**batch)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step == 1 or step % 10 == 0):
        print(f"step {step}: loss {loss:.3f}", flush=True)
