"""torch's own engines, Accelerate's plugin and DeepSpeed, training one small transformer; functions of a rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS, ROWS, WIDTH, CLASSES = 4, 8, 32, 5


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its residual."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def model(device="cuda"):
    torch.manual_seed(0)
    return Model().to(device)


def batch(step):
    """The global batch of a step, on the CPU."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(ROWS, 6, WIDTH, generator=generator), torch.randint(CLASSES, (ROWS,), generator=generator))


def own(step, parts=None, part=None):
    """A rank's rows of it, through pinned memory as a loader brings them."""
    parts, part = parts or dist.get_world_size(), dist.get_rank() if part is None else part
    return [each.chunk(parts)[part].contiguous().pin_memory().to("cuda", non_blocking=True) for each in batch(step)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def loop(forward, step_optimizer, backward=None, parts=None, part=None):
    """Losses of STEPS steps, the mean over the ranks."""
    losses = []
    for step in range(STEPS):
        x, y = own(step, parts, part)
        loss = F.cross_entropy(forward(x).float(), y)
        (backward or torch.Tensor.backward)(loss)
        step_optimizer()
        total = loss.detach().clone()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        losses.append(total)
    return [loss.item() for loss in losses]


def alone():
    """The oracle: one process, the CPU, the whole batch."""
    whole = model("cpu")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        loss = F.cross_entropy(whole(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def stepper(optimizer, parameters):
    def step():
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(**options):
    wrapped = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=0.02, **options)
    return loop(wrapped, stepper(adamw(wrapped.parameters()), list(wrapped.parameters())))


def ddp_bucket_view():
    return ddp(gradient_as_bucket_view=True, static_graph=True)


def zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=1e-2, fused=True)
    return loop(wrapped, stepper(optimizer, list(wrapped.parameters())))


def fsdp2(mesh=None, **options):
    from torch.distributed.fsdp import fully_shard

    whole = model()
    for block in whole.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(whole, mesh=mesh, **options)
    return loop(whole, stepper(adamw(whole.parameters()), list(whole.parameters())))


def fsdp2_kept():
    return fsdp2(reshard_after_forward=False)


def fsdp2_hybrid():
    from torch.distributed.device_mesh import init_device_mesh

    return fsdp2(init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard")))


def dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    whole = model()
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for block in whole.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2, foreach=False)

    def step():  # DTensors and plain tensors are clipped by one norm
        sharded = [p for p in whole.parameters() if hasattr(p, "full_tensor")]
        plain = [p for p in whole.parameters() if not hasattr(p, "full_tensor")]
        norms = [nn.utils.get_total_norm([p.grad for p in group], foreach=False) for group in (sharded, plain)]
        norms[0] = norms[0].full_tensor()
        norm = torch.stack(norms).norm()
        for group in (sharded, plain):
            nn.utils.clip_grads_with_norm_(group, 1.0, norm, foreach=False)
        optimizer.step()
        optimizer.zero_grad()

    return loop(whole, step, parts=1, part=0)


def _pipeline(schedule, stages_per_rank, style="loop"):
    import torch.distributed.pipelining as pp

    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, count = model(), ranks * stages_per_rank
    layers = [*whole.blocks, nn.Sequential(_Mean(), whole.head)]
    parts = [nn.Sequential(*layers[i * len(layers) // count : (i + 1) * len(layers) // count]) for i in range(count)]
    mine = [rank, count - 1 - rank] if style == "v" else list(range(rank, count, ranks))
    mine = mine[:stages_per_rank]
    stages = [pp.PipelineStage(parts[i], i, count, torch.device("cuda", rank)) for i in mine]

    def loss_of(output, target):
        return F.cross_entropy(output, target)

    runner = schedule(stages[0] if stages_per_rank == 1 else stages, n_microbatches=4, loss_fn=loss_of)
    parameters = [p for i in mine for p in parts[i].parameters()]
    optimizer = adamw(parameters)
    losses = []
    for step in range(STEPS):
        x, y = own(step, 1, 0)
        of_micro_batches: list[torch.Tensor] = []
        given = [x] if 0 in mine else []
        runner.step(*given, **({"target": y, "losses": of_micro_batches} if count - 1 in mine else {}))
        squares = sum(p.grad.square().sum() for p in parameters)
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(of_micro_batches).mean().detach() if of_micro_batches else torch.zeros((), device="cuda")
        dist.all_reduce(total)
        losses.append(total)
    return [loss.item() for loss in losses]


class _Mean(nn.Module):
    def forward(self, x):
        return x.mean(dim=1)


def schedule_gpipe():
    from torch.distributed.pipelining import ScheduleGPipe

    return _pipeline(ScheduleGPipe, 1)


def schedule_1f1b():
    from torch.distributed.pipelining import Schedule1F1B

    return _pipeline(Schedule1F1B, 1)


def schedule_interleaved():
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    return _pipeline(ScheduleInterleaved1F1B, 2)


def schedule_zbv():
    from torch.distributed.pipelining import ScheduleZBVZeroBubble

    return _pipeline(ScheduleZBVZeroBubble, 2, "v")


def accelerate_fsdp():
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    whole = model()
    wrapped, optimizer = accelerator.prepare(whole, adamw(whole.parameters()))

    def step():
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return loop(wrapped, step, accelerator.backward)


def _deepspeed(stage, **zero):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    whole = model()
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 5000, **zero},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=whole, optimizer=adamw(whole.parameters()), config=settings)
    return loop(engine, engine.step, engine.backward)


def deepspeed_1():
    return _deepspeed(1)


def deepspeed_2():
    return _deepspeed(2)


def deepspeed_2_overlapped():
    return _deepspeed(2, overlap_comm=True)


def deepspeed_3():
    return _deepspeed(3, stage3_param_persistence_threshold=0)


ENGINES = {
    each.__name__: each
    for each in (
        ddp,
        ddp_bucket_view,
        zero_redundancy_optimizer,
        fsdp2,
        fsdp2_kept,
        fsdp2_hybrid,
        dtensor,
        schedule_gpipe,
        schedule_1f1b,
        schedule_interleaved,
        schedule_zbv,
        accelerate_fsdp,
        deepspeed_1,
        deepspeed_2,
        deepspeed_2_overlapped,
        deepspeed_3,
    )
}
RANKS = {"fsdp2_hybrid": 4}
