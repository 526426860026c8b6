"""Planted wrong answers of lesson 15: the solution with one thing wrong, and the property that shows it."""

from course_lib.grading.selftest import Planted

PLANTED = (
    Planted("experts.route", "the worst experts", "chosen", "topk(k)", "topk(k, largest=False)"),
    Planted(
        "experts.route",
        "probabilities that do not add up to one",
        "weights",
        "weights = scores.softmax(dim=-1)",
        "weights = logits.softmax(dim=-1).gather(1, chosen)",
    ),
    Planted(
        "experts.route",
        "all chosen experts weigh alike",
        "weights",
        "scores.softmax(dim=-1)",
        "torch.full_like(scores, 1 / k)",
    ),
    Planted(
        "experts.route",
        "exponentials by themselves",
        "large scores",
        "scores.softmax(dim=-1)",
        "scores.exp() / scores.exp().sum(dim=-1, keepdim=True)",
    ),
    Planted(
        "experts.route",
        "token by token",
        "kept",
        "    for choice in range(k):\n        for token in range(len(logits)):\n",
        "    for token in range(len(logits)):\n        for choice in range(k):\n",
    ),
    Planted("experts.route", "room for one more", "kept", "taken[expert] < capacity", "taken[expert] <= capacity"),
    Planted(
        "experts.route",
        "new room for every choice",
        "kept",
        "    for choice in range(k):\n",
        "    for choice in range(k):\n        taken = [0] * logits.shape[1]\n",
    ),
    Planted("experts.route", "late tokens first", "kept", "range(len(logits))", "reversed(range(len(logits)))"),
    Planted("experts.route", "drops nothing", "kept", "taken[expert] < capacity", "True"),
    Planted(
        "experts.route",
        "dropped copies weigh nothing",
        "weights",
        "return chosen, weights, kept",
        "return chosen, weights * kept / (weights * kept).sum(dim=-1, keepdim=True).clamp(min=1e-9), kept",
    ),
    Planted("experts.dispatch", "in the order of ranks", "rows", "rows[expert_of.argsort(stable=True)]", "rows"),
    Planted("experts.dispatch", "tokens are not sorted", "rows", "tokens[chosen.argsort(stable=True)]", "tokens"),
    Planted(
        "experts.dispatch",
        "the last rank's tokens first",
        "rows",
        "rows[expert_of.argsort(stable=True)]",
        "rows.flip(0)[expert_of.flip(0).argsort(stable=True)]",
    ),
    Planted(
        "experts.dispatch",
        "what was sent for what came",
        "counts",
        "arriving.view(ranks, own).sum(dim=0)",
        "counts.view(ranks, own).sum(dim=0)",
    ),
    Planted(
        "experts.dispatch",
        "counts by rank",
        "counts",
        "arriving.view(ranks, own).sum(dim=0)",
        "arriving.view(ranks, own).sum(dim=1)",
    ),
    Planted(
        "experts.dispatch",
        "gathers all counts",
        "nothing else travels",
        "    dist.all_to_all_single(arriving, counts)\n",
        "    everybodys = [torch.empty_like(counts) for _ in range(ranks)]\n"
        "    dist.all_gather(everybodys, counts)\n"
        "    first = dist.get_rank() * own\n"
        "    arriving = torch.cat([each[first:first + own] for each in everybodys])\n",
    ),
    Planted(
        "experts.dispatch",
        "gathers all tokens besides",
        "nothing else travels",
        "    expert_of = torch.arange(own)",
        "    dist.all_gather([torch.empty_like(tokens) for _ in range(ranks)], tokens)\n"
        "    expert_of = torch.arange(own)",
    ),
    Planted(
        "experts.dispatch",
        "as much room for every rank as the fullest needs",
        "nothing else travels",
        "    dist.all_to_all_single(rows, tokens[chosen.argsort(stable=True)], received, sent)\n",
        "    room = torch.tensor(max(sent))\n"
        "    dist.all_reduce(room, op=dist.ReduceOp.MAX)\n"
        "    mine = tokens[chosen.argsort(stable=True)].split(sent)\n"
        "    padded = torch.stack([torch.cat([part, part.new_zeros(int(room) - len(part), part.shape[1])]) "
        "for part in mine])\n"
        "    came = torch.empty_like(padded)\n"
        "    dist.all_to_all_single(came, padded)\n"
        "    rows = torch.cat([part[:number] for part, number in zip(came, received)])\n",
    ),
    Planted(
        "experts.gradients",
        "a mean over those that hold them",
        "experts",
        "experts / ranks",
        "experts / (ranks // size)",
    ),
    Planted("experts.gradients", "a mean over the group that shares", "experts", "experts / ranks", "experts / size"),
    Planted("experts.gradients", "a sum", "experts", "experts / ranks", "experts"),
    Planted("experts.gradients", "averaged with other experts", "experts", ", group=same[rank % size])", ")"),
    Planted(
        "experts.gradients",
        "experts that stay alone",
        "experts",
        "    dist.all_reduce(experts, group=same[rank % size])\n",
        "",
    ),
    Planted(
        "experts.gradients",
        "the ranks that share for those that hold the same",
        "experts",
        "same = [dist.new_group(list(range(place, ranks, size))) for place in range(size)]",
        "same = [group for first in range(0, ranks, size) for group in "
        "[dist.new_group(list(range(first, first + size)))] if first <= rank < first + size] * size",
    ),
    Planted(
        "experts.gradients",
        "the router only where experts are the same",
        "router",
        "dist.all_reduce(router)",
        "dist.all_reduce(router, group=same[rank % size])",
    ),
    Planted("experts.gradients", "the router is summed", "router", "return router / ranks", "return router"),
    Planted(
        "experts.gradients",
        "all experts over all ranks",
        "each once",
        "    dist.all_reduce(experts, group=same[rank % size])\n",
        "    place, whole = rank % size, experts.new_zeros(size, len(experts))\n"
        "    whole[place] = experts\n    dist.all_reduce(whole)\n    experts = whole[place]\n",
    ),
    Planted(
        "experts.layer",
        "the experts here alone",
        "output",
        "    scores, chosen = (tokens @ router.T).topk(k)\n",
        "    scores, chosen = (tokens @ router.T).topk(k)\n    chosen = chosen % own + dist.get_rank() * own\n",
    ),
    Planted(
        "experts.layer", "outputs are not weighted", "output", "weights.flatten()[order].unsqueeze(-1) * back", "back"
    ),
    Planted(
        "experts.layer",
        "weights in another order",
        "output",
        "weights.flatten()[order].unsqueeze(-1)",
        "weights.flatten().unsqueeze(-1)",
    ),
    Planted(
        "experts.layer",
        "a softmax over all experts",
        "output",
        "weights = scores.softmax(dim=-1)",
        "weights = (tokens @ router.T).softmax(dim=-1).gather(1, chosen)",
    ),
    Planted(
        "experts.layer",
        "no way back for gradients",
        "gradients of experts",
        "            return AllToAll.apply(gradient, *ctx.counts), None, None",
        "            back = AllToAll.apply(gradient, *ctx.counts)\n"
        "            return torch.zeros_like(back), None, None",
    ),
    Planted(
        "experts.layer",
        "tokens without a gradient from their experts",
        "gradient of tokens",
        "AllToAll.apply(tokens[order // k], sent, received)",
        "AllToAll.apply(tokens.detach()[order // k].requires_grad_(), sent, received)",
    ),
    Planted(
        "experts.layer",
        "the router learns nothing",
        "gradient of the router",
        "weights = scores.softmax(dim=-1)",
        "weights = scores.detach().softmax(dim=-1)",
    ),
    Planted(
        "experts.layer",
        "experts' gradients are scaled",
        "gradients of experts",
        "    outputs = torch.zeros_like(rows)\n",
        "    outputs = torch.zeros_like(rows)\n"
        "    up, down = (each.detach() + (each - each.detach()) / ranks for each in (up, down))\n",
    ),
    Planted(
        "experts.layer",
        "gathers all tokens",
        "copies alone travel",
        "    rows = AllToAll.apply(tokens[order // k], sent, received)\n",
        "    rows = AllToAll.apply(tokens[order // k], sent, received)\n"
        "    dist.all_gather([torch.empty_like(tokens) for _ in range(ranks)], tokens.detach())\n",
    ),
    Planted(
        "experts.layer",
        "sends outputs twice",
        "copies alone travel",
        "    back = AllToAll.apply(outputs, received, sent)\n",
        "    back = AllToAll.apply(outputs.detach(), received, sent) * 0\n"
        "    back = back + AllToAll.apply(outputs, received, sent)\n",
    ),
    Planted(
        "experts.route",
        "exponentials in float64",
        "large scores",
        "scores.softmax(dim=-1)",
        "(scores.double().exp() / scores.double().exp().sum(dim=-1, keepdim=True)).float()",
    ),
    Planted(
        "experts.dispatch",
        "rows in float32",
        "rows",
        "tokens.new_empty(sum(received), tokens.shape[1])",
        "torch.empty(sum(received), tokens.shape[1])",
    ),
    Planted(
        "experts.dispatch",
        "a rank that gets nothing stays away",
        "rows",
        "    dist.all_to_all_single(rows, tokens[chosen",
        "    if not sum(received):\n        return rows, [0] * own\n    dist.all_to_all_single(rows, tokens[chosen",
    ),
    Planted(
        "experts.layer",
        "leaves out experts without tokens",
        "gradients of experts",
        "        outputs = outputs.index_add(0, mine,",
        "        if not len(mine):\n            continue\n        outputs = outputs.index_add(0, mine,",
    ),
)
