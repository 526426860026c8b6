"""Fast kernels draw dropout's distribution, attend as torch's do, and run only where they were asked."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from course_lib.config import build as config_of
from course_lib.errors import ConfigError
from course_lib.training import cpu_kernels
from testing import tiny_architectures
from testing.tiny_architectures import batch

pytestmark = pytest.mark.usefixtures("torchs_own")

# --- dropout ---


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3])
def test_dropout_keeps_the_mean_and_drops_the_share(p):
    torch.manual_seed(0)
    x = torch.full((1000, 1003), 2.0, requires_grad=True)  # a size that no word divides
    y = cpu_kernels.dropout(x, p)
    share = (y == 0).float().mean().item()
    assert share == pytest.approx(p, abs=0.002) and y.mean().item() == pytest.approx(2.0, abs=0.01)
    assert set(y.unique().tolist()) == {0.0, y.max().item()} and y.max().item() == pytest.approx(2 / (1 - p), rel=1e-4)
    y.sum().backward()
    assert torch.equal(x.grad == 0, y == 0), "the gradient passes where the value passed"


def test_it_follows_torchs_generator_and_is_off_in_evaluation():
    x = torch.ones(501)
    torch.manual_seed(3)
    first = cpu_kernels.dropout(x, 0.5)
    second = cpu_kernels.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(cpu_kernels.dropout(x, 0.5), first) and not torch.equal(first, second)
    module = cpu_kernels.Dropout16
    assert module(0.5).eval()(x) is x and torch.equal(module(0.0).train()(x), x)
    assert not module(1.0).train()(x).any() and module(0.5).train()(x.to("meta")).is_meta, "torch's own drops these"


def test_every_bit_of_the_words_is_fair_and_none_follows_another():
    torch.manual_seed(0)
    words = cpu_kernels.random_words(2**16)
    bits = torch.stack([words >> i & 1 for i in range(64)]).double()
    assert (bits.mean(1) - 0.5).abs().max() < 5 * 0.5 / 2**8
    assert (torch.corrcoef(bits) - torch.eye(64)).abs().max() < 6 / 2**8
    assert (torch.corrcoef(torch.stack([bits[:, :-1].flatten(), bits[:, 1:].flatten()]))[0, 1]).abs() < 5 / 2**11


# --- where they run ---


@pytest.mark.parametrize(
    ("options", "device", "picked"),
    [
        ({}, "cpu", "fast"),
        ({"training_type": "basic"}, "cpu", "torch"),
        ({"torch_compile": True}, "cpu", "torch"),
        ({"training_type": "basic", "cpu_kernels": "fast"}, "cpu", "fast"),
        ({"cpu_kernels": "torch"}, "cpu", "torch"),
        ({}, "cuda", None),
        ({"cpu_kernels": "torch"}, "mps", None),
    ],
)
def test_the_kernels_of_a_run(options, device, picked):
    assert cpu_kernels.pick_kernels(config_of(options), torch.device(device)) == picked


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_fast_ones_are_refused_off_the_cpu(device):
    with pytest.raises(ConfigError, match=f"cpu_kernels fast is for .* a CPU, and the device is {device}.*--device"):
        cpu_kernels.pick_kernels(config_of({"cpu_kernels": "fast"}), torch.device(device))


def bert():
    return tiny_architectures.build(CONFIG_MAPPING["bert"], "classification")


def test_modules_stay_who_they_are_and_other_models_torchs():
    model, other = bert(), bert()
    dropouts = [each for each in model.modules() if type(each) is nn.Dropout]
    dropouts[0].eval()
    called = []
    dropouts[0].register_forward_hook(lambda *_: called.append(True))
    cpu_kernels.use_fast_kernels(model)
    assert dropouts and all(type(each) is cpu_kernels.Dropout16 for each in dropouts)
    assert [each for each in model.modules() if isinstance(each, nn.Dropout)] == dropouts and not dropouts[0].training
    assert model.config._attn_implementation == "sdpa" and set(model.state_dict()) == set(other.state_dict())
    assert not [name for name, each in other.named_modules() if hasattr(each, "fast_attention")]
    model(**batch())
    assert called
    torch.manual_seed(1)
    wanted = other.train()(**batch()).logits  # beside a fast model
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    torch.manual_seed(1)
    assert torch.equal(other(**batch()).logits, wanted)


def test_a_model_that_is_copied_or_sent_stays_fast():
    model = bert()
    cpu_kernels.use_fast_kernels(model)
    sent = pickle.dumps(model)
    AttentionInterface.register("sdpa", sdpa_attention_forward)  # as in a new process
    for again in (pickle.loads(sent), copy.deepcopy(model)):
        assert AttentionInterface._global_mapping["sdpa"] is cpu_kernels.attention
        torch.manual_seed(1)
        wanted = model.train()(**batch()).logits
        torch.manual_seed(1)
        assert torch.equal(again.train()(**batch()).logits, wanted)


# --- attention ---


class Attention(nn.Module):
    """What a model hands to the attention interface as itself."""

    def __init__(self, groups=1, **attributes):
        super().__init__()
        self.num_key_value_groups = groups
        vars(self).update(attributes)


@pytest.fixture
def calls(monkeypatch):
    """Of the fast attention, by their number; a dropout of 1e-6 drops nothing."""
    found, real = [], cpu_kernels._dropped
    monkeypatch.setattr(cpu_kernels, "_dropped", lambda *given: found.append(given[1]) or real(*given))
    return found


def attended(module, mask=None, keys=6, heads=4, **more):
    torch.manual_seed(0)
    query = torch.randn(2, 4, 6, 8)
    key, value = torch.randn(2, heads, keys, 8), torch.randn(2, heads, keys, 8)
    both = [
        kernel(module, query, key, value, mask, dropout=p, **more)[0]
        for kernel, p in ((cpu_kernels.attention, 1e-6), (sdpa_attention_forward, 0.0))
    ]
    assert both[0].shape == both[1].shape and both[0].is_contiguous()
    assert torch.allclose(*both, atol=1e-6)


def marked(**attributes):
    model = Attention(**attributes)
    cpu_kernels.use_fast_kernels(model)
    return model.train()


HIDES = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]).bool()[:, None, None].expand(2, 1, 6, 6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scaling": 0.3},
        {"mask": HIDES},
        {"mask": HIDES, "is_causal": True},
        {"is_causal": False, "keys": 9},
        {"position_ids": torch.arange(6)[None]},
        {"output_attentions": False, "sliding_window": None},
    ],
)
@pytest.mark.parametrize("attributes", [{}, {"is_causal": False}, {"groups": 2}])
def test_arguments_that_it_knows(calls, options, attributes):
    if options.get("keys") and not attributes.get("is_causal", True):
        attributes = {}
    attended(marked(**attributes), heads=4 // attributes.get("groups", 1), **options)
    assert len(calls) == 1


NOTHING_TO_SEE = HIDES.clone()
NOTHING_TO_SEE[1, 0, 3] = False


@pytest.mark.parametrize(
    "options",
    [
        {"position_bias": torch.randn(1, 4, 6, 6)},
        {"position_bias": torch.randn(1, 4, 6, 6), "mask": HIDES},
        {"mask": torch.zeros(2, 1, 6, 6)},
        {"mask": NOTHING_TO_SEE},
        {"keys": 9},
        {"something_new": True},
    ],
)
def test_everything_else_goes_to_torch(calls, options):
    attended(marked(), **options)
    assert not calls


def test_never_in_evaluation_nor_without_dropout_nor_in_another_model(calls):
    q = torch.randn(2, 4, 6, 8)
    for module, p in ((marked().eval(), 0.5), (marked(), 0.0), (Attention().train(), 0.5)):
        torch.manual_seed(0)
        found = cpu_kernels.attention(module, q, q, q, None, dropout=p)[0]
        torch.manual_seed(0)
        assert torch.equal(found, sdpa_attention_forward(module, q, q, q, None, dropout=p)[0])
    assert not calls
