"""Planted wrong answers of lesson 16: each exhibit as it was released, and others; the property that shows it."""

from course_lib.grading.selftest import Planted

MIXTURE = '''import torch.distributed as dist


def reduce_mixture(gradients):
    for name, gradient in gradients.items():
        if ".mlp." not in name:
            dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
'''
EXPERTS = '''import torch.distributed as dist


def reduce_experts(gradient, copies):
    dist.all_reduce(gradient, group=copies)
    gradient /= dist.get_world_size(copies)
'''
BUCKETS = '''import torch
import torch.distributed as dist


def average_in_buckets(gradients, limit):
    bucket = []

    def send():
        if bucket:
            together = torch.cat(bucket)
            dist.all_reduce(together)
            together /= dist.get_world_size()
            for gradient, part in zip(bucket, together.split([len(each) for each in bucket])):
                gradient.copy_(part)
            bucket.clear()

    for gradient in gradients:
        if len(gradient) > limit:  # it has a message of its own
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
        elif len(gradient) < limit:
            if sum(len(each) for each in bucket) + len(gradient) > limit:
                send()
            bucket.append(gradient)
    send()
'''
OUTER = '''import torch.distributed as dist


def outer_step(weights, before, momentum, rate, beta):
    pseudo_gradient = weights - before
    dist.all_reduce(pseudo_gradient)
    pseudo_gradient /= dist.get_world_size()
    momentum.mul_(beta).add_(pseudo_gradient)
    weights.copy_(before - rate * momentum)
'''

AS_RELEASED = "as it was released"
PLANTED = (
    Planted("museum.mixture", AS_RELEASED, "router", "", MIXTURE),
    Planted("museum.mixture", "a shared expert is taken for one of a rank's own", "shared experts", '".experts." not',
            '"experts." not'),
    Planted("museum.mixture", "the experts of different ranks are summed too", "experts", 'if ".experts." not in name:',
            "if True:"),
    Planted("museum.mixture", "experts are left as they are", "experts",
            "            dist.all_reduce(gradient)\n        gradient /=",
            "            dist.all_reduce(gradient)\n            gradient /="),
    Planted("museum.mixture", "the sum, not divided", "all others", "        gradient /= dist.get_world_size()\n", ""),
    Planted("museum.experts", AS_RELEASED, "gradient", "", EXPERTS),
    Planted("museum.experts", "summed over all ranks, whose experts are different", "gradient", ", group=copies)", ")"),
    Planted("museum.experts", "not divided", "gradient", "    gradient /= dist.get_world_size()\n", ""),
    Planted("museum.experts", "divided by the ranks with different experts alone", "gradient",
            "dist.get_world_size()", "(dist.get_world_size() // dist.get_world_size(copies))"),
    Planted("museum.experts", "a second all-reduce, of copies that are equal by then", "one all-reduce",
            "    gradient /= dist.get_world_size()\n",
            "    dist.all_reduce(gradient, group=copies)\n"
            "    gradient /= dist.get_world_size() * dist.get_world_size(copies)\n"),
    Planted("museum.buckets", AS_RELEASED, "as large as a bucket", "", BUCKETS),
    Planted("museum.buckets", "a bucket may grow past its size", "messages", "+ len(gradient) > limit:", "> limit:"),
    Planted("museum.buckets", "a message for each", "messages", "len(gradient) > limit:  #", "True:  #"),
    Planted("museum.buckets", "the last bucket stays", "smaller than a bucket",
            "            bucket.append(gradient)\n    send()\n", "            bucket.append(gradient)\n"),
    Planted("museum.buckets", "what has a message of its own is not divided", "larger than a bucket",
            "            dist.all_reduce(gradient)\n            gradient /= dist.get_world_size()\n",
            "            dist.all_reduce(gradient)\n"),
    Planted("museum.buckets", "the larger ones are left out", "larger than a bucket",
            "            dist.all_reduce(gradient)\n            gradient /= dist.get_world_size()\n",
            "            pass\n"),
    Planted("museum.outer", AS_RELEASED, "weights", "", OUTER),
    Planted("museum.outer", "the sign turned at the weights alone", "momentum", "",
            OUTER.replace("before - rate", "before + rate")),
    Planted("museum.outer", "from where the rank has come to", "weights", "before - rate", "weights - rate"),
    Planted("museum.outer", "each rank its own momentum", "one all-reduce", "    dist.all_reduce(pseudo_gradient)\n"
            "    pseudo_gradient /= dist.get_world_size()\n", ""),
    Planted("museum.outer", "averages the weights, too", "one all-reduce", "    pseudo_gradient = before - weights\n",
            "    dist.all_reduce(weights)\n    weights /= dist.get_world_size()\n"
            "    pseudo_gradient = before - weights\n"),
    Planted("museum.outer", "no momentum", "momentum", ".mul_(beta)", ".mul_(0)"),
)
