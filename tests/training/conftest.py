"""What is compared here does not depend on a model's width."""

import pytest
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from course_lib.training import cpu_kernels
from tests.narrow_presets import narrow_presets  # noqa: F401
from tests.training import quick


@pytest.fixture(scope="module", autouse=True)
def nothing_prepared():
    """As another module's presets have other widths."""
    quick.prepared.cache_clear()


@pytest.fixture
def torchs_own(monkeypatch):
    """The test begins with transformers' attention, and leaves it and malloc so."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    monkeypatch.setattr(cpu_kernels, "keep_freed_memory", lambda: None)
