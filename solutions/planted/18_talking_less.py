"""Planted wrong answers of lesson 18: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("less.link", "rounds down", "local steps", "math.ceil", "math.floor"),
    Planted("less.link", "one more where it comes out even", "local steps", "math.ceil(", "1 + math.floor("),
    Planted("less.link", "a share of the computing", "local steps", "waits * (1 - share) /", "waits /"),
    Planted("less.link", "a message of the whole size", "local steps", "2 * (ranks - 1) / ranks * size", "size"),
    Planted("less.link", "no latency", "local steps", "waits = latency + 2", "waits = 2"),
    Planted("less.link", "one latency for all messages", "seconds", 'way["messages"] * latency', "latency"),
    Planted("less.link", "bits for bytes", "seconds", 'way["bytes"] / rate', '8 * way["bytes"] / rate'),
    Planted("less.link", "an exchange after each step", "seconds", 'way["every"] * compute', "compute"),
    Planted(
        "less.link",
        "forgets the period that has begun",
        "seconds",
        '-(-way["steps"] // way["every"])',
        '(way["steps"] // way["every"])',
    ),
    Planted(
        "less.link",
        "stops within a period",
        "seconds",
        '-(-way["steps"] // way["every"])',
        '(way["steps"] / way["every"])',
    ),
    Planted(
        "less.link",
        "an infinity where it is never reached",
        "seconds",
        'None if way["steps"] is None else',
        'float("inf") if way["steps"] is None else',
    ),
    Planted(
        "less.link",
        "who never gets there is first",
        "first",
        'None if way["steps"] is None else -(-way["steps"] // way["every"]) * period',
        '-(-(way["steps"] or 0) // way["every"]) * period',
    ),
    Planted("less.link", "the fewest bytes", "first", "key=seconds.get", 'key=lambda name: ways[name]["bytes"]'),
    Planted("less.link", "the fewest steps", "first", "key=seconds.get", 'key=lambda name: ways[name]["steps"]'),
    Planted("less.link", "the last of those that tie", "first", "for name in ways if", "for name in reversed(ways) if"),
    Planted("less.average", "after every step", "once per period", "if steps % every == 0", "if steps"),
    Planted(
        "less.average",
        "counts from 0, as torch's averager does",
        "once per period",
        "steps % every == 0",
        "(steps - 1) % every == 0",
    ),
    Planted("less.average", "a sum", "weights", "            mean /= dist.get_world_size()\n", ""),
    Planted(
        "less.average",
        "the weights of rank 0",
        "once per period",
        "            dist.all_reduce(mean)\n            mean /= dist.get_world_size()\n",
        "            dist.broadcast(mean, 0)\n",
    ),
    Planted(
        "less.average",
        "averages before the step",
        "weights",
        "        optimizer.step()\n        steps += 1\n        if steps",
        "        steps += 1\n        if steps",
    ),
    Planted(
        "less.average",
        "averages gradients, not weights",
        "weights",
        "",
        """import torch
import torch.distributed as dist


def local_sgd(model, optimizer, every):
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    steps = 0

    def step():
        nonlocal steps
        steps += 1
        if steps % every == 0:
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
            dist.all_reduce(flat)
            for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
                p.grad = part.view_as(p) / dist.get_world_size()
        optimizer.step()

    return step
""",
    ),
    Planted(
        "less.average",
        "the mean of the optimizer's states too",
        "each rank's own",
        "                parameter.copy_(part.view_as(parameter))\n",
        "                parameter.copy_(part.view_as(parameter))\n"
        "            for state in [state for p in parameters[1:] for state in optimizer.state.get(p, [])]:\n"
        "                dist.all_reduce(state)\n                state /= dist.get_world_size()\n",
    ),
    Planted(
        "less.average",
        "begins the optimizer's states anew",
        "each rank's own",
        "                parameter.copy_(part.view_as(parameter))\n",
        "                parameter.copy_(part.view_as(parameter))\n            optimizer.state.clear()\n",
    ),
    Planted(
        "less.average",
        "the mean of the buffers too",
        "each rank's own",
        "                parameter.copy_(part.view_as(parameter))\n",
        "                parameter.copy_(part.view_as(parameter))\n"
        "            for buffer in model.buffers():\n                dist.all_reduce(buffer)\n"
        "                buffer /= dist.get_world_size()\n",
    ),
    Planted("less.average", "frozen weights travel", "once per period", " if parameter.requires_grad]", "]"),
    Planted(
        "less.average",
        "a message for each weight",
        "once per period",
        "            mean = torch.cat([parameter.flatten() for parameter in parameters])\n"
        "            dist.all_reduce(mean)\n            mean /= dist.get_world_size()\n"
        "            for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters])):\n"
        "                parameter.copy_(part.view_as(parameter))\n",
        "            for parameter in parameters:\n                dist.all_reduce(parameter)\n"
        "                parameter /= dist.get_world_size()\n",
    ),
    Planted(
        "less.average",
        "leaves a weight that has no gradient here as it is",
        "weights",
        "                parameter.copy_(part",
        "                if parameter.grad is not None:\n                    parameter.copy_(part",
    ),
    Planted(
        "less.average", "tensors that the model never sees", "weights", "parameter.copy_(", "parameter.clone().copy_("
    ),
    Planted(
        "less.int8",
        "one scale for the tensor",
        "sum",
        "values.abs().amax(-1, keepdim=True) / 127",
        "(values.abs().amax() / 127).expand(*values.shape[:-1], 1).contiguous()",
    ),
    Planted("less.int8", "cuts off what should be rounded", "sum", ".round()", ""),
    Planted("less.int8", "an epsilon", "sum", "keepdim=True) / 127", "keepdim=True) / 127 + 1e-8"),
    Planted("less.int8", "the largest number does not fit", "sum", "keepdim=True) / 127", "keepdim=True) / 128"),
    Planted("less.int8", "7 levels, as of 4 bits", "sum", "keepdim=True) / 127", "keepdim=True) / 7"),
    Planted(
        "less.int8",
        "everybody's codes by one's own scales",
        "sum",
        "(arrived * their_scales)",
        "(arrived * scales[dist.get_rank()])",
    ),
    Planted(
        "less.int8",
        "adds up in 8 bits",
        "sum",
        "(arrived * their_scales).sum(0)",
        "arrived.sum(0, dtype=torch.int8) * their_scales.amax(0)",
    ),
    Planted(
        "less.int8",
        "adds up codes and scales, each by themselves",
        "sum",
        "(arrived * their_scales).sum(0)",
        "arrived.float().sum(0) * their_scales.sum(0)",
    ),
    Planted("less.int8", "a mean", "sum", "return (codes * scales)", "return (codes * scales / ranks)"),
    Planted(
        "less.int8",
        "the padding stays",
        "sum",
        "(codes * scales).view(-1)[: tensor.numel()]",
        "(codes * scales).view(-1)",
    ),
    Planted("less.int8", "fp32 whatever came", "bf16", ".to(tensor.dtype)", ""),
    Planted(
        "less.int8",
        "an infinity is a large number",
        "not finite",
        "code((arrived * their_scales).sum(0))",
        "code((arrived * their_scales).nan_to_num().sum(0))",
    ),
    Planted(
        "less.int8",
        "the owner keeps what it has added up",
        "same bits",
        "    own, own_scales = code((arrived * their_scales).sum(0))\n"
        "    dist.all_gather_single(codes.view(-1, block), own)\n"
        "    dist.all_gather_single(scales.view(-1, 1), own_scales)\n"
        "    return (codes * scales)",
        "    exact = (arrived * their_scales).sum(0)\n    own, own_scales = code(exact)\n"
        "    dist.all_gather_single(codes.view(-1, block), own)\n"
        "    dist.all_gather_single(scales.view(-1, 1), own_scales)\n"
        "    decoded = codes * scales\n    decoded[dist.get_rank()] = exact\n    return decoded",
    ),
    Planted(
        "less.int8",
        "the sums travel in fp32",
        "bytes",
        "    own, own_scales = code((arrived * their_scales).sum(0))\n"
        "    dist.all_gather_single(codes.view(-1, block), own)\n"
        "    dist.all_gather_single(scales.view(-1, 1), own_scales)\n"
        "    return (codes * scales)",
        "    dist.all_gather_single(padded.view(-1, block), (arrived * their_scales).sum(0))\n    return padded",
    ),
    Planted(
        "less.int8",
        "every rank gets everybody's codes",
        "bytes",
        "",
        """import torch
import torch.distributed as dist


def int8_all_reduce(tensor, block):
    ranks = dist.get_world_size()
    padded = torch.nn.functional.pad(tensor.float(), (0, -len(tensor) % block)).view(-1, block)
    scales = padded.abs().amax(-1, keepdim=True) / 127
    codes = (padded / scales).round().to(torch.int8)
    all_codes, all_scales = ([torch.empty_like(each) for _ in range(ranks)] for each in (codes, scales))
    dist.all_gather(all_codes, codes)
    dist.all_gather(all_scales, scales)
    return sum(c * s for c, s in zip(all_codes, all_scales)).view(-1)[: len(tensor)].to(tensor.dtype)
""",
    ),
    Planted(
        "less.int8",
        "rounds, then sums in fp32 all the same",
        "bytes",
        "",
        """import torch
import torch.distributed as dist


def int8_all_reduce(tensor, block):
    padded = torch.nn.functional.pad(tensor.float(), (0, -len(tensor) % block)).view(-1, block)
    scales = padded.abs().amax(-1, keepdim=True) / 127
    total = (padded / scales).round().nan_to_num() * scales
    dist.all_reduce(total)
    return total.view(-1)[: len(tensor)].to(tensor.dtype)
""",
    ),
    Planted("less.powersgd", "begins with the same Q again", "approximation", "p @ mean.T, mean,", "p @ mean.T, q,"),
    Planted("less.powersgd", "P is not made orthonormal", "rank 1 is exact", "    p = torch.linalg.qr(p).Q\n", ""),
    Planted(
        "less.powersgd",
        "columns of length 1 that are not orthogonal",
        "approximation",
        "torch.linalg.qr(p).Q",
        "torch.nn.functional.normalize(p, dim=0)",
    ),
    Planted(
        "less.powersgd",
        "a basis of each rank, averaged",
        "approximation",
        "    dist.all_reduce(p)\n    p = torch.linalg.qr(p).Q\n",
        "    p = torch.linalg.qr(p).Q\n    dist.all_reduce(p)\n    p /= dist.get_world_size()\n",
    ),
    Planted(
        "less.powersgd",
        "divides by a norm of 0",
        "zeros stay zeros",
        "    p = torch.linalg.qr(p).Q\n",
        "    for column in range(p.shape[1]):\n        for before in range(column):\n"
        "            p[:, column] -= (p[:, before] @ p[:, column]) * p[:, before]\n"
        "        p[:, column] /= p[:, column].norm()\n",
    ),
    Planted("less.powersgd", "a sum", "approximation", "    mean /= dist.get_world_size()\n", ""),
    Planted("less.powersgd", "each rank its own product", "approximation", "p @ mean.T, mean,", "p @ own.T, mean,"),
    Planted("less.powersgd", "each rank its own next Q", "approximation", "p @ mean.T, mean,", "p @ mean.T, own,"),
    Planted(
        "less.powersgd",
        "a new Q for every step",
        "approximation",
        "matrix @ q",
        "matrix @ torch.randn(q.shape, generator=torch.Generator().manual_seed(0))",
    ),
    Planted("less.powersgd", "keeps nothing", "nothing is lost", "matrix - p @ own.T", "torch.zeros_like(matrix)"),
    Planted("less.powersgd", "keeps it, and never adds it", "approximation", "gradient + left_out", "gradient"),
    Planted("less.powersgd", "keeps what it has sent too", "nothing is lost", "matrix - p @ own.T", "matrix"),
    Planted(
        "less.powersgd",
        "keeps what was left out twice",
        "nothing is lost",
        "matrix - p @ own.T",
        "matrix - p @ own.T + left_out",
    ),
    Planted(
        "less.powersgd", "forgets what waited before", "nothing is lost", "matrix - p @ own.T", "gradient - p @ own.T"
    ),
    Planted("less.powersgd", "no agreement on P", "bytes", "    dist.all_reduce(p)\n", ""),
    Planted(
        "less.powersgd",
        "reduces the whole matrix",
        "bytes",
        "    matrix = gradient + left_out\n",
        "    matrix = gradient + left_out\n    dist.all_reduce(matrix)\n    matrix /= dist.get_world_size()\n",
    ),
    Planted(
        "less.topk",
        "keeps nothing back",
        "weights",
        "        self.left_out[positions] = 0\n",
        "        self.left_out.zero_()\n",
    ),
    Planted("less.topk", "keeps what it has sent too", "weights", "        self.left_out[positions] = 0\n", ""),
    Planted(
        "less.topk",
        "what waited is overwritten",
        "weights",
        "self.left_out += self.shared",
        "self.left_out = self.shared",
    ),
    Planted(
        "less.topk",
        "what waited counts twice",
        "weights",
        "self.left_out += self.shared",
        "self.left_out += self.left_out + self.shared",
    ),
    Planted(
        "less.topk",
        "what waits is measured against the mean",
        "weights",
        "        self.velocity.mul_",
        "        self.left_out.add_(values.new_zeros(len(self.left_out)).index_add("
        "0, positions, values) - change)\n        self.velocity.mul_",
    ),
    Planted(
        "less.topk",
        "the difference the other way round",
        "weights",
        "self.shared - self.weights()",
        "self.weights() - self.shared",
    ),
    Planted("less.topk", "a sum", "weights", "several / ranks", "several"),
    Planted(
        "less.topk",
        "a mean over those that sent it",
        "weights",
        "            change[places] += several / ranks\n",
        "            change[places] += several\n"
        "        change /= torch.cat(all_positions).bincount(minlength=len(change)).clamp(min=1)\n",
    ),
    Planted(
        "less.topk",
        "the inner optimizer begins anew",
        "weights",
        "        self.velocity.mul_",
        "        self.optimizer.state.clear()\n        self.velocity.mul_",
    ),
    Planted(
        "less.topk",
        "an outer step after each inner one",
        "pairs alone travel",
        "self.steps % self.every == 0",
        "self.steps",
    ),
    Planted(
        "less.topk",
        "the largest, but not of those below 0",
        "weights",
        "self.left_out.abs().split",
        "self.left_out.split",
    ),
    Planted(
        "less.topk",
        "the largest of all parameters together",
        "weights",
        "self.left_out.abs().split(self.sizes)",
        "self.left_out.abs().split(sum(self.sizes))",
    ),
    Planted("less.topk", "k rounded down, so perhaps 0", "weights", "math.ceil(", "math.floor("),
    Planted(
        "less.topk",
        "k rounded to the nearest",
        "weights",
        "math.ceil(self.density * len(part))",
        "max(1, round(self.density * len(part)))",
    ),
    Planted(
        "less.topk",
        "ties as topk has them",
        "ties",
        "part.argsort(descending=True, stable=True)[:k]",
        "part.topk(k).indices",
    ),
    Planted(
        "less.topk",
        "the highest index of those that tie",
        "ties",
        "part.argsort(descending=True, stable=True)[:k]",
        "len(part) - 1 - part.flip(0).argsort(descending=True, stable=True)[:k]",
    ),
    Planted(
        "less.topk", "positions of 8 bytes", "pairs alone travel", "torch.cat(positions).int()", "torch.cat(positions)"
    ),
    Planted(
        "less.topk",
        "zeros travel too",
        "pairs alone travel",
        "            change[places] += several / ranks\n",
        "            change[places] += several / ranks\n        dist.all_reduce(torch.zeros_like(change))\n",
    ),
    Planted(
        "less.topk",
        "a message for each value",
        "pairs alone travel",
        "        dist.all_gather(all_values, values)\n",
        "        for i in range(len(values)):\n"
        "            dist.all_gather([several[i] for several in all_values], values[i].clone())\n",
    ),
    Planted(
        "less.topk", "momentum without Nesterov", "weights", "change + self.momentum * self.velocity", "self.velocity"
    ),
    Planted("less.topk", "no outer momentum", "weights", "change + self.momentum * self.velocity", "change"),
    Planted(
        "less.topk", "momentum damped, as Adam's", "weights", ".add_(change)", ".add_((1 - self.momentum) * change)"
    ),
    Planted(
        "less.topk",
        "elements that nobody sent stay apart",
        "weights",
        "zip(self.parameters, self.shared.split(self.sizes))",
        "zip(self.parameters, torch.where(change != 0, self.shared, self.weights()).split(self.sizes))",
    ),
    Planted(
        "less.topk",
        "one's own pairs first",
        "same bits",
        "in zip(all_positions, all_values):",
        "in ((all_positions[r], all_values[r]) for r in sorted(range(ranks), key=dist.get_rank().__ne__)):",
    ),
    Planted("less.topk", "frozen parameters take part", "pairs alone travel", " if parameter.requires_grad]", "]"),
    Planted(
        "less.topk",
        "what waits is not loaded",
        "resumes",
        '"steps"]\n        for name in ("shared", "left_out", ',
        '"steps"]\n        for name in ("shared", ',
    ),
    Planted(
        "less.topk",
        "the shared weights are not loaded",
        "resumes",
        '"steps"]\n        for name in ("shared", ',
        '"steps"]\n        for name in (',
    ),
    Planted("less.topk", "the outer momentum is not loaded", "resumes", '"left_out", "velocity"):\n', '"left_out"):\n'),
    Planted(
        "less.topk", "a period begins anew with what is loaded", "resumes", '        self.steps = state["steps"]\n', ""
    ),
    Planted("less.topk", "hands out its own tensors", "resumes", "getattr(self, name).clone()", "getattr(self, name)"),
)
