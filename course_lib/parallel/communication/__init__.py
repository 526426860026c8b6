"""Saying less between data-parallel ranks: what to do where the link, not the arithmetic, sets the pace.

Two ways. Some say something **less often**: each rank makes H steps by itself, and then they agree on the weights.

- :mod:`~course_lib.parallel.communication.local_sgd`: they take the mean of their weights;
- :mod:`~course_lib.parallel.communication.diloco`: they take the mean of their changes for the gradient of an outer
  optimizer.

Others say **less each time**: they are communication hooks of :class:`course_lib.parallel.ddp.DataParallel`, and every
step is still a step of all ranks.

- :mod:`~course_lib.parallel.communication.power_sgd`: each matrix as the product of two thin ones;
- :mod:`~course_lib.parallel.communication.top_k`: the largest elements alone;
- :mod:`~course_lib.parallel.communication.quantized_all_reduce`: 8 or 4 bits an element, a scale per block;
- :mod:`~course_lib.parallel.communication.hierarchical`: all bytes, but few of them over the slow link.

Bytes that a rank sends for a gradient of E float32 elements, S = 4 E, N ranks, the ring model:

=========================== =======================================================
plain all-reduce            2 (N - 1) / N * S every step
LocalSGD, DiLoCo            2 (N - 1) / N * S every H steps
PowerSGD, rank r            2 (N - 1) / N * 4 r (n + m) for each n x m matrix
top-k                       8 k (N - 1): k values and k positions to every other rank
b bits in blocks of B       2 (N - 1) / N * (b / 8 + 4 / B) * E
hierarchical, G per machine 2 (G - 1) / G * S within, 2 (M - 1) / M * S / G between M
=========================== =======================================================
"""
