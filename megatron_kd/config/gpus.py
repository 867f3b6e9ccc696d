"""What is known of the devices of ``cluster.gpu``: memory, arithmetic, bandwidths. From the vendor's data sheets.

Bandwidths are those of one GPU, bytes/s; links and network in one direction.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """One kind of device.

    Attributes:
        memory_gib: what programs can take in all, GiB of 2^30 bytes: less than the GB of the data sheet.
        peak_flops: dense bfloat16, FLOP/s, without structured sparsity.
        float32_flops: FLOP/s in float32 outside tensor cores, as torch multiplies float32 matrices by default.
        memory_bandwidth: of its own memory.
        link_bandwidth: to the other GPUs of a node (NVLink).
        network_bandwidth: to other nodes: one adapter a GPU, as in the vendor's eight-GPU machines.
        host_bandwidth: from the host's memory: PCIe 4.0 (A100) or 5.0 with 16 lanes, NVLink-C2C of a Grace shared by
            its two GPUs.
    """

    memory_gib: float
    peak_flops: float
    float32_flops: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float


GPUS = {
    "a100": GPU(79.1, 312e12, 19.5e12, 2.04e12, 300e9, 25e9, 32e9),  # SXM, 80 GB
    "h100": GPU(79.1, 989e12, 67e12, 3.35e12, 450e9, 50e9, 64e9),  # SXM, 80 GB
    "h200": GPU(139.8, 989e12, 67e12, 4.8e12, 450e9, 50e9, 64e9),
    "b200": GPU(178.3, 2.25e15, 75e12, 7.7e12, 900e9, 50e9, 64e9),
    "b300": GPU(267.6, 2.25e15, 75e12, 7.7e12, 900e9, 100e9, 64e9),
    "gb200": GPU(184.3, 2.5e15, 80e12, 8.0e12, 900e9, 50e9, 225e9),
    "gb300": GPU(276.6, 2.5e15, 80e12, 8.0e12, 900e9, 100e9, 225e9),
}
"""By the names of ``cluster.gpu``; a CPU is no such device."""
