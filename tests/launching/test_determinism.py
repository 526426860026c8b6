"""The same bits in every run, where torch can give them; and random streams that nobody shares."""

import itertools
import random
import shlex

import datasets
import numpy as np
import pytest
import torch
from torch.nn.functional import embedding
from torch.utils.data import get_worker_info

from course_lib import cli
from course_lib.data.batching import GlobalBatchSampler, training_loader
from course_lib.errors import ConfigError
from course_lib.launching.determinism import PROMISE, deterministic
from course_lib.system.seeding import seed_everything, seed_worker


@pytest.fixture
def two_threads():
    """What several threads add up in one place comes in any order."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def gradient_of_a_look_up():
    """The gradient of ``table[ids]``: 200,000 numbers added up in 50 places (index_put_ with accumulate)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (200_000,), generator=generator)
    table = torch.zeros(50, requires_grad=True)
    (table[ids] * torch.randn(200_000, generator=generator)).sum().backward()
    return table.grad


def differs_within(tries):
    first = gradient_of_a_look_up()
    return any(not torch.equal(gradient_of_a_look_up(), first) for _ in range(tries))


def test_an_operator_whose_threads_race_gives_the_same_bits(two_threads):
    assert differs_within(1000), "it is not deterministic by itself, also on a CPU"
    with deterministic():
        assert not differs_within(100)
    assert not torch.are_deterministic_algorithms_enabled() and differs_within(1000), "all is put back"


def test_an_operator_without_a_deterministic_form_is_named():
    def put():
        return torch.zeros(5).put_(torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))

    put()
    with deterministic(False):
        put()
    told = "put_ has no deterministic form on this device: leave out --deterministic"
    with pytest.raises(ConfigError, match=told), deterministic():
        put()
    with pytest.raises(RuntimeError, match="something else"), deterministic():
        raise RuntimeError("something else")
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_was_asked_for_before_is_put_back():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic():
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


RUN = shlex.split(
    "train --training_type basic --model tiny-bert --device cpu --max_train_samples 16 --max_eval_samples 9 "
    "--max_length 16 --batch_size 4 --max_steps 3 --logging_steps 1 --save_steps 0 --eval_steps 0 --keep_best false "
    "--baselines false --progress_bar false"
)


def weights_of(folder, *options):
    assert cli.main([*RUN, "--output_dir", str(folder), *options]) == 0
    return (folder / "model" / "model.safetensors").read_bytes()


def test_two_runs_give_the_same_file_and_say_what_that_means(tmp_path, capsys):
    first, second = (weights_of(tmp_path / name, "--deterministic") for name in ("first", "second"))
    assert first == second and capsys.readouterr().out.count(PROMISE["cpu"]) == 2
    assert weights_of(tmp_path / "third", "--seed", "1") != first and PROMISE["cpu"] not in capsys.readouterr().out
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_that_cannot_be_deterministic_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def put_back(input, weight, *rest):
        return embedding(input, weight, *rest) + torch.zeros(1).put_(torch.tensor([0]), torch.zeros(1))

    monkeypatch.setattr(torch.nn.functional, "embedding", put_back)
    assert cli.main([*RUN, "--output_dir", str(tmp_path / "run"), "--deterministic"]) == 2
    err = capsys.readouterr().err
    assert "course: put_ has no deterministic form" in err and "Traceback" not in err
    assert not (tmp_path / "run" / "summary.json").exists()


# --- seeds ---


def drawn():
    """A first draw of each of the three streams; NumPy's and Python's are wide, so that no two meet by chance."""
    return random.getrandbits(64), int(np.random.randint(2**63)), int(torch.randint(2**62, ()))


def test_no_two_ranks_workers_or_epochs_share_a_stream_and_the_same_ones_do():
    streams = {}
    for rank in range(8):
        seed_everything(42, rank)
        streams["rank", rank] = drawn()
        for worker, epoch in itertools.product(range(4), range(8)):
            seed_worker(42, rank, worker, epoch)
            streams[rank, worker, epoch] = drawn()
    for library in zip(*streams.values(), strict=True):
        assert len(set(library)) == len(streams)
    for place in [(0, 0, 0), (3, 2, 5), (7, 3, 7)]:
        seed_worker(42, *place)
        assert drawn() == streams[place]
    seed_worker(43, 0, 0, 0)
    assert drawn() not in streams.values()


def draws(rows):
    """A collator that draws from the streams of the process it is in."""
    worker = get_worker_info()
    return worker and worker.id, rows[0]["mask_seed"][1], drawn()


def test_workers_draw_by_rank_worker_and_epoch_and_the_rank_itself_is_left_alone():
    rows = datasets.Dataset.from_dict({"input_ids": [[1]] * 8, "labels": [0] * 8})

    def draws_of(rank, epochs):
        sampler = GlobalBatchSampler([1] * 8, 2, seed=7)
        loader = training_loader(rows, sampler, draws, 2, rank=rank)
        found = []
        for epoch in epochs:
            sampler.start_at(epoch)
            found += list(loader)
        return found

    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = draws_of(0, [0, 1])
    assert torch.equal(torch.get_rng_state(), before), "the stream that dropout uses is not touched"
    assert {(worker, epoch) for worker, epoch, _ in first} == {(0, 0), (1, 0), (0, 1), (1, 1)}
    assert draws_of(0, [0, 1]) == first, "the same place gives the same draws"
    assert draws_of(0, [1]) == first[4:], "wherever the run began"
    every = first + draws_of(1, [0, 1])
    assert len({draw for _, _, draw in every}) == len(every) == 16
