"""Options of a training that is over in seconds."""

QUICK = {
    "model": "tiny-gpt2",
    "max_train_samples": 64,
    "max_eval_samples": 8,
    "max_length": 32,
    "eval_steps": 0,
    "save_steps": 0,
    "device": "cpu",
    "progress_bar": False,
    "baselines": False,
    "batch_size": 4,
    "tracker": "none",
    "keep_best": False,
}
