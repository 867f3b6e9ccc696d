"""What is assumed rather than derived: shares of the peaks that real kernels reach, reserves, imbalance of experts.

Every constant has its reason beside it. None has been measured by this project; they are for Hopper and newer GPUs with
Transformer Engine. docs/plan.md compares what they predict with published runs.
"""

from __future__ import annotations

GIB = 2**30

# --- arithmetic: share of the dense bf16 peak ---
DENSE_GEMM = 0.65
"""Matrices of thousands of rows and columns: 600 to 700 of 989 TFLOP/s on H100 under its power limit."""
GROUPED_GEMM = 0.48
"""Experts: a few thousand rows each, ragged, one launch for all."""
LOSS_GEMM = 0.62
"""The head chunk by chunk: large matrices, float32 output, dW read and written once a chunk."""
ATTENTION = {64: 0.38, 128: 0.52, 256: 0.55}
"""Causal flash attention, forward and backward together, by head size: the softmax weighs more on narrow heads."""
WINDOWED_ATTENTION = 0.20
"""Windows of some hundred positions: tiles at the edges are mostly masked."""
MEMORY_BANDWIDTH = 0.80
"""Share of the data sheet's that large elementwise kernels reach."""

# --- elementwise work: reads and writes of the kept activations ---
ELEMENTWISE_FORWARD = 2.5
"""Every kept tensor is written once and read once by the next operator; rotary positions and activations are not fused
and make tensors that nobody keeps."""
ELEMENTWISE_BACKWARD = 4.0
"""It is read again, its gradient is written and read, and so are those of what was not kept."""

# --- communication: share of the link's bandwidth ---
LINK = 0.70
"""NCCL's rings in a node with messages of tens of MB; the network likewise."""
ALL_TO_ALL = 0.60
"""Experts and context-parallel attention: many smaller messages, uneven with experts."""
HOST_LINK = 0.80
"""Large copies from pinned memory: about 50 of PCIe 5.0's 64 GB/s; all GPUs of a node copy at once."""
TENSOR_PARALLEL_EXPOSED = 0.80
"""Share of tensor-parallel collectives that no product hides (no userbuffers overlap is set)."""

# --- imbalance of experts, where they are spread over ranks ---
MOE_TIME_IMBALANCE = 1.15
"""The busiest rank of a layer against the mean: the others wait for it."""
MOE_KEPT_IMBALANCE = 1.20
"""Sum over the layers of one rank against the mean: layers are uneven in different places."""
MOE_WORST_LAYER = 2.0
"""One layer's buffers on the busiest rank against the mean; nothing limits it (no token is dropped)."""

# --- memory that no tensor accounts for ---
USABLE = 0.95
"""Share of a GPU's memory that a plan may fill: what the arithmetic of activations may be wrong by."""
CONTEXT_GIB = 1.0
"""CUDA context, kernels, workspaces of cuBLAS, cuDNN and Transformer Engine."""
COMMUNICATOR_GIB = 0.25
"""NCCL's buffers for each group that has several ranks."""
FRAGMENTATION = 0.04
"""Of everything that comes and goes in a step; with ``expandable_segments:True``."""
HOST_CPU_GIB = 0.8
"""Resident memory of the process and its libraries where the device is the CPU."""

# --- the rest of a step ---
STEP_OVERHEAD_S = 0.05
"""Python, the schedule, the exchange of the stop flag, logging: once a step."""
LAYER_LAUNCH_S = 60e-6
"""Least time of one layer's forward pass: its kernel launches. Matters for small models only."""
CPU_FLOPS_PER_CORE = 1.25e11
"""float32 on one core with AVX2, for recipes with ``gpu: cpu``: so that three bare products of the loss take their
measured time (docs/measurements.md, "The loss alone")."""
CPU_THREADS = 2
"""Where a recipe leaves them to the machine."""
CPU_MEMORY_BANDWIDTH = 1.0e10
CPU_LINK = 2.0e9
"""gloo over the loopback."""


def attention_share(head_size: int) -> float:
    """The share for the next known head size."""
    return next((share for size, share in ATTENTION.items() if head_size <= size), ATTENTION[256])
