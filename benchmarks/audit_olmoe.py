"""A small OLMoE by Transformers' own parallelism, for `course audit`: `make` is called on each rank.

    course audit benchmarks/audit_olmoe.py:make --ranks 2 --axes tp
    course audit benchmarks/audit_olmoe.py:experts --ranks 2 --axes tp      # the experts, and not the layers, are split

The grouped matmul of the experts takes float32 and less, so that the tolerance is that of float32.
"""

import functools
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, OlmoeConfig
from transformers.distributed import DistributedConfig

from course_lib.audit import Layout, Subject

FOLDER = tempfile.TemporaryDirectory()
torch.manual_seed(0)
AutoModelForCausalLM.from_config(OlmoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    dtype=torch.float32).save_pretrained(FOLDER.name)
IDS = torch.randint(3, 64, (4, 16), generator=torch.Generator().manual_seed(1))


def make(layout: Layout, split_experts: bool = False) -> Subject:
    """Tensor parallelism over tp, FSDP2 over shard; Transformers does it while it loads."""
    config = DistributedConfig(tp_size=layout.tp, fsdp_size=layout.shard, enable_expert_parallel=split_experts)
    distributed = {"distributed_config": config} if layout.ranks > 1 else {}
    model = AutoModelForCausalLM.from_pretrained(FOLDER.name, dtype=torch.float32, **distributed)
    rows = IDS.chunk(layout.shard)[layout.place(dist.get_rank())["shard"]]
    return Subject(model, torch.optim.AdamW(model.parameters(), lr=1e-3),
                   lambda model, ids: model(input_ids=ids, labels=ids).loss, rows)


experts = functools.partial(make, split_experts=True)
"""The tensor ranks share the experts; all else is whole on each."""
