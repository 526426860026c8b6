"""Planted wrong answers of lesson 19: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

FORWARD = """        beside = self.dropout(x).float() @ self.A.T @ self.B.T
        return output + (self.scaling * beside).to(output.dtype)
"""
MERGE = """            self.base.weight.copy_(self.kept.float() + self.scaling * (self.B @ self.A))
"""
SUM = "self.kept.float() + self.scaling * (self.B @ self.A)"
KEEP = "            self.kept = self.base.weight.clone()\n" + MERGE
SCORES = """        return -F.cross_entropy(logits, labels[:, 1:], reduction="none").sum(1)
"""
REFERENCE = """    with torch.no_grad(), model.disable_adapter():
        reference = scores(*chosen) - scores(*rejected)
"""
WALK = """    for place in files:
        with open_file(folder / place) as file:
            for key in list(file.keys()):
                part = file.get_slice(key)
                shape = part.get_shape()
                if len(shape) < 2:
                    pieces[key] = file.get_tensor(key)
                else:
                    per_rank = -(-shape[0] // dist.get_world_size())
                    begin = dist.get_rank() * per_rank
                    pieces[key] = part[begin:begin + per_rank]
"""
FLAT_MEAN = """\
        mean = self.flat(torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained.values())
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
"""

PLANTED = (
    Planted("lora.layer", "scaling forgotten", "output", "self.scaling = alpha / r", "self.scaling = 1"),
    Planted("lora.layer", "r over alpha", "output", "alpha / r", "r / alpha"),
    Planted("lora.layer", "alpha not divided by r", "output", "alpha / r", "alpha"),
    Planted("lora.layer", "alpha / sqrt(r), as rsLoRA", "output", "alpha / r", "alpha / r ** 0.5"),
    Planted(
        "lora.layer",
        "both begin at zero",
        "begins at the base",
        "nn.Parameter(torch.empty(r, base.in_features).uniform_(-bound, bound))",
        "nn.Parameter(torch.zeros(r, base.in_features))",
    ),
    Planted(
        "lora.layer",
        "both are drawn",
        "begins at the base",
        "torch.zeros(base.out_features, r)",
        "torch.empty(base.out_features, r).uniform_(-bound, bound)",
    ),
    Planted(
        "lora.layer",
        "B is drawn and A zero",
        "begins at the base",
        "        self.kept = None\n\n    def forward",
        "        self.A, self.B = (nn.Parameter(p.detach()) for p in "
        "(0 * self.A, torch.empty_like(self.B).uniform_(-bound, bound)))\n"
        "        self.kept = None\n\n    def forward",
    ),
    Planted("lora.layer", "A from a normal distribution", "begins at the base", "uniform_(-bound, bound)", "normal_()"),
    Planted("lora.layer", "base is not frozen", "base is frozen", "base.requires_grad_(False)", "base"),
    Planted(
        "lora.layer",
        "the weight is frozen, the bias is not",
        "base is frozen",
        "self.base = base.requires_grad_(False)",
        "self.base = base\n        base.weight.requires_grad_(False)",
    ),
    Planted(
        "lora.layer",
        "base in no_grad: x has no gradient through it",
        "gradients",
        "        output = self.base(x)\n",
        "        with torch.no_grad():\n            output = self.base(x)\n",
    ),
    Planted(
        "lora.layer",
        "x detached on the way to A",
        "gradients",
        "self.dropout(x).float()",
        "self.dropout(x).detach().float()",
    ),
    Planted(
        "lora.layer",
        "A and B in the dtype of the base",
        "base is frozen",
        "        self.kept = None\n\n    def forward",
        "        self.A, self.B = (nn.Parameter(p.detach().to(base.weight.dtype)) for p in (self.A, self.B))\n"
        "        self.kept = None\n\n    def forward",
    ),
    Planted(
        "lora.layer", "an output in fp32", "output", "(self.scaling * beside).to(output.dtype)", "self.scaling * beside"
    ),
    Planted(
        "lora.layer",
        "B A is made in each forward",
        "never B A",
        FORWARD,
        "        product = self.scaling * (self.B @ self.A)\n"
        "        return output + (self.dropout(x).float() @ product.T).to(output.dtype)\n",
    ),
    Planted(
        "lora.layer",
        "W + B A is made in each forward",
        "never B A",
        "        output = self.base(x)\n        if self.kept is not None:\n            return output\n" + FORWARD,
        "        if self.kept is not None or self.training:\n            output = self.base(x)\n"
        "            return output if self.kept is not None else output + (self.scaling * (self.dropout(x).float()"
        " @ self.A.T @ self.B.T)).to(output.dtype)\n"
        "        weight = self.base.weight.float() + self.scaling * (self.B @ self.A)\n"
        "        return nn.functional.linear(x, weight.to(x.dtype), self.base.bias)\n",
    ),
    Planted(
        "lora.layer",
        "adapter and base in one product each, from the right",
        "never B A",
        "self.dropout(x).float() @ self.A.T @ self.B.T",
        "self.dropout(x).float() @ (self.A.T @ self.B.T)",
    ),
    Planted(
        "lora.layer",
        "the base's forward twice",
        "never B A",
        "        output = self.base(x)\n",
        "        output = self.base(x)\n        output = self.base(x)\n",
    ),
    Planted(
        "lora.layer",
        "dropout on the way to the base",
        "dropout",
        "        output = self.base(x)\n",
        "        x = self.dropout(x)\n        output = self.base(x)\n",
    ),
    Planted(
        "lora.layer",
        "dropout behind A",
        "dropout",
        "self.dropout(x).float() @ self.A.T",
        "self.dropout(x.float() @ self.A.T)",
    ),
    Planted(
        "lora.layer",
        "dropout behind B",
        "dropout",
        FORWARD,
        "        beside = self.dropout(x.float() @ self.A.T @ self.B.T)\n"
        "        return output + (self.scaling * beside).to(output.dtype)\n",
    ),
    Planted("lora.layer", "no dropout", "dropout", "self.dropout(x)", "x"),
    Planted(
        "lora.layer",
        "dropout also in evaluation",
        "output",
        "self.dropout(x)",
        "nn.functional.dropout(x, self.dropout.p)",
    ),
    Planted(
        "lora.layer",
        "what is left is not scaled up",
        "dropout",
        "self.dropout(x).float()",
        "(x * (torch.rand_like(x) >= self.dropout.p * self.training)).float()",
    ),
    Planted("lora.layer", "merges without scaling", "merged", "self.scaling * (self.B @ self.A)", "self.B @ self.A"),
    Planted("lora.layer", "merged transposed", "merged", "self.B @ self.A", "(self.A.T @ self.B.T)"),
    Planted(
        "lora.layer",
        "the sum in the base's dtype",
        "merged",
        SUM,
        "self.kept + (self.scaling * (self.B @ self.A)).to(self.kept.dtype)",
    ),
    Planted(
        "lora.layer",
        "B A in the base's dtype",
        "merged",
        "(self.B @ self.A)",
        "(self.B.to(self.kept.dtype) @ self.A.to(self.kept.dtype)).float()",
    ),
    Planted(
        "lora.layer",
        "a new weight in fp32",
        "merged",
        MERGE,
        f"            self.base.weight = nn.Parameter({SUM}, requires_grad=False)\n",
    ),
    Planted(
        "lora.layer",
        "the weight's data replaced, in other memory",
        "merged",
        MERGE,
        f"            self.base.weight.data = ({SUM}).to(self.kept.dtype)\n",
    ),
    Planted(
        "lora.layer",
        "merges twice",
        "merged",
        "        if self.kept is None:\n" + KEEP,
        "        whole = self.base.weight.clone()\n"
        "        self.base.weight.copy_(whole.float() + self.scaling * (self.B @ self.A))\n"
        "        self.kept = whole if self.kept is None else self.kept\n",
    ),
    Planted(
        "lora.layer",
        "merged, and the adapter still beside it",
        "merged",
        "        if self.kept is not None:\n            return output\n",
        "",
    ),
    Planted("lora.layer", "B zeroed where it is merged", "unmerged", MERGE, MERGE + "            self.B.zero_()\n"),
    Planted(
        "lora.layer",
        "unmerges by subtraction",
        "unmerged",
        "            self.base.weight.copy_(self.kept)\n",
        "            self.base.weight.copy_(self.base.weight.float() - self.scaling * (self.B @ self.A))\n",
    ),
    Planted(
        "lora.layer",
        "keeps the weight itself, not a copy",
        "unmerged",
        "self.base.weight.clone()",
        "self.base.weight.detach()",
    ),
    Planted(
        "lora.layer",
        "keeps a copy in bf16",
        "unmerged",
        "self.base.weight.clone()",
        "self.base.weight.clone().bfloat16()",
    ),
    Planted(
        "lora.layer",
        "never has its adapter again",
        "unmerged",
        "            self.base.weight.copy_(self.kept)\n            self.kept = None\n",
        "            self.base.weight.copy_(self.kept)\n",
    ),
    Planted(
        "lora.nf4",
        "floor instead of the nearest",
        "nearest level",
        "torch.bucketize(divided, (levels[1:] + levels[:-1]) / 2)",
        "(torch.bucketize(divided, levels, right=True) - 1)",
    ),
    Planted("lora.nf4", "the next level above", "nearest level", "(levels[1:] + levels[:-1]) / 2", "levels[:-1]"),
    Planted(
        "lora.nf4",
        "levels taken as evenly spaced",
        "nearest level",
        "torch.bucketize(divided, (levels[1:] + levels[:-1]) / 2)",
        "((divided + 1) * 7.5).round().long()",
    ),
    Planted(
        "lora.nf4",
        "NF4's levels whatever is handed in",
        "nearest level",
        "(levels[1:] + levels[:-1]) / 2",
        "(lambda nf4: (nf4[1:] + nf4[:-1]) / 2)(torch.tensor([-1., -.6962, -.5251, -.3949, -.2844, -.1848, -.0911, "
        "0, .0796, .1609, .2461, .3379, .4407, .5626, .7230, 1]))",
    ),
    Planted(
        "lora.nf4",
        "codes packed and read the other way round",
        "nearest level",
        "(16 * first + second)",
        "(16 * second + first)",
    ),
    Planted(
        "lora.nf4",
        "read the other way round",
        "comes back",
        "torch.stack([self.codes // 16, self.codes % 16], 1)",
        "torch.stack([self.codes % 16, self.codes // 16], 1)",
    ),
    Planted(
        "lora.nf4",
        "the first half above, the second half below",
        "nearest level",
        ".view(-1, 2).unbind(1)",
        ".view(2, -1).unbind(0)",
    ),
    Planted(
        "lora.nf4",
        "a scale for the whole tensor",
        "scales",
        "rows.abs().amax(1)",
        "rows.abs().amax().expand(len(rows)).contiguous()",
    ),
    Planted(
        "lora.nf4",
        "a scale for each row of the matrix",
        "scales",
        "rows.abs().amax(1)",
        "weight.detach().float().abs().amax(1)",
    ),
    Planted(
        "lora.nf4",
        "column after column",
        "scales",
        "weight.detach().float().flatten()",
        "weight.detach().float().T.flatten()",
    ),
    Planted("lora.nf4", "the largest, but not of those below 0", "scales", "rows.abs().amax(1)", "rows.amax(1)"),
    Planted("lora.nf4", "the sign is lost", "nearest level", "divided = rows /", "divided = rows.abs() /"),
    Planted(
        "lora.nf4",
        "scales kept in bf16",
        "bytes",
        "        divided = rows",
        "        self.scales = self.scales.bfloat16()\n        divided = rows",
    ),
    Planted("lora.nf4", "the mean magnitude", "scales", "rows.abs().amax(1)", "rows.abs().mean(1)"),
    Planted(
        "lora.nf4",
        "blocks of 128",
        "scales",
        "(0, -self.count % 64)).view(-1, 64)",
        "(0, -self.count % 128)).view(-1, 128)",
    ),
    Planted(
        "lora.nf4",
        "the short last block left out",
        "scales",
        "torch.nn.functional.pad(flat, (0, -self.count % 64)).view(-1, 64)",
        "flat[: self.count // 64 * 64].view(-1, 64)",
    ),
    Planted(
        "lora.nf4",
        "padding among the codes",
        "nearest level",
        ".flatten()[: self.count]\n        first",
        ".flatten()\n        first",
    ),
    Planted(
        "lora.nf4",
        "a code to a byte",
        "nearest level",
        "(16 * first + second)",
        "torch.stack([first, second]).flatten()",
    ),
    Planted(
        "lora.nf4",
        "codes as 32-bit integers",
        "bytes",
        "(16 * first + second).to(torch.uint8)",
        "(16 * first + second).int()",
    ),
    Planted(
        "lora.nf4",
        "keeps the codes beside the bytes",
        "bytes",
        "        first, second",
        "        self.unpacked = codes\n        first, second",
    ),
    Planted(
        "lora.nf4",
        "keeps the weight",
        "bytes",
        "        flat = weight.detach().float().flatten()",
        "        self.flat = flat = weight.detach().float().flatten()",
    ),
    Planted("lora.nf4", "a graph that holds the weight", "bytes", "weight.detach()", "weight"),
    Planted(
        "lora.nf4",
        "unpacks once, and gives that again",
        "comes back",
        "    def dequantize(self):\n",
        "        self.whole = self.unpack()\n\n    def dequantize(self):\n        return self.whole\n\n"
        "    def unpack(self):\n",
    ),
    Planted("lora.nf4", "fp32 whatever came", "comes back", ".view(self.shape).to(self.dtype)", ".view(self.shape)"),
    Planted("lora.nf4", "flat, without its shape", "comes back", ".view(self.shape)", ""),
    Planted(
        "lora.nf4",
        "padding comes back",
        "comes back",
        ".flatten()[: self.count]\n        scales",
        ".flatten()\n        scales",
    ),
    Planted(
        "lora.nf4",
        "scales never multiplied",
        "comes back",
        "self.levels[codes.int()] * scales",
        "self.levels[codes.int()]",
    ),
    Planted(
        "lora.nf4",
        "levels rounded to bf16",
        "exact on levels",
        "self.levels, self.shape, self.dtype = levels,",
        "self.levels, self.shape, self.dtype = levels.bfloat16().float(),",
    ),
    Planted(
        "lora.nf4",
        "an epsilon on the scale",
        "exact on levels",
        "self.scales = rows.abs().amax(1)",
        "self.scales = rows.abs().amax(1) + 1e-8",
    ),
    Planted(
        "lora.nf4",
        "zeros divided by their scale",
        "zeros and small blocks",
        "torch.where(self.scales == 0, 1, self.scales)",
        "self.scales",
    ),
    Planted(
        "lora.nf4",
        "a smallest scale",
        "zeros and small blocks",
        "torch.where(self.scales == 0, 1, self.scales)",
        "self.scales.clamp(min=1e-12)",
    ),
    Planted(
        "lora.nf4",
        "a scale of 1 for zeros, and no level for zero",
        "zeros and small blocks",
        "        codes = torch.bucketize",
        "        divided = divided + (self.scales == 0)[:, None]\n"
        "        self.scales = torch.where(self.scales == 0, 1, self.scales)\n        codes = torch.bucketize",
    ),
    Planted(
        "lora.nf4",
        "a table of 16 distances for each",
        "no table",
        "torch.bucketize(divided, (levels[1:] + levels[:-1]) / 2)",
        "(divided.unsqueeze(-1) - levels).abs().argmin(-1)",
    ),
    Planted(
        "lora.nf4",
        "borders at the geometric mean",
        "nearest level",
        "(levels[1:] + levels[:-1]) / 2",
        "(levels[1:] * levels[:-1]).clamp(min=0).sqrt() * levels[1:].sign()",
    ),
    Planted(
        "lora.dpo",
        "a mean over tokens",
        "loss",
        SCORES,
        "        scored = -F.cross_entropy(logits, labels[:, 1:], reduction='none')\n"
        "        return scored.sum(1) / (labels[:, 1:] != -100).sum(1)\n",
    ),
    Planted(
        "lora.dpo",
        "no shift",
        "loss",
        "        logits = model(ids)[:, :-1].transpose(1, 2)\n" + SCORES,
        "        logits = model(ids).transpose(1, 2)\n" + SCORES.replace("labels[:, 1:]", "labels"),
    ),
    Planted(
        "lora.dpo",
        "shifted the other way",
        "loss",
        "        logits = model(ids)[:, :-1].transpose(1, 2)\n" + SCORES,
        "        logits = model(ids)[:, 1:].transpose(1, 2)\n" + SCORES.replace("labels[:, 1:]", "labels[:, :-1]"),
    ),
    Planted("lora.dpo", "prompt and padding count", "loss", "labels[:, 1:]", "ids[:, 1:]"),
    Planted(
        "lora.dpo",
        "padding counts",
        "loss",
        "labels[:, 1:]",
        "torch.where(labels.flip(1).cummax(1).values.flip(1) < 0, ids, labels)[:, 1:]",
    ),
    Planted(
        "lora.dpo",
        "tokens of id 0 taken for padding",
        "loss",
        "labels[:, 1:]",
        "labels.masked_fill(ids == 0, -100)[:, 1:]",
    ),
    Planted("lora.dpo", "no reference", "loss", REFERENCE, "    reference = 0\n"),
    Planted(
        "lora.dpo", "a reference with adapters", "loss", "torch.no_grad(), model.disable_adapter()", "torch.no_grad()"
    ),
    Planted(
        "lora.dpo",
        "a reference with a graph",
        "one model",
        "torch.no_grad(), model.disable_adapter()",
        "model.disable_adapter()",
    ),
    Planted(
        "lora.dpo",
        "a reference that is detached afterwards",
        "one model",
        REFERENCE,
        "    with model.disable_adapter():\n        reference = (scores(*chosen) - scores(*rejected)).detach()\n",
    ),
    Planted(
        "lora.dpo",
        "adapters off for both",
        "one model",
        "    margins = beta * (scores(*chosen) - scores(*rejected) - reference)\n",
        "    with model.disable_adapter():\n        margins = beta * (scores(*chosen) - "
        "scores(*rejected) - reference)\n    margins = margins + 0 * sum(p.sum() for p in model.parameters())\n",
    ),
    Planted(
        "lora.dpo",
        "a copy of the model as its reference",
        "one model",
        REFERENCE,
        "    import copy\n    policy, model = model, copy.deepcopy(model)\n" + REFERENCE + "    model = policy\n",
    ),
    Planted(
        "lora.dpo",
        "the reference of chosen answers alone",
        "loss",
        "        reference = scores(*chosen) - scores(*rejected)\n",
        "        reference = scores(*chosen)\n",
    ),
    Planted(
        "lora.dpo",
        "a second pass with adapters, for the margins",
        "one model",
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n    scores(*chosen)\n",
    ),
    Planted(
        "lora.dpo",
        "beta outside the logarithm",
        "loss",
        "    margins = beta * (scores(*chosen) - scores(*rejected) - reference)\n"
        "    loss = -F.logsigmoid(margins).mean()\n",
        "    margins = scores(*chosen) - scores(*rejected) - reference\n"
        "    loss = -beta * F.logsigmoid(margins).mean()\n    margins = beta * margins\n",
    ),
    Planted(
        "lora.dpo",
        "beta on the model alone",
        "loss",
        "beta * (scores(*chosen) - scores(*rejected) - reference)",
        "beta * (scores(*chosen) - scores(*rejected)) - reference",
    ),
    Planted("lora.dpo", "divided by beta", "loss", "beta * (", "1 / beta * ("),
    Planted(
        "lora.dpo",
        "chosen and rejected swapped",
        "loss",
        "    margins = beta * (scores(*chosen) - scores(*rejected) - reference)\n",
        "    margins = -beta * (scores(*chosen) - scores(*rejected) - reference)\n",
    ),
    Planted(
        "lora.dpo", "the loss of the reversed preference", "loss", "-F.logsigmoid(margins)", "-F.logsigmoid(-margins)"
    ),
    Planted("lora.dpo", "the sign of the loss", "loss", "-F.logsigmoid(margins)", "F.logsigmoid(margins)"),
    Planted("lora.dpo", "a sum over pairs", "loss", "F.logsigmoid(margins).mean()", "F.logsigmoid(margins).sum()"),
    Planted(
        "lora.dpo",
        "the logarithm of a mean",
        "loss",
        "-F.logsigmoid(margins).mean()",
        "-torch.sigmoid(margins).mean().log()",
    ),
    Planted(
        "lora.dpo",
        "the logarithm of a sigmoid",
        "large margins",
        "F.logsigmoid(margins)",
        "torch.sigmoid(margins).log()",
    ),
    Planted(
        "lora.dpo",
        "the logarithm of a sigmoid and an epsilon",
        "large margins",
        "F.logsigmoid(margins)",
        "(torch.sigmoid(margins) + 1e-8).log()",
    ),
    Planted("lora.dpo", "1 + exp", "large margins", "-F.logsigmoid(margins)", "(1 + (-margins).exp()).log()"),
    Planted("lora.dpo", "a hinge instead", "loss", "-F.logsigmoid(margins)", "F.relu(1 - margins)"),
    Planted("lora.dpo", "gradients add up over steps", "adapters move", "    optimizer.zero_grad()\n", ""),
    Planted("lora.dpo", "no optimizer step", "adapters move", "    optimizer.step()\n", ""),
    Planted(
        "lora.dpo",
        "gradients cleared after the backward",
        "adapters move",
        "    optimizer.zero_grad()\n    loss.backward()\n",
        "    loss.backward()\n    optimizer.zero_grad()\n",
    ),
    Planted(
        "lora.dpo",
        "everything is trained",
        "adapters move",
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n    model.requires_grad_(True)\n"
        "    margins = beta * (scores(*chosen) - scores(*rejected) - reference)\n"
        "    loss = -F.logsigmoid(margins).mean()\n",
    ),
    Planted("lora.dpo", "margins without beta", "margins", "margins.detach()", "margins.detach() / beta"),
    Planted("lora.dpo", "the mean margin", "margins", "margins.detach()", "margins.detach().mean()"),
    Planted(
        "lora.dpo",
        "the model's margin without its reference",
        "margins",
        "margins.detach()",
        "margins.detach() + beta * reference",
    ),
    Planted(
        "lora.sharded_load",
        "reads all, then cuts",
        "bytes read",
        "part[begin:begin + per_rank]",
        "file.get_tensor(key)[begin:begin + per_rank]",
    ),
    Planted(
        "lora.sharded_load",
        "reads all by a slice, then cuts",
        "bytes read",
        "part[begin:begin + per_rank]",
        "part[:][begin:begin + per_rank]",
    ),
    Planted(
        "lora.sharded_load",
        "reads a tensor for its shape",
        "bytes read",
        "part.get_shape()",
        "list(file.get_tensor(key).shape)",
    ),
    Planted(
        "lora.sharded_load",
        "rank 0 reads and broadcasts",
        "no collective",
        WALK,
        """    import torch
    for place in sorted(files):
        with open_file(folder / place) as file:
            for key in sorted(file.keys()):
                whole = file.get_tensor(key).contiguous()
                dist.broadcast(whole, 0)
                whole = whole.clone()
                if whole.ndim > 1:
                    per_rank = -(-len(whole) // dist.get_world_size())
                    whole = whole[dist.get_rank() * per_rank:][:per_rank]
                pieces[key] = whole
""",
    ),
    Planted(
        "lora.sharded_load",
        "rank 0 reads norms and broadcasts them",
        "no collective",
        "pieces[key] = file.get_tensor(key)",
        "pieces[key] = file.get_tensor(key)\n                    dist.broadcast(pieces[key], 0)",
    ),
    Planted(
        "lora.sharded_load",
        "rank 0 alone has the norms",
        "pieces",
        "pieces[key] = file.get_tensor(key)",
        "pieces[key] = file.get_tensor(key) if dist.get_rank() == 0 else file.get_tensor(key) * 0",
    ),
    Planted(
        "lora.sharded_load",
        "opens a file for each tensor",
        "each file once",
        WALK,
        """    for place in files:
        with open_file(folder / place) as file:
            names = list(file.keys())
        for key in names:
            with open_file(folder / place) as file:
                part = file.get_slice(key)
                shape = part.get_shape()
                if len(shape) < 2:
                    pieces[key] = file.get_tensor(key)
                else:
                    per_rank = -(-shape[0] // dist.get_world_size())
                    begin = dist.get_rank() * per_rank
                    pieces[key] = part[begin:begin + per_rank]
""",
    ),
    Planted(
        "lora.sharded_load",
        "the last rows are dropped",
        "pieces",
        "-(-shape[0] // dist.get_world_size())",
        "shape[0] // dist.get_world_size()",
    ),
    Planted(
        "lora.sharded_load",
        "one row more than there should be",
        "bytes read",
        "-(-shape[0] // dist.get_world_size())",
        "shape[0] // dist.get_world_size() + 1",
    ),
    Planted(
        "lora.sharded_load",
        "the last rank takes what is left",
        "pieces",
        "                    per_rank = -(-shape[0] // dist.get_world_size())\n"
        "                    begin = dist.get_rank() * per_rank\n"
        "                    pieces[key] = part[begin:begin + per_rank]\n",
        "                    per_rank = shape[0] // dist.get_world_size()\n"
        "                    begin = dist.get_rank() * per_rank\n"
        "                    last = dist.get_rank() + 1 == dist.get_world_size()\n"
        "                    pieces[key] = part[begin:] if last else part[begin:begin + per_rank]\n",
    ),
    Planted(
        "lora.sharded_load",
        "the first ranks have one row more, as in array_split",
        "pieces",
        "                    per_rank = -(-shape[0] // dist.get_world_size())\n"
        "                    begin = dist.get_rank() * per_rank\n"
        "                    pieces[key] = part[begin:begin + per_rank]\n",
        "                    few, more = divmod(shape[0], dist.get_world_size())\n"
        "                    begin = dist.get_rank() * few + min(dist.get_rank(), more)\n"
        "                    pieces[key] = part[begin:begin + few + (dist.get_rank() < more)]\n",
    ),
    Planted(
        "lora.sharded_load",
        "every N-th row",
        "pieces",
        "part[begin:begin + per_rank]",
        "file.get_tensor(key)[dist.get_rank()::dist.get_world_size()]",
    ),
    Planted("lora.sharded_load", "the same rows on every rank", "pieces", "dist.get_rank() * per_rank", "0 * per_rank"),
    Planted(
        "lora.sharded_load",
        "columns instead of rows",
        "pieces",
        "part[begin:begin + per_rank]",
        "part[:, begin:begin + per_rank]",
    ),
    Planted("lora.sharded_load", "norms are cut too", "pieces", "len(shape) < 2", "len(shape) < 1"),
    Planted("lora.sharded_load", "three dimensions are not cut", "pieces", "len(shape) < 2", "len(shape) != 2"),
    Planted(
        "lora.sharded_load",
        "tensors with fewer rows than ranks are whole everywhere",
        "fewer rows than ranks",
        "len(shape) < 2",
        "len(shape) < 2 or shape[0] < dist.get_world_size()",
    ),
    Planted(
        "lora.sharded_load",
        "no piece where there is no row",
        "fewer rows than ranks",
        "                    pieces[key] = part[begin:begin + per_rank]\n",
        "                    if begin < shape[0]:\n"
        "                        pieces[key] = part[begin:begin + per_rank]\n",
    ),
    Planted(
        "lora.sharded_load",
        "nothing without its shape",
        "fewer rows than ranks",
        "                    pieces[key] = part[begin:begin + per_rank]\n",
        "                    pieces[key] = part[begin:begin + per_rank]\n"
        "                    if begin >= shape[0]:\n"
        "                        pieces[key] = pieces[key].flatten()\n",
    ),
    Planted(
        "lora.sharded_load",
        "all in fp32",
        "dtypes",
        "    return pieces\n",
        "    return {key: piece.float() for key, piece in pieces.items()}\n",
    ),
    Planted(
        "lora.sharded_load",
        "all in bf16",
        "dtypes",
        "    return pieces\n",
        "    import torch\n    return {key: piece.to(torch.bfloat16) for key, piece in pieces.items()}\n",
    ),
    Planted(
        "lora.sharded_load", "the first file alone", "pieces", "for place in files:", "for place in sorted(files)[:1]:"
    ),
    Planted("lora.sharded_load", "only with an index", "pieces", "if index.exists():", "if True:"),
    Planted(
        "lora.sharded_load",
        "ranks share the files out",
        "pieces",
        "for place in files:",
        "for place in sorted(files)[dist.get_rank()::dist.get_world_size()]:",
    ),
    Planted(
        "lora.sync",
        "each rank keeps what it has drawn",
        "start",
        "        self.take(self.flat(self.trained.values()))\n",
        "",
    ),
    Planted(
        "lora.sync",
        "begins at the mean of all ranks",
        "start",
        "        self.take(self.flat(self.trained.values()))\n",
        "        flat = self.flat(self.trained.values())\n        dist.all_reduce(flat)\n"
        "        with torch.no_grad():\n            for parameter, part in self.parts(flat):\n"
        "                parameter.copy_(part.view_as(parameter) / dist.get_world_size())\n",
    ),
    Planted(
        "lora.sync",
        "from the last rank",
        "start",
        "dist.broadcast(flat, 0)",
        "dist.broadcast(flat, dist.get_world_size() - 1)",
    ),
    Planted("lora.sync", "tensors that the model never sees", "start", "parameter.copy_(", "parameter.clone().copy_("),
    Planted(
        "lora.sync",
        "the whole model travels at the start",
        "adapters alone travel",
        "        self.take(self.flat(self.trained.values()))\n",
        "        for tensor in model.state_dict().values():\n            dist.broadcast(tensor, 0)\n",
    ),
    Planted("lora.sync", "a sum of gradients", "weights", "        mean /= dist.get_world_size()\n", ""),
    Planted(
        "lora.sync",
        "a message for each gradient",
        "adapters alone travel",
        FLAT_MEAN,
        FLAT_MEAN.replace(
            "        dist.all_reduce(mean)\n",
            "        for _, part in self.parts(mean):\n            dist.all_reduce(part)\n",
        ),
    ),
    Planted(
        "lora.sync",
        "frozen weights among the gradients",
        "adapters alone travel",
        "for name, p in model.named_parameters() if p.requires_grad}",
        "for name, p in model.named_parameters()}",
    ),
    Planted(
        "lora.sync",
        "gradients that are missing here are left out",
        "weights",
        "torch.zeros_like(p) if p.grad is None else p.grad for p in self.trained.values())",
        "p.grad for p in self.trained.values() if p.grad is not None)",
    ),
    Planted(
        "lora.sync",
        "missing gradients left out, in messages of their own",
        "weights",
        FLAT_MEAN,
        "        for p in self.trained.values():\n            if p.grad is not None:\n"
        "                dist.all_reduce(p.grad)\n"
        "        mean = self.flat(torch.zeros_like(p) if p.grad is None else p.grad "
        "for p in self.trained.values())\n        mean /= dist.get_world_size()\n",
    ),
    Planted(
        "lora.sync",
        "no gradient comes where there was none",
        "weights",
        "            parameter.grad = part.view_as(parameter)\n",
        "            if parameter.grad is not None:\n                parameter.grad = part.view_as(parameter)\n",
    ),
    Planted(
        "lora.sync",
        "averages weights, not gradients",
        "weights",
        FLAT_MEAN,
        "        mean = self.flat(torch.zeros_like(p) if p.grad is None else p.grad for p in "
        "self.trained.values())\n        weights = self.flat(self.trained.values())\n"
        "        dist.all_reduce(weights)\n        with torch.no_grad():\n"
        "            for parameter, part in self.parts(weights / dist.get_world_size()):\n"
        "                parameter.copy_(part.view_as(parameter))\n",
    ),
    Planted(
        "lora.sync",
        "bf16 on the wire",
        "adapters alone travel",
        "        dist.all_reduce(mean)\n",
        "        half = mean.bfloat16()\n        dist.all_reduce(half)\n        mean = half.float()\n",
    ),
    Planted(
        "lora.sync",
        "heads and adapters in two messages",
        "adapters alone travel",
        "        dist.all_reduce(mean)\n",
        "        dist.all_reduce(mean[:8])\n        dist.all_reduce(mean[8:])\n",
    ),
    Planted(
        "lora.sync",
        "a message to agree on who has gradients",
        "adapters alone travel",
        "        dist.all_reduce(mean)\n",
        "        dist.all_reduce(mean)\n        dist.all_reduce(torch.ones(1))\n",
    ),
    Planted(
        "lora.sync",
        "the optimizer steps before the mean",
        "weights",
        "        mean = self.flat(torch.zeros_like",
        "        self.optimizer.step()\n        mean = self.flat(torch.zeros_like",
    ),
    Planted("lora.sync", "gradients add up over steps", "weights", "        self.optimizer.zero_grad()\n", ""),
    Planted("lora.sync", "no clipping", "weights", "        mean *= (self.max_norm / norm).clamp(max=1)\n", ""),
    Planted("lora.sync", "scales small gradients up", "weights", ".clamp(max=1)", ""),
    Planted(
        "lora.sync",
        "clips before the mean",
        "weights",
        FLAT_MEAN + "        norm = mean.norm()\n        mean *= (self.max_norm / norm).clamp(max=1)\n",
        FLAT_MEAN.replace(
            "        dist.all_reduce",
            "        norm = mean.norm()\n        mean *= (self.max_norm / norm).clamp(max=1)\n        dist.all_reduce",
        ),
    ),
    Planted(
        "lora.sync",
        "clips each parameter by itself",
        "weights",
        "        mean *= (self.max_norm / norm).clamp(max=1)\n",
        "        for _, part in self.parts(mean):\n            part *= (self.max_norm / part.norm()).clamp(max=1)\n",
    ),
    Planted(
        "lora.sync",
        "the norm after clipping",
        "norm",
        "        return norm.item()\n",
        "        return mean.norm().item()\n",
    ),
    Planted(
        "lora.sync",
        "the largest number as the norm",
        "norm",
        "        return norm.item()\n",
        "        return mean.abs().max().item()\n",
    ),
    Planted(
        "lora.sync",
        "saves the whole model",
        "file",
        "        self.optimizer, self.max_norm = optimizer, max_norm\n",
        "        self.optimizer, self.max_norm = optimizer, max_norm\n"
        "        whole = {name: p.detach() for name, p in model.named_parameters()}\n"
        "        self.save = lambda path: dist.get_rank() == 0 and save_file(whole, path)\n",
    ),
    Planted(
        "lora.sync",
        "the norm of this rank's own gradients",
        "norm",
        FLAT_MEAN + "        norm = mean.norm()\n        mean *= (self.max_norm / norm).clamp(max=1)\n",
        FLAT_MEAN.replace("        dist.all_reduce", "        norm = mean.norm()\n        dist.all_reduce")
        + "        mean *= (self.max_norm / mean.norm()).clamp(max=1)\n",
    ),
    Planted(
        "lora.sync",
        "every rank saves",
        "file",
        "        if dist.get_rank() == 0:\n            save_file",
        "        if dist.get_rank() >= 0:\n            save_file",
    ),
    Planted(
        "lora.sync",
        "saves one flat tensor",
        "file",
        "save_file({name: p.detach() for name, p in self.trained.items()}, path)",
        'save_file({"flat": self.flat(self.trained.values())}, path)',
    ),
    Planted("lora.sync", "saves in bf16", "file", "{name: p.detach() for", "{name: p.detach().bfloat16() for"),
    Planted(
        "lora.sync",
        "waits for the others when it saves",
        "adapters alone travel",
        "    def save(self, path):\n",
        "    def save(self, path):\n        dist.barrier()\n",
    ),
    Planted(
        "lora.sync",
        "gathers before it saves",
        "adapters alone travel",
        "    def save(self, path):\n",
        "    def save(self, path):\n        dist.broadcast(self.flat(self.trained.values()), 0)\n",
    ),
    Planted(
        "lora.sync",
        "every rank reads",
        "loaded",
        "load_file(path) if dist.get_rank() == 0 else self.trained",
        "load_file(path)",
    ),
    Planted(
        "lora.sync",
        "rank 0 alone loads",
        "loaded",
        "        self.take(self.flat(held[name] for name in self.trained))\n",
        "        with torch.no_grad():\n            for name, parameter in self.trained.items():\n"
        "                parameter.copy_(held[name])\n",
    ),
    Planted(
        "lora.sync",
        "loads in the order of the file",
        "loaded",
        "self.flat(held[name] for name in self.trained)",
        "self.flat(held[name] for name in sorted(held, reverse=True))",
    ),
)
