"""Offload in the plans: who has it, what it holds in host memory, and what PCIe and the host's memory cost."""

from dataclasses import replace

import pytest

from course_lib.planning import cost, hardware, memory, models, optimizers, strategy, strategy_map
from course_lib.planning.plan import Plan

FSDP = Plan(1024, "fsdp", 3, data=8, offload="parameters", checkpointing="full", compiled=True)


def test_the_search_has_offload_for_fsdp_as_for_zero():
    model = models.load("facebook/opt-6.7b")
    offloads = {
        (plan.engine, plan.stage, plan.offload)
        for plan in strategy.layouts(model, 8, 8, 2048, 64, "bf16")
        if plan.tensor * plan.pipeline == 1
    }
    assert offloads == {
        ("ddp", 0, "none"),
        ("fsdp", 3, "none"),
        ("fsdp", 3, "parameters"),
        *(("deepspeed", stage, offload) for stage in (1, 2, 3) for offload in ("none", "optimizer")),
        ("deepspeed", 3, "parameters"),
    }
    alone = [plan for plan in strategy.layouts(model, 1, 1, 2048, 64, "bf16") if plan.engine == "fsdp"]
    assert [plan.offload for plan in alone] == ["parameters"], "one GPU has nothing to shard, and a host"


def test_it_is_found_where_nothing_else_of_fsdp_fits():
    cluster = hardware.cluster("A100-40", 8, memory_gb=12)
    result = strategy.search(models.load("facebook/opt-6.7b"), cluster, 2048, families=("FSDP",))
    assert {candidate.plan.offload for candidate in result.candidates} == {"parameters"}
    assert result.best.plan.strategy == "FSDP + CPU offload + full checkpointing"
    assert strategy_map.Place(result.model, 8, (result.best,)).families == ("FSDP + offload",)
    with pytest.raises(strategy.NothingFits, match="host memory"):
        strategy.search(result.model, replace(cluster, host_memory=8 * 2**30), 2048, families=("FSDP",))


def test_the_host_holds_all_states_and_the_gpu_a_block_at_a_time():
    """fp32 weights, gradients and two moments: 16 bytes per parameter and rank's share."""
    model = models.load("facebook/opt-6.7b")
    held, kept = memory.estimate(model, FSDP), memory.estimate(model, replace(FSDP, offload="none"))
    assert held.host == pytest.approx(16 * model.parameters / 8, rel=0.01)
    assert held.parameters == held.optimizer == 0 and held.gradients < kept.gradients / model.layers * 1.01
    assert held.total < kept.total - 11 * model.parameters / 8
    alone = memory.estimate(model, replace(FSDP, data=1))
    assert alone.host == pytest.approx(16 * model.parameters, rel=0.01)
    assert alone.buffers > (2 + 4) * model.layer, "a gathered block in 16 bits, and as it comes from the host"


def test_deepspeed_alone_on_a_gpu_still_gathers_what_it_fetches():
    plan = Plan(1024, "deepspeed", 3, offload="parameters", checkpointing="full")
    assert memory.estimate(models.load("facebook/opt-6.7b"), plan).buffers > 2 * memory.DEEPSPEED_LIVE


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_pcie_carries_the_pieces_as_they_are_kept(engine):
    """One GPU and no overlap, so that nothing is hidden and no link but PCIe has a part: by hand, for the blocks."""
    model, cluster = models.load("facebook/opt-6.7b"), hardware.cluster("A100-80", 1)
    plan = replace(FSDP, engine=engine, data=1, overlap=False)
    moved = cost.estimate(model, plan, cluster).data - cost.estimate(model, replace(plan, offload="none"), cluster).data
    kept, gradients = plan.bytes.parameters, plan.bytes.gradients if engine == "fsdp" else 0
    assert (kept, gradients) == {"fsdp": (4, 4), "deepspeed": (2, 0)}[engine]
    blocks, ends = model.layers * model.layer, model.embedding + model.head
    pcie = cluster.accelerator.pcie
    assert moved == pytest.approx((blocks * (2 * kept + gradients) + ends * kept) / pcie)


def test_later_micro_batches_wait_for_the_sum_in_host_memory():
    """From the second on a gradient of 4 bytes leaves, and 12 bytes of host memory move, behind no computing."""
    model, cluster = models.load("facebook/opt-6.7b"), hardware.cluster("A100-80", 8)
    one, four = (cost.estimate(model, replace(FSDP, micro_batch=16, accumulation=count), cluster) for count in (1, 4))
    share = model.layers * model.layer / 8
    waits = share * (4 / cluster.accelerator.pcie + 12 / (cluster.host_bandwidth / 8))
    assert four.data - one.data == pytest.approx(3 * waits)


def test_the_update_runs_at_the_hosts_bandwidth():
    model, cluster = models.load("facebook/opt-6.7b"), hardware.cluster("A100-80", 8)
    update = optimizers.traffic("adamw", model) * model.parameters / 8 / (cluster.host_bandwidth / 8)
    assert cost.estimate(model, FSDP, cluster).optimizer == pytest.approx(update)
    zero = cost.estimate(model, replace(FSDP, engine="deepspeed"), cluster).optimizer
    assert zero == pytest.approx(update + 2 * model.parameters / 8 / cluster.accelerator.pcie), "gradients leave"
    half = replace(FSDP, engine="deepspeed", offload="optimizer")
    moved = (2 + 2) * model.parameters / 8 / cluster.accelerator.pcie
    assert cost.estimate(model, half, cluster).optimizer == pytest.approx(update + moved), "and weights come back"


def test_a_cpu_has_nothing_to_offload_to():
    result = strategy.search(models.load("gpt2"), hardware.cluster("CPU", 1), 32, 8)
    assert {candidate.plan.strategy for candidate in result.candidates} == {"DDP", "DDP + full checkpointing"}


def test_the_rule_of_thumb_is_told_which_of_the_two_the_search_takes():
    """13 billion parameters on 4 GPUs: offload by the rule, which A100 have no need of."""
    places = strategy_map.survey("A100-80", ("facebook/opt-13b",), (4,), families=strategy.FAMILIES[:-1])
    (case,) = strategy_map.disagreements(places, "A100-80")
    assert (case.place.families[0], case.rule, case.because) == ("FSDP", "offload", "FSDP fits without offload")


def test_too_little_host_memory_is_what_the_explanation_names():
    """13 billion parameters on 2 x A10G: the GPUs would hold FSDP's offload, their hosts would not."""
    result = strategy.search(models.load("facebook/opt-13b"), hardware.cluster("A10G", 2), 1024, 8)
    line = next(line for line in strategy.explain(result) if line.startswith("FSDP does not fit"))
    assert "GiB of host memory per GPU short; fits from 3 GPUs on" in line
    missing = float(line.split(" is ")[1].split(" GiB")[0])
    failed = next(failure for failure in result.failed if failure.family == "FSDP")
    short = failed.memory.host / memory.HOST_USABLE - result.cluster.host_memory
    assert missing == pytest.approx(short / 2**30, abs=0.05)
    none = replace(result.cluster, gpus=1, gpus_per_node=1, host_memory=2**20)
    plan = Plan(1024, "deepspeed", 1, offload="optimizer")
    assert strategy.remedy(models.load("gpt2"), none, plan).endswith("GiB of host memory for each GPU")


def test_a_thousand_gpus_are_searched_with_few_estimates(monkeypatch):
    """Each takes some 20 microseconds; the time of a search is theirs."""
    asked, estimate = [], cost.estimate
    monkeypatch.setattr(cost, "estimate", lambda *args: asked.append(args) or estimate(*args))
    result = strategy.search(models.load("llama-70b"), hardware.cluster("H100", 1024), 2048)
    assert len(result.candidates) <= len(asked) < 20_000
    assert any(candidate.plan.offload != "none" for candidate in result.candidates)
