"""Planted wrong answers of lesson 10: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted(
        "faults.resume",
        "the weights alone",
        "rates",
        '        run.optimizer.load_state_dict(state["optimizer"])\n'
        '        run.schedule.load_state_dict(state["schedule"])\n',
        "",
    ),
    Planted(
        "faults.resume",
        "the momentum begins anew",
        "losses",
        '        run.optimizer.load_state_dict(state["optimizer"])\n',
        '        run.optimizer.rate = state["optimizer"]["rate"]\n',
    ),
    Planted(
        "faults.resume",
        "the epoch begins anew",
        "rows",
        'run.place, run.step = state["place"], state["step"]',
        'run.place, run.step = 0, state["step"]',
    ),
    Planted(
        "faults.resume",
        "the next epoch's order is another",
        "rows",
        '        run.shuffle.set_state(state["shuffle"])\n',
        "",
    ),
    Planted("faults.resume", "other dropout masks", "losses", '        torch.set_rng_state(state["torch"])\n', ""),
    Planted("faults.resume", "other noise", "losses", '        np.random.set_state(state["numpy"])\n', ""),
    Planted("faults.resume", "other augmentation", "losses", '        random.setstate(state["python"])\n', ""),
    Planted(
        "faults.resume",
        "a reference for a copy",
        "losses",
        "copy.deepcopy(run.model.state_dict())",
        "run.model.state_dict()",
    ),
    Planted(
        "faults.resume",
        "a reference for the momentum",
        "losses",
        "copy.deepcopy(run.optimizer.state_dict())",
        "run.optimizer.state_dict()",
    ),
    Planted("faults.resume", "counts from 0", "steps", 'state["place"], state["step"]', 'state["place"], 0'),
    Planted(
        "faults.hang",
        "the first that is dead",
        "who",
        "    for sequence in sorted(",
        '    for rank, r in enumerate(ranks):\n        if not r["alive"]:\n'
        '            return rank, "dead", r["calls"][-1]["sequence"] + 1\n    for sequence in sorted(',
    ),
    Planted(
        "faults.hang",
        "whoever still waits",
        "who",
        "    for sequence in sorted(",
        '    for rank, r in enumerate(ranks):\n        if not r["calls"][-1]["ended"]:\n'
        '            return rank, "behind", r["calls"][-1]["sequence"]\n    for sequence in sorted(',
    ),
    Planted("faults.hang", "the dead are behind", "what", '"behind" if ranks[rank]["alive"] else "dead"', '"behind"'),
    Planted(
        "faults.hang",
        "names alone, without sizes",
        "what",
        '(call["collective"], call["elements"])',
        'call["collective"]',
    ),
    Planted("faults.hang", "the last call that it made", "where", "what, last[rank] + 1", "what, last[rank]"),
    Planted("faults.hang", "places for sequence numbers", "who", 'call["sequence"]: (call', "number: (call"),
    Planted(
        "faults.hang", "somebody must be guilty", "who", "    if min(last) == max(last):\n        return None\n", ""
    ),
    Planted("faults.agreement", "sums", "ranks", "hashlib.sha256(data).digest()[:8]", 'sum(data).to_bytes(8, "big")'),
    Planted(
        "faults.agreement",
        "whoever differs from this rank",
        "ranks",
        "Counter(digests).most_common(1)[0][0]",
        "digests[dist.get_rank()]",
    ),
    Planted(
        "faults.agreement",
        "the norm",
        "ranks",
        "hashlib.sha256(data).digest()[:8]",
        "sum(tensor.double().square().sum() for tensor in tensors).numpy().tobytes()",
    ),
    Planted(
        "faults.agreement", "rank 0 is always right", "ranks", "Counter(digests).most_common(1)[0][0]", "digests[0]"
    ),
    Planted(
        "faults.agreement",
        "sends everything",
        "one small collective",
        "    dist.all_gather(gathered, own)",
        "    for t in tensors:\n        dist.broadcast(t.clone(), 0)\n    dist.all_gather(gathered, own)",
    ),
    Planted(
        "faults.agreement",
        "pickles",
        "one small collective",
        "    dist.all_gather(gathered, own)",
        "    dist.all_gather_object(gathered, own)",
    ),
    Planted(
        "faults.agreement",
        "the shapes alone",
        "ranks",
        "hashlib.sha256(data).digest()[:8]",
        'len(data).to_bytes(8, "big")',
    ),
    Planted(
        "faults.checkpoint",
        "files that are not synced",
        "survives",
        '            self.disk.sync(f"{step}/{name}")\n',
        "",
    ),
    Planted(
        "faults.checkpoint", "a last file that is not synced", "survives", '        self.disk.sync(f"{step}.tmp")\n', ""
    ),
    Planted(
        "faults.checkpoint",
        "deletes before it writes",
        "survives",
        "        sums = {}",
        "        for path in self.disk.list():\n            self.disk.delete(path)\n        sums = {}",
    ),
    Planted(
        "faults.checkpoint",
        "does not look at its files' checksums",
        "notices damage",
        "if hashlib.sha256(files[name]).hexdigest() != expected:",
        "if False:",
    ),
    Planted(
        "faults.checkpoint",
        "believes its last file",
        "notices damage",
        "if hashlib.sha256(body).hexdigest().encode() != checksum:",
        "if False:",
    ),
    Planted("faults.checkpoint", "keeps all of them", "keeps few", "[-self.keep :]", ""),
    Planted("faults.checkpoint", "keeps the oldest", "finds the last", "[-self.keep :]", "[: self.keep]"),
    Planted(
        "faults.checkpoint",
        "the first that it finds",
        "finds the last",
        "sorted(self.finished(), reverse=True)",
        "sorted(self.finished())",
    ),
    Planted(
        "faults.checkpoint",
        "gives up where the newest is damaged",
        "notices damage",
        "            if files is not None:\n                return step, files\n",
        "            return None if files is None else (step, files)\n",
    ),
    Planted(
        "faults.checkpoint",
        "one file in place, the newest over the last",
        "survives",
        "",
        """
import json


class Checkpoints:
    def __init__(self, disk, keep):
        self.disk = disk

    def save(self, step, files):
        text = json.dumps([step, {name: data.decode() for name, data in files.items()}])
        self.disk.write("latest", text.encode())
        self.disk.sync("latest")

    def newest(self):
        try:
            step, files = json.loads(self.disk.read("latest"))
        except (KeyError, ValueError):
            return None
        return step, {name: data.encode() for name, data in files.items()}
""",
    ),
    Planted(
        "faults.checkpoint",
        "renames what is not yet on the medium",
        "survives",
        "",
        """
import json


class Checkpoints:
    def __init__(self, disk, keep):
        self.disk, self.keep = disk, keep

    def save(self, step, files):
        text = json.dumps({name: data.decode() for name, data in files.items()})
        self.disk.write("new", text.encode())
        self.disk.rename("new", f"{step:06}")
        self.disk.sync(f"{step:06}")
        for path in [path for path in self.disk.list() if path != "new"][: -self.keep]:
            self.disk.delete(path)

    def newest(self):
        for path in reversed([path for path in self.disk.list() if path != "new"]):
            files = json.loads(self.disk.read(path))
            return int(path), {name: data.encode() for name, data in files.items()}
        return None
""",
    ),
    Planted(
        "faults.agreement",
        "Python's own hash",
        "ranks",
        "hashlib.sha256(data).digest()[:8]",
        'hash(data).to_bytes(8, "little", signed=True)',
    ),
    Planted(
        "faults.agreement",
        "the higher of two is right",
        "ranks",
        "Counter(digests).most_common(1)[0][0]",
        "max(reversed(digests), key=digests.count)",
    ),
)
