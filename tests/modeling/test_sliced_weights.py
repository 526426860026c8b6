"""A model that fits on no rank: what each reads, and that its peak is its shards and one unit."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from course_lib.errors import ModelError
from course_lib.metering.allocation_log import AllocationLog
from course_lib.modeling import sliced_weights
from course_lib.parallel.blocks import blocks
from course_lib.parallel.fsdp import FullyShardedDataParallel
from course_lib.parallel.sharding import Shard
from course_lib.parallel.torch_engines.fsdp import shard_with_torch
from course_lib.parallel.zero3 import Zero3
from tests.ranks import on_ranks
from tests.torch_versions import FSDP2_ON_CPUS, needs

ENGINES = {"zero3": Zero3, "fsdp": FullyShardedDataParallel, "torch": shard_with_torch}
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request, tmp_path_factory):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, tie_word_embeddings=request.param))
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path, max_shard_size="200KB")
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


class Allocated(AllocationLog):
    """Of tensors that have elements: those on the meta device have none."""

    def hold(self, tensor, kind, module=""):
        if not tensor.is_meta:
            super().hold(tensor, kind, module)


def local_shards(wrapped, engine):
    """This rank's shards by name; FSDP2 deals out rows."""
    if engine != "torch":
        return wrapped.shards()
    rank, found = dist.get_rank(), {}
    for name, p in wrapped.module.named_parameters():
        first = min(-(-p.shape[0] // dist.get_world_size()) * rank, p.shape[0])
        found[name] = Shard(p.shape, first * p.shape[1:].numel(), p.detach().to_local().view(-1))
    return found


def loaded(path, engine, whole):
    """The loss, the largest sum of bytes alive, those read, and those of this rank's shards."""
    config = LlamaConfig.from_pretrained(path)
    with Allocated() as log:
        log.start()
        if whole:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            for p in model.parameters():
                log.hold(p, "parameters")
        else:
            model = sliced_weights.build_empty(AutoModelForCausalLM, config, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters())
        wrapped = ENGINES[engine](model, optimizer, **({} if whole else {"filled_later": True}))
        weights = sliced_weights.SlicedWeights(path)
        shards = local_shards(wrapped, engine)
        if not whole:
            sliced_weights.fill(shards, weights)
            if engine != "torch":
                wrapped.refresh()
        log.stop()
    alive = peak = 0
    for change in log.changes():
        alive += change.bytes
        peak = max(peak, alive)
    ids = torch.arange(16)[None] % 128
    loss = wrapped(input_ids=ids, labels=ids).loss
    loss.backward()
    wrapped.step()
    return loss.item(), peak, weights.bytes_read, sum(shard.data.nbytes for shard in shards.values())


@needs(FSDP2_ON_CPUS)
@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(4)
def test_each_rank_reads_its_pieces_and_holds_no_more_than_them_and_a_unit(folder, engine):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(16)[None] % 128
    expected = pytest.approx(model(input_ids=ids, labels=ids).loss.item(), abs=1e-5)
    of_blocks = [sum(p.nbytes for p in block.parameters()) for block in blocks(model).values()]
    size = sum(p.nbytes for p in model.parameters())
    unit = max(*of_blocks, size - sum(of_blocks))
    row = 4 * 192  # a run may begin and end within rows

    loss, peak, *_ = loaded(folder, engine, whole=True)
    assert loss == expected and peak > size, "what is otherwise there on every rank"
    loss, peak, read, shards = loaded(folder, engine, whole=False)
    assert loss == expected and shards == pytest.approx(size / dist.get_world_size(), rel=0.02)
    assert shards <= read <= shards + 2 * row * len(dict(model.named_parameters()))
    assert peak <= shards + unit + 2 * row + 4096 < size / 1.5


def test_a_run_of_elements_is_that_of_the_whole(folder):
    weights, name = sliced_weights.SlicedWeights(folder), "model.layers.1.mlp.down_proj.weight"
    whole = AutoModelForCausalLM.from_pretrained(folder).get_parameter(name).detach().flatten()
    for start, numel in ((0, 5), (191, 2), (64 * 192 - 1, 1), (100, 1000), (0, 64 * 192)):
        assert torch.equal(weights.read(name, start, numel), whole[start : start + numel])
    with pytest.raises(ModelError, match=r"lack lm_heat\.weight"):
        weights.read("lm_heat.weight", 0, 1)
