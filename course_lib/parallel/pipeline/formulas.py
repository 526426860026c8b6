"""Bubbles in closed form, to put beside what the simulator and the clock say.

Sources: arXiv 2104.04473 section 2.2 (GPipe, 1F1B, interleaved), arXiv 2211.05953 section 4 (breadth-first), arXiv
2401.10241 table 2 and section 6 (ZB-H1, ZB-H2, ZB-V), deepseek-ai/DualPipe README (DualPipeV).

Letters differ there: the zero-bubble paper's B is the gradient of the input alone, here I, and DeepSeek's is the
whole backward, here I + W. So (p - 1)(F + I - W) is ZB-H1's bubble in both.
"""

from fractions import Fraction

from course_lib.parallel.pipeline.simulation import Costs, exact


def bubble_time(name: str, ranks: int, microbatches: int, costs: Costs) -> Fraction | None:
    """Wait of a rank in one step, by its schedule's formula.

    It is the wait from the step's first start to its last end (``Timeline.bubble``); for ZB-H2 and ZB-V, whose ranks
    end as late as they began, the wait between a rank's own first and last action (``Timeline.stage_bubble``); for
    DualPipeV that of the last rank. As a share of the step, wait / (wait + work), it is (p - 1) / (m + p - 1) for
    GPipe and 1F1B and (p - 1) / (v m + p - 1) when interleaved, where a stage is 1 / v of a rank's work.

    Args:
        name: a key of ``schedules.KINDS``.
        ranks: ranks of the pipeline, p.
        microbatches: micro-batches of one step, m.
        costs: of one micro-batch in one stage, the same in all; messages take no time.

    Returns:
        The time, or None where there is no formula for these numbers: too few micro-batches to fill the pipeline,
        or lengths of F, I and W for which the published one does not hold.
    """
    forward, backward, weight = (costs.of(cost, 1)[0] for cost in ("forward", "backward_input", "backward_weight"))
    others = ranks - 1
    match name:
        # Fill and drain: the last rank waits for p - 1 forwards before its first action, and for p - 1 backwards after
        # its last one. 1F1B holds less, and waits as long.
        case "gpipe" | "1f1b":
            return others * (forward + backward + weight)
        # As many waits, for stages that take 1 / v as long, which is in the costs.
        case "interleaved" | "looped_bfs" if microbatches >= ranks:
            return others * (forward + backward + weight)
        # Of a backward only I is waited for, and into each wait one W is moved: F + I, less W.
        case "zb_h1" | "interleaved_zero_bubble" if microbatches >= ranks and weight <= min(forward, backward):
            return others * (forward + backward - weight)
        # Two of them: with F = I = W nothing is left.
        case "zb_h2" if microbatches >= 2 * ranks - 1 and 2 * weight <= forward + backward:
            return others * (forward + backward - 2 * weight)
        case "zbv" if microbatches >= 2 * ranks - 1 and forward == backward == weight:
            return Fraction(0)
        case "dualpipev" if costs.pair is not None and forward == backward >= weight:
            return others * (exact(costs.pair) + backward - 2 * weight)
    return None
